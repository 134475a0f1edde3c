"""Output types of Outlines, which become JSON schemas of a request."""

import enum
import os
from typing import Literal

import openai
import outlines
import pydantic


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0, le=130)
    mood: Mood


model = outlines.from_vllm(openai.OpenAI(), os.environ["MODEL"])
person = Person.model_validate_json(model("Ada is 36 and in a good mood.", Person, max_tokens=100, temperature=0))
choice = model("Is the sea wet? Yes or no?", Literal["Yes", "No"], max_tokens=10)
assert choice in ("Yes", "No"), choice
year = model("In which year did the first human land on the moon?", outlines.types.Regex(r"(19|20)\d\d"), max_tokens=10)
assert len(year) == 4 and year.isdigit(), year
print(f"{person!r}, {choice}, {year}")

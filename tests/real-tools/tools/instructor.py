"""Instructor's ways to a Pydantic model."""

import os
from typing import Literal

import instructor
import openai
import pydantic


class City(pydantic.BaseModel):
    name: str
    country: str


class Trip(pydantic.BaseModel):
    traveller: str
    days: int = pydantic.Field(ge=1, le=60)
    means: Literal["train", "ship", "bicycle"]
    cities: list[City] = pydantic.Field(min_length=1, max_length=2)


ask = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "Ada goes to Oslo in Norway by ship, for 5 days. Which trip is that?"}],
    "max_tokens": 200,
    "temperature": 0,
    "max_retries": 0,
}
for mode in instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA:
    trip = instructor.from_openai(openai.OpenAI(), mode=mode).chat.completions.create(response_model=Trip, **ask)
    assert isinstance(trip, Trip), trip
partial = None
for partial in instructor.from_openai(openai.OpenAI()).chat.completions.create_partial(response_model=Trip, **ask):
    pass
assert Trip.model_validate(partial.model_dump())
by_responses = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.RESPONSES_TOOLS)
ask["max_output_tokens"] = ask.pop("max_tokens")
trip = by_responses.create(response_model=Trip, **ask)
assert isinstance(trip, Trip), trip
print(trip)

"""DSPy's typed signatures."""

import os
from typing import Literal

import dspy

given = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "max_tokens": 300, "temperature": 0}
lm = dspy.LM(f"openai/{os.environ['MODEL']}", num_retries=0, cache=False, **given)
cities = []


class Sort(dspy.Signature):
    """Sort a letter by its mood."""

    letter: str = dspy.InputField()
    mood: Literal["glad", "angry"] = dspy.OutputField()
    urgent: bool = dspy.OutputField()


def get_weather(city: str) -> str:
    """The weather in a city, now."""
    cities.append(city)
    return f"It is sunny in {city}."


dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
sorted_letter = dspy.Predict(Sort)(letter="Thank you for the flowers!")
assert sorted_letter.mood in ("glad", "angry") and isinstance(sorted_letter.urgent, bool), sorted_letter
answer = dspy.ReAct("question -> answer", tools=[get_weather], max_iters=2)(question="What is the weather in Oslo?")
assert answer.answer, answer
print(f"mood {sorted_letter.mood!r}, urgent {sorted_letter.urgent}; {len(cities)} calls, {len(lm.history)} requests")

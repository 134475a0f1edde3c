"""Agents of Agno by chat and by responses, with a tool and with an output schema."""

import os

import pydantic
from agno.agent import Agent
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from agno.tools import tool


class Report(pydantic.BaseModel):
    city: str
    degrees: int


cities = []


@tool(stop_after_tool_call=True)
def get_weather(city: str) -> str:
    """The weather in a city, now."""
    cities.append(city)
    return f"It is sunny in {city}, 12 degrees."


given = {"id": os.environ["MODEL"], "base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
given |= {"temperature": 0, "max_retries": 0}
for model in OpenAILike(**given, max_tokens=100), OpenAIResponses(**given, max_output_tokens=100):
    cities.clear()
    agent = Agent(model=model, tools=[get_weather], tool_choice="required", telemetry=False)
    said = agent.run("What is the weather in Oslo?")
    assert cities and said.status == "COMPLETED", said
    report = Agent(model=model, output_schema=Report, telemetry=False).run("It is 12 degrees in Oslo.").content
    assert isinstance(report, Report), report
print(f"get_weather({cities[0]!r}), {report!r}")

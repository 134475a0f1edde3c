"""Pydantic AI by three protocols."""

import os

import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Report(pydantic.BaseModel):
    city: str
    degrees: int


seen = []
for kind, output in (OpenAIChatModel, Report), (OpenAIChatModel, NativeOutput(Report)), (OpenAIResponsesModel, Report), (AnthropicModel, Report):
    agent = Agent(kind(os.environ["MODEL"]), output_type=output, model_settings={"max_tokens": 100, "temperature": 0})

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city, now."""
        return f"It is sunny in {city}, 12 degrees."

    report = agent.run_sync("What is the weather in Oslo?").output
    assert isinstance(report, Report), report
    seen.append(repr(report))
print(*seen, sep=", ")

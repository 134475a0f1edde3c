"""An agent of Strands with a tool, and its structured output, which is a call that it forces."""

import os

import pydantic
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel


class Report(pydantic.BaseModel):
    city: str
    degrees: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city, now."""
    return f"It is sunny in {city}, 12 degrees."


client = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "max_retries": 0}
seen = []
for kind, most in (OpenAIModel, "max_tokens"), (OpenAIResponsesModel, "max_output_tokens"):
    model = kind(client_args=client, model_id=os.environ["MODEL"], params={most: 100, "temperature": 0})
    agent = Agent(model=model, tools=[get_weather], callback_handler=None)
    said = agent("What is the weather in Oslo?")
    assert said.stop_reason in ("end_turn", "max_tokens") and said.metrics.accumulated_usage["outputTokens"] > 0, said
    report = agent("Report it.", structured_output_model=Report).structured_output
    assert isinstance(report, Report), report
    seen.append(repr(report))
print(*seen, sep=", ")

"""OpenAI's SDK for agents."""

import os

import agents
import pydantic


class Report(pydantic.BaseModel):
    city: str
    degrees: int


cities = []


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather in a city, now."""
    cities.append(city)
    return f"It is sunny in {city}, 12 degrees."


client = agents.AsyncOpenAI(max_retries=0)
forced = agents.ModelSettings(tool_choice="required", max_tokens=100, temperature=0)
for kind in agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel:
    model = kind(os.environ["MODEL"], client)
    cities.clear()
    agent = agents.Agent("weather", instructions="Answer in a sentence.", model=model, tools=[get_weather], model_settings=forced)
    said = agents.Runner.run_sync(agent, "What is the weather in Oslo?", max_turns=4)
    assert cities, said
    reporter = agents.Agent("reporter", model=model, output_type=Report, model_settings=agents.ModelSettings(max_tokens=100, temperature=0))
    report = agents.Runner.run_sync(reporter, "It is 12 degrees in Oslo.").final_output
    assert isinstance(report, Report), report
print(f"get_weather({cities[0]!r}), {report!r}")

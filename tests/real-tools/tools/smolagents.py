"""An agent of smolagents that calls tools."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

cities = []


@tool
def get_weather(city: str) -> str:
    """The weather in a city, now.

    Args:
        city: The city's name.
    """
    cities.append(city)
    return f"It is sunny in {city}, 12 degrees."


model = OpenAIServerModel(os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_tokens=200, temperature=0)
agent = ToolCallingAgent([get_weather], model, max_steps=3)
result = agent.run("What is the weather in Oslo?", return_full_result=True)
assert cities and result.state in ("success", "max_steps_error"), result.state
print(f"get_weather for {cities}; {result.state}")

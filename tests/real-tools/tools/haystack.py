"""Haystack's components for OpenAI's API, and its agent."""

import os
from typing import Annotated

from haystack import Document
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool

cities, chunks = [], []


@tool
def get_weather(city: Annotated[str, "The city's name"]) -> str:
    """The weather in a city, now."""
    cities.append(city)
    return f"It is sunny in {city}, 12 degrees."


given = {"model": os.environ["MODEL"], "api_base_url": os.environ["OPENAI_BASE_URL"], "max_retries": 0}
question = [ChatMessage.from_user("What is the weather in Oslo?")]
for kind, most in (OpenAIChatGenerator, "max_completion_tokens"), (OpenAIResponsesChatGenerator, "max_output_tokens"):
    limits = {most: 60, "temperature": 0}
    streaming = kind(**given, generation_kwargs=limits, streaming_callback=chunks.append)
    assert streaming.run(question)["replies"][0].text and chunks
    generator = kind(**given, generation_kwargs=limits | {"tool_choice": "required"})
    agent = Agent(chat_generator=generator, tools=[get_weather], exit_conditions=["get_weather"])
    result = agent.run(messages=question)
    assert result["messages"][-1].tool_call_result.result.startswith("It is sunny"), result
embedder = OpenAIDocumentEmbedder(model="embedder", api_base_url=os.environ["OPENAI_BASE_URL"], progress_bar=False)
documents = embedder.run([Document(content="the sea"), Document(content="a boat")])["documents"]
assert all(document.embedding for document in documents), documents
print(f"get_weather for {cities}, {len(chunks)} chunks, {len(documents)} documents with vectors")

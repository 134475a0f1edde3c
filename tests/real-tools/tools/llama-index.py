"""LlamaIndex with a model like OpenAI's."""

import os

import pydantic
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


class Person(pydantic.BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city, now."""
    return f"It is sunny in {city}."


model = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    max_tokens=100,
    temperature=0,
    max_retries=0,
)
ask = [ChatMessage(role="user", content="What is the weather in Oslo?")]
whole = model.chat(ask).message.content
streamed = "".join(part.delta or "" for part in model.stream_chat(ask))
assert whole and whole == streamed, (whole, streamed)
answer = model.chat_with_tools([FunctionTool.from_defaults(get_weather)], chat_history=ask, tool_required=True)
(call, *_) = model.get_tool_calls_from_response(answer)
assert call.tool_name == "get_weather" and list(call.tool_kwargs) == ["city"], call
person = model.as_structured_llm(Person).complete("Ada is 36.").raw
assert isinstance(person, Person), person
embedder = OpenAILikeEmbedding(model_name="embedder", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
assert len(embedder.get_text_embedding_batch(["the sea", "a boat"])) == 2
print(f"get_weather({call.tool_kwargs}), {person!r}")

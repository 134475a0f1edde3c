"""LangChain's client for OpenAI's API."""

import os

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


@tool
def get_weather(city: str) -> str:
    """The weather in a city, now."""
    return f"It is sunny in {city}."


class Person(pydantic.BaseModel):
    name: str
    age: int


seen = []
for by_responses in False, True:
    model = ChatOpenAI(model=os.environ["MODEL"], max_tokens=100, temperature=0, max_retries=0, use_responses_api=by_responses)
    dialog = [HumanMessage("What is the weather in Oslo?")]
    called = model.bind_tools([get_weather], tool_choice="required").invoke(dialog)
    call = called.tool_calls[0]
    assert call["name"] == "get_weather" and list(call["args"]) == ["city"] and not called.invalid_tool_calls, called
    dialog += [called, *(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls)]
    assert model.bind_tools([get_weather]).invoke(dialog).usage_metadata["output_tokens"] > 0
    for method in ["json_schema", "function_calling"]:
        person = model.with_structured_output(Person, method=method).invoke("Ada is 36.")
        assert isinstance(person, Person), person
    whole = None
    for chunk in model.stream("Say hello.", **({} if by_responses else {"stream_usage": True})):
        whole = chunk if whole is None else whole + chunk
    assert whole.text and whole.usage_metadata["output_tokens"] > 0, whole
    seen.append(f"{'responses' if by_responses else 'chat'}: {call['name']}({call['args']}), {person!r}")
vectors = OpenAIEmbeddings(model="embedder", check_embedding_ctx_length=False).embed_documents(["the sea", "a boat"])
print(*seen, f"{len(vectors)} vectors", sep="; ")

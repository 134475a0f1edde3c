"""Anthropic's own client."""

import os

import anthropic

MODEL = os.environ["MODEL"]
client = anthropic.Anthropic(max_retries=0)
ask = {"model": MODEL, "max_tokens": 60, "messages": [{"role": "user", "content": "What is the weather in Oslo?"}]}
tool = {
    "name": "get_weather",
    "description": "The weather in a city, now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
}

models = [model.id for model in client.models.list()]
assert MODEL in models, models
counted = client.messages.count_tokens(model=MODEL, messages=ask["messages"]).input_tokens
message = client.messages.create(**ask)
assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted, (message.usage, counted)
assert message.content[0].type == "text", message

with client.messages.stream(**ask) as stream:
    said = "".join(stream.text_stream)
    assert said == stream.get_final_message().content[0].text

called = client.messages.create(**ask, tools=[tool], tool_choice={"type": "tool", "name": "get_weather"})
(call,) = [block for block in called.content if block.type == "tool_use"]
assert called.stop_reason == "tool_use" and list(call.input) == ["city"], called
result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 12 degrees"}
ask["messages"] += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
answer = client.messages.create(**ask, tools=[tool], thinking={"type": "disabled"})
assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use"), answer
print(f"{len(models)} models, {counted} tokens, {call.name}({call.input})")

"""Responses and conversations with the official client."""

import concurrent.futures
import typing

import openai
import pydantic
import pytest

PROMPT = "The tide fills the pool, and the wheel turns. " * 8


@pytest.fixture
def respond(client, model):
    def respond(input, **parameters):
        return client.responses.create(model=model, input=input, **({"max_output_tokens": 12, "temperature": 0} | parameters))

    return respond


def test_a_response_has_text_and_usage(respond):
    response = respond(PROMPT, instructions="Be brief.", metadata={"who": "test"})
    assert response.object == "response" and response.id.startswith("resp_")
    assert response.output[0].type == "message" and response.output[0].id.startswith("msg_")
    assert response.output_text == response.output[0].content[0].text
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.instructions, response.metadata) == ("Be brief.", {"who": "test"})
    if response.usage.output_tokens == 12:
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_streamed_it_is_the_same(respond):
    whole = respond(PROMPT)
    events = list(respond(PROMPT, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == ("response.completed" if whole.status == "completed" else "response.incomplete")
    assert text == last.response.output_text == whole.output_text
    assert last.response.id == events[0].response.id and last.response.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_own_accumulation_agrees(client, model):
    with client.responses.stream(model=model, input=PROMPT, max_output_tokens=12, temperature=0) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert deltas


def test_the_next_turn_goes_on_and_hits_the_cache(client, respond):
    first = respond(PROMPT)
    second = respond("And then?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16 - 16
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items] == ["message"] * 3
    assert items[0].content[0].text == PROMPT and items[1].id == first.output[0].id
    # The same turns, sent whole, are the same prompt.
    turns = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert respond(turns).output_text == second.output_text


def test_what_is_stored_can_be_had_and_deleted(client, respond):
    response = respond("Keep this.")
    stored = client.responses.retrieve(response.id)
    assert (stored.output_text, stored.usage, stored.status) == (response.output_text, response.usage, response.status)
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.input_items.list, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.NotFoundError):
        respond("More.", previous_response_id=response.id)


def test_what_is_not_stored_is_not_there(client, respond):
    response = respond("Forget this.", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_conversation(client, respond):
    conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": PROMPT}], metadata={"a": "b"})
    first = respond("Go on.", conversation=conversation.id)
    second = respond("Once more.", conversation=conversation.id)
    assert second.conversation.id == conversation.id
    assert second.usage.input_tokens > first.usage.input_tokens
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    assert len(list(client.conversations.items.list(conversation.id, limit=2))) == 4, "page by page"
    assert client.conversations.update(conversation.id, metadata={"a": "c"}).metadata == {"a": "c"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_results_of_tools_are_read(respond):
    response = respond(
        [
            {"role": "user", "content": "What is the weather?"},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Kyoto"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
        tools=[
            {"type": "web_search"},
            {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}, "strict": False},
        ],
    )
    assert [tool.name for tool in response.tools] == ["weather"], "tools of other types are skipped"


@pytest.mark.parametrize(
    "parameters, param",
    [
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input[0].content"),
    ],
)
def test_what_cannot_be_done_is_refused(respond, parameters, param):
    with pytest.raises(openai.BadRequestError) as refused:
        respond(**({"input": "x"} | parameters))
    assert refused.value.param == param


def test_sixteen_streams_at_once(respond):
    def text(n):
        events = list(respond(f"{PROMPT} {n}", stream=True))
        assert events[-1].type in ("response.completed", "response.incomplete")
        return events[-1].response.output_text

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(text, range(16)))
    assert together[3] == respond(f"{PROMPT} 3").output_text


def test_a_format_constrains_the_answer(client, respond, model):
    class Tide(pydantic.BaseModel):
        high: bool
        metres: typing.Literal[1, 2, 3]

    # More tokens than an answer can have: eight places of white space of up to 42 tokens, and what is between them.
    parsed = client.responses.parse(model=model, input=PROMPT, text_format=Tide, max_output_tokens=500).output_parsed
    assert isinstance(parsed, Tide)
    schema = {"type": "array", "items": {"$dynamicRef": "#x"}}
    with pytest.raises(openai.BadRequestError) as refused:
        respond(PROMPT, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert refused.value.param == "text.format.schema.items.$dynamicRef"

"""Requests of real clients that deviate from the documentation, with the official clients."""

import json
import os

import anthropic
import openai
import pytest
from checkpoints import caller_in
from conftest import running_cluster
from schemas import ONE_LINE

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    if os.environ.get("TIDEMILL_URL"):
        pytest.skip("needs a cluster of a model of its own")
    with running_cluster("--local-tail-tokens", "0", model=caller_in(tmp_path_factory.mktemp("caller"))) as url:
        yield url


@pytest.fixture(scope="module")
def caller(url):
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def chat(caller, messages, **parameters):
    return caller.chat.completions.create(model="caller", messages=messages, **({"max_tokens": 4, "temperature": 0} | parameters))


def called(arguments, **message):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call]} | message,
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "user", "content": "And tomorrow?"},
    ]


@pytest.mark.parametrize("arguments", ["{}", '{"city": "Os', "{", "", "null", "[1]", "42", '"Oslo"', '"{\\"city\\": \\"Oslo\\"}"'])
def test_a_chat_goes_on_whatever_its_calls_were(caller, arguments):
    assert chat(caller, called(arguments), tools=[WEATHER]).usage.completion_tokens == 4


def test_no_content_is_an_empty_text(caller):
    tokens = {chat(caller, called("{}", **content)).usage.prompt_tokens for content in ({}, {"content": None}, {"content": ""}, {"content": []})}
    assert len(tokens) == 1


def test_parts_of_other_protocols_are_texts(caller):
    parts = [[{"type": "text", "text": "Hello"}], [{"type": "input_text", "text": "Hello"}], ["Hello"], "Hello"]
    assert len({chat(caller, [{"role": "user", "content": content}]).usage.prompt_tokens for content in parts}) == 1


def test_any_call_is_a_required_one(caller):
    answer = chat(caller, [{"role": "user", "content": "Weather?"}], tools=[WEATHER], tool_choice="any", parallel_tool_calls=False, max_tokens=200, temperature=1, seed=1, logit_bias=ONE_LINE)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def test_allowed_tools_are_the_only_ones(caller):
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "other"}}]}}
    answer = chat(caller, [{"role": "user", "content": "x"}], tools=[WEATHER, other], tool_choice=allowed, max_tokens=200, temperature=1, seed=1, logit_bias=ONE_LINE)
    calls = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["other"], "the same call again ends the turn"


def test_functions_are_the_older_tools(caller):
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"], "additionalProperties": False}
    given = {"functions": [{"name": "weather", "parameters": schema}], "function_call": {"name": "weather"}, "max_tokens": 200, "temperature": 1, "seed": 1, "logit_bias": ONE_LINE}
    choice = chat(caller, [{"role": "user", "content": "Weather?"}], **given).choices[0]
    assert (choice.finish_reason, choice.message.function_call.name, choice.message.tool_calls) == ("function_call", "weather", None)
    json.loads(choice.message.function_call.arguments)


def test_a_forced_call_that_is_cut_is_no_text(caller, url):
    for max_tokens in range(1, 40, 3):
        given = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": max_tokens, "temperature": 1, "seed": 3}
        assert not chat(caller, [{"role": "user", "content": "Weather?"}], **given).choices[0].message.content
        assert not "".join(
            chunk.choices[0].delta.content or "" for chunk in chat(caller, [{"role": "user", "content": "Weather?"}], stream=True, **given) if chunk.choices
        )


def test_a_custom_tools_input_is_text(caller):
    tool = {"type": "custom", "name": "pick", "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"}}
    given = {"model": "caller", "input": "Pick.", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100}
    response = caller.responses.create(**given)
    (item,) = [item for item in response.output if item.type == "custom_tool_call"]
    assert len(item.input) == 3 and set(item.input) <= set("ab")
    history = [{"role": "user", "content": "Pick."}, item.model_dump(), {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}]
    assert caller.responses.create(model="caller", input=history, max_output_tokens=4).usage.output_tokens == 4


def test_items_of_hosted_tools_are_welcome(caller):
    items = [
        {"role": "user", "content": "Search."},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "tides"}},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c1", "output": "a"},
    ]
    assert caller.responses.create(model="caller", input=items, max_output_tokens=4).usage.output_tokens == 4


def test_a_response_has_logprobs_where_they_are_wanted(caller):
    given = {"model": "caller", "input": "Hello", "max_output_tokens": 6, "temperature": 0, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    part = caller.responses.create(**given).output[0].content[0]
    assert 1 <= len(part.logprobs) <= 6
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in part.logprobs)


def test_a_failed_call_says_so(url):
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="unused", max_retries=0, timeout=60) as claude:

        def tokens(**result):
            content = [{"type": "tool_result", "tool_use_id": "t1", "content": "no such city"} | result]
            messages = [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]},
                {"role": "user", "content": content},
            ]
            return claude.messages.count_tokens(model="caller", messages=messages).input_tokens

        assert tokens(is_error=True) > tokens(is_error=False) == tokens()
        assert tokens(is_error=True) == tokens(content="Error: no such city")

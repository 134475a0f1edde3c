"""Tools as the official client uses them. The model's weights are random, so it calls only where a grammar makes it; what it
then calls with is its own choice."""

import concurrent.futures
import json
import os

import openai
import pydantic
import pytest
from checkpoints import caller_in
from conftest import running_cluster, wait_for_publishing
from schemas import ONE_LINE

PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["°C", "°F"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["place", "unit", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
TIME = {"type": "function", "function": {"name": "get_time"}}
QUESTION = [{"role": "user", "content": "What is the weather in Kyōto, and what time is it there?"}]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A client of a model whose template supports tools."""
    if os.environ.get("TIDEMILL_URL"):
        pytest.skip("needs a cluster of a model of its own")
    model = caller_in(tmp_path_factory.mktemp("caller"))
    with running_cluster("--local-tail-tokens", "0", model=model) as url, openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def ask(client, seed=1, **parameters):
    given = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400, "logit_bias": ONE_LINE}
    return client.chat.completions.create(
        model=client.models.list().data[0].id, messages=QUESTION, temperature=1, seed=seed, **(given | parameters)
    )


def check(name, arguments):
    """The arguments keep to the tool's schema."""
    arguments = json.loads(arguments)
    if name == "get_time":
        assert arguments == {}
        return
    assert name == "get_weather"
    assert arguments.keys() == {"place", "unit", "days"}
    assert isinstance(arguments["place"], str) and len(arguments["place"]) <= 12
    assert arguments["unit"] in ("°C", "°F")
    assert len(arguments["days"]) <= 3 and all(0 <= day <= 9 for day in arguments["days"])


def assemble(stream):
    """A streamed answer in the form of a whole one: content, calls, finish reason."""
    content, calls, finish = "", [], None
    for chunk in stream:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                if part.index == len(calls):
                    assert part.id and part.type == "function" and part.function.arguments == ""
                    calls.append([part.id, part.function.name, ""])
                else:
                    assert part.id is None and part.function.name is None
                    calls[part.index][2] += part.function.arguments
    return content or None, calls, finish


def whole(answer):
    (choice,) = answer.choices
    calls = [[call.id, call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
    return choice.message.content or None, calls, choice.finish_reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"])
def test_a_call_that_must_come_comes_and_keeps_to_its_schema(caller, choice):
    expected = {"get_weather", "get_time"} if choice == "required" else {"get_weather"}
    names = set()
    for seed in range(128):
        content, calls, finish = whole(ask(caller, seed, tool_choice=choice))
        assert (content, len(calls), finish) == (None, 1, "tool_calls")
        check(*calls[0][1:])
        names.add(calls[0][1])
        # Which tool is called is the model's choice; in so many draws it makes both.
        if seed >= 7 and names == expected:
            break
    assert names == expected


def test_a_tool_that_is_named_is_called_once(caller):
    choice = {"type": "function", "function": {"name": "get_time"}}
    for seed in range(4):
        assert whole(ask(caller, seed, tool_choice=choice, parallel_tool_calls=True))[1:] == (whole(ask(caller, seed, tool_choice=choice))[1], "tool_calls")
        assert len(assemble(ask(caller, seed, tool_choice=choice, parallel_tool_calls=True, stream=True))[1]) == 1
        answer = caller.responses.create(
            model=caller.models.list().data[0].id, input="What time is it?", tools=[{"type": "function", "name": "get_time"}],
            tool_choice={"type": "function", "name": "get_time"}, parallel_tool_calls=True, max_output_tokens=100, temperature=1,
        )
        assert [item.type for item in answer.output] == ["function_call"]


def test_a_streamed_call_is_the_call_at_once(caller):
    for seed in range(4):
        at_once = whole(ask(caller, seed, parallel_tool_calls=True))
        assert assemble(ask(caller, seed, parallel_tool_calls=True, stream=True)) == at_once


def test_sixteen_streams_with_a_constraint_of_their_own_each(caller):
    kinds = [
        {},
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tool_choice": "auto", "max_tokens": 60},
        {"tool_choice": "none", "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}},
    ]
    alone = [whole(ask(caller, seed, **kinds[seed % 4])) for seed in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda seed: assemble(ask(caller, seed, stream=True, **kinds[seed % 4])), range(16)))
    assert together == alone
    for seed, (content, calls, finish) in enumerate(alone):
        if seed % 4 in (0, 1):
            check(*calls[0][1:])
        if seed % 4 == 3:
            assert (calls, finish) == ([], "stop")
            check("get_weather", content)


def test_the_next_turn_takes_what_the_tool_said(caller):
    answer = ask(caller)
    message = answer.choices[0].message
    said = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 °C"}
    wait_for_publishing(str(caller.base_url).rstrip("/"))
    again = caller.chat.completions.create(
        model=answer.model, messages=[*QUESTION, message, said], tools=[WEATHER, TIME], max_tokens=8, temperature=0
    )
    assert again.usage.prompt_tokens > answer.usage.total_tokens - 8, "the call and its result are in the prompt"
    assert again.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens // 16 * 16


class Forecast(pydantic.BaseModel):
    place: str = pydantic.Field(max_length=12)
    degrees: int = pydantic.Field(ge=-99, le=99)


def test_the_client_parses_answers_and_arguments_into_its_own_types(caller):
    model = caller.models.list().data[0].id
    common = {"model": model, "messages": QUESTION, "max_tokens": 400, "seed": 3, "logit_bias": ONE_LINE}
    parsed = caller.chat.completions.parse(response_format=Forecast, **common).choices[0].message.parsed
    assert isinstance(parsed, Forecast)
    tool = openai.pydantic_function_tool(Forecast, name="forecast")
    message = caller.chat.completions.parse(tools=[tool], tool_choice="required", parallel_tool_calls=False, **common).choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Forecast)


def test_a_strict_schema_that_cannot_be_kept_is_refused(caller):
    parameters = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?<=a)b"}}}
    strict = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(caller, tools=[strict])
    assert refusal.value.param.startswith("tools[0]")

"""Anthropic's API with its official client."""

import concurrent.futures
import json

import anthropic
import pytest

SYSTEM = "You help with code. Tools are for looking, not for guessing. Say what you saw, and no more. " * 6
TOOLS = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


@pytest.fixture(scope="session")
def claude(root):
    with anthropic.Anthropic(base_url=root, api_key="unused", max_retries=0, timeout=60) as claude:
        yield claude


@pytest.fixture
def body(model):
    """A request for a short greedy answer."""

    def body(messages, **parameters):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        # The client knows no temperature any more; the API does.
        return {"model": model, "max_tokens": 12, "messages": messages, "extra_body": {"temperature": 0}} | parameters

    return body


def test_a_message_has_content_and_usage(claude, body):
    message = claude.messages.create(**body("Hello", system=SYSTEM))
    assert (message.type, message.role, message.id[:4]) == ("message", "assistant", "msg_")
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert all(block.type == "text" for block in message.content)
    assert 1 <= message.usage.output_tokens <= 12


def test_models_are_listed_in_pages(claude, model):
    every = list(claude.models.list(limit=1))
    assert model in [one.id for one in every] and len({one.id for one in every}) == len(every)
    assert all(one.type == "model" and one.display_name and one.created_at.year >= 2024 for one in every)
    one = claude.models.retrieve(model)
    assert (one.id, one.type, one.created_at) == (model, "model", every[0].created_at)
    first = claude.models.list(limit=1)
    assert first.first_id == first.last_id == every[0].id and first.has_more == (len(every) > 1)


def test_streamed_it_is_the_same(claude, body):
    whole = claude.messages.create(**body("Hello", system=SYSTEM))
    with claude.messages.stream(**body("Hello", system=SYSTEM)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [text] == [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    names = [event.type for event in claude.messages.create(**body("Hello", system=SYSTEM), stream=True)]
    # The client keeps pings to itself.
    assert [name for name in names if name not in ("ping", "content_block_delta")] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_beta_client_is_welcome(claude, body):
    message = claude.beta.messages.create(**body("Hello"), betas=["some-future-beta-2027-01-01"])
    assert message.type == "message"


def test_a_bearer_token_is_welcome(root, body):
    with anthropic.Anthropic(base_url=root, auth_token="unused", api_key=None, max_retries=0) as claude:
        assert claude.messages.create(**body("Hello")).type == "message"


def test_tokens_are_counted_as_they_are_used(claude, body):
    request = body("Hello", system=SYSTEM, tools=TOOLS)
    usage = claude.messages.create(**request).usage
    counted = {name: request[name] for name in ("model", "messages", "system", "tools")}
    count = claude.messages.count_tokens(**counted).input_tokens
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    assert count >= claude.messages.count_tokens(**(counted | {"tools": []})).input_tokens
    del counted["system"]
    assert count > claude.messages.count_tokens(**counted).input_tokens


def test_a_second_turn_hits_the_cache_though_its_billing_header_differs(claude, body):
    def system(header, cache_control):
        return [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.330; cc_entrypoint=cli; cch={header};"},
            {"type": "text", "text": SYSTEM, "cache_control": cache_control},
        ]

    question = {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}
    first = claude.messages.create(**body([question], system=system("0a1b2", {"type": "ephemeral"})))
    answer = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    plain = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    again = {"role": "user", "content": "And now?"}
    with claude.messages.stream(**body([plain, answer, again], system=system("f9e8d", {"type": "ephemeral", "ttl": "1h"}))) as stream:
        started = next(event for event in stream if event.type == "message_start").message.usage
        final = stream.get_final_message().usage
    before = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert final.cache_read_input_tokens >= before // 16 * 16 - 16 > 0
    assert started.cache_read_input_tokens == final.cache_read_input_tokens, "known with the first token"


def test_tools_and_their_results_are_read(claude, body):
    turns = [
        {"role": "user", "content": "What is the weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Kyoto"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]}]},
    ]
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    message = claude.messages.create(**body(turns, tools=[*TOOLS, hosted]))
    assert message.stop_reason in ("end_turn", "max_tokens", "tool_use")


@pytest.mark.parametrize(
    "parameters, error, word",
    [
        ({"model": "none"}, anthropic.NotFoundError, "none"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]}, anthropic.BadRequestError, "image input"),
    ],
)
def test_errors_are_the_clients_own(claude, body, parameters, error, word):
    with pytest.raises(error) as refused:
        claude.messages.create(**(body("Hello") | parameters))
    assert refused.value.body["type"] == "error" and word in refused.value.body["error"]["message"]


def test_sixteen_streams_at_once(claude, body):
    def text(n):
        with claude.messages.stream(**body(f"Hello {n}", system=SYSTEM)) as stream:
            return "".join(stream.text_stream)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(text, range(16)))
    assert together[5] == "".join(block.text for block in claude.messages.create(**body("Hello 5", system=SYSTEM)).content)


def test_a_format_constrains_the_answer(claude, body):
    schema = {"type": "object", "properties": {"high": {"type": "boolean"}}, "required": ["high"], "additionalProperties": False}
    # More tokens than an answer can have: four places of white space of up to 42 tokens, and what is between them.
    wanted = body("Hello", max_tokens=300)
    wanted["extra_body"] = wanted["extra_body"] | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    message = claude.messages.create(**wanted)
    assert message.stop_reason == "end_turn" and isinstance(json.loads(message.content[0].text)["high"], bool)
    wanted["extra_body"]["output_config"]["format"]["schema"] = {"$dynamicRef": "#x"}
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(**wanted)
    assert "output_config.format.schema.$dynamicRef" in str(refused.value)

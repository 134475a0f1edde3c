"""/v1/chat/completions as the official client uses it."""

import math

from conftest import wait_for_publishing

QUESTION = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "Why does a tide mill need no river, and what does it do at low water?"},
]
BLOCK = 16


def ask(client, model, messages, **parameters):
    parameters = {"temperature": 0, "max_tokens": 24} | parameters
    return client.chat.completions.create(model=model, messages=messages, **parameters)


def test_an_answer_has_the_form_that_openai_defines(client, model):
    answer = ask(client, model, QUESTION)
    assert answer.object == "chat.completion"
    assert answer.model == model
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert 0 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_is_the_same_answer(client, model):
    whole = ask(client, model, QUESTION)
    chunks = list(ask(client, model, QUESTION, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert all(chunk.usage is None for chunk in chunks), "usage only where it is asked for"


def test_a_stream_ends_with_the_usage_that_was_asked_for(client, model):
    whole = ask(client, model, QUESTION)
    *chunks, last = ask(client, model, QUESTION, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_says_where_the_prompt_came_from(client, model):
    usage = ask(client, model, QUESTION).usage
    provenance = usage.model_extra["tidemill"]
    assert sum(provenance["tokens"].values()) == usage.prompt_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens


def test_max_completion_tokens_is_the_newer_name(client, model):
    extra = {"ignore_eos": True}
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=5, extra_body=extra
    )
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


def test_the_next_turn_finds_the_last_one_cached(url, client, model):
    extra = {"ignore_eos": True, "return_token_ids": True}
    first = ask(client, model, QUESTION, max_tokens=40, extra_body=extra)
    answer = first.choices[0]
    known = first.model_extra["prompt_token_ids"] + answer.model_extra["token_ids"]
    wait_for_publishing(url)  # A person reads the answer.
    messages = QUESTION + [
        {"role": "assistant", "content": answer.message.content},
        {"role": "user", "content": "And at high water?"},
    ]
    second = ask(client, model, messages, extra_body=extra)
    again = second.model_extra["prompt_token_ids"]
    # A random model's answer need not survive ids -> text -> ids. What did survive must be found; that all of it is
    # found where ids are passed on is asserted in test_completions.py.
    common = next((i for i, (a, b) in enumerate(zip(known, again)) if a != b), min(len(known), len(again)))
    assert common >= first.usage.prompt_tokens, "the template renders an earlier turn as it did before"
    # The last token of an answer was drawn but never fed back, so it has no KV.
    blocks = min(common, len(known) - 1) // BLOCK
    assert second.usage.prompt_tokens_details.cached_tokens >= blocks * BLOCK > 0


def test_logprobs_describe_every_token(client, model):
    answer = ask(client, model, QUESTION, max_tokens=8, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    for token in content:
        assert token.logprob <= 0
        likeliest = [top.logprob for top in token.top_logprobs]
        assert len(likeliest) == 3 and likeliest == sorted(likeliest, reverse=True)
        assert sum(map(math.exp, likeliest)) <= 1.001
        assert math.isclose(token.logprob, likeliest[0], abs_tol=1e-6), "greedy takes the likeliest"


def test_streamed_logprobs_are_the_same(client, model):
    parameters = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = ask(client, model, QUESTION, **parameters).choices[0].logprobs.content
    chunks = ask(client, model, QUESTION, stream=True, **parameters)
    streamed = [token for chunk in chunks for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content]
    assert [(token.token, token.logprob) for token in streamed] == [(token.token, token.logprob) for token in whole]


def test_choices_are_different_and_repeatable(client, model):
    parameters = {"n": 3, "seed": 7, "temperature": 1, "extra_body": {"ignore_eos": True, "return_token_ids": True}}

    def drawn(**changes):
        choices = ask(client, model, QUESTION, **(parameters | changes)).choices
        assert [choice.index for choice in choices] == list(range(len(choices)))
        return [tuple(choice.model_extra["token_ids"]) for choice in choices]

    three = drawn()
    assert len(set(three)) == 3
    assert drawn() == three
    assert drawn(n=1) == three[:1]
    assert not set(drawn(seed=100)) & set(three)


def test_streamed_choices_are_told_apart_by_index(client, model):
    parameters = {"n": 3, "seed": 7, "temperature": 1}
    whole = {choice.index: choice.message.content for choice in ask(client, model, QUESTION, **parameters).choices}
    streamed = dict.fromkeys(whole, "")
    for chunk in ask(client, model, QUESTION, stream=True, **parameters):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == whole

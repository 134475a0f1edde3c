"""The response cache: the same answer for the same request, and only for that."""

import concurrent.futures

import anthropic
import httpx
import openai
import pytest
from conftest import running_cluster

PROMPT = "The tide comes in, and the wheel"


@pytest.fixture(scope="module")
def url():
    with running_cluster("--response-cache", "1MiB") as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture
def complete(client, model):
    def complete(prompt=PROMPT, extra_body=None, **parameters):
        given = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True} | (extra_body or {})}
        return client.completions.create(model=model, prompt=prompt, **(given | parameters))

    return complete


def is_hit(answer):
    return answer.usage.tidemill["response_cache"]


def said(answer):
    return [(choice.index, choice.text, choice.finish_reason, choice.logprobs) for choice in answer.choices]


def test_the_same_request_has_the_same_answer(complete):
    first, second = complete(), complete()
    assert (is_hit(first), is_hit(second)) == (False, True)
    assert said(first) == said(second)
    assert first.id != second.id, "it is an answer of its own"
    assert first.usage.completion_tokens == second.usage.completion_tokens
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


def test_every_difference_counts(complete):
    complete(prompt="Another")
    asked = {"prompt": "Another"}
    for other in (
        {"prompt": "Another "},
        {"max_tokens": 23},
        {"seed": 1, "temperature": 0.5},
        {"seed": 2, "temperature": 0.5},
        {"logprobs": 1},
        {"n": 2},
        {"presence_penalty": 0.5},
        {"logit_bias": {"5": 1}},
        {"extra_body": {"cache_salt": "tenant"}},
        {"extra_body": {"cache_salt": "tenant"}, "max_tokens": 3},
        {"extra_body": {"guided_regex": "[a-z]+"}},
    ):
        assert not is_hit(complete(**(asked | other))), other
        assert is_hit(complete(**(asked | other))), other


def test_an_answer_drawn_without_a_seed_is_not_kept(complete):
    assert not any(is_hit(complete(prompt="Dice", temperature=1)) for _ in range(3))


def test_a_stream_is_the_same(client, model, complete):
    fields = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model=model, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **fields) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == complete().choices[0].text
    assert is_hit(chunks[-1])


def test_stop_strings_are_applied_anew(complete):
    whole = complete(prompt="Stop").choices[0].text
    stop = whole[5:8]
    cut = complete(prompt="Stop", stop=[stop])
    assert is_hit(cut)
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_messages_find_it_too(url, model):
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="unused", max_retries=0) as claude:
        messages = [{"role": "user", "content": "Hello!"}]
        # The client knows no temperature any more; the API does.
        asked = {"model": model, "max_tokens": 16, "messages": messages, "extra_body": {"temperature": 0}}
        answers = [claude.messages.create(**asked) for _ in range(2)]
    assert answers[0].content == answers[1].content
    assert answers[0].stop_reason == answers[1].stop_reason


def test_sixteen_at_once(url, complete):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: said(complete(prompt=f"Number {n % 4}")), range(64)))
    assert all(answers[n] == answers[n % 4] for n in range(64))
    metrics = httpx.get(url.removesuffix("/v1") + "/metrics").text
    hits = next(line for line in metrics.splitlines() if line.startswith('tidemill_response_cache_total{outcome="hit"}'))
    assert float(hits.split()[-1]) > 0

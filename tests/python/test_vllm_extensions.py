"""vLLM's extensions of OpenAI's API that its users rely on, over plain HTTP, with vLLM's names and places."""

import httpx
import pytest

IDS = [21 + 13 * i % 180 for i in range(50)]


@pytest.fixture
def post(url, model):
    def post(path, **body):
        response = httpx.post(f"{url}{path}", json={"model": model, "temperature": 0} | body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    return post


@pytest.fixture
def answer(post):
    """The choice of /v1/completions; 24 tokens unless something ends it earlier."""

    def answer(**body):
        given = {"prompt": IDS, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        (choice,) = post("/completions", **(given | body))["choices"]
        return choice

    return answer


def test_token_ids_are_where_vllm_puts_them(post):
    body = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    (choice,) = post("/completions", prompt=IDS, **body)["choices"]
    assert choice["prompt_token_ids"] == IDS
    assert len(choice["token_ids"]) == 6
    chat = post("/chat/completions", messages=[{"role": "user", "content": "Hello"}], **body)
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert len(chat["choices"][0]["token_ids"]) == 6


def test_token_ids_are_not_sent_unasked(post):
    (choice,) = post("/completions", prompt=IDS, max_tokens=2)["choices"]
    assert choice.get("token_ids") is None and choice.get("prompt_token_ids") is None


def test_one_candidate_is_greedy(answer):
    greedy = answer()["token_ids"]
    assert answer(temperature=1, top_k=1, seed=1)["token_ids"] == greedy
    assert answer(temperature=1, min_p=1.0, seed=1)["token_ids"] == greedy
    assert answer(temperature=1, seed=1)["token_ids"] != greedy


def test_a_stop_token_ends_the_answer(answer):
    greedy = answer()["token_ids"]
    stop = greedy[-1]
    first = greedy.index(stop)
    stopped = answer(stop_token_ids=[stop])
    assert (stopped["token_ids"], stopped["finish_reason"]) == (greedy[: first + 1], "stop")


def test_min_tokens_keeps_stop_tokens_away(answer):
    stop = answer()["token_ids"][0]
    assert answer(stop_token_ids=[stop])["token_ids"] == [stop]
    longer = answer(stop_token_ids=[stop], min_tokens=10)["token_ids"]
    assert len(longer) >= 10 and stop not in longer[:10]


def test_repetition_is_penalized(answer):
    # Long enough that the unpenalized answer repeats itself.
    plain = answer(max_tokens=128)["token_ids"]
    assert len(set(plain)) < len(plain)
    assert answer(max_tokens=128, repetition_penalty=1.0)["token_ids"] == plain
    penalized = answer(max_tokens=128, repetition_penalty=5.0)["token_ids"]
    assert len(set(penalized)) > len(set(plain))


def test_ignore_eos_goes_on(answer):
    choice = answer(max_tokens=64)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (64, "length")

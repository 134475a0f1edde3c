"""Refusals: the right status, OpenAI's error object, and a server that is none the worse for it."""

import json
import select
import socket
import time
import urllib.parse

import httpx
import openai
import pytest

HELLO = [{"role": "user", "content": "Hello"}]


def assert_error_object(error, status):
    """OpenAI's: {"error": {"message", "type", "param", "code"}}."""
    assert {"message", "type", "param", "code"} <= error.keys(), error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str), status


@pytest.fixture(autouse=True)
def still_healthy(complete):
    yield
    assert len(complete([30, 31, 32], max_tokens=2).choices[0].model_extra["token_ids"]) == 2


@pytest.mark.parametrize("chat", [True, False])
def test_an_unknown_model_is_not_found(client, chat):
    with pytest.raises(openai.NotFoundError) as refusal:
        if chat:
            client.chat.completions.create(model="no-such-model", messages=HELLO)
        else:
            client.completions.create(model="no-such-model", prompt="Hello")
    assert_error_object(refusal.value.body, 404)
    assert "no-such-model" in refusal.value.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"messages": "Hello"},
        {"messages": [{"role": "user"}]},
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 1.5},
        {"max_tokens": -1},
        {"n": 0},
        {"presence_penalty": 3},
        {"logprobs": True, "top_logprobs": 1000},
        {"extra_body": {"min_p": 2}},
        {"extra_body": {"repetition_penalty": 0}},
        {"extra_body": {"logit_bias": {"x": 1}}},
    ],
    ids=json.dumps,
)
def test_a_wrong_value_is_a_bad_request(client, model, wrong):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**({"model": model, "messages": HELLO, "max_tokens": 4} | wrong))
    assert_error_object(refusal.value.body, 400)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model":', b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_a_body_that_is_no_request_is_a_bad_request(url, path, body):
    response = httpx.post(url + path, content=body, headers={"content-type": "application/json"}, timeout=30)
    assert response.status_code == 400, response.text
    assert_error_object(response.json()["error"], 400)


def test_a_prompt_token_outside_the_vocabulary_is_a_bad_request(client, model):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=model, prompt=[1_000_000_000], max_tokens=2)
    assert_error_object(refusal.value.body, 400)


def test_a_prompt_longer_than_the_context_says_so(client, model, cluster):
    context = cluster()["context_tokens"]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=model, prompt=[30] * (context + 1), max_tokens=1)
    assert refusal.value.code == "context_length_exceeded"
    assert_error_object(refusal.value.body, 400)


def test_a_body_that_is_too_large_is_refused(url):
    address = urllib.parse.urlsplit(url)
    size = 1 << 30
    head = (
        f"POST {address.path}/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(head.encode() + b'{"model":"m","prompt":"')
        # The server may answer from the length alone, or when it has read enough; never after all of it.
        for _ in range(size >> 17):
            if select.select([connection], [], [], 0)[0]:
                break
            try:
                connection.sendall(b"x" * (1 << 16))
            except ConnectionError:
                break
        answer = b""
        while b"\r\n\r\n" not in answer or b"}}" not in answer:
            received = connection.recv(1 << 16)
            if not received:
                break
            answer += received
    status, _, body = answer.partition(b"\r\n\r\n")
    assert status.split()[1] == b"413", answer
    assert_error_object(json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["error"], 413)


def test_an_unknown_path_and_a_wrong_method_are_refused(root):
    assert httpx.get(f"{root}/v1/no-such-thing").status_code == 404
    assert httpx.get(f"{root}/v1/completions").status_code == 405


def wait_until_idle(cluster, seconds=10):
    """Nothing runs, waits or holds device memory, at the front door or at a worker. Workers report once a second."""
    deadline = time.monotonic() + seconds
    while True:
        view = cluster()
        busy = view["requests"] + view["sequences_running"] + view["sequences_waiting"]
        for member in view["members"]:
            busy += member["assigned"] + member["report"]["running"] + member["report"]["waiting"]
            if member["role"] in ("decode", "prefill"):
                busy += member["report"]["blocks"]["hbm"]["used"]
        if busy == 0:
            return
        assert time.monotonic() < deadline, f"still busy after {seconds} s: {json.dumps(view, indent=1)}"
        time.sleep(0.1)


def test_a_client_that_goes_away_frees_everything(complete, cluster):
    wait_until_idle(cluster)
    long = cluster()["context_tokens"] // 2
    streams = [complete([40 + i] * 40, max_tokens=long, stream=True) for i in range(8)]
    tokens = [sum(1 for _ in zip(range(3), stream)) for stream in streams]
    assert tokens == [3] * 8
    assert cluster()["sequences_running"] > 0, "they would have gone on"
    for stream in streams:
        stream.close()
    wait_until_idle(cluster)


def test_a_client_that_does_not_wait_for_its_answer_frees_everything(url, model, cluster):
    body = {"model": model, "prompt": [50] * 40, "max_tokens": cluster()["context_tokens"] // 2, "ignore_eos": True, "n": 8}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/completions", json=body, timeout=0.2)
    wait_until_idle(cluster)

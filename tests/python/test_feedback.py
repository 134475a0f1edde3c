"""Feedback on answers of any endpoint: only on their own tenant's, one opinion per user; and golden cases made from it."""

import json
import os
import signal
import socket
import subprocess

import anthropic
import httpx
import openai
import pytest
from conftest import DRAIN_S, MODEL, ready_url

QUESTION = [{"role": "user", "content": "Write to jane@example.org, please."}]


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """Front door, operators' port, and the keys of two tenants."""
    data = tmp_path_factory.mktemp("feedback")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        admin = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--feedback", "--data", str(data), "--admin", admin]
    command = [os.environ["TIDEMILL_BIN"], "up", "--http", "127.0.0.1:0", "--model", str(MODEL), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        url, admin = ready_url(process), f"http://{admin}"
        keys = [tidemill("keys", "create", "--tenant", name, "--tier", "premium", "--url", admin).strip() for name in ["acme", "other"]]
        yield url, admin, keys
        process.send_signal(signal.SIGTERM)
        assert process.wait(DRAIN_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def tidemill(*args, status=0):
    done = subprocess.run([os.environ["TIDEMILL_BIN"], *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done
    return done.stdout if status == 0 else done.stderr


def of(heard, tenant=0):
    return openai.OpenAI(base_url=heard[0], api_key=heard[2][tenant], max_retries=0, timeout=60)


def say(client, response_id, **fields):
    return client.post("/feedback", cast_to=httpx.Response, body={"response_id": response_id, **fields}).json()


def test_an_opinion_of_any_answer(heard, tmp_path):
    with of(heard) as openai_client, of(heard, 1) as other:
        model = openai_client.models.list().data[0].id
        chat = openai_client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0)
        stream = list(openai_client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, stream=True))
        completion = openai_client.completions.create(model=model, prompt="Once", max_tokens=4)
        response = openai_client.responses.create(model=model, input="Hello", max_output_tokens=16)
        claude = anthropic.Anthropic(base_url=heard[0].removesuffix("/v1"), api_key=heard[2][0], max_retries=0)
        message = claude.messages.create(model=model, max_tokens=8, messages=QUESTION)
        for answer in [chat, stream[0], completion, response, message]:
            said = say(openai_client, answer.id, rating="up", user="u")
            assert said == {"object": "feedback", "response_id": answer.id, "rating": "up", "replaced": False}
            with pytest.raises(openai.NotFoundError):
                say(other, answer.id, rating="down")

        # An answer has one opinion of its owner, whatever the names of users.
        assert say(openai_client, chat.id, regenerate=True, user="v")["replaced"]
        assert say(openai_client, chat.id, rating="down", comment="Ask jim@example.org", user="u")["replaced"]
        for wrong in [{}, {"rating": "sideways"}, {"comment": "x" * 5000}]:
            with pytest.raises(openai.BadRequestError):
                say(openai_client, chat.id, **wrong)
        with pytest.raises(openai.NotFoundError):
            say(openai_client, "chatcmpl-0", rating="up")

    _, admin, _ = heard
    listed = json.loads(tidemill("feedback", "list", "--rating", "down", "--url", admin, "--json"))["feedback"]
    assert [(row["response_id"], row["comment"], row["tenant"], row["user"]) for row in listed] == [(chat.id, "Ask [EMAIL]", "acme", "u")]
    assert listed[0]["question"] == [{"role": "user", "content": "Write to [EMAIL], please."}]
    assert listed[0]["answer"] == chat.choices[0].message.content
    assert len(json.loads(tidemill("feedback", "list", "--url", admin, "--json"))["feedback"]) == 5

    golden = tmp_path / "golden.jsonl"
    tidemill("feedback", "golden", chat.id, "--cases", golden, "--url", admin)
    tidemill("feedback", "golden", response.id, "--contains", "hello", "--cases", golden, "--url", admin)
    assert "has a case" in tidemill("feedback", "golden", chat.id, "--cases", golden, "--url", admin)
    assert "nobody has said" in tidemill("feedback", "golden", "chatcmpl-0", "--cases", golden, "--url", admin, status=1)
    cases = [json.loads(line) for line in golden.read_text().splitlines()]
    assert [case["id"] for case in cases] == [listed[0]["response_id"], response.id]
    assert "Ask [EMAIL]" in cases[0]["checks"][0]["judge"]["rubric"] and cases[0]["messages"] == listed[0]["question"]
    assert cases[1]["checks"] == [{"contains": ["hello"]}] and cases[1]["messages"] == [{"role": "user", "content": "Hello"}]

    metrics = httpx.get(f"{admin}/metrics").text
    for rating, count in [("up", 5), ("down", 1), ("regenerate", 1)]:
        assert f'tidemill_feedback_total{{model="{model}",rating="{rating}"}} {count}' in metrics


def test_a_server_that_does_not_ask_says_so(client, url):
    with pytest.raises(openai.BadRequestError, match="--feedback"):
        say(client, "chatcmpl-0", rating="up")

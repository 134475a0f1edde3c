"""Repeated requests and resumed streams, with the official clients."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket

import anthropic
import httpx
import openai
import pytest
from conftest import running_cluster

MESSAGES = [{"role": "user", "content": "Tell of the tide."}]


@pytest.fixture
def key(request):
    """A header with a key of its own for each test."""
    return {"Idempotency-Key": request.node.name}


def event_lines(text):
    """Events without comments."""
    return [event for event in text.split("\n\n") if event and not event.startswith(":")]


def said(events):
    chunks = [json.loads(line.removeprefix("data: ")) for event in events for line in event.split("\n") if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_a_chat_is_computed_once(client, model, key):
    ask = lambda: client.chat.completions.with_raw_response.create(model=model, messages=MESSAGES, max_tokens=20, extra_headers=key)
    first, again = ask(), ask()
    assert (first.headers["x-idempotency"], again.headers["x-idempotency"]) == ("started", "replayed")
    assert first.text == again.text and first.parse() == again.parse()
    with pytest.raises(openai.UnprocessableEntityError, match="another body"):
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=21, extra_headers=key)


def test_ids_of_events_do_not_disturb_the_openai_client(client, model, key):
    stream = lambda: list(client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=20, stream=True, extra_headers=key))
    first, again = stream(), stream()
    assert first == again and len(first) > 2
    assert first[-1].choices[0].finish_reason in ("length", "stop")


def test_a_response_goes_on_after_an_event(client, model, key):
    events = list(client.responses.create(model=model, input="Tell.", max_output_tokens=20, stream=True, extra_headers=key))
    name = events[0].response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=4))
    assert rest == events[5:]
    assert client.responses.retrieve(name).output_text == events[-1].response.output_text


def test_ids_of_events_do_not_disturb_the_anthropic_client(root, model, key):
    with anthropic.Anthropic(base_url=root, api_key="unused", max_retries=0, timeout=60) as claude:

        def text():
            with claude.messages.stream(model=model, max_tokens=20, messages=MESSAGES, extra_headers=key) as stream:
                return "".join(stream.text_stream), stream.get_final_message()

        first, again = text(), text()
    assert first == again and first[0] == first[1].content[0].text


def free_ports():
    """The first of two consecutive free ports."""
    for _ in range(100):
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    pytest.fail("there are no two free ports in a row")


@pytest.mark.skipif("TIDEMILL_URL" in os.environ, reason="it stops a coordinator of a cluster of its own")
def test_a_stream_goes_on_at_another_coordinator():
    """A coordinator that is stopped is as good as dead to its clients, and `tidemill up` does not end the cluster for it."""
    port = free_ports()
    with running_cluster("--coordinator", "2", http=f"127.0.0.1:{port}") as url, httpx.Client(timeout=60) as http:
        other = f"http://127.0.0.1:{port + 1}/v1"
        model = http.get(url + "/models").raise_for_status().json()["data"][0]["id"]
        body = {"model": model, "messages": MESSAGES, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        # The answer without faults.
        whole = said(event_lines(http.post(url + "/chat/completions", json=body).raise_for_status().text))
        key = {"Idempotency-Key": "k"}
        stopped = coordinator_at(port)
        heard = ""
        try:
            with http.stream("POST", url + "/chat/completions", json=body, headers=key) as stream:
                for text in stream.iter_text():
                    heard += text
                    if heard.count("\n\n") > 20:
                        break
                os.kill(stopped, signal.SIGSTOP)
            heard = heard[: heard.rindex("\n\n")]
            last = re.findall(r"^id: (.*)$", heard, re.MULTILINE)[-1]
            rest = http.post(other + "/chat/completions", json=body, headers=key | {"Last-Event-ID": last}).raise_for_status()
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert rest.headers["x-idempotency"] == "recomputed"
        assert len(event_lines(heard)) < 200, "it broke off in the middle"
        assert said(event_lines(heard) + event_lines(rest.text)) == whole


def coordinator_at(port):
    """The process that listens on a port."""
    rows = [row.split() for row in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A")
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == f"socket:[{inode}]":
                return int(link.parts[2])
    pytest.fail(f"nobody listens at {port}")

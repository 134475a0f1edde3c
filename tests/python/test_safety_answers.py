"""The last stage of the safety checks, on answers: its verdicts in every protocol, and the behaviour while it is down."""

import json
import os
import signal
import time

import anthropic
import httpx
import openai
import pytest
from clusters import wait_until
from judges import HARMLESS, LENIENT_ANSWERS, SAFE, UNSAFE, classifier, judged, saying

__all__ = ["classifier"]
AFTER = " A river is old. A stone is tall."
UNREMARKABLE = "the old tree must stay. a river is old."
ASKED = "tidemill_safety_model_seconds_count"


def answering(*arguments, settings=""):
    return judged(*arguments, settings=f"answers = true\n{settings}", checks=LENIENT_ANSWERS)


@pytest.fixture(scope="module")
def strict(tmp_path_factory, classifier):
    with answering(tmp_path_factory.mktemp("strict"), classifier, UNSAFE) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lenient(tmp_path_factory, classifier):
    with answering(tmp_path_factory.mktemp("lenient"), classifier, SAFE, settings="deadline_ms = 700") as cluster:
        yield cluster


def streamed(cluster, text, **fields):
    """Each choice's text and its last choice object, and the bytes that came."""
    body = {"model": "chat", "messages": [{"role": "user", "content": HARMLESS}], "max_tokens": 200, "temperature": 0, "stream": True}
    body |= {"structured_outputs": {"choice": [text]}, "logprobs": True, "return_token_ids": True} | fields
    raw = httpx.post(f"{cluster.url}/chat/completions", json=body, timeout=60).text
    said, ended = {}, {}
    for line in raw.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                assert choice["index"] not in ended, "nothing follows the end"
                said[choice["index"]] = said.get(choice["index"], "") + (choice["delta"].get("content") or "")
                if choice["finish_reason"]:
                    ended[choice["index"]] = choice
    assert raw.rstrip().endswith("data: [DONE]")
    return said, ended, raw


def test_a_doubted_answer_is_released_once_it_was_judged(lenient):
    text = lenient.doubtful_answer() + AFTER
    asked = lenient.metric(ASKED, 'side="output"')
    whole = lenient.ask(HARMLESS, logprobs=True, n=2, **saying(text))
    for choice in whole.choices:
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert "".join(token.token for token in choice.logprobs.content).removesuffix("<|eot_id|>") == text
    assert lenient.metric(ASKED, 'side="output"') == asked + 2, "one question a choice"
    said, ended, raw = streamed(lenient, text, n=2)
    assert said == {0: text, 1: text}
    assert [choice["finish_reason"] for choice in ended.values()] == ["stop"] * 2
    assert lenient.metric(ASKED, 'side="output"') == asked + 4
    assert lenient.metric(ASKED, 'side="input"') == 0
    # Judging is not billed.
    events = [json.loads(line) for line in lenient.usage("--format", "events").splitlines()]
    assert {event["model"] for event in events} == {"chat"}


def test_nobody_is_asked_about_what_is_unremarkable(strict):
    asked = strict.metric(ASKED)
    assert strict.ask(HARMLESS, **saying(UNREMARKABLE)).choices[0].message.content == UNREMARKABLE
    assert strict.ask(HARMLESS).choices[0].finish_reason == "length"
    assert strict.metric(ASKED) == asked


def test_nothing_of_a_doubted_answer_and_nothing_after_it_is_sent(strict):
    passage = strict.doubtful_answer()
    choice = strict.ask(HARMLESS, logprobs=True, **saying(passage + AFTER)).choices[0]
    reason = choice.model_extra["stop_reason"]
    assert choice.finish_reason == "content_filter"
    assert (reason["category"], reason["stage"], round(reason["score"])) == ("hate", "model", 1)
    before = choice.message.content
    assert len(before) < passage.index("zorb") + len("zorb") and passage.startswith(before)
    assert before.startswith("".join(token.token for token in choice.logprobs.content))

    said, ended, raw = streamed(strict, passage + AFTER, n=2)
    assert said == {0: before, 1: before}, "the same, streamed"
    assert [choice["finish_reason"] for choice in ended.values()] == ["content_filter"] * 2
    for word in ["zorb", "river", "stone"]:
        assert word not in raw
    assert 'tidemill_safety_blocks_total{side="output",category="hate",stage="model"} 3' in httpx.get(f"{strict.admin}/metrics").text


def test_every_protocol_says_so_in_its_own_words(strict):
    passage = strict.doubtful_answer()
    forced = saying(passage + AFTER)["extra_body"]
    completion = strict.client.completions.create(model="chat", prompt=HARMLESS, max_tokens=200, extra_body=forced).choices[0]
    assert (completion.finish_reason, completion.model_extra["stop_reason"]["stage"]) == ("content_filter", "model")

    asked = {"model": "chat", "input": HARMLESS, "extra_body": forced}
    response = strict.client.responses.create(**asked)
    events = list(strict.client.responses.create(stream=True, **asked))
    for ended in response, events[-1].response, strict.client.responses.retrieve(response.id):
        assert (ended.status, ended.incomplete_details.reason) == ("incomplete", "content_filter")
        assert ended.incomplete_details.model_extra["violation"]["stage"] == "model"
        assert "zorb" not in ended.output_text
    assert "zorb" not in "".join(event.delta for event in events if event.type == "response.output_text.delta")

    claude = anthropic.Anthropic(base_url=strict.url.removesuffix("/v1"), api_key="unused", max_retries=0)
    asked = {"model": "chat", "max_tokens": 200, "messages": [{"role": "user", "content": HARMLESS}], "extra_body": forced}
    message = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        parts = list(stream.text_stream)
        last = stream.get_final_message()
    for message in message, last:
        assert message.stop_reason == "refusal"
        assert "zorb" not in "".join(block.text for block in message.content)
    assert "zorb" not in "".join(parts)


def test_a_batch_goes_the_same_way(strict):
    passage = strict.doubtful_answer()
    body = {"model": "chat", "messages": [{"role": "user", "content": HARMLESS}], "max_tokens": 200}
    body |= saying(passage + AFTER)["extra_body"]
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()
    given = strict.client.files.create(file=("lines.jsonl", line), purpose="batch")
    batch = strict.client.batches.create(input_file_id=given.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: strict.client.batches.retrieve(batch.id).status == "completed", within_s=30)
    output = strict.client.files.content(strict.client.batches.retrieve(batch.id).output_file_id).text
    choice = json.loads(output)["response"]["body"]["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]["stage"]) == ("content_filter", "model") and "zorb" not in output


def test_closed_cuts_what_cannot_be_checked(lenient):
    passage = lenient.doubtful_answer()
    pid = lenient.judge_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        said, ended, raw = streamed(lenient, passage + AFTER, n=2)
        assert 0.6 < time.monotonic() - started < 10
        for choice in ended[0], ended[1]:
            assert (choice["finish_reason"], choice["stop_reason"]["code"]) == ("content_filter", "safety_check_unavailable")
            assert "too slow" in choice["stop_reason"]["message"] and "zorb" not in raw and "river" not in raw
        assert lenient.metric("tidemill_safety_unchecked_total") == 2, "nobody is asked again"
        response = lenient.client.responses.create(model="chat", input=HARMLESS, extra_body=saying(passage)["extra_body"])
        assert response.incomplete_details.model_extra["unchecked"]["code"] == "safety_check_unavailable"
        claude = anthropic.Anthropic(base_url=lenient.url.removesuffix("/v1"), api_key="unused", max_retries=0)
        asked = {"model": "chat", "max_tokens": 200, "messages": [{"role": "user", "content": HARMLESS}]}
        message = claude.messages.create(extra_body=saying(passage)["extra_body"], **asked)
        assert (message.stop_reason, message.stop_details.code) == ("refusal", "safety_check_unavailable")
        assert lenient.ask(HARMLESS, **saying(UNREMARKABLE)).choices[0].finish_reason == "stop"
        started = time.monotonic()
        assert lenient.ask(HARMLESS, **saying(passage)).choices[0].finish_reason == "content_filter"
        assert time.monotonic() - started < 0.5, "a dead judge does not cost every answer its deadline"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: lenient.ask(HARMLESS, **saying(passage)).choices[0].finish_reason == "stop")
    assert lenient.metric("tidemill_safety_unchecked_total", 'side="output"') >= 4
    assert lenient.metric("tidemill_safety_bypasses_total") == 0
    lenient.told("the last safety check of an uncertain answer failed; refusing it")


def test_open_lets_pass_and_never_what_may_be_about_children(tmp_path, classifier):
    settings = 'deadline_ms = 500\nwhen_down = "open"\nopen_for_s = 60'
    with answering(tmp_path, classifier, SAFE, settings=settings) as cluster:
        hate, csam = cluster.doubtful_answer(), cluster.doubtful_answer("plim")
        pid = cluster.judge_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            assert cluster.ask(HARMLESS, **saying(hate + AFTER)).choices[0].message.content == hate + AFTER
            cut = cluster.ask(HARMLESS, **saying(csam + AFTER)).choices[0]
            assert cut.finish_reason == "content_filter" and "plim" not in cut.message.content
        finally:
            os.kill(pid, signal.SIGCONT)
        assert cluster.metric("tidemill_safety_bypasses_total", 'side="output"') == 1
        cluster.told("the last safety check of an uncertain answer failed; letting it pass")


def test_a_client_that_leaves_ends_the_judgement(tmp_path, classifier):
    with answering(tmp_path, classifier, SAFE, settings="deadline_ms = 60000") as cluster:
        text = cluster.doubtful_answer() + AFTER
        assert cluster.ask(HARMLESS, **saying(text)).choices[0].finish_reason == "stop"
        pid = cluster.judge_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(openai.APITimeoutError):
                cluster.ask(HARMLESS, timeout=1, **saying(text))
            wait_until(lambda: cluster.metric("tidemill_requests_running") == 0, within_s=3)
        finally:
            os.kill(pid, signal.SIGCONT)

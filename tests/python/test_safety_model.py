"""The last stage of the safety checks, a model of the cluster: its verdicts, and the behaviour while it is down, slow or gives invalid
answers. Also disclaimers. Judges are real checkpoints that always give the same answer."""

import json
import os
import re
import signal
import subprocess
import time

import anthropic
import httpx
import openai
import pytest
from checkpoints import planted
from clusters import tidemill, wait_until
from judges import HARMLESS, LENIENT_ANSWERS, NEITHER, SAFE, UNSAFE, classifier, judged, saying

__all__ = ["classifier"]
DISCLAIMERS = """
[[safety.disclaimer]]
name = "medical"
patterns = ["the the the"]
text = "This is not medical advice."
[[safety.disclaimer]]
name = "legal"
patterns = ["re: sued? {1,3}them"]
text = "This is not legal advice."
"""


@pytest.fixture(scope="module")
def strict(tmp_path_factory, classifier):
    with judged(tmp_path_factory.mktemp("strict"), classifier, UNSAFE, disclaimers=DISCLAIMERS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lenient(tmp_path_factory, classifier):
    with judged(tmp_path_factory.mktemp("lenient"), classifier, SAFE, "deadline_ms = 700", checks=LENIENT_ANSWERS) as cluster:
        yield cluster


def test_a_judge_refuses_what_the_classifier_is_not_sure_of(strict):
    calls = [
        lambda text: strict.ask(text),
        lambda text: strict.client.completions.create(model="chat", prompt=text, max_tokens=2),
        lambda text: strict.client.responses.create(model="chat", input=text, max_output_tokens=16),
        lambda text: strict.client.chat.completions.create(
            model="chat", messages=[{"role": "system", "content": text}, {"role": "user", "content": "hi"}], max_tokens=2
        ),
    ]
    for call in calls:
        with pytest.raises(openai.BadRequestError) as refused:
            call(strict.hate)
        assert refused.value.code == "content_filter"
        assert "hate (found by model, score 1.00 of 1)" in refused.value.message
    ids = httpx.post(strict.url.removesuffix("/v1") + "/tokenize", json={"model": "chat", "prompt": strict.hate}).json()["tokens"]
    with pytest.raises(openai.BadRequestError) as refused:
        strict.client.completions.create(model="chat", prompt=ids, max_tokens=2)
    assert refused.value.code == "content_filter"
    claude = anthropic.Anthropic(base_url=strict.url.removesuffix("/v1"), api_key="unused", max_retries=0)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="chat", max_tokens=2, messages=[{"role": "user", "content": strict.hate}])
    metrics = httpx.get(f"{strict.admin}/metrics").text
    assert 'tidemill_safety_blocks_total{side="input",category="hate",stage="model"} 6' in metrics


def test_nobody_is_asked_about_the_rest(strict):
    asked = strict.metric("tidemill_safety_model_seconds_count")
    assert strict.ask(HARMLESS).choices[0].finish_reason == "length"
    assert strict.metric("tidemill_safety_model_seconds_count") == asked


def test_one_doubtful_message_of_a_long_chat_is_enough(strict):
    says = [{"role": role, "content": HARMLESS} for _ in range(20) for role in ("user", "assistant")]
    assert strict.client.chat.completions.create(model="chat", messages=says, max_tokens=2)
    says[10] = {"role": "user", "content": strict.hate}
    with pytest.raises(openai.BadRequestError) as refused:
        strict.client.chat.completions.create(model="chat", messages=says, max_tokens=2)
    assert refused.value.code == "content_filter"


def test_a_judge_lets_pass_what_it_finds_safe_and_nobody_pays_for_that(lenient):
    asked = lenient.metric("tidemill_safety_model_seconds_count")
    requests = lenient.metric("tidemill_requests_total")
    answer = lenient.ask(lenient.hate)
    assert answer.choices[0].message.content
    assert lenient.metric("tidemill_safety_model_seconds_count") == asked + 1
    assert lenient.metric("tidemill_requests_total") == requests + 1
    events = [json.loads(line) for line in lenient.usage("--format", "events").splitlines()]
    assert events and {event["model"] for event in events} == {"chat"}


def test_nobody_is_asked_about_answers_unless_the_file_says_so(lenient):
    asked = lenient.metric("tidemill_safety_model_seconds_count")
    text = lenient.doubtful_answer()
    assert lenient.ask(HARMLESS, **saying(text)).choices[0].message.content == text
    assert lenient.metric("tidemill_safety_model_seconds_count") == asked


def test_closed_refuses_while_the_judge_hangs(lenient):
    lenient.ask(lenient.hate)
    pid = lenient.judge_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        refused = lenient.refusal(lenient.hate)
        assert 0.6 < time.monotonic() - started < 10
        assert (refused.status_code, refused.code) == (503, "safety_check_unavailable")
        assert "too slow" in refused.message and "messages" in refused.message
        assert refused.response.headers["retry-after"]
        assert lenient.ask(HARMLESS).choices[0].message.content, "what is not doubtful does not wait for it"
        # A dead one does not cost every request its deadline.
        lenient.refusal(lenient.hate), lenient.refusal(lenient.hate)
        started = time.monotonic()
        assert lenient.refusal(lenient.hate).status_code == 503
        assert time.monotonic() - started < 0.5
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: passes(lenient, lenient.hate))
    assert lenient.metric("tidemill_safety_unchecked_total") >= 4
    assert lenient.metric("tidemill_safety_bypasses_total") == 0
    lenient.told("the last safety check of an uncertain prompt failed; refusing it")


def test_closed_refuses_while_there_is_no_worker(lenient):
    pid = lenient.judge_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: lenient.judge_pid() is None, within_s=30)
        # It may wait for one, or not.
        assert not passes(lenient, lenient.hate)
        assert lenient.ask(HARMLESS).choices[0].message.content
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: passes(lenient, lenient.hate))


def test_a_judge_that_crashes_comes_back(lenient):
    for _ in range(3):
        wait_until(lenient.judge_pid)
        os.kill(lenient.judge_pid(), signal.SIGKILL)
        # Refused, or late: never unchecked.
        wait_until(lambda: passes(lenient, lenient.hate))
    assert lenient.metric("tidemill_safety_bypasses_total") == 0


def passes(cluster, text):
    try:
        cluster.ask(text)
    except openai.InternalServerError as error:
        assert error.code == "safety_check_unavailable"
        return False
    return True


def test_open_lets_pass_for_a_while_and_never_what_may_be_about_children(tmp_path, classifier):
    window_s = 6
    settings = f'deadline_ms = 500\nwhen_down = "open"\nopen_for_s = {window_s}'
    with judged(tmp_path, classifier, SAFE, settings) as cluster:
        assert passes(cluster, cluster.hate) and passes(cluster, cluster.csam)
        pid = cluster.judge_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert passes(cluster, cluster.hate)
            first_failure = time.monotonic()
            assert not passes(cluster, cluster.csam)
            assert passes(cluster, cluster.hate)
            bypasses = cluster.metric("tidemill_safety_bypasses_total")
            assert bypasses == 2 and first_failure - started < window_s
            assert len(re.findall("failed; letting it pass", "".join(cluster.log))) == bypasses
            wait_until(lambda: not passes(cluster, cluster.hate), within_s=window_s + 2)
            assert time.monotonic() - first_failure > window_s - 2
            assert not passes(cluster, cluster.hate)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: passes(cluster, cluster.csam))
        shut = cluster.metric("tidemill_safety_bypasses_total")
        pid = cluster.judge_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            assert passes(cluster, cluster.hate), "the window opens again after a success"
            assert cluster.metric("tidemill_safety_bypasses_total") == shut + 1
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_judge_that_is_talked_into_nonsense_lets_nothing_pass(tmp_path, classifier):
    with judged(tmp_path, classifier, NEITHER, 'when_down = "open"') as cluster:
        refused = cluster.refusal(cluster.hate)
        assert refused.code == "safety_check_unavailable" and "neither of its two words" in refused.message
        assert cluster.metric("tidemill_safety_bypasses_total") == 0


def test_a_disclaimer_comes_once_at_the_end(strict):
    said = " the" * 6 + "\n\nThis is not medical advice."
    before = strict.metric("tidemill_safety_disclaimers_total")
    assert strict.ask(HARMLESS).choices[0].message.content == said
    for choice in strict.ask(HARMLESS, n=2).choices:
        assert choice.message.content == said
    streamed = {0: "", 1: ""}
    for chunk in strict.ask(HARMLESS, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == [said, said]
    completion = strict.client.completions.create(model="chat", prompt=HARMLESS, max_tokens=6)
    assert completion.choices[0].text == said and completion.usage.completion_tokens == 6
    response = strict.client.responses.create(model="chat", input=HARMLESS, max_output_tokens=16)
    assert response.output_text == " the" * 16 + "\n\nThis is not medical advice."
    events = list(strict.client.responses.create(model="chat", input=HARMLESS, max_output_tokens=16, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == response.output_text
    claude = anthropic.Anthropic(base_url=strict.url.removesuffix("/v1"), api_key="unused", max_retries=0)
    message = claude.messages.create(model="chat", max_tokens=6, messages=[{"role": "user", "content": HARMLESS}])
    assert message.content[0].text == said
    assert strict.metric("tidemill_safety_disclaimers_total") == before + 9


def test_no_disclaimer_where_it_does_not_belong(strict):
    assert "advice" not in strict.ask(HARMLESS, max_tokens=2).choices[0].message.content
    fine = {"structured_outputs": {"choice": ["the the the"]}}
    assert strict.ask(HARMLESS, max_tokens=20, extra_body=fine).choices[0].message.content == "the the the"
    # Its text would match; the safety checks end it before.
    cut = {"structured_outputs": {"choice": ["the the the: you should kill yourself"]}}
    choice = strict.ask(HARMLESS, max_tokens=80, extra_body=cut).choices[0]
    assert choice.finish_reason == "content_filter" and "advice" not in choice.message.content


def test_a_judge_that_cannot_be_one_is_refused_at_start(tmp_path):
    planted(tmp_path / "guard", SAFE)
    config = tmp_path / "coordinator.toml"
    config.write_text('[safety.judge]\nmodel = "guard"\nsafe = "unharmful"\n')
    command = [tidemill(), "up", "--http", "127.0.0.1:0", "--model", str(tmp_path / "guard"), "--coordinator-config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "begins both words with the same token" in ended.stderr

"""The semantic cache: a similar question's answer, for tenants that opted in, where everything else is equal; and it says so.

An encoder with random weights stands in for a trained one: to it nearly all questions are alike, so these tests show the guards and the way of
a question. How often trained weights are right is measured apart (`bench/semantic.py`).
"""

import os
import pathlib
import signal
import subprocess
import time

import httpx
import openai
import pytest
from clusters import Cluster, client, tidemill, wait_until
from conftest import MODEL, running_cluster

ENCODER = pathlib.Path(__file__).parents[2] / "model/tests/encoders/bert-mean"
# These machines are busy: a question may take long to be read.
SETTINGS = '[semantic_cache]\nmodel = "bert-mean"\nthreshold = 0.5\nwait_ms = 30000\n'

ASKED = "How do I reset my password?"
ALIKE = "What is the way to reset a password?"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("semantic"), SETTINGS, models=(MODEL, ENCODER))
    yield cluster
    if cluster.process.poll() is None:
        cluster.stop()


@pytest.fixture(scope="module")
def tenant(cluster):
    """A client of a new tenant."""

    def tenant(name, opts_in=True):
        key = cluster.key(name, "premium")
        if opts_in:
            operate("tenants", "set", name, "--semantic-cache", "true", "--url", cluster.admin)
        return client(cluster, key)

    return tenant


def operate(*arguments):
    subprocess.run([tidemill(), *arguments], check=True, capture_output=True, timeout=60)


def ask(client, question, system=None, messages=None, extra_body=None, **parameters):
    messages = messages or [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    given = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True} | (extra_body or {})} | parameters
    return client.chat.completions.with_raw_response.create(model="llama3", messages=messages, **given)


def hit(answer):
    usage = answer.parse().usage.tidemill
    told = answer.headers.get("x-tidemill-response-cache")
    assert (usage["response_cache"] == "semantic") == (told is not None) == ("similar_to" in usage)
    return usage["response_cache"] == "semantic"


def test_a_paraphrase_hits_and_says_so(tenant):
    acme = tenant("acme")
    first = ask(acme, ASKED)
    assert not hit(first)
    second = ask(acme, ALIKE)
    assert hit(second)
    first, told = first.parse(), second.headers["x-tidemill-response-cache"]
    second = second.parse()
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.id != first.id, "it is an answer of its own"
    similar = second.usage.tidemill["similar_to"]
    assert similar["response"] == first.id and 0.5 <= similar["similarity"] <= 1
    assert told == f"semantic; similarity={similar['similarity']:.3f}; response={first.id}"
    assert second.usage.prompt_tokens != first.usage.prompt_tokens, "the bill is of its own prompt"
    assert second.usage.completion_tokens == 8
    assert second.usage.prompt_tokens_details.cached_tokens == 0 and not any(second.usage.tidemill["tokens"].values())
    for misses in ["How do I not reset my password?", "How do I reset my Tidemill password?", 'How do I "reset" my password?']:
        assert not hit(ask(acme, misses)), misses


def test_a_changed_number_misses(tenant):
    numbers = tenant("numbers")
    assert not hit(ask(numbers, "How many miles are 5 kilometers?"))
    assert not hit(ask(numbers, "How many miles are 50 kilometers?"))
    assert hit(ask(numbers, "So how many miles are 5 kilometers?"))


def test_a_stream_says_so_in_its_header_and_usage(tenant):
    streams = tenant("streams")
    whole = ask(streams, ASKED).parse().choices[0].message.content
    answer = ask(streams, ALIKE, stream=True, stream_options={"include_usage": True})
    assert answer.headers["x-tidemill-response-cache"].startswith("semantic; similarity=0.")
    chunks = list(answer.parse())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.tidemill["response_cache"] == "semantic"


def test_nobody_gets_another_tenants_answer(tenant):
    mine, theirs = tenant("mine"), tenant("theirs")
    assert not hit(ask(mine, ASKED))
    assert not hit(ask(theirs, ALIKE))
    assert hit(ask(mine, ALIKE))


def test_who_did_not_opt_in_gets_and_gives_nothing(tenant, cluster):
    out = tenant("out", opts_in=False)
    assert not hit(ask(out, ASKED)) and not hit(ask(out, ALIKE))
    operate("tenants", "set", "out", "--semantic-cache", "true", "--url", cluster.admin)
    assert not hit(ask(out, ALIKE)) and hit(ask(out, ASKED)), "from now on"
    operate("tenants", "set", "out", "--semantic-cache", "false", "--url", cluster.admin)
    assert not hit(ask(out, ASKED))


def test_everything_else_must_be_equal(tenant):
    strict = tenant("strict")
    assert not hit(ask(strict, ASKED, system="Be brief."))
    tool = {"type": "function", "function": {"name": "reset", "parameters": {"type": "object", "properties": {}}}}
    turns = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": ALIKE}]
    for other in (
        {"system": "Be kind."},
        {"system": None},
        {"temperature": 0.5, "seed": 1},
        {"max_tokens": 7},
        {"tools": [tool]},
        {"messages": turns},
        {"n": 2},
        {"logprobs": True},
        {"presence_penalty": 0.5},
        {"extra_body": {"cache_salt": "mine"}},
        {"extra_body": {"guided_regex": "[a-z]+"}},
        {"extra_body": {"semantic_cache": False}},
        {"extra_body": {"conversation": "new"}},
    ):
        assert not hit(ask(strict, ALIKE, **({"system": "Be brief."} | other))), other
    assert hit(ask(strict, ALIKE, system="Be brief."))
    assert not hit(ask(strict, "A question drawn by dice?", temperature=1)) and not hit(ask(strict, "The question drawn by dice?", temperature=1))


def test_operators_see_it(tenant, cluster):
    seen = tenant("seen")
    ask(seen, ASKED), ask(seen, ALIKE)
    lines = dict(line.rsplit(" ", 1) for line in httpx.get(cluster.admin + "/metrics").text.splitlines() if line and line[0] != "#")
    assert float(lines['tidemill_semantic_cache_total{outcome="hit"}']) > 0
    assert float(lines["tidemill_semantic_cache_answers"]) > 0 and float(lines["tidemill_semantic_cache_bytes"]) > 0
    assert float(lines["tidemill_semantic_cache_seconds_count"]) > 0 and float(lines["tidemill_semantic_cache_read_seconds_count"]) > 0


def unread(cluster, reason):
    lines = dict(line.rsplit(" ", 1) for line in httpx.get(cluster.admin + "/metrics").text.splitlines() if line and line[0] != "#")
    return float(lines.get(f'tidemill_semantic_cache_unread_total{{reason="{reason}"}}', 0))


def encoders_worker(cluster):
    """The process of the encoder's only worker."""
    children = pathlib.Path(f"/proc/{cluster.process.pid}/task").glob("*/children")
    pids = [int(pid) for child in children for pid in child.read_text().split()]
    lines = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids}
    return next(pid for pid, line in lines.items() if "tidemill-decode" in line and str(ENCODER) in line)


def test_no_request_waits_for_an_encoder_that_is_slow_or_gone(tmp_path):
    wait_s = 2
    cluster = Cluster(tmp_path, SETTINGS.replace("30000", str(wait_s * 1000)), models=(MODEL, ENCODER))
    try:
        key = cluster.key("acme", "premium")
        operate("tenants", "set", "acme", "--semantic-cache", "true", "--url", cluster.admin)
        acme = client(cluster, key)
        assert not hit(ask(acme, ASKED)) and hit(ask(acme, ALIKE))
        worker = encoders_worker(cluster)
        os.kill(worker, signal.SIGSTOP)
        assert not hit(ask(acme, ALIKE)), "the first waits in vain"
        assert unread(cluster, "overdue") + unread(cluster, "failed") == 1
        for _ in range(20):
            begun = time.monotonic()
            assert not hit(ask(acme, ALIKE))
            assert time.monotonic() - begun < wait_s, "and the others do not wait"
        assert unread(cluster, "paused") + unread(cluster, "no_worker") >= 20
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: hit(ask(acme, ALIKE)))
        os.kill(worker, signal.SIGKILL)
        begun = time.monotonic()
        ask(acme, ALIKE)
        assert time.monotonic() - begun < wait_s + 10
        wait_until(lambda: hit(ask(acme, ALIKE)))
    finally:
        cluster.stop()


def test_without_a_model_it_is_off_and_says_why(tmp_path):
    cluster = Cluster(tmp_path, "[semantic_cache]\n", "--response-cache", "1MiB")
    try:
        cluster.told(r"the semantic cache is off: semantic_cache.model is not set")
        key = cluster.key("acme", "premium")
        operate("tenants", "set", "acme", "--semantic-cache", "true", "--url", cluster.admin)
        acme = client(cluster, key)
        assert not hit(ask(acme, ASKED)) and not hit(ask(acme, ALIKE))
        assert ask(acme, ASKED).parse().usage.tidemill["response_cache"] is True, "the cache of equal requests stays"
    finally:
        cluster.stop()


def test_it_is_off_by_default():
    with running_cluster("--response-cache", "1MiB") as url:
        with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as anybody:
            assert not hit(ask(anybody, ASKED)) and not hit(ask(anybody, ALIKE))
            assert ask(anybody, ASKED).parse().usage.tidemill["response_cache"] is True

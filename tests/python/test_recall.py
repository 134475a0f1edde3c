"""Old messages and facts ranked by words and an encoder's vectors, and `auto` by examples: with an encoder that is slow, killed, or not there.

An encoder with random weights stands in for a trained one: these tests show the way of the texts, the bounds and the failures. How often trained
weights find what is needed is measured apart (`bench/retrieval.py`).
"""

import itertools
import os
import signal
import subprocess
import time

import httpx
import pytest
from clusters import Cluster, client, tidemill, wait_until
from conftest import MODEL
from test_context import context, prompt, remember, say, user
from test_semantic_cache import ENCODER, encoders_worker

WAIT_S = 2
CONFIG = f"""
[context]
model = "bert-mean"
wait_ms = {WAIT_S * 1000}
[memory]
facts_max = 200
[router.auto]
small = "llama3"
large = "qwen3"
model = "bert-mean"
wait_ms = {WAIT_S * 1000}
meaning = 1.0
small_examples = ["Hello there."]
large_examples = ["Prove that there are infinitely many primes."]
"""
WISH = {"turns_max": 2, "retrieve": 2, "retrieve_tokens": 200}
TOLD = ["The boat is called Marigold.", "It coughs when it is cold.", "The berth costs forty.", "Thank you."]


@pytest.fixture()
def cluster(tmp_path):
    cluster = Cluster(tmp_path, CONFIG, models=(MODEL, MODEL.parent / "qwen3", ENCODER))
    cluster.key("first", "premium")
    yield cluster
    if cluster.process.poll() is None:
        cluster.stop()


def metric(cluster, name):
    lines = dict(line.rsplit(" ", 1) for line in httpx.get(cluster.admin + "/metrics").text.splitlines() if line and line[0] != "#")
    return float(lines.get(f"tidemill_{name}", 0))


def unread(cluster, *reasons, of="recall"):
    return sum(metric(cluster, f'{of}_unread_total{{reason="{reason}"}}') for reason in reasons)


def converse(acme):
    """A conversation of which the first turns are left out."""
    id = acme.conversations.create().id
    for text in TOLD:
        say(acme, text, conversation=id, context=WISH)
    return id


def test_what_shares_no_word_is_found_and_words_remain_without_the_encoder(cluster):
    acme = user(cluster, "acme")
    id = converse(acme)

    def ranked(said):
        answer = say(acme, said, conversation=id, context=WISH)
        return context(answer)["ranked"], context(answer)["retrieved"]["messages"], answer

    new = itertools.count()

    def both():
        # Only vectors can find what has no word in common.
        told, found, _ = ranked(f"Zz{next(new)}?")
        return told["by"] == "both" and told["texts"] >= told["vectors"] > 0 and len(found) == 2

    wait_until(both)
    told, _, answer = ranked("Marigold?")
    assert told["by"] == "both" and "reason" not in told
    assert prompt(acme, answer).count("Marigold") >= 2, "the name is found by its word"
    assert metric(cluster, 'recall_ranked_total{by="both"}') > 0 and metric(cluster, "recall_texts") > len(TOLD)

    worker = encoders_worker(cluster)
    os.kill(worker, signal.SIGSTOP)
    begun = time.monotonic()
    told, found, _ = ranked("Yyy?")
    assert (told["by"], found) == ("words", []) and told["reason"] in ("overdue", "failed"), "the first waits in vain"
    assert time.monotonic() - begun < WAIT_S + 10
    for n in range(5):
        begun = time.monotonic()
        told, found, _ = ranked(f"Marigold, number {n}?")
        assert told["by"] == "words" and found, "words alone"
        assert time.monotonic() - begun < WAIT_S, "and the others do not wait"
    assert unread(cluster, "paused", "no_worker", "overdue", "failed") >= 6
    os.kill(worker, signal.SIGCONT)
    wait_until(both)
    os.kill(worker, signal.SIGKILL)
    begun = time.monotonic()
    told, _, _ = ranked("Xxx?")
    assert time.monotonic() - begun < WAIT_S + 10
    wait_until(both)

    assert metric(cluster, "recall_texts") > 0
    erase = [tidemill(), "erase", "--tenant", "acme", "--url", cluster.admin]
    subprocess.run(erase, capture_output=True, timeout=60)
    wait_until(lambda: metric(cluster, "recall_texts") == 0)


def test_facts_beyond_the_room_are_chosen_by_what_was_said(cluster):
    ann = user(cluster, "acme", "ann")
    # The window has 4,096 tokens, and facts an eighth of it: by characters, since the vocabulary is tiny.
    for n in range(30):
        remember(ann, f"Fact {n}: " + f"filler {n} " * 6)
    remember(ann, "Keeps the boat Marigold.")

    def chosen(said):
        answer = say(ann, said, memory=True)
        return context(answer), prompt(ann, answer)

    wait_until(lambda: (chosen("Marigold?")[0].get("ranked") or {}).get("by") == "both")
    told, given = chosen("Marigold?")
    memory = told["memory"]
    assert memory["facts_chosen"] > 0 and memory["facts_left_out"] > 0
    assert memory["facts"] + memory["facts_left_out"] == 31
    assert "Fact 0:" in given, "the first facts stay at the beginning"
    assert given.index("Fact 0:") < given.index("Keeps the boat Marigold.") < given.index("Marigold?")
    other = chosen("Hello there.")[1]
    head = "Also known of the user"
    assert given[: given.index(head)] == other[: other.index(head)], "the beginning does not depend on the question"
    os.kill(encoders_worker(cluster), signal.SIGKILL)
    told, given = chosen("Where is Marigold now?")
    assert "Keeps the boat Marigold." in given and told["memory"]["facts_chosen"] > 0


def auto(client, said):
    answer = client.chat.completions.with_raw_response.create(
        model="auto", messages=[{"role": "user", "content": said}], max_tokens=4, temperature=0
    )
    return answer.headers["x-tidemill-model"], answer.headers["x-tidemill-route"]


def test_auto_goes_by_examples_and_by_form_without_the_encoder(cluster):
    acme = client(cluster, cluster.key("acme", "premium"))
    wait_until(lambda: "meaning" in auto(acme, "Hello there.")[1])
    # The only example of a side lies on it, also for random weights.
    for said, model, sign in [("Hello there.", "llama3", "-"), ("Prove that there are infinitely many primes.", "qwen3", "+")]:
        chosen, why = auto(acme, said)
        assert chosen == model and f"meaning {sign}" in why, (said, chosen, why)
    responded = acme.responses.create(model="auto", input="Prove that there are infinitely many primes.", max_output_tokens=16)
    assert responded.model == "qwen3"
    assert acme.completions.create(model="auto", prompt="Hello there.", max_tokens=4).model == "llama3"
    worker = encoders_worker(cluster)
    os.kill(worker, signal.SIGSTOP)
    begun = time.monotonic()
    chosen, why = auto(acme, "Prove that there are infinitely many primes.")
    assert chosen == "llama3" and why.endswith(("(form alone: overdue)", "(form alone: failed)")), why
    assert time.monotonic() - begun < WAIT_S + 10
    begun = time.monotonic()
    assert "form alone: paused" in auto(acme, "Hello there.")[1]
    assert time.monotonic() - begun < WAIT_S
    assert unread(cluster, "overdue", "failed", of="route") >= 1
    # So that it drains when the cluster ends.
    os.kill(worker, signal.SIGCONT)

"""The time that a model of the cluster takes to judge a prompt of which the classifier is uncertain: `tidemill_safety_model_seconds`.

    judge_time.py TIDEMILL MODEL [FLAG...]

MODEL, a Llama checkpoint, gets weights that always say "safe" (the work stays the same) and one worker (`tidemill up FLAG...`). The prompts
are the held-out sentences that the classifier doubts, each once, first one at a time, then eight. Needs the Python of the tests.
"""

import concurrent.futures
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))


def main():
    os.environ["TIDEMILL_BIN"], model, *flags = sys.argv[1:]
    from clusters import Cluster
    from checkpoints import planted

    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        judge = planted(directory / "judge", first_token(pathlib.Path(model)), pathlib.Path(model))
        cluster = Cluster(directory, '[safety]\n[safety.judge]\nmodel = "judge"\n', *flags, models=[judge])
        try:
            doubted = [text for text in sentences() if is_doubted(cluster.url, text)]
            half = len(doubted) // 2
            ask(cluster.url, "judge", "Good morning")
            for at_once, texts in [(1, doubted[:half]), (8, doubted[half:])]:
                before = spent(cluster.admin)
                with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
                    times = sorted(threads.map(lambda text: ask(cluster.url, "judge", text), texts))
                count, seconds = (now - then for now, then in zip(spent(cluster.admin), before, strict=True))
                print(
                    f"{at_once} at a time: {count:.0f} judged of {len(texts)}, {seconds / count * 1e3:.1f} ms each; "
                    f"whole answers of one token: p50 {at(times, 0.5):.1f} ms, p99 {at(times, 0.99):.1f} ms"
                )
        finally:
            cluster.stop()


def first_token(model):
    """The first token of "safe" in this vocabulary, at the start of a word, since it follows the template's last line."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return [next(piece for length in (4, 3, 2, 1) if (piece := "safe"[:length]) in vocabulary)]


def sentences():
    """The held-out corpus: `{a|b}` stands for each of its parts."""
    for line in (ROOT / "safety" / "corpus" / "held-out.txt").read_text().splitlines():
        if line and line[0] not in "#[":
            parts = [part.split("|") for part in re.split(r"[{}]", line)]
            yield from ("".join(chosen) for chosen in itertools.product(*parts))


def is_doubted(url, text):
    scores = post(f"{url}/moderations", {"input": text})["results"][0]["category_scores"]
    return 0.5 <= max(scores.values()) < 0.95


def ask(url, model, text):
    started = time.monotonic()
    post(f"{url}/chat/completions", {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1})
    return (time.monotonic() - started) * 1e3


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def spent(admin):
    """The number of judgements, and their total seconds."""
    with urllib.request.urlopen(f"{admin}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = (re.search(rf"^tidemill_safety_model_seconds_{part}(?:\{{.*\}})? (\S+)$", text, re.M) for part in ("count", "sum"))
    return [float(value[1]) if value else 0.0 for value in found]


def at(ordered, share):
    return ordered[round((len(ordered) - 1) * share)]


main()

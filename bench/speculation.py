"""Tokens per second with speculation and without, by turns, on a trained model; and whether every answer is the same.

    python3 bench/speculation.py TIDEMILL MODEL [--batch 1,4,16] [--task edit,chat,seeded] [--rounds N] [--tokens N] [-- UP-FLAGS]

TIDEMILL is the program; MODEL is a GGUF file, a directory, a hub id, or whatever `up --model` takes. Two clusters of one decode worker each
run side by side, one with `--speculation off`. Each round sends the same requests to one, the other, the other and the one, so that what
else the machine does falls on both alike; only one of them works at a time. Their prompts have been sent before, so rounds decode and
hardly compute prompts.

Tasks: `edit` asks for a program back with a change in it; `chat` asks questions, greedily; `seeded` the same at temperature 0.7. Standard
output is Markdown, progress goes to standard error. The exit status is 1 if an answer differs.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

READY_S = 900
REQUEST_S = 900

NAMES = ["orders", "invoices", "parcels", "tickets", "readings", "accounts", "recipes", "songs"]
PROGRAM = '''\
class {Name}:
    """Keeps {names} by their number, and counts what was asked of it."""

    def __init__(self, limit=100):
        self.limit = limit
        self.{names} = {{}}
        self.lookups = 0
        self.misses = 0

    def add(self, number, {name}):
        if number in self.{names}:
            raise KeyError(f"{name} {{number}} is there already")
        if len(self.{names}) >= self.limit:
            raise OverflowError(f"no room for more than {{self.limit}} {names}")
        self.{names}[number] = {name}
        return {name}

    def find(self, number):
        self.lookups += 1
        {name} = self.{names}.get(number)
        if {name} is None:
            self.misses += 1
        return {name}

    def remove(self, number):
        if number not in self.{names}:
            raise KeyError(f"there is no {name} {{number}}")
        return self.{names}.pop(number)

    def total(self):
        return sum({name}["amount"] for {name} in self.{names}.values())
'''
EDITS = [
    "Rename the method `find` to `look_up`.",
    "Rename the attribute `limit` to `capacity` everywhere.",
    "Add a method `clear` that removes everything.",
    "Make `total` return 0.0 if there is nothing.",
]
QUESTIONS = [
    "Why is the sky blue? Explain it to a child.",
    "Explain the difference between TCP and UDP.",
    "What should I see in Lisbon in two days?",
    "How does a refrigerator work?",
    "Write a short letter that asks a landlord to repair a window.",
    "What are the advantages and disadvantages of remote work?",
    "Explain what a hash table is and when it is slow.",
    "How do I cook rice without a rice cooker?",
    "Who was Ada Lovelace, and what is she known for?",
    "Give me five ideas for a birthday party in the rain.",
    "What is inflation, and who gains by it?",
    "Describe how vaccines work.",
    "How can I learn to swim as an adult?",
    "Explain recursion with an example in Python.",
    "What is the difference between weather and climate?",
    "Write a poem of eight lines about a lighthouse.",
]


def requests(task, count, tokens):
    bodies = []
    for i in range(count):
        if task == "edit":
            names = NAMES[i % len(NAMES)]
            program = PROGRAM.format(Name=names.capitalize(), names=names, name=names[:-1])
            text = f"{EDITS[i // 2 % len(EDITS)]} Answer with the whole program in one code block, and nothing else.\n\n```python\n{program}```"
        else:
            text = QUESTIONS[i % len(QUESTIONS)]
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.0}
        if task == "seeded":
            body |= {"temperature": 0.7, "top_p": 0.95, "seed": i}
        bodies.append(body)
    return bodies


class Cluster:
    """`tidemill up` with one decode worker, until the end of the block."""

    def __init__(self, program, model, speculation, flags):
        command = [program, "up", "--model", model, "--served-model-name", "m", "--http", "127.0.0.1:0", "--prefill", "0", "--kvpool", "0"]
        command += ["--log", "warn", "--speculation", speculation, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)

    def __enter__(self):
        deadline = time.monotonic() + READY_S
        for line in self.process.stdout:
            if line.startswith("ready "):
                self.url = line.split()[1]
                return self
            if time.monotonic() > deadline:
                break
        self.__exit__()
        raise SystemExit("the cluster was not ready")

    def __exit__(self, *_):
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()

    def post(self, body):
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            return json.load(answer)

    def round(self, bodies):
        """All at once: their answers, and the tokens per second of all together."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            started = time.monotonic()
            answers = list(pool.map(self.post, bodies))
            took = time.monotonic() - started
        return answers, sum(answer["usage"]["completion_tokens"] for answer in answers) / took

    def places(self):
        """Guessed tokens and right ones so far, by their place in the draft."""
        time.sleep(2.5)  # Two heartbeats bring what the worker counted.
        with urllib.request.urlopen(self.url.replace("/v1", "/metrics"), timeout=60) as answer:
            text = answer.read().decode()
        counts = {}
        for kind in ("drafted", "accepted"):
            found = re.findall(rf'tidemill_tokens_{kind}_total{{[^}}]*place="(\d+)"[^}}]*}} (\S+)', text)
            counts[kind] = {int(place): float(count) for place, count in found}
        return counts


def since(before, after):
    return {kind: {place: count - before[kind].get(place, 0) for place, count in after[kind].items()} for kind in after}


def text_of(answer):
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]


def measure(off, on, task, batch, args):
    bodies = requests(task, batch, args.tokens)
    warm = [body | {"max_tokens": 1} for body in bodies]
    for cluster in (off, on):
        cluster.round(warm)
    before, rates, same = on.places(), {off: [], on: []}, True
    for turn in range(args.rounds):
        expected = None
        for cluster in (off, on, on, off):
            answers, rate = cluster.round(bodies)
            rates[cluster].append(rate)
            texts = [text_of(answer) for answer in answers]
            expected = expected or texts
            if texts != expected:
                same = False
                print(f"{task}, {batch} at once: an answer differs", file=sys.stderr)
        print(f"{task}, {batch} at once, round {turn + 1}: {rates[off][-2:]} {rates[on][-2:]}", file=sys.stderr)
    counts = since(before, on.places())
    plain, fast = statistics.median(rates[off]), statistics.median(rates[on])
    drafted, accepted = sum(counts["drafted"].values()), sum(counts["accepted"].values())
    tokens = 2 * args.rounds * sum(answer["usage"]["completion_tokens"] for answer in answers)
    share = f"{accepted / drafted:.2f}" if drafted else "–"
    print(f"| {task} | {batch} | {plain:.1f} | {fast:.1f} | {fast / plain:.2f} | {drafted / tokens:.2f} | {share} | {'yes' if same else 'NO'} |")
    sys.stdout.flush()
    return same, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tidemill")
    parser.add_argument("model")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--task", default="edit,chat,seeded")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("up", nargs="*", help="flags of `tidemill up`, after --")
    args = parser.parse_args()
    places, all_same = {}, True
    with Cluster(args.tidemill, args.model, "off", args.up) as off, Cluster(args.tidemill, args.model, "ngram", args.up) as on:
        print("| task | at once | tokens/s without | with | ratio | guessed for each token | right | same answers |")
        print("|---|---:|---:|---:|---:|---:|---:|---|")
        for task in args.task.split(","):
            for batch in map(int, args.batch.split(",")):
                same, counts = measure(off, on, task, batch, args)
                all_same &= same
                if batch == 1:
                    places[task] = counts
    most = max((max(counts["drafted"], default=0) for counts in places.values()), default=0)
    if most:
        print("\n| right, of those guessed at this place | " + " | ".join(str(place) for place in range(1, most + 1)) + " |")
        print("|---|" + "---:|" * most)
    for task, counts in places.items():
        shares = [counts["drafted"].get(place, 0) for place in range(1, most + 1)]
        cells = [f"{counts['accepted'].get(place, 0) / drafted:.2f}" if drafted else "–" for place, drafted in enumerate(shares, 1)]
        if most:
            print(f"| {task}, 1 at once | " + " | ".join(cells) + " |")
    sys.exit(0 if all_same else 1)


if __name__ == "__main__":
    main()

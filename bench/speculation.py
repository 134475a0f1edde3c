"""Tokens per second with speculation and without, by turns, on a trained model; and whether every answer is the same.

    python3 bench/speculation.py TIDEMILL MODEL [--draft FILE] [--draft-quantize int8] [--llama SERVER] [--batch 1,4,16]
        [--task edit,chat,seeded] [--temperature T] [--seed N] [--rounds N] [--tokens N] [-- UP-FLAGS]

TIDEMILL is the program; MODEL is a GGUF file, a directory, a hub id, or whatever `up --model` takes. Two clusters of one decode worker each
run side by side, one with `--speculation off`. Each round sends the same requests to one, the other, the other and the one, so that what
else the machine does falls on both alike; only one of them works at a time. Their prompts have been sent before, so rounds decode and
hardly compute prompts. With --draft, the other cluster has this draft model; without, it guesses by n-grams.

Tasks: `edit` asks for a program back with a change in it; `chat` asks questions, greedily; `seeded` the same with --temperature, from --seed
on. With --llama, llama.cpp's server then answers the same requests on the same files (GGUF), without and with the draft model, one
after the other; its flags are after --llama-flags. Standard output is Markdown, progress goes to standard error. The exit status
is 1 if an answer of Tidemill differs.
"""

import argparse
import contextlib
import json
import re
import shlex
import socket
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


def requests(task, count, args):
    bodies = []
    for i in range(count):
        if task == "edit":
            names = NAMES[i % len(NAMES)]
            program = PROGRAM.format(Name=names.capitalize(), names=names, name=names[:-1])
            text = f"{EDITS[i // 2 % len(EDITS)]} Answer with the whole program in one code block, and nothing else.\n\n```python\n{program}```"
        else:
            text = QUESTIONS[i % len(QUESTIONS)]
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": args.tokens, "temperature": 0.0}
        if task == "seeded":
            body |= {"temperature": args.temperature, "top_p": 0.95, "seed": args.seed + i}
        bodies.append(body)
    return bodies


class Server:
    """A program that answers chats at `url`, until the end of the block."""

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


class Llama(Server):
    """llama.cpp's server with room for `batch` sequences."""

    def __init__(self, args, batch, drafts):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        context = batch * (1024 + args.tokens)
        command = [args.llama, "-m", args.model, "--port", str(port), "-np", str(batch), "-c", str(context), *shlex.split(args.llama_flags)]
        if drafts:
            command += ["--spec-type", "draft-simple", "-md", args.draft, "--spec-draft-n-max", str(args.llama_draft_max)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    def __enter__(self):
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url.replace("/v1", "/health"), timeout=5):
                return self
            time.sleep(0.5)
        self.__exit__()
        raise SystemExit("llama.cpp's server was not ready")


class Cluster(Server):
    """`tidemill up` with one decode worker."""

    def __init__(self, args, speculation):
        command = [args.tidemill, "up", "--model", args.model, "--served-model-name", "m", "--http", "127.0.0.1:0"]
        command += ["--prefill", "0", "--kvpool", "0", "--log", "warn", "--speculation", speculation, *args.up]
        if speculation == "draft":
            command += ["--draft-model", args.draft, "--draft-quantize", args.draft_quantize]
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
    bodies = requests(task, batch, args)
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


def measure_llama(args):
    """Tokens per second of llama.cpp without a draft model and with it, in the same table of tasks and batches."""
    print("\n| llama.cpp: task | at once | tokens/s without | with | ratio |\n|---|---:|---:|---:|---:|")
    for batch in map(int, args.batch.split(",")):
        rates = {}
        for drafts in (False, True):
            with Llama(args, batch, drafts) as server:
                for task in args.task.split(","):
                    bodies = requests(task, batch, args)
                    server.round([body | {"max_tokens": 1} for body in bodies])
                    rates[task, drafts] = statistics.median(server.round(bodies)[1] for _ in range(2 * args.rounds))
                    print(f"llama.cpp, {task}, {batch} at once, draft {drafts}: {rates[task, drafts]:.1f}", file=sys.stderr)
        for task in args.task.split(","):
            plain, fast = rates[task, False], rates[task, True]
            print(f"| {task} | {batch} | {plain:.1f} | {fast:.1f} | {fast / plain:.2f} |")
        sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tidemill")
    parser.add_argument("model")
    parser.add_argument("--draft", help="a draft model: a GGUF file, a directory or a hub id")
    parser.add_argument("--draft-quantize", default="int8")
    parser.add_argument("--llama", help="llama.cpp's llama-server, for the same on GGUF files")
    parser.add_argument("--llama-draft-max", type=int, default=8)
    parser.add_argument("--llama-flags", default="", help="more flags of llama-server, in one argument")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--task", default="edit,chat,seeded")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the task seeded")
    parser.add_argument("--seed", type=int, default=0, help="of the first request of the task seeded")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("up", nargs="*", help="flags of `tidemill up`, after --")
    args = parser.parse_args()
    if args.llama and not args.draft:
        parser.error("--llama compares draft models: give --draft, too")
    places, all_same = {}, True
    with Cluster(args, "off") as off, Cluster(args, "draft" if args.draft else "ngram") as on:
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
    if args.llama:
        measure_llama(args)
    sys.exit(0 if all_same else 1)


if __name__ == "__main__":
    main()

"""Time to first token of prompts that a cluster finds in object storage after a cold restart, beside prompts that it computes.

    python3 bench/object_storage.py TIDEMILL MODEL (--s3 URL --bucket NAME | --directory DIR) [--lengths 512,2048] [--prompts N]
        [-- UP-FLAGS]

TIDEMILL is the program; MODEL is a GGUF file, a directory, a hub id, or whatever `up --model` takes. URL is an S3 server that is not AWS's;
credentials come from the environment. The bucket or the directory should be empty.

A first cluster computes N prompts of each length and ends, which writes its blocks. A second one begins with empty memory and no disk. By
turns it gets a stored prompt and a new one of the same length, one at a time, and then the stored one again, whose blocks its worker has by
then. Answers to stored prompts must be those of the first cluster: the exit status is 1 otherwise. Standard output is Markdown, progress goes
to standard error.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request

READY_S = 900
REQUEST_S = 900
WORDS = "river stone paper engine garden winter letter orange window bridge copper summer planet marble forest signal".split()


def prompt(kind, number, words):
    """A text unlike every other's from its first words on."""
    random.seed(f"{kind} {number} {words}")
    return f"{words} {kind} {number}: " + " ".join(random.choice(WORDS) for _ in range(words))


class Cluster:
    """`tidemill up` with blocks in object storage, until the end of the block."""

    def __init__(self, args):
        place = ["--pool-objects", f"s3://{args.bucket}/kv" if args.s3 else f"file://{args.directory}"]
        place += ["--pool-objects-endpoint", args.s3] if args.s3 else []
        command = [args.tidemill, "up", "--model", args.model, "--served-model-name", "m", "--http", "127.0.0.1:0", "--log", "warn"]
        command += ["--prefill", "1", "--decode", "1", "--local-tail-tokens", "0", "--pool-objects-uses", "1", *place, *args.up]
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
            self.process.wait(120)
        self.process.kill()

    def complete(self, text):
        """The answer, its time to first token in milliseconds, and where its prompt's tokens came from."""
        body = {"model": "m", "prompt": text, "max_tokens": 16, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(f"{self.url}/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        answer, first, usage, started = "", None, None, time.monotonic()
        with urllib.request.urlopen(request, timeout=REQUEST_S) as events:
            for line in events:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("choices"):
                    first = first or 1000 * (time.monotonic() - started)
                    answer += event["choices"][0]["text"]
                usage = event.get("usage") or usage
        return answer, first, usage

    def pool(self):
        with urllib.request.urlopen(self.url.replace("/v1", "/cluster"), timeout=60) as answer:
            members = json.load(answer)["members"]
        return next(member["report"] for member in members if member["role"] == "kvpool")

    def wait_until_listed(self):
        self.complete("? " * 64)  # A pool node learns from its first client which model's blocks it keeps.
        deadline = time.monotonic() + 120
        while self.pool()["blocks"]["object"]["cached"] == 0:
            if time.monotonic() > deadline:
                raise SystemExit("the pool node found nothing in object storage")
            time.sleep(0.2)
        time.sleep(2.5)  # A heartbeat brings how fast the server is.


def store(args):
    with Cluster(args) as cluster:
        cluster.complete("warm up " * 64)
        answers = {}
        for words in args.lengths:
            for number in range(args.prompts):
                answers[words, number], took, _ = cluster.complete(prompt("stored", number, words))
                print(f"stored {words} words, prompt {number}: first token after {took:.0f} ms", file=sys.stderr)
        return answers


def measure(args, expected):
    rows, same = [], True
    with Cluster(args) as cluster:
        cluster.wait_until_listed()
        for words in args.lengths:
            times = {"stored": [], "new": [], "again": []}
            tokens, found = 0, []
            for number in range(args.prompts):
                for kind in ("stored", "new", "again") if number % 2 else ("new", "stored", "again"):
                    answer, took, usage = cluster.complete(prompt("new" if kind == "new" else "stored", number, words))
                    times[kind].append(took)
                    if kind == "stored":
                        tokens = usage["prompt_tokens"]
                        found.append(usage["tidemill"]["tokens"]["object"])
                    same &= kind == "new" or answer == expected[words, number]
                    print(f"{kind} {words} words, prompt {number}: {took:.0f} ms, {usage['tidemill']['tokens']}", file=sys.stderr)
            rows.append((tokens, statistics.median(found), *(statistics.median(times[kind]) for kind in ("new", "stored", "again"))))
        time.sleep(2.5)  # A heartbeat brings what the node counted.
        return rows, same, cluster.pool()["counters"]["objects"]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("tidemill")
    parser.add_argument("model")
    parser.add_argument("--s3")
    parser.add_argument("--bucket")
    parser.add_argument("--directory")
    parser.add_argument("--lengths", type=lambda text: [int(words) for words in text.split(",")], default=[512, 2048])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("up", nargs="*")
    args = parser.parse_args()
    if bool(args.s3 and args.bucket) == bool(args.directory):
        parser.error("needs either --s3 with --bucket, or --directory")
    rows, same, objects = measure(args, store(args))
    print("| prompt tokens | of them read from objects | computed, ms | from objects, ms | ratio | again, ms |")
    print("|---:|---:|---:|---:|---:|---:|")
    for tokens, found, new, stored, again in rows:
        print(f"| {tokens} | {found:.0f} | {new:.0f} | {stored:.0f} | {stored / new:.2f} | {again:.0f} |")
    print(f"\nThe pool node's counters: `{json.dumps(objects)}`. Answers to stored prompts: {'the same' if same else '**different**'}.")
    sys.exit(not same)


if __name__ == "__main__":
    main()

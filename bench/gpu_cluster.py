"""The disaggregated cluster on one GPU, prefill and decode processes sharing it, against a decode worker alone: the same greedy answers.

    python3 bench/gpu_cluster.py --bin target/release --model model/tests/fixtures/llama3 [--device cuda] [--json FILE] [--way WAY] [-- FLAGS]

Ways: `disaggregated`, also with everything cached (the default); `preempted`, with device blocks for a few sequences only; `crashed`, a
prefill and a decode worker of two killed while they answer; `failing`, where one device is expected to fail by itself; `damaged`, where
every block in the pool node's memory changes behind its back, and then a new decode worker fetches them.

Answers are compared token by token. On a GPU a row's bits depend on how many rows are multiplied at once (docs/ARCHITECTURE.md, §5), and
the two clusters cut prompts differently. So an answer may differ, but only from a token on that was as likely as the other's, within
TIE; how many are the same to the end is reported. Needs nothing but Python.
"""

import argparse
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

# The effect of rounding to bf16 on logits of models with random weights, in natural logarithms.
TIE = 0.3
TOKENS = 48
READY_S = 240
DRAIN_S = 60


class Cluster:
    """`tidemill up`, until the end of the block."""

    def __init__(self, args, prefill, flags=()):
        options = {"--http": "127.0.0.1:0", "--device": args.device, "--model": args.model, "--prefill": str(prefill), "--decode": "1"}
        options |= {"--local-tail-tokens": "0", "--pool-memory": "1GiB", "--log": "warn"}
        # Later ones replace earlier ones: the program takes each once.
        given = [*args.up, *flags]
        options |= dict(zip(given[::2], given[1::2], strict=True))
        command = [os.path.join(args.bin, "tidemill"), "up", *(word for option in options.items() for word in option)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)

    def __enter__(self):
        lines = queue.Queue()
        threading.Thread(target=lambda: [lines.put(line) for line in self.process.stdout], daemon=True).start()
        started = time.monotonic()
        while True:
            try:
                line = lines.get(timeout=1)
            except queue.Empty:
                if self.process.poll() is not None or time.monotonic() - started > READY_S:
                    self.__exit__()
                    raise SystemExit("the cluster was not ready") from None
                continue
            if line.startswith("ready "):
                self.url = line.split()[1]
                self.ready_s = time.monotonic() - started
                return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(DRAIN_S)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def ask(self, prompt, **more):
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | more
        request = urllib.request.Request(self.url + "/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as response:
            return json.load(response)

    def get(self, path):
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(self.url.replace("/v1", path), timeout=60) as response:
            return response.read().decode()

    def members(self, role):
        return [member for member in json.loads(self.get("/cluster"))["members"] if member["role"] == role]

    def metrics(self, **names):
        """Sums of metrics, given as name or (name, label), once heartbeats have brought them."""
        time.sleep(2.5)
        lines = self.get("/metrics").splitlines()
        parts = {key: (name,) if isinstance(name, str) else name for key, name in names.items()}
        found = {key: [line for line in lines if line.startswith(name) and all(label in line for label in labels)] for key, (name, *labels) in parts.items()}
        return {key: sum(float(line.rsplit(" ", 1)[1]) for line in found[key]) for key in found}

    def damage(self):
        """Changes a byte of every slot of the pool node."""
        (node,) = self.members("kvpool")
        dram = node["report"]["blocks"]["dram"]
        stride = -(-dram["bytes_per_block"] // 64) * 64
        folder = f"/proc/{node['pid']}/fd"
        fds = [os.path.join(folder, fd) for fd in os.listdir(folder)]
        (arena,) = [fd for fd in fds if os.readlink(fd).startswith("/memfd:tidemill-kvpool")]
        with open(arena, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            # Slots are the last thing in the arena, one after the other.
            for at in range(len(memory) - dram["total"] * stride + stride // 2, len(memory), stride):
                memory[at] ^= 0x10

    def replace_decode(self):
        """Kills the decode worker, and waits for the next one."""
        (old,) = [member["pid"] for member in self.members("decode")]
        os.kill(old, signal.SIGKILL)
        for _ in range(READY_S * 10):
            if any(member["pid"] != old for member in self.members("decode")):
                return
            time.sleep(0.1)
        raise SystemExit("no decode worker came back")

    def complete(self, prompt):
        """Asks without log-probabilities first, since only then tokens are sampled on the device."""
        answer = self.ask(prompt)
        scored = self.ask(prompt, logprobs=2)["choices"][0]
        return {
            "ids": answer["choices"][0]["token_ids"],
            "scored_ids": scored["token_ids"],
            "top": [sorted(top.values(), reverse=True) for top in scored["logprobs"]["top_logprobs"]],
            "prefill_tokens": answer["usage"].get("tidemill", {}).get("tokens", {}).get("prefill", 0),
        }

    def complete_all(self, prompts):
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(self.complete, prompts))


def first_difference(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)


def is_tie(answer, at):
    """Whether the likeliest two tokens there were as likely as each other, as far as is known."""
    if first_difference(answer["ids"][:at], answer["scored_ids"][:at]) is not None:
        return True
    top = answer["top"][at]
    return len(top) > 1 and top[0] - top[1] <= TIE


def compare(one, other):
    at = first_difference(one["ids"], other["ids"])
    if at is None:
        return "same"
    return "differ_at_a_tie" if is_tie(one, at) and is_tie(other, at) else "differ"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    parser.add_argument("--way", default="disaggregated", choices=["disaggregated", "preempted", "crashed", "failing", "damaged"])
    parser.add_argument("--few-blocks", default="192KiB", help="with --way preempted: a worker's memory for blocks")
    parser.add_argument("up", nargs="*", help="further arguments of `tidemill up`, after --")
    args = parser.parse_args()
    # Prompts of a few blocks, of several chunks, and with shared prefixes.
    prompts = [[3 + (7 * i + 31 * length) % 180 for i in range(length)] for length in (5, 16, 17, 40, 100, 200, 300)]
    prompts += [prompts[-1][:150] + [9, 8, 7], prompts[-1][:150] + [7, 8, 9]]
    answers, ready, notes = {}, {}, {}

    def ask(name, prefill, flags=(), meanwhile=None, between=None, again=True):
        with Cluster(args, prefill, flags) as cluster:
            ready[name] = cluster.ready_s
            disturbance = threading.Thread(target=meanwhile or (lambda _: None), args=(cluster,))
            disturbance.start()
            answers[name] = cluster.complete_all(prompts)
            disturbance.join()
            before = between(cluster) if between else {}
            if again:
                # With everything cached.
                answers[name + ", cached"] = cluster.complete_all(prompts)
            notes[name] = cluster.metrics(
                preemptions="tidemill_preemptions_total",
                rescues="tidemill_rescues_total",
                fetched_by_device=("tidemill_kv_fetched_bytes_total", 'by="device"'),
                fetched_by_host=("tidemill_kv_fetched_bytes_total", 'by="host"'),
                corrupt=("tidemill_kv_misses_total", 'reason="corrupt"'),
            )
            notes[name] |= before

    def crash(cluster):
        """Ends the first decode worker that is seen to work, then a prefill worker."""
        for role in ("decode", "prefill"):
            for _ in range(600):
                running = [member["pid"] for member in cluster.members(role) if member["assigned"]]
                if running:
                    os.kill(running[0], signal.SIGKILL)
                    break
                time.sleep(0.05)

    def damage(cluster):
        before = cluster.metrics(fetched_before=("tidemill_kv_fetched_bytes_total", 'by="device"'))
        cluster.damage()
        cluster.replace_decode()
        return before

    ask("alone", 0)
    if args.way == "disaggregated":
        ask("disaggregated", 1)
    elif args.way == "preempted":
        ask("preempted", 1, ["--kv-memory", args.few_blocks], again=False)
    elif args.way == "crashed":
        ask("crashed", 2, ["--decode", "2"], crash)
    elif args.way == "damaged":
        ask("damaged", 1, ["--pool-memory", "32MiB"], between=damage)
    else:
        ask("failing", 1, ["--decode", "2"])
    report = {"model": args.model, "device": args.device, "ready_s": ready, "answers": len(prompts), "notes": notes, "comparisons": {}}
    for name in answers:
        outcomes = [compare(answer, reference) for answer, reference in zip(answers[name], answers["alone"])]
        report["comparisons"][name] = {outcome: outcomes.count(outcome) for outcome in ("same", "differ_at_a_tie", "differ")}
    report["tokens_from_the_prefill_worker"] = sum(answer["prefill_tokens"] for name in answers if name == args.way for answer in answers[name])
    print(json.dumps(report, indent=2))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
    if any(counts["differ"] for counts in report["comparisons"].values()) or not report["tokens_from_the_prefill_worker"]:
        sys.exit(1)


if __name__ == "__main__":
    main()

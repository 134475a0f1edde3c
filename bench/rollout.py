"""A rollout on a live cluster: one to a model that is as good, in four steps, and one to a model that is slower, which goes back by itself.

    rollout.py TIDEMILL MODEL SLOWER [STEP_SECONDS]

Twice MODEL and once SLOWER, a decode worker each; 1,000 users, about 60 requests a second of 16 tokens. Prints when each share began,
how many users had it, and how long the slower one was there. Needs the Python of the tests.
"""

import collections
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))
USERS = 1000
AT_ONCE = 40
STEPS = [1, 5, 25, 100]


def main():
    tidemill, model, slower = sys.argv[1:4]
    step_s = int((sys.argv[4:5] or ["20"])[0])
    os.environ["TIDEMILL_BIN"] = tidemill
    from clusters import Cluster

    with tempfile.TemporaryDirectory() as name:
        names = [flag for served in ("now", "next", "slower") for flag in ("--served-model-name", served)]
        cluster = Cluster(pathlib.Path(name), "", *names, models=[model, model, slower])
        ask = Asking(cluster.url)
        try:
            watch(tidemill, cluster.admin, ask, "next", ["--steps", ",".join(map(str, STEPS)), "--step-seconds", str(step_s), "--requests-min", "10"])
            rollout(tidemill, cluster.admin, "abort", "--from", "now")
            rollout(tidemill, cluster.admin, "forget", "--from", "now")
            time.sleep(5)
            watch(tidemill, cluster.admin, ask, "slower", ["--steps", "50,100", "--step-seconds", "600"])
        finally:
            ask.stop()
            cluster.stop()


def watch(tidemill, admin, ask, to, flags):
    rollout(tidemill, admin, "start", "--from", "now", "--to", to, "--no-gate", *flags)
    began, shares = time.monotonic(), []
    while True:
        state = json.loads(rollout(tidemill, admin, "status", "--json"))["rollouts"][0]
        after = time.monotonic() - began
        if not shares or shares[-1] != state["share"]:
            shares.append(state["share"])
            print(f"to {to}: {state['share']:.0%} after {after:.1f} s", flush=True)
        if state["state"] in ("done", "rolled_back"):
            break
        time.sleep(0.1)
    counts, lost = ask.counts(began)
    print(f"to {to}: {state['state']} after {after:.1f} s: {state['why']}")
    print(f"  answers since it began: {dict(counts)}, {lost} failed; users of `{to}`: {len(ask.users(to, began))} of {len(ask.users(None, began))} who asked")


def rollout(tidemill, admin, *arguments):
    command = [tidemill, "rollout", *arguments, "--url", admin]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


class Asking:
    """Users who send requests all the time, a fixed number at once."""

    def __init__(self, url):
        self.url, self.answers, self.going = url, [], True
        self.threads = [threading.Thread(target=self.ask) for _ in range(AT_ONCE)]
        for thread in self.threads:
            thread.start()

    def ask(self):
        while self.going:
            number = random.randrange(USERS)
            body = {"model": "now", "prompt": f"user {number} says", "max_tokens": 16, "user": f"user-{number}", "temperature": 0}
            request = urllib.request.Request(f"{self.url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    self.answers.append((time.monotonic(), number, json.load(answer)["model"]))
            except urllib.error.URLError:
                self.answers.append((time.monotonic(), number, None))
            time.sleep(0.6)

    def counts(self, since):
        models = collections.Counter(model for at, _, model in self.answers if at >= since)
        return models, models.pop(None, 0)

    def users(self, of, since):
        """The users of a model since a time; of any model if `None`."""
        return {user for at, user, model in self.answers if at >= since and of in (None, model)}

    def stop(self):
        self.going = False
        for thread in self.threads:
            thread.join()


main()

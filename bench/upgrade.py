"""A cluster that is upgraded process by process while clients stream answers, and then goes back.

    python3 bench/upgrade.py OLD NEW MODEL [--clients N]

OLD and NEW are directories with the programs of two adjacent releases (`tidemill` and those of the roles); MODEL is whatever `up --model` takes.

A cluster of three coordinators, a prefill worker, two decode workers and two pool nodes begins with OLD's programs. They are replaced by
NEW's, as a package manager would, and `tidemill up` restarts the cluster, one process after the other (SIGHUP). Then the same the other way.
Meanwhile clients stream answers. One that a coordinator refuses, as it drains, or whose connection is refused, goes to the next coordinator, as
behind a load balancer. The exit status is 1 if an answer is not what OLD alone answered, or breaks off. Standard output is Markdown, progress
goes to standard error.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

PROGRAMS = ["tidemill", "tidemill-coordinator", "tidemill-prefill", "tidemill-decode", "tidemill-kvpool"]
READY_S = 120
RESTART_S = 300
REQUEST_S = 60
PROMPTS = [f"{number}: " + f"The {thing} and the sea. " * 12 for number, thing in enumerate("mill wheel tide stone sluice miller grain harbour".split())]


class Refused(Exception):
    """A coordinator that takes no requests now."""


class Cluster:
    def __init__(self, programs, model, data):
        command = [programs / "tidemill", "up", "--model", model, "--served-model-name", "m", "--http", "127.0.0.1:0", "--log", "warn"]
        command += ["--coordinator", "3", "--prefill", "1", "--decode", "2", "--kvpool", "2", "--local-tail-tokens", "0", "--threads", "1"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([*command, "--data", data], stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True)
        self.said = []
        threading.Thread(target=self.read, daemon=True).start()
        self.doors = [self.process.stdout.readline().split()[1] for _ in range(3)]

    def read(self):
        for line in self.process.stderr:
            self.said.append(line)
            sys.stderr.write(line)

    def restart(self):
        """Restarts process after process, and returns the seconds that it took."""
        begun, before = time.monotonic(), len(self.said)
        self.process.send_signal(signal.SIGHUP)
        while not any("every process was restarted" in line for line in self.said[before:]):
            if time.monotonic() - begun > RESTART_S or self.process.poll() is not None:
                raise SystemExit("the restart did not end")
            time.sleep(0.1)
        return time.monotonic() - begun

    def releases(self):
        """The number of members of each release, as one coordinator of each says."""
        with urllib.request.urlopen(self.doors[0].removesuffix("/v1") + "/cluster", timeout=REQUEST_S) as answer:
            members = [member.get("release", "not told") for member in json.load(answer)["members"]]
        return ", ".join(f"{release} at {members.count(release)}" for release in sorted(set(members)))

    def stop(self):
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(60)
        self.process.kill()


def stream(door, prompt, gaps):
    body = {"model": "m", "prompt": prompt, "max_tokens": 256, "temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(f"{door}/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    text, ended, last = "", False, time.monotonic()
    try:
        answer = urllib.request.urlopen(request, timeout=REQUEST_S)
    except urllib.error.HTTPError as error:
        if error.code == 503:
            raise Refused from error
        raise
    except (urllib.error.URLError, ConnectionError, http.client.RemoteDisconnected) as error:
        raise Refused from error
    with answer:
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                now = time.monotonic()
                gaps.append(now - last)
                last = now
    if not ended:
        raise RuntimeError("the stream broke off")
    return text


class Load:
    """Clients that stream answer after answer, and compare each with the one from before."""

    def __init__(self, doors, clients, wanted):
        self.doors, self.wanted = doors, wanted
        self.answers, self.moved, self.wrong, self.gaps = 0, 0, [], []
        self.lock, self.ends = threading.Lock(), threading.Event()
        self.threads = [threading.Thread(target=self.client, args=(number,)) for number in range(clients)]
        for thread in self.threads:
            thread.start()

    def client(self, number):
        turn = number
        while not self.ends.is_set():
            turn += 1
            prompt, gaps, fault = turn % len(PROMPTS), [], None
            try:
                if stream(self.doors[turn % len(self.doors)], PROMPTS[prompt], gaps) != self.wanted[prompt]:
                    fault = "another answer"
            except Refused:
                with self.lock:
                    self.moved += 1
                time.sleep(0.02)
                continue
            except (OSError, ValueError, RuntimeError) as error:
                fault = f"{type(error).__name__}: {error}"
            with self.lock:
                self.answers += 1
                self.gaps.append(max(gaps, default=0))
                if fault:
                    self.wrong.append(fault)
                    print(fault, file=sys.stderr)

    def so_far(self):
        with self.lock:
            seen = self.answers, self.moved, len(self.wrong), max(self.gaps, default=0)
            self.answers, self.moved, self.gaps = 0, 0, []
            return seen

    def end(self):
        self.ends.set()
        for thread in self.threads:
            thread.join()


def install(programs, into):
    """Replaces the programs while they run."""
    for name in PROGRAMS:
        shutil.copy(programs / name, into / f"{name}.new")
        os.replace(into / f"{name}.new", into / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        home = pathlib.Path(home)
        programs = home / "bin"
        programs.mkdir()
        install(args.old, programs)
        cluster = Cluster(programs, args.model, home / "data")
        try:
            wanted = [stream(cluster.doors[0], prompt, []) for prompt in PROMPTS]
            load = Load(cluster.doors, args.clients, wanted)
            print("| | releases then | s | answers | refused, asked elsewhere | wrong or broken off | longest pause, s |")
            print("|---|---|---:|---:|---:|---:|---:|")
            faults = 0
            try:
                for step, release in [("before", None), ("upgrade", args.new), ("back", args.old)]:
                    if release:
                        install(release, programs)
                        took = cluster.restart()
                    else:
                        took = 10.0
                        time.sleep(took)
                    answers, moved, wrong, pause = load.so_far()
                    print(f"| {step} | {cluster.releases()} | {took:.0f} | {answers} | {moved} | {wrong - faults} | {pause:.2f} |", flush=True)
                    faults = wrong
            finally:
                load.end()
        finally:
            cluster.stop()
    sys.exit(1 if load.wrong else 0)


if __name__ == "__main__":
    main()

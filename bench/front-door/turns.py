"""Front doors side by side: clusters with the echo engine, all up at once, measured in turns of a second, so that other load on the machine
affects all of them.

    turns.py MODEL ROUNDS STREAMS NAME=DIR[,FLAG...] ...

DIR holds the programs of one build; FLAGs are for its `tidemill up`. Prints the medians of each, and of its rounds' ratios to the first.
Needs `wrk` and Linux.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile

POST = pathlib.Path(__file__).with_name("post.lua")
ECHO = ["--engine", "echo", "--prefill", "0", "--kvpool", "0", "--sequences-max", "1024", "--log", "warn", "--http", "127.0.0.1:0"]


class Door:
    def __init__(self, name, model, data, programs, flags):
        self.name, self.turns = name, []
        self.env = os.environ | {"MODEL": pathlib.Path(model).name}
        command = [pathlib.Path(programs, "tidemill"), "up", "--model", model, *ECHO, *flags, "--data", data / name]
        log = data / f"{name}.log"
        with log.open("w") as errors:
            self.cluster = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        ready = re.match(r"ready (\S+)", self.cluster.stdout.readline())
        if not ready:
            sys.exit(f"{name} did not start:\n{log.read_text()}")
        self.url = f"{ready[1]}/chat/completions"
        children = subprocess.run(["ps", "--ppid", str(self.cluster.pid), "-o", "pid=,args="], capture_output=True, text=True, check=True)
        lines = [line.split(maxsplit=1) for line in children.stdout.splitlines()]
        self.coordinator = next(pid for pid, args in lines if "tidemill-coordinator" in args)

    def ask(self, streams):
        before = self.cpu_s()
        command = ["wrk", "-t1", f"-c{streams}", "-d1s", "-s", POST, self.url]
        said = subprocess.run(command, env=self.env, capture_output=True, text=True, check=True).stdout
        turn = json.loads(said.splitlines()[-1])
        turn["cpu_us"] = (self.cpu_s() - before) / turn["requests"] * 1e6
        return turn

    def cpu_s(self):
        nanoseconds = 0
        for thread in pathlib.Path("/proc", self.coordinator, "task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                nanoseconds += int((thread / "schedstat").read_text().split()[0])
        return nanoseconds / 1e9

    def stop(self):
        self.cluster.send_signal(signal.SIGTERM)
        self.cluster.wait(60)


def main():
    model, rounds, streams = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    doors = []
    with tempfile.TemporaryDirectory() as data:
        try:
            for argument in sys.argv[4:]:
                name, given = argument.split("=", 1)
                programs, *flags = given.split(",")
                doors.append(Door(name, model, pathlib.Path(data), programs, flags))
            for door in doors:
                door.ask(streams)
            for number in range(rounds):
                for door in doors if number % 2 == 0 else reversed(doors):
                    door.turns.append(door.ask(streams))
        finally:
            for door in doors:
                door.stop()
    for door in doors:
        show(door, doors[0])


def show(door, first):
    def median(field):
        return statistics.median(turn[field] for turn in door.turns)

    pairs = list(zip(door.turns, first.turns, strict=True))
    faster = statistics.median(ours["per_s"] / theirs["per_s"] for ours, theirs in pairs)
    dearer = statistics.median(ours["cpu_us"] - theirs["cpu_us"] for ours, theirs in pairs)
    failed = sum(turn["failed"] for turn in door.turns)
    print(
        f"{door.name:12} {median('per_s'):8.0f} requests/s, p50 {median('p50_ms'):.2f} ms, p99 {median('p99_ms'):.2f} ms, "
        f"CPU {median('cpu_us'):.1f} us; beside {first.name}: x {faster:.3f}, CPU {dearer:+.1f} us; {failed} failed"
    )


if __name__ == "__main__":
    main()

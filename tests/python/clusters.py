"""Clusters of a test's own, with tenants."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import threading
import time

import openai
import pytest
from conftest import MODEL, OFTEN, ready_url


class Cluster:
    """`tidemill up` with a data directory of its own that outlives it, and an operators' address."""

    def __init__(self, data, config, *flags, models=(MODEL,)):
        self.data = data
        self.models = [flag for model in models for flag in ("--model", str(model))]
        self.config = data / "coordinator.toml"
        self.config.write_text(config)
        self.flags = flags
        self.log = []
        self.start()

    def start(self):
        self.begun = len(self.log)
        self.process = subprocess.Popen(
            [tidemill(), "up", "--http", "127.0.0.1:0", "--admin", "127.0.0.1:0", *self.models, "--data", str(self.data)]
            + ["--coordinator-config", str(self.config), "--prefill", "0", "--restarts", "1000", *OFTEN, *self.flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self.read, args=(self.process,), daemon=True).start()
        self.url = ready_url(self.process)
        self.admin = self.told(r"operators' port (http://\S+)")

    def told(self, pattern):
        """The output on stderr, which may arrive a moment after that on stdout."""
        deadline = time.monotonic() + 10
        while not (found := re.findall(pattern, "".join(self.log[self.begun :]))):
            assert time.monotonic() < deadline, f"no {pattern} in {self.log}"
            time.sleep(0.01)
        return found[-1]

    def read(self, process):
        for line in process.stderr:
            self.log.append(line)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, "a cluster that is told to stop ends well"

    def keys(self, *arguments):
        return subprocess.run([tidemill(), "keys", *arguments, "--url", self.admin], capture_output=True, text=True, timeout=60)

    def key(self, tenant, tier=None):
        made = self.keys("create", "--tenant", tenant, *(["--tier", tier] if tier else []))
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()

    def usage(self, *arguments):
        command = [tidemill(), "usage", "--data", str(self.data), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    def coordinator_pid(self):
        """The process id, or `None` while the coordinator is down."""
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    # The kernel truncates names to 15 characters.
                    if pathlib.Path(f"/proc/{child}/comm").read_text().strip() == "tidemill-coordinator"[:15]:
                        return int(child)
        return None


def tidemill():
    return os.environ.get("TIDEMILL_BIN") or pytest.skip("these tests start clusters of their own: set TIDEMILL_BIN")


def client(cluster, key):
    return openai.OpenAI(base_url=cluster.url, api_key=key, max_retries=0, timeout=60)


def complete(client, **fields):
    given = {"model": "llama3", "prompt": [1, 2, 3, 4], "max_tokens": 4, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return client.completions.create(**(given | fields))


def wait_until(holds, within_s=120):
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)

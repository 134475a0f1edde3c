"""KV blocks in an S3 server: a cluster that starts with nothing finds its prefixes there, and goes on when the server hangs or is gone."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest
from conftest import cluster_at, running_cluster, wait_for_reports

BUCKET = "kv-blocks"
KEYS = {"AWS_ACCESS_KEY_ID": "tide", "AWS_SECRET_ACCESS_KEY": "tide", "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
# Of several hundred tokens, each unlike the others from its first block on.
PROMPTS = [f"{n} " + " ".join(f"word{n * 37 + i}" for i in range(120)) for n in range(4)]


class Server:
    """Moto's S3, in a process of its own."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert httpx.put(f"{self.url}/{BUCKET}", trust_env=False).status_code == 200
                return
            except httpx.TransportError:
                assert self.process.poll() is None and time.monotonic() < deadline, "the server does not begin"
                time.sleep(0.1)

    def packs(self):
        listing = httpx.get(f"{self.url}/{BUCKET}?list-type=2", trust_env=False).text
        return [part.split("</Key>")[0] for part in listing.split("<Key>")[1:]]

    def end(self):
        # A process that is stopped ends by nothing else.
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    if os.environ.get("TIDEMILL_URL"):
        pytest.skip("needs clusters of its own")
    server = Server()
    yield server
    server.end()


def cluster(server):
    flags = ["--pool-objects", f"s3://{BUCKET}/blocks", "--pool-objects-endpoint", server.url, "--pool-objects-uses", "1"]
    return running_cluster("--local-tail-tokens", "0", "--decode", "1", *flags)


def answers(url):
    client = openai.OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0)
    model = client.models.list().data[0].id
    return [client.completions.create(model=model, prompt=prompt, max_tokens=16, temperature=0) for prompt in PROMPTS]


def texts(answers):
    return [answer.choices[0].text for answer in answers]


def objects(url):
    [pool] = [member for member in cluster_at(url)["members"] if member["role"] == "kvpool"]
    return pool["report"]


def wait_until_known(url):
    # Pool nodes learn from their first client which model's blocks they keep.
    client = openai.OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0)
    client.completions.create(model=client.models.list().data[0].id, prompt="?" * 64, max_tokens=1)
    deadline = time.monotonic() + 60
    while objects(url)["blocks"]["object"]["cached"] == 0:
        assert time.monotonic() < deadline, "nothing is found in the bucket"
        time.sleep(0.1)
    # By its next report, coordinators know how fast the server is.
    wait_for_reports(url)


def test_a_cold_restart_finds_its_prefixes(server):
    with cluster(server) as url:
        cold = answers(url)
    assert server.packs() and all(name.startswith("blocks/") and name.endswith(".pack") for name in server.packs())
    with cluster(server) as url:
        wait_until_known(url)
        again = answers(url)
        assert texts(again) == texts(cold)
        found = [answer.usage.tidemill["tokens"]["object"] for answer in again]
        assert sum(found) > 0, found
        # A heartbeat brings what the node counted.
        deadline = time.monotonic() + 30
        while (counters := objects(url)["counters"]["objects"])["loaded"]["bytes"] == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert counters["loaded"]["bytes"] > 0 and counters["errors"] == counters["corrupt"] == 0, counters


def test_a_server_that_hangs_or_is_gone_changes_no_answer(server):
    with cluster(server) as url:
        cold = answers(url)
    with cluster(server) as url:
        wait_until_known(url)
        server.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert texts(answers(url)) == texts(cold)
        # Each wait is a second at most, and after three of them nothing is asked.
        assert time.monotonic() - started < 60
        server.end()
        assert texts(answers(url)) == texts(cold)

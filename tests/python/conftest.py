"""A real cluster for the official OpenAI client.

TIDEMILL_URL names a running one (http://…/v1); otherwise TIDEMILL_BIN names the `tidemill` binary, and one cluster is
started for the session, ended with SIGTERM, and must leave nothing behind.
"""

import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import threading
import time

import httpx
import openai
import pytest

# A tiny checkpoint with random weights: its answers mean nothing, so any prompt will do.
MODEL = pathlib.Path(__file__).parents[2] / "model/tests/fixtures/llama3"
READY_S = 300
# Tests wait for reports.
OFTEN = ["--heartbeat-ms", "100"]
DRAIN_S = 60


@pytest.fixture(scope="session")
def url():
    """Base URL of the API, up to and including /v1."""
    with running_cluster() as url:
        yield url


@pytest.fixture(scope="module")
def disaggregated():
    """The base URL of a separate cluster, where a prefill worker computes every full block of a prompt."""
    with running_cluster("--local-tail-tokens", "0") as url:
        yield url


@contextlib.contextmanager
def running_cluster(*flags, model=MODEL, http="127.0.0.1:0", operators=None):
    """`operators`: the URL of their port, if they have one of their own."""
    if running := os.environ.get("TIDEMILL_URL"):
        yield running.rstrip("/")
        return
    binary = os.environ.get("TIDEMILL_BIN")
    if not binary:
        pytest.fail("set TIDEMILL_URL to a running cluster, or TIDEMILL_BIN to the tidemill binary")
    command = [binary, "up", "--http", http, "--model", str(model), *OFTEN, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        url = ready_url(process)
        yield url
        pids = [member["pid"] for member in cluster_at(operators or url)["members"]]
        process.send_signal(signal.SIGTERM)
        assert process.wait(DRAIN_S) == 0, "a cluster that is told to stop ends well"
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")], "no process is left behind"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def ready_url(process):
    """The URL in the line `ready http://ADDR/v1`, which comes when requests will succeed."""
    lines = queue.Queue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + READY_S
    while True:
        try:
            line = lines.get(timeout=max(0, deadline - time.monotonic()))
        except queue.Empty:
            pytest.fail(f"`tidemill up` was not ready within {READY_S} s")
        if line is None:
            pytest.fail(f"`tidemill up` ended with {process.wait()} before it was ready")
        if line.startswith("ready "):
            return line.split()[1].rstrip("/")


def cluster_at(url):
    return httpx.get(url.removesuffix("/v1") + "/cluster").raise_for_status().json()


def wait_for_reports(url):
    """Waits until each member has reported twice more: the second report was made after this call. Returns what `/cluster` says then."""
    known = {member["epoch"]: member["reports"] for member in cluster_at(url)["members"]}
    deadline = time.monotonic() + 30
    while True:
        cluster = cluster_at(url)
        if all(member["reports"] >= known.get(member["epoch"], 0) + 2 for member in cluster["members"]):
            return cluster
        assert time.monotonic() < deadline, cluster
        time.sleep(0.02)


def wait_for_publishing(url):
    """Waits until all blocks are published: between a report and the next one no member moves blocks or learns of any. What waits to
    be published is in no report, but it is put without a pause."""

    def moved(cluster):
        return [(member["epoch"], member["indexed_blocks"], member["report"]["counters"]["transfer"]) for member in cluster["members"]]

    deadline = time.monotonic() + 30
    while True:
        before = moved(cluster_at(url))
        after = wait_for_reports(url)
        if after["requests"] == 0 and moved(after) == before:
            return
        assert time.monotonic() < deadline, after


@pytest.fixture(scope="session")
def root(url):
    """The base URL of everything that is not OpenAI's API."""
    return url.removesuffix("/v1")


@pytest.fixture
def cluster(url):
    """Calls /cluster."""
    return lambda: cluster_at(url)


@pytest.fixture(scope="session")
def client(url):
    # No retries: some tests expect a refusal, and no test may pass only at the second attempt.
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture
def complete(client, model):
    """Greedy /v1/completions of exactly `max_tokens` tokens, with token ids. OpenAI's and vLLM's parameters alike."""

    def complete(prompt, max_tokens=16, **parameters):
        openai_names = {"temperature", "seed", "n", "stop", "logprobs", "echo", "stream", "stream_options", "logit_bias"}
        known = {name: value for name, value in parameters.items() if name in openai_names}
        extra = {"ignore_eos": True, "return_token_ids": True}
        extra |= {name: value for name, value in parameters.items() if name not in openai_names}
        known.setdefault("temperature", 0)
        return client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, extra_body=extra, **known)

    return complete

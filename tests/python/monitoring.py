"""Helpers for tests of alerts and dashboards: the metrics that exist, and a Prometheus that scrapes a cluster."""

import contextlib
import pathlib
import re
import shutil
import socket
import subprocess

import httpx
import pytest
import yaml
from clusters import wait_until

ROOT = pathlib.Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"


def reference():
    """Every metric, as the series that its type makes of it."""
    rows = re.findall(r"^\| `(tidemill_\w+)` \| (\w+) \|", (ROOT / "docs/reference/metrics.md").read_text(), re.M)
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + suffix for name, kind in rows for suffix in suffixes.get(kind, ("",))}


def used(expression):
    """The metrics in a query, including recorded ones. Values of labels are not searched."""
    return set(re.findall(r"\btidemill[\w:]+", re.sub(r'"[^"]*"', "", expression)))


@contextlib.contextmanager
def prometheus(data, url):
    """Runs a Prometheus that scrapes the cluster once a second, with rules without delays. Yields a function that queries its API."""
    waits_not = re.sub(r"^( +for:).*$", r"\1 0s", (MONITORING / "alerts.yml").read_text(), flags=re.M)
    (data / "alerts.yml").write_text(waits_not)
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [httpx.URL(url).netloc.decode()]}]
    del config["alerting"]
    (data / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program("prometheus"), f"--config.file={data}/prometheus.yml", f"--storage.tsdb.path={data}/tsdb"]
    with open(data / "log", "w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def ask(what, **parameters):
        assert process.poll() is None, (data / "log").read_text()
        return httpx.get(f"http://{address}/api/v1/{what}", params=parameters, timeout=10).raise_for_status().json()["data"]

    def answers():
        with contextlib.suppress(httpx.HTTPError):
            return ask("status/runtimeinfo")

    try:
        wait_until(answers)
        yield ask
    finally:
        process.kill()
        process.wait()


def program(name):
    return shutil.which(name) or pytest.fail(f"no {name}: `make setup-test` installs it")

"""Grafana's dashboards: as their generator makes them, of metrics that exist, and queries that a Prometheus beside a cluster takes."""

import json
import os
import subprocess
import sys

import pytest
from clusters import wait_until
from conftest import running_cluster
from monitoring import MONITORING, prometheus, reference, used

FILES = sorted((MONITORING / "dashboards").glob("*.json"))


def queries():
    """Title of the panel and query, of all dashboards."""
    for path in FILES:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


def test_the_files_are_what_the_generator_makes(tmp_path):
    subprocess.run([sys.executable, MONITORING / "dashboards.py", tmp_path], check=True, timeout=60)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in FILES}, "run deploy/monitoring/dashboards.py"


def test_every_query_is_of_metrics_that_exist():
    known = reference()
    unknown = {(title, name) for title, query in queries() for name in used(query) - known}
    assert len(FILES) == 4 and not unknown


def test_a_prometheus_beside_a_cluster_answers_every_query(tmp_path):
    if os.environ.get("TIDEMILL_URL"):
        pytest.skip("the cluster may be elsewhere")
    with running_cluster("--engine", "echo") as url, prometheus(tmp_path, url) as ask:
        wait_until(lambda: ask("query", query="tidemill_worker_up")["result"])
        for title, query in queries():
            # Grafana sets that; a query that is refused has the status 400.
            assert "result" in ask("query", query=query.replace("$__rate_interval", "1m")), title

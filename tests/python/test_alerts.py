"""The alerts: metrics that exist, a test and a heading of the guide for each, and a Prometheus that scrapes a cluster with a fault."""

import os
import re
import signal
import subprocess

import httpx
import pytest
import yaml
from clusters import wait_until
from conftest import cluster_at, running_cluster
from monitoring import MONITORING, ROOT, program, prometheus, reference, used

GUIDE = "docs/guides/alerts.md"


def rules():
    return [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def alerts():
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def test_every_rule_uses_metrics_that_exist():
    known = reference() | {rule["record"] for rule in rules() if "record" in rule}
    names = {name for rule in rules() for name in used(rule["expr"])}
    assert names and not names - known, "rules use metrics that the reference lacks"


def test_every_alert_has_a_heading_that_it_links_to():
    headings = set(re.findall(r"^### (Tidemill\w+)$", (ROOT / GUIDE).read_text(), re.M))
    assert headings == set(alerts()), "headings and alerts differ"
    for name, alert in alerts().items():
        assert alert["annotations"]["runbook"] == f"{GUIDE}#{name.lower()}"
        assert alert["labels"]["severity"] in {"page", "ticket"}


def test_every_alert_is_shown_to_fire_and_to_keep_quiet():
    assert {path.stem for path in (MONITORING / "tests").glob("*.yml")} == set(alerts())
    for name in alerts():
        cases = yaml.safe_load((MONITORING / f"tests/{name}.yml").read_text())["tests"]
        tries = [case for test in cases for case in test["alert_rule_test"]]
        assert {case["alertname"] for case in tries} == {name}
        assert {bool(case.get("exp_alerts")) for case in tries} == {True, False}, f"{name} must fire in one case and not in another"


def test_the_rules_do_what_their_tests_say():
    tests = sorted((MONITORING / "tests").glob("*.yml"))
    for arguments in (["check", "config", MONITORING / "prometheus.yml"], ["test", "rules", *tests]):
        done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_prometheus_notices_that_the_only_decode_worker_is_gone(tmp_path):
    if os.environ.get("TIDEMILL_URL"):
        pytest.skip("it kills a worker of a cluster of its own")
    with running_cluster("--engine", "echo", "--restarts", "0") as url, prometheus(tmp_path, url) as ask:
        # Only this alert counts: on a busy machine, others may fire as well.
        gone = ("TidemillMembersFew", "decode")
        firing = lambda: {(alert["labels"]["alertname"], alert["labels"].get("role")) for alert in ask("alerts")["alerts"]}
        value = lambda query: [sample["value"][1] for sample in ask("query", query=query)["result"]]
        body = {"model": "llama3", "prompt": [1] * 100, "max_tokens": 4}
        httpx.post(f"{url}/completions", json=body, timeout=60).raise_for_status()
        wait_until(lambda: value('tidemill:members:count{role="decode"}') == ["1"])
        # Rates need two scrapes with something between them.
        wait_until(lambda: httpx.post(f"{url}/completions", json=body, timeout=60) and value("tidemill:goodput_missed:ratio5m") == ["0"])
        evaluated = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
        assert not [rule for rule in evaluated if rule["health"] != "ok"]
        assert gone not in firing()
        for member in cluster_at(url)["members"]:
            if member["role"] == "decode":
                os.kill(member["pid"], signal.SIGKILL)
        wait_until(lambda: gone in firing())

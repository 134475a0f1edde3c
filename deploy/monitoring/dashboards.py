#!/usr/bin/env python3
"""Makes Grafana's dashboards from the tables below: one file per dashboard in `dashboards/`, or in the directory that is named.

Every coordinator reports every worker, so what comes from workers is taken once per worker before it is added up. `make test` compares
the files with what this makes, and the metrics with the reference.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent

# Panels stand two in a row, on Grafana's grid of 24 columns.
WIDTH, HEIGHT = 12, 8

CACHED = '{source=~"hbm|dram|nvme|remote"}'


def rate(metric, by, filter=""):
    """A coordinator's counter, added up over coordinators."""
    return f"sum by ({by}) (rate({metric}{filter}[$__rate_interval]))"


def worker_rate(metric, by, filter=""):
    """A worker's counter, as any coordinator tells it, added up over workers."""
    each = f"max by (worker, role, {by}) (rate({metric}{filter}[$__rate_interval]))"
    return f"sum by ({by}) ({each})"


def worker_gauge(metric, by, filter=""):
    return f"sum by ({by}) (max by (worker, role, {by}) ({metric}{filter}))"


def quantiles(metric, by=""):
    """The median, the 95th and the 99th percentile of a coordinator's histogram, with their legends."""
    labels, legend = ("le, " + by, " {{" + by + "}}") if by else ("le", "")
    rates = f"sum by ({labels}) (rate({metric}_bucket[$__rate_interval]))"
    return [(f"p{q * 100:.0f}{legend}", f"histogram_quantile({q}, {rates})") for q in (0.5, 0.95, 0.99)]


# Title of a dashboard: its panels, each a title, Grafana's unit, and legends with queries.
DASHBOARDS = {
    "cluster": [
        ("Goodput", "percentunit", [(
            "{{class}}",
            rate("tidemill_class_choices_total", "class", '{outcome="attained"}') + " / " + rate("tidemill_class_choices_total", "class"),
        )]),
        ("Requests", "reqps", [("{{outcome}}", rate("tidemill_requests_total", "outcome"))]),
        ("Time to first token", "s", quantiles("tidemill_ttft_seconds")),
        ("Time to first token, as predicted", "s", quantiles("tidemill_ttft_predicted_seconds")),
        ("Time per further token", "s", quantiles("tidemill_tpot_seconds")),
        ("Time of a request", "s", quantiles("tidemill_e2e_seconds")),
        ("Tokens per second", "short", [
            ("prompts", "sum(rate(tidemill_prompt_tokens_total[$__rate_interval]))"),
            ("answers", "sum(rate(tidemill_generation_tokens_total[$__rate_interval]))"),
        ]),
        ("Sequences", "short", [
            ("running", "sum(tidemill_requests_running)"),
            ("waiting", "sum(tidemill_requests_waiting)"),
        ]),
        ("Members", "short", [("{{role}}", "count by (role) (max by (worker, role) (tidemill_worker_up))")]),
        ("Unhealthy workers, rescues per second", "short", [
            ("{{worker}} unhealthy", "max by (worker) (tidemill_probe_unhealthy)"),
            ("rescues", "sum(rate(tidemill_rescues_total[$__rate_interval]))"),
        ]),
        ("Registry: entries behind", "short", [
            ("{{instance}} to apply", "tidemill_registry_lag"),
            ("{{instance}} slowest, as its leader sees it", "tidemill_registry_behind"),
        ]),
        ("Event loops: 99th percentile of delays", "s", [(
            "{{instance}} {{loop}}",
            "histogram_quantile(0.99, sum by (le, instance, loop) (rate(tidemill_event_loop_delay_seconds_bucket[$__rate_interval])))",
        )]),
    ],
    "roles": [
        ("Jobs that wait", "short", [("{{role}} {{worker}}", "max by (worker, role) (tidemill_worker_waiting)")]),
        ("Jobs that run", "short", [("{{role}} {{worker}}", "max by (worker, role) (tidemill_worker_running)")]),
        ("Time of a step", "s", quantiles("tidemill_step_seconds", "role")),
        ("Sequences in a step of decode", "short", quantiles("tidemill_batch_size")),
        ("Tokens drawn per second", "short", [("{{worker}}", "max by (worker) (rate(tidemill_tokens_generated_total[$__rate_interval]))")]),
        ("Prompt tokens of prefill per second", "short", [("{{source}}", worker_rate("tidemill_prefill_tokens_total", "source"))]),
        ("Device blocks in use", "percentunit", [(
            "{{role}} {{worker}}",
            'max by (worker, role) (tidemill_kv_blocks{tier="hbm", state="used"})'
            ' / sum by (worker, role) (max by (worker, role, state) (tidemill_kv_blocks{tier="hbm"}))',
        )]),
        ("Preemptions per second", "short", [("{{worker}}", "max by (worker) (rate(tidemill_preemptions_total[$__rate_interval]))")]),
        ("Error of predicted steps", "percentunit", [
            ("{{worker}} {{quantile}}", "max by (worker, quantile) (tidemill_prediction_error_ratio)"),
        ]),
        ("Steps per second", "short", [("{{role}} {{worker}}", "max by (worker, role) (rate(tidemill_steps_total[$__rate_interval]))")]),
    ],
    "pool": [
        ("Prompt tokens by source", "short", [("{{source}}", worker_rate("tidemill_prefix_tokens_total", "source"))]),
        ("Share of cached prompt tokens", "percentunit", [(
            "cached",
            f"sum({worker_rate('tidemill_prefix_tokens_total', 'source', CACHED)})"
            f" / sum({worker_rate('tidemill_prefix_tokens_total', 'source')})",
        )]),
        ("Bytes held", "bytes", [("{{tier}}", worker_gauge("tidemill_kv_bytes", "tier"))]),
        ("Blocks", "short", [("{{tier}} {{state}}", worker_gauge("tidemill_kv_blocks", "tier, state"))]),
        ("Bytes moved per second", "Bps", [
            ("{{transport}} {{tier}} {{direction}}", worker_rate("tidemill_kv_transfer_bytes_total", "transport, tier, direction")),
        ]),
        ("Time of a transfer: 95th percentile", "s", [(
            "{{transport}} {{direction}}",
            "histogram_quantile(0.95, sum by (le, transport, direction) (rate(tidemill_kv_transfer_seconds_bucket[$__rate_interval])))",
        )]),
        ("Misses per second", "short", [("{{reason}}", worker_rate("tidemill_kv_misses_total", "reason"))]),
        ("Bytes got, by what copied them", "Bps", [("{{by}}", worker_rate("tidemill_kv_fetched_bytes_total", "by"))]),
        ("Disks: errors per second, given up", "short", [
            ("{{worker}} errors", "max by (worker) (rate(tidemill_kv_disk_errors_total[$__rate_interval]))"),
            ("{{worker}} given up", "max by (worker) (tidemill_kv_disk_given_up)"),
        ]),
        ("RDMA connections per second", "short", [
            ("opened", "sum(max by (worker) (rate(tidemill_kv_rails_opened_total[$__rate_interval])))"),
            ("lost", "sum(max by (worker) (rate(tidemill_kv_rails_lost_total[$__rate_interval])))"),
            ("fenced", "sum(max by (worker) (rate(tidemill_kv_rails_fenced_total[$__rate_interval])))"),
        ]),
    ],
    # No metric names a tenant: `tidemill usage` adds up what each one used.
    "tenants": [
        ("Refused by a tenant's limits", "reqps", [("{{kind}}", rate("tidemill_quota_refusals_total", "kind"))]),
        ("Refused by shares", "reqps", [("{{resource}} {{share}}", rate("tidemill_share_refusals_total", "resource, share"))]),
        ("Turned away: too much to do", "reqps", [("{{tier}}", rate("tidemill_shed_total", "tier"))]),
        ("Steps of tiers that are turned away", "short", [("{{instance}}", "tidemill_shedding_step")]),
        ("Choices", "reqps", [("{{class}} {{outcome}}", rate("tidemill_class_choices_total", "class, outcome"))]),
        ("Usage log: lost, failing", "short", [
            ("{{instance}} lost", "tidemill_usage_events_lost_total"),
            ("{{instance}} failing", "tidemill_usage_log_failing"),
        ]),
        ("Usage that has not arrived", "bytes", [("{{instance}}", "tidemill_usage_sink_behind_bytes")]),
        ("Safety: blocks", "reqps", [("{{side}} {{category}}", rate("tidemill_safety_blocks_total", "side, category"))]),
        ("Safety: unchecked", "reqps", [
            ("passed, {{side}} {{reason}}", rate("tidemill_safety_bypasses_total", "side, reason")),
            ("refused, {{side}} {{reason}}", rate("tidemill_safety_unchecked_total", "side, reason")),
        ]),
        ("Connections closed, doors refused", "reqps", [
            ("closed: {{reason}}", rate("tidemill_connections_closed_total", "reason")),
            ("refused: {{what}}", rate("tidemill_door_refusals_total", "what")),
        ]),
        ("Caches of answers", "reqps", [
            ("response cache {{outcome}}", rate("tidemill_response_cache_total", "outcome")),
            ("semantic cache {{outcome}}", rate("tidemill_semantic_cache_total", "outcome")),
            ("repeats {{outcome}}", rate("tidemill_replays_total", "outcome")),
        ]),
        ("Batches", "short", [
            ("running", "sum(tidemill_batches_running)"),
            ("requests per second, {{outcome}}", rate("tidemill_batch_requests_total", "outcome")),
        ]),
    ],
}


def dashboard(name, panels):
    return {
        "uid": f"tidemill-{name}",
        "title": f"Tidemill: {name}",
        "tags": ["tidemill"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["tidemill"], "title": "Tidemill", "asDropdown": True, "keepTime": True}],
        "templating": {"list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]},
        "panels": [panel(index, *rest) for index, rest in enumerate(panels)],
    }


def panel(index, title, unit, queries):
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + at), "datasource": source, "expr": query, "legendFormat": legend}
        for at, (legend, query) in enumerate(queries)
    ]
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": index % 2 * WIDTH, "y": index // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": targets,
    }


def main(directory):
    directory.mkdir(parents=True, exist_ok=True)
    for name, panels in DASHBOARDS.items():
        (directory / f"{name}.json").write_text(json.dumps(dashboard(name, panels), indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if sys.argv[1:] else HERE / "dashboards")

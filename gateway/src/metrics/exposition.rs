//! The cluster and its workers' reports in Prometheus' text format.

use crate::base::registry::RegistryView;
use std::fmt::Write;
use tidemill_cluster::{ClusterView, MemberView, ModelView, PredictionError, ProbesView};
use tidemill_proto::{
    message::{Blocks, Counters, Moved, Role, TierBlocks},
    step::DRAFT_TOKENS_MAX,
};

/// Appends all metrics of the cluster.
pub(super) fn write(text: &mut String, cluster: &ClusterView) {
    let mut family = |name: &str, kind: &str, help: &str, samples: &[(String, f64)]| {
        let _ = writeln!(text, "# HELP tidemill_{name} {help}\n# TYPE tidemill_{name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(text, "tidemill_{name}{labels} {value}");
        }
    };
    let one = |value: f64| vec![(String::new(), value)];
    family("requests_running", "gauge", "Sequences at a decode worker", &one(cluster.sequences_running as f64));
    family("requests_waiting", "gauge", "Sequences that wait for a place at a decode worker", &one(cluster.sequences_waiting as f64));
    family(
        "rescues_total",
        "counter",
        "Sequences that continued at another worker after their own was lost; a drain does not count",
        &one(cluster.rescues as f64),
    );
    for Family { name, kind, help, samples } in WORKER_FAMILIES {
        let all: Vec<_> = cluster
            .members
            .iter()
            .flat_map(|member| samples(member).into_iter().map(|(labels, value)| (label_set(member, &labels), value)))
            .collect();
        family(name, kind, help, &all);
    }
    transfer_times(text, &cluster.members);
    expert_rows(text, &cluster.members);
    probes(text, &cluster.models);
    wanted(text, &cluster.models);
}

/// Writes how many workers the models want, where something decides about that.
fn wanted(text: &mut String, models: &[ModelView]) {
    let mut head =
        "# HELP tidemill_wanted_workers Workers that a `model` wants of a `role`: prefill, decode\n# TYPE tidemill_wanted_workers gauge\n";
    for (model, wanted) in models.iter().filter_map(|model| Some((escaped(&model.name), model.wanted?))) {
        for (role, workers) in [(Role::Prefill, wanted.prefill), (Role::Decode, wanted.decode)] {
            let name = role_name(role);
            let _ = writeln!(text, "{head}tidemill_wanted_workers{{role=\"{name}\",model=\"{model}\"}} {workers}");
            head = "";
        }
    }
}

/// Writes the gauges of models whose engines are probed.
fn probes(text: &mut String, models: &[ModelView]) {
    let probed: Vec<_> = models.iter().filter_map(|model| Some((escaped(&model.name), model.probes.as_ref()?))).collect();
    let mut family = |name: &str, kind: &str, help: &str, samples: &dyn Fn(&ProbesView) -> Vec<(&'static str, f64)>| {
        let _ = writeln!(text, "# HELP tidemill_probe_{name} {help}\n# TYPE tidemill_probe_{name} {kind}");
        for (model, probes) in &probed {
            for (label, value) in samples(probes) {
                let _ = writeln!(text, "tidemill_probe_{name}{{model=\"{model}\"{label}}} {value}");
            }
        }
    };
    if probed.is_empty() {
        return;
    }
    family("rounds_total", "counter", "Rounds of probes of a `model` that ended", &|probes| vec![("", probes.rounds as f64)]);
    family(
        "answers_total",
        "counter",
        "Workers' answers to a round of probes of a `model`, by `outcome`: same, differs, unanswered",
        &|probes| {
            let ProbesView { same, differs, unanswered, .. } = probes;
            [(",outcome=\"same\"", same), (",outcome=\"differs\"", differs), (",outcome=\"unanswered\"", unanswered)]
                .map(|(label, count)| (label, *count as f64))
                .to_vec()
        },
    );
    family("age_seconds", "gauge", "Time since the last round of probes of a `model` ended", &|probes| {
        probes.age_s.map_or(vec![], |age| vec![("", age)])
    });
}

/// Writes the state of this coordinator's registry.
pub(super) fn write_registry(text: &mut String, registry: &RegistryView) {
    let behind = registry.behind.values().copied().max().unwrap_or(0);
    let rows: [(&str, &str, &str, f64); 9] = [
        ("leader", "gauge", "1 if this coordinator leads the registry", f64::from(registry.part == "leader")),
        ("has_leader", "gauge", "1 if this coordinator knows a leader", f64::from(registry.leader.is_some())),
        ("term", "counter", "Elections so far, lost ones too", registry.term as f64),
        ("voters", "gauge", "Coordinators that vote", registry.voters.len() as f64),
        ("applied_total", "counter", "Log entries applied here", registry.applied as f64),
        ("lag", "gauge", "Entries committed and not applied here", registry.lag as f64),
        ("behind", "gauge", "At the leader: entries that the slowest coordinator lacks", behind as f64),
        ("records", "gauge", "Records agreed on", registry.records as f64),
        ("stopped", "gauge", "1 if this coordinator's registry has stopped", f64::from(registry.stopped.is_some())),
    ];
    for (name, kind, help, value) in rows {
        let _ = writeln!(
            text,
            "# HELP tidemill_registry_{name} {help}\n# TYPE tidemill_registry_{name} {kind}\ntidemill_registry_{name} {value}"
        );
    }
}

type Samples = Vec<(Vec<(&'static str, &'static str)>, f64)>;

/// Values of the label `place`.
const PLACES: [&str; DRAFT_TOKENS_MAX] = [
    "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16", "17", "18", "19", "20", "21", "22", "23", "24",
    "25", "26", "27", "28", "29", "30", "31", "32",
];

fn by_place(counts: &[u64]) -> Samples {
    PLACES.into_iter().zip(counts).map(|(place, &count)| (vec![("place", place)], count as f64)).collect()
}

/// A metric that every worker has.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    /// Labels and values, besides the worker's own labels.
    samples: fn(&MemberView) -> Samples,
}

const WORKER_FAMILIES: &[Family] = &[
    Family { name: "worker_up", kind: "gauge", help: "1 for every registered worker", samples: |_| vec![(vec![], 1.0)] },
    Family {
        name: "probe_unhealthy",
        kind: "gauge",
        help: "1 for a worker that computed wrongly, as probes or an operator say, and gets no more work",
        samples: |m| if m.probe.is_some() || m.unhealthy { vec![(vec![], f64::from(m.unhealthy))] } else { vec![] },
    },
    Family {
        name: "worker_waiting",
        kind: "gauge",
        help: "Jobs that wait for room at a worker",
        samples: |m| vec![(vec![], f64::from(m.report.waiting))],
    },
    Family {
        name: "worker_running",
        kind: "gauge",
        help: "Sequences or prefill jobs that a worker computes",
        samples: |m| vec![(vec![], f64::from(m.report.running))],
    },
    Family {
        name: "kv_blocks",
        kind: "gauge",
        help: "KV blocks by `tier` (hbm: device memory, also on a CPU; dram; nvme; object: shared, so all nodes count the same) and `state` (free; cached: usable, not in use; used)",
        samples: |m| {
            let states = |(tier, blocks): (&'static str, Blocks)| {
                let states = [("free", blocks.free), ("cached", blocks.cached), ("used", blocks.used)];
                states.map(|(state, n)| (vec![("tier", tier), ("state", state)], n as f64))
            };
            tiers(m).into_iter().flat_map(states).collect()
        },
    },
    Family {
        name: "kv_bytes",
        kind: "gauge",
        help: "Bytes of KV held, cached or in use, by `tier`",
        samples: |m| {
            let bytes = |blocks: Blocks| blocks.cached.saturating_add(blocks.used) as f64 * blocks.bytes_per_block as f64;
            tiers(m).into_iter().map(|(tier, blocks)| (vec![("tier", tier)], bytes(blocks))).collect()
        },
    },
    Family {
        name: "kv_transfer_bytes_total",
        kind: "counter",
        help: "Block bytes moved, by `transport` (shm, rdma, quic, disk, object), `tier` and `direction` (put, get)",
        samples: |m| lanes(m).into_iter().map(|(labels, moved)| (labels.to_vec(), moved.bytes as f64)).collect(),
    },
    Family {
        name: "kv_fetched_bytes_total",
        kind: "counter",
        help: "Bytes of blocks got, `by` what copied them: a GPU itself (device), from the memory of a pool node on its host, or the host",
        samples: |m| {
            let fetched = &m.report.counters.fetched;
            match m.role {
                Role::Prefill | Role::Decode => {
                    [("device", fetched.by_device), ("host", fetched.by_host)].map(|(by, bytes)| (vec![("by", by)], bytes as f64)).to_vec()
                }
                Role::Kvpool => vec![],
            }
        },
    },
    Family {
        name: "prefix_tokens_total",
        kind: "counter",
        help: "Prompt tokens by `source` of their KV: hbm, dram, nvme, object, remote (cached), prefill (computed for this request), computed (by decode itself)",
        samples: |m| {
            let t = &m.report.counters.tokens;
            [
                ("hbm", t.hbm),
                ("dram", t.dram),
                ("nvme", t.nvme),
                ("object", t.object),
                ("remote", t.remote),
                ("prefill", t.prefill),
                ("computed", t.local),
            ]
            .map(|(source, tokens)| (vec![("source", source)], tokens as f64))
            .to_vec()
        },
    },
    Family {
        name: "prefill_tokens_total",
        kind: "counter",
        help: "Prompt tokens of prefill jobs, by `source`: computed, cached",
        samples: |m| {
            let c = &m.report.counters;
            [("computed", c.prefill_computed_tokens), ("cached", c.prefill_cached_tokens)]
                .map(|(source, tokens)| (vec![("source", source)], tokens as f64))
                .to_vec()
        },
    },
    Family {
        name: "kv_misses_total",
        kind: "counter",
        help: "Blocks asked for and not usable, by `reason`: absent, stale (slot reused), corrupt, unreachable, disk_corrupt, object_corrupt",
        samples: |m| {
            let misses = &m.report.counters.misses;
            [
                ("absent", misses.absent),
                ("stale", misses.stale),
                ("corrupt", misses.corrupt),
                ("unreachable", misses.unreachable),
                ("disk_corrupt", m.report.counters.disk.corrupt),
                ("object_corrupt", m.report.counters.objects.corrupt),
            ]
            .map(|(reason, n)| (vec![("reason", reason)], n as f64))
            .to_vec()
        },
    },
    Family {
        name: "kv_rails_opened_total",
        kind: "counter",
        help: "RDMA connections of a worker that were opened",
        samples: |m| vec![(vec![], m.report.counters.rails.opened as f64)],
    },
    Family {
        name: "kv_rails_lost_total",
        kind: "counter",
        help: "RDMA connections of a worker that broke, or that their pool node closed; as many as were opened: blocks travel over QUIC",
        samples: |m| vec![(vec![], m.report.counters.rails.lost as f64)],
    },
    Family {
        name: "kv_rails_fenced_total",
        kind: "counter",
        help: "How often a pool node closed a client's RDMA connections because it was late to fill a slot",
        samples: |m| vec![(vec![], m.report.counters.rails.fenced as f64)],
    },
    Family {
        name: "kv_disk_errors_total",
        kind: "counter",
        help: "Reads and writes of a pool node's disk that failed",
        samples: |m| vec![(vec![], m.report.counters.disk.errors as f64)],
    },
    Family {
        name: "kv_disk_given_up",
        kind: "gauge",
        help: "1 if a pool node goes on without its disk, because of errors",
        samples: |m| vec![(vec![], m.report.counters.disk.given_up as f64)],
    },
    Family {
        name: "kv_object_requests_total",
        kind: "counter",
        help: "Requests of a pool node to its object storage, by `kind`: read, write (to list, too), delete",
        samples: |m| {
            let o = &m.report.counters.objects;
            of_objects(m, &[("read", o.reads), ("write", o.writes), ("delete", o.deletes)], "kind")
        },
    },
    Family {
        name: "kv_object_failures_total",
        kind: "counter",
        help: "Requests to object storage that brought nothing, by `reason`: error, late (no answer in time), refused (not made: bounds, failures before)",
        samples: |m| {
            let o = &m.report.counters.objects;
            of_objects(m, &[("error", o.errors), ("late", o.late), ("refused", o.refused)], "reason")
        },
    },
    Family {
        name: "kv_object_left_alone",
        kind: "gauge",
        help: "1 while a pool node reads nothing from its object storage because that failed a moment ago",
        samples: |m| if has_objects(m) { vec![(vec![], m.report.counters.objects.left_alone as f64)] } else { vec![] },
    },
    Family {
        name: "kv_object_spent_usd",
        kind: "gauge",
        help: "Dollars for a pool node's requests to object storage since the day began (UTC), by the prices of its settings",
        samples: |m| if has_objects(m) { vec![(vec![], m.report.counters.objects.spent_usd)] } else { vec![] },
    },
    Family {
        name: "preemptions_total",
        kind: "counter",
        help: "Sequences that lost their device blocks and came back",
        samples: |m| vec![(vec![], m.report.counters.preemptions as f64)],
    },
    Family {
        name: "tokens_generated_total",
        kind: "counter",
        help: "Tokens drawn",
        samples: |m| vec![(vec![], m.report.counters.tokens_generated as f64)],
    },
    Family {
        name: "tokens_drafted_total",
        kind: "counter",
        help: "Tokens that a decode worker guessed and computed ahead, by `place` in the draft, from 1 on",
        samples: |m| by_place(&m.report.counters.tokens_drafted),
    },
    Family {
        name: "tokens_accepted_total",
        kind: "counter",
        help: "Guessed tokens that turned out to be the ones drawn, by `place` in the draft",
        samples: |m| by_place(&m.report.counters.tokens_accepted),
    },
    Family {
        name: "prediction_error_ratio",
        kind: "gauge",
        help: "Error of the predictions of a worker's last 128 steps, as a share of their time, by `quantile`: 0.5, 0.9",
        samples: |m| {
            let quantiles = |error: PredictionError| vec![(vec![("quantile", "0.5")], error.p50), (vec![("quantile", "0.9")], error.p90)];
            m.prediction_error.map_or(vec![], quantiles)
        },
    },
    Family { name: "steps_total", kind: "counter", help: "Engine steps", samples: |m| vec![(vec![], m.report.counters.steps as f64)] },
];

/// A member's transfers, by transport, tier and direction.
fn lanes(member: &MemberView) -> Vec<([(&'static str, &'static str); 3], Moved)> {
    let Counters { transfer: t, disk: d, objects: o, .. } = &member.report.counters;
    let shared = t.lanes().map(|(transport, direction, moved)| (transport.name(), direction.name(), *moved));
    let disk = [("disk", "put", d.stored), ("disk", "get", d.loaded)];
    let of_tier = |tier| move |(transport, direction, moved)| ([("transport", transport), ("tier", tier), ("direction", direction)], moved);
    let disk = disk.into_iter().filter(|_| member.role == Role::Kvpool).map(of_tier("nvme"));
    let objects = [("object", "put", o.stored), ("object", "get", o.loaded)];
    let objects = objects.into_iter().filter(|_| has_objects(member)).map(of_tier("object"));
    shared.map(of_tier("dram")).chain(disk).chain(objects).collect()
}

/// Whether a member is a pool node with object storage.
fn has_objects(member: &MemberView) -> bool {
    member.report.blocks.object.bytes_per_block > 0
}

fn of_objects(member: &MemberView, counts: &[(&'static str, u64)], label: &'static str) -> Samples {
    if has_objects(member) { counts.iter().map(|&(value, n)| (vec![(label, value)], n as f64)).collect() } else { vec![] }
}

/// Writes the durations of transfers: a histogram for each lane that has any.
fn transfer_times(text: &mut String, members: &[MemberView]) {
    let help = "Time of a transfer, by `transport`, `tier` and `direction`: a batch that was put, a block that was got, a read or write of the disk or of object storage";
    let _ = writeln!(text, "# HELP tidemill_kv_transfer_seconds {help}\n# TYPE tidemill_kv_transfer_seconds histogram");
    for member in members {
        for (labels, moved) in lanes(member).into_iter().filter(|(_, moved)| moved.transfers > 0) {
            let mut sample = |suffix: &str, more: &[(&str, &str)], value: f64| {
                let labels = label_set(member, &[&labels, more].concat());
                let _ = writeln!(text, "tidemill_kv_transfer_seconds_{suffix}{labels} {value}");
            };
            let mut count = 0;
            for (bound, within) in Moved::BOUNDS_S.iter().zip(moved.times) {
                count += within;
                sample("bucket", &[("le", &bound.to_string())], count as f64);
            }
            sample("bucket", &[("le", "+Inf")], moved.transfers as f64);
            sample("sum", &[], moved.seconds);
            sample("count", &[], moved.transfers as f64);
        }
    }
}

/// The number of experts that are shown; no published model has as many.
const EXPERTS_MAX: usize = 1024;

/// Writes the rows of each expert, which show how evenly a model's experts are chosen.
fn expert_rows(text: &mut String, members: &[MemberView]) {
    let help = "Rows that went through an `expert`, by its number, in all layers together; of workers that compute on a CPU";
    let _ = writeln!(text, "# HELP tidemill_expert_rows_total {help}\n# TYPE tidemill_expert_rows_total counter");
    for member in members {
        for (expert, rows) in member.report.counters.expert_rows.iter().take(EXPERTS_MAX).enumerate() {
            let labels = label_set(member, &[("expert", &expert.to_string())]);
            let _ = writeln!(text, "tidemill_expert_rows_total{labels} {rows}");
        }
    }
}

/// The tiers that a member has, by name.
fn tiers(member: &MemberView) -> Vec<(&'static str, Blocks)> {
    let TierBlocks { hbm, dram, nvme, object } = member.report.blocks;
    match member.role {
        Role::Prefill | Role::Decode => vec![("hbm", hbm)],
        Role::Kvpool => {
            let further = [("nvme", nvme), ("object", object)].into_iter().filter(|(_, blocks)| blocks.total > 0);
            [("dram", dram)].into_iter().chain(further).collect()
        }
    }
}

/// Escapes quotes and line breaks, which must not end a label.
pub(super) fn escaped(label: &str) -> String {
    label.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn label_set(member: &MemberView, more: &[(&str, &str)]) -> String {
    // A worker chooses its name.
    let name = escaped(&member.name);
    let mut labels = format!("{{worker=\"{name}\",role=\"{}\"", role_name(member.role));
    if member.role == Role::Kvpool {
        // A pool node is a member of each model whose blocks it keeps, and its figures are of that model's.
        let _ = write!(labels, ",model=\"{}\"", escaped(&member.model));
    }
    for (key, value) in more {
        let _ = write!(labels, ",{key}=\"{value}\"");
    }
    labels + "}"
}

pub(super) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Kvpool => "kvpool",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_cluster::autoscale::Wanted;
    use tidemill_proto::{
        message::Report,
        pool::{Direction, Transport},
    };

    #[test]
    fn wanted_workers_are_told_of_models_that_want_a_number() {
        let model = |name: &str, wanted| ModelView {
            name: name.into(),
            layout: None,
            context_tokens: None,
            requests: 0,
            sequences_waiting: 0,
            sequences_running: 0,
            rescues: 0,
            probes: None,
            wanted,
        };
        let mut text = String::new();
        wanted(&mut text, &[model("still", None)]);
        assert_eq!(text, "");
        let two = |prefill, decode| Some(Wanted { prefill, decode });
        wanted(&mut text, &[model("a", two(1, 2)), model("b", two(0, 4))]);
        assert_eq!(text.matches("# TYPE").count(), 1);
        assert!(text.contains("\ntidemill_wanted_workers{role=\"prefill\",model=\"a\"} 1\n"), "{text}");
        assert!(text.ends_with("\ntidemill_wanted_workers{role=\"decode\",model=\"b\"} 4\n"), "{text}");
    }

    #[test]
    fn transfer_times_are_a_histogram_of_each_lane_and_experts_have_a_line_each() {
        let mut times = [0; Moved::BOUNDS_S.len()];
        (times[0], times[2]) = (2, 1);
        let mut report = Report::default();
        report.counters.transfer[(Transport::Shm, Direction::Get)] = Moved { bytes: 40, transfers: 4, seconds: 9.5, times };
        report.counters.expert_rows = [7].into_iter().chain([0; EXPERTS_MAX]).collect();
        report.counters.disk.loaded = Moved { bytes: 10, transfers: 1, seconds: 0.5, ..Moved::default() };
        let member = |role| MemberView {
            name: "one".into(),
            model: "m".into(),
            host: "here".into(),
            role,
            pid: 1,
            release: None,
            epoch: "1".into(),
            draining: false,
            unhealthy: false,
            probe: None,
            seconds_since_heartbeat: 0.0,
            reports: 1,
            assigned: 0,
            report: report.clone(),
            step_cost: None,
            prediction_error: None,
            indexed_blocks: 0,
            addr: None,
        };
        let mut text = String::new();
        expert_rows(&mut text, &[member(Role::Decode)]);
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let line = |expert, rows| format!("tidemill_expert_rows_total{{worker=\"one\",role=\"decode\",expert=\"{expert}\"}} {rows}");
        assert!(lines.len() == EXPERTS_MAX && lines[..2] == [line(0, 7), line(1, 0)], "{}", lines[0]);

        let mut text = String::new();
        transfer_times(&mut text, &[member(Role::Decode)]);
        let labels = r#"worker="one",role="decode",transport="shm",tier="dram",direction="get""#;
        for (le, count) in [("0.00001", 2), ("0.000025", 2), ("0.00005", 3), ("5", 3), ("+Inf", 4)] {
            let line = format!("tidemill_kv_transfer_seconds_bucket{{{labels},le=\"{le}\"}} {count}\n");
            assert!(text.contains(&line), "no {line} in {text}");
        }
        assert!(text.contains(&format!("_sum{{{labels}}} 9.5\n")) && text.contains(&format!("_count{{{labels}}} 4\n")), "{text}");
        assert!(!text.contains("transport=\"disk\"") && !text.contains("transport=\"quic\""), "{text}");
        transfer_times(&mut text, &[member(Role::Kvpool)]);
        assert!(text.contains(r#"transport="disk",tier="nvme",direction="get"} 0.5"#), "{text}");
    }
}

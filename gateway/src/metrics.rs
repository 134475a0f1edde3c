//! What `/metrics` shows, under the names of ARCHITECTURE §10: what the front door measures goes through the `metrics`
//! crate; what workers report is written out as they last said it, so that it vanishes with them.

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::{
    fmt::Write,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tidemill_cluster::{ClusterView, MemberView};
use tidemill_proto::message::{Blocks, Counters, Moved, Role, StepSample, TierBlocks};

/// Upper bounds of the latency histograms, in seconds.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0];
const ROWS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];

/// The process's recorder: one, however many coordinators a test runs in it.
static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

/// Starts to record.
pub fn install() {
    RECORDER.get_or_init(|| {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)
            .and_then(|builder| builder.set_buckets_for_metric(Matcher::Full("tidemill_batch_size".into()), ROWS))
            .expect("the bounds are not empty")
            .build_recorder();
        let handle = recorder.handle();
        if metrics::set_global_recorder(recorder).is_err() {
            tracing::warn!("another metrics recorder is installed: /metrics shows what workers report only");
        }
        describe();
        handle
    });
}

fn describe() {
    describe_histogram!("tidemill_ttft_seconds", "From a request's arrival to its first token, per choice");
    describe_histogram!("tidemill_ttft_predicted_seconds", "What the scheduler expected that time to be, of choices that ended");
    describe_histogram!("tidemill_tpot_seconds", "Mean time per token after the first, per choice");
    describe_histogram!("tidemill_itl_seconds", "Between two tokens of a choice");
    describe_histogram!("tidemill_e2e_seconds", "From a request's arrival to its last token");
    describe_histogram!("tidemill_step_seconds", "One step of an engine");
    describe_histogram!("tidemill_batch_size", "Sequences that decoded a token in one step");
    describe_counter!("tidemill_requests_total", "Requests that ended, by outcome");
    describe_gauge!("tidemill_goodput_ratio", "Share of finished choices that met the TTFT and TPOT objectives");
}

/// How a request ended.
#[derive(Clone, Copy, Debug)]
pub enum RequestOutcome {
    Ok,
    /// The client's fault: a 4xx answer.
    Invalid,
    /// Not taken: 429 or 503.
    Rejected,
    Failed,
    /// The client left.
    Cancelled,
}

pub fn count_request(outcome: RequestOutcome) {
    let outcome = match outcome {
        RequestOutcome::Ok => "ok",
        RequestOutcome::Invalid => "invalid",
        RequestOutcome::Rejected => "rejected",
        RequestOutcome::Failed => "failed",
        RequestOutcome::Cancelled => "cancelled",
    };
    counter!("tidemill_requests_total", "outcome" => outcome).increment(1);
}

pub fn observe_ttft(time: Duration) {
    histogram!("tidemill_ttft_seconds").record(time);
}

pub fn observe_predicted_ttft(ms: f64) {
    histogram!("tidemill_ttft_predicted_seconds").record(ms / 1e3);
}

pub fn observe_itl(time: Duration) {
    histogram!("tidemill_itl_seconds").record(time);
}

pub fn observe_e2e(time: Duration) {
    histogram!("tidemill_e2e_seconds").record(time);
}

/// What a served request should feel like.
#[derive(Debug)]
pub struct Objectives {
    pub ttft: Duration,
    pub tpot: Duration,
    met: AtomicU64,
    finished: AtomicU64,
}

impl Objectives {
    pub fn new(ttft: Duration, tpot: Duration) -> Self {
        Self { ttft, tpot, met: AtomicU64::new(0), finished: AtomicU64::new(0) }
    }

    /// A choice ended in good order. `tpot`: where there was more than one token.
    pub fn observe(&self, ttft: Duration, tpot: Option<Duration>) {
        if let Some(tpot) = tpot {
            histogram!("tidemill_tpot_seconds").record(tpot);
        }
        let met = ttft <= self.ttft && tpot.is_none_or(|tpot| tpot <= self.tpot);
        let met = self.met.fetch_add(met.into(), Ordering::Relaxed) + u64::from(met);
        let finished = self.finished.fetch_add(1, Ordering::Relaxed) + 1;
        gauge!("tidemill_goodput_ratio").set(met as f64 / finished as f64);
    }
}

pub struct WorkerLabels {
    pub name: String,
    pub role: Role,
}

pub fn observe_steps(worker: &WorkerLabels, steps: &[StepSample]) {
    let labels = || [("worker", worker.name.clone()), ("role", role_name(worker.role).into())];
    for step in steps {
        histogram!("tidemill_step_seconds", &labels()).record(f64::from(step.ms) / 1e3);
        if worker.role == Role::Decode {
            histogram!("tidemill_batch_size", &labels()).record(f64::from(step.decode_rows));
        }
    }
}

/// Everything, in Prometheus' text format.
pub fn render(cluster: &ClusterView) -> String {
    let mut text = RECORDER.get().map(PrometheusHandle::render).unwrap_or_default();
    let mut family = |name: &str, kind: &str, help: &str, samples: &[(String, f64)]| {
        let _ = writeln!(text, "# HELP tidemill_{name} {help}\n# TYPE tidemill_{name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(text, "tidemill_{name}{labels} {value}");
        }
    };
    let one = |value: f64| vec![(String::new(), value)];
    family("requests_running", "gauge", "Sequences at a decode worker", &one(cluster.sequences_running as f64));
    family("requests_waiting", "gauge", "Sequences that wait for a place", &one(cluster.sequences_waiting as f64));
    family("rescues_total", "counter", "Sequences that went on at another worker", &one(cluster.rescues as f64));
    for Family { name, kind, help, samples } in WORKER_FAMILIES {
        let all: Vec<_> = cluster
            .members
            .iter()
            .flat_map(|member| samples(member).into_iter().map(|(labels, value)| (label_set(member, &labels), value)))
            .collect();
        family(name, kind, help, &all);
    }
    transfer_times(&mut text, &cluster.members);
    text
}

type Samples = Vec<(Vec<(&'static str, &'static str)>, f64)>;

/// One metric that every worker has.
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
        help: "KV blocks by state",
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
        help: "Bytes of KV held (cached or in use)",
        samples: |m| {
            let bytes = |blocks: Blocks| blocks.cached.saturating_add(blocks.used) as f64 * blocks.bytes_per_block as f64;
            tiers(m).into_iter().map(|(tier, blocks)| (vec![("tier", tier)], bytes(blocks))).collect()
        },
    },
    Family {
        name: "kv_transfer_bytes_total",
        kind: "counter",
        help: "Block bytes moved",
        samples: |m| lanes(m).into_iter().map(|(labels, moved)| (labels.to_vec(), moved.bytes as f64)).collect(),
    },
    Family {
        name: "prefix_tokens_total",
        kind: "counter",
        help: "Prompt tokens by where their KV came from",
        samples: |m| {
            let t = &m.report.counters.tokens;
            [("hbm", t.hbm), ("dram", t.dram), ("nvme", t.nvme), ("remote", t.remote), ("prefill", t.prefill), ("computed", t.local)]
                .map(|(source, tokens)| (vec![("source", source)], tokens as f64))
                .to_vec()
        },
    },
    Family {
        name: "prefill_tokens_total",
        kind: "counter",
        help: "Prompt tokens of prefill jobs",
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
        help: "Blocks that were asked for and not usable",
        samples: |m| {
            let misses = &m.report.counters.misses;
            [
                ("absent", misses.absent),
                ("stale", misses.stale),
                ("corrupt", misses.corrupt),
                ("unreachable", misses.unreachable),
                ("disk_corrupt", m.report.counters.disk.corrupt),
            ]
            .map(|(reason, n)| (vec![("reason", reason)], n as f64))
            .to_vec()
        },
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
        help: "Whether a pool node goes on without its disk, because of errors",
        samples: |m| vec![(vec![], m.report.counters.disk.given_up as f64)],
    },
    Family {
        name: "preemptions_total",
        kind: "counter",
        help: "Sequences that lost their device blocks",
        samples: |m| vec![(vec![], m.report.counters.preemptions as f64)],
    },
    Family {
        name: "tokens_generated_total",
        kind: "counter",
        help: "Tokens drawn",
        samples: |m| vec![(vec![], m.report.counters.tokens_generated as f64)],
    },
    Family { name: "steps_total", kind: "counter", help: "Engine steps", samples: |m| vec![(vec![], m.report.counters.steps as f64)] },
];

/// What a member moved, by transport, the tier that it put to or got from, and direction.
fn lanes(member: &MemberView) -> Vec<([(&'static str, &'static str); 3], Moved)> {
    let Counters { transfer: t, disk: d, .. } = &member.report.counters;
    let shared = [("shm", "put", t.shm_put), ("shm", "get", t.shm_get), ("quic", "put", t.quic_put), ("quic", "get", t.quic_get)];
    let disk = [("disk", "put", d.stored), ("disk", "get", d.loaded)];
    let of_tier = |tier| move |(transport, direction, moved)| ([("transport", transport), ("tier", tier), ("direction", direction)], moved);
    let disk = disk.into_iter().filter(|_| member.role == Role::Kvpool).map(of_tier("nvme"));
    shared.into_iter().map(of_tier("dram")).chain(disk).collect()
}

/// How long transfers took: a histogram of each lane in which there were any.
fn transfer_times(text: &mut String, members: &[MemberView]) {
    let help = "Time of a transfer: a batch that was put, a block that was got, a read or write of the disk";
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

/// The tiers that a member has, by name.
fn tiers(member: &MemberView) -> Vec<(&'static str, Blocks)> {
    let TierBlocks { hbm, dram, nvme } = member.report.blocks;
    match member.role {
        Role::Prefill | Role::Decode => vec![("hbm", hbm)],
        Role::Kvpool if nvme.total == 0 => vec![("dram", dram)],
        Role::Kvpool => vec![("dram", dram), ("nvme", nvme)],
    }
}

fn label_set(member: &MemberView, more: &[(&str, &str)]) -> String {
    // A worker chooses its name; a quote or a line break in it must not end the label.
    let name = member.name.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut labels = format!("{{worker=\"{name}\",role=\"{}\"", role_name(member.role));
    for (key, value) in more {
        let _ = write!(labels, ",{key}=\"{value}\"");
    }
    labels + "}"
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Kvpool => "kvpool",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::message::Report;

    #[test]
    fn transfer_times_are_a_histogram_of_each_lane_that_was_used() {
        let mut times = [0; Moved::BOUNDS_S.len()];
        (times[0], times[2]) = (2, 1);
        let mut report = Report::default();
        report.counters.transfer.shm_get = Moved { bytes: 40, transfers: 4, seconds: 9.5, times };
        report.counters.disk.loaded = Moved { bytes: 10, transfers: 1, seconds: 0.5, ..Moved::default() };
        let member = |role| MemberView {
            name: "one".into(),
            host: "here".into(),
            role,
            pid: 1,
            epoch: "1".into(),
            draining: false,
            seconds_since_heartbeat: 0.0,
            assigned: 0,
            report: report.clone(),
            indexed_blocks: None,
            addr: None,
        };
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

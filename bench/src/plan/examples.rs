//! Published worked examples, step by step: the source's number, and ours by the same arithmetic. If a source is imprecise, both are shown
//! with the reason.

use super::{
    assumptions::{Assumptions, HOURS_PER_MONTH, SPOT_DISCOUNT},
    fleet::{Fleet, mean_over_peak},
    tables::{self, HardwareRow},
};
use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
pub struct Example {
    pub name: &'static str,
    pub about: &'static str,
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Step {
    pub what: &'static str,
    pub source: f64,
    pub ours: f64,
    /// The reason for a difference, if the source is imprecise. Otherwise the two agree within [`TOLERANCE`].
    pub loose: Option<&'static str>,
}

pub const TOLERANCE: f64 = 0.02;

const DAY_S: f64 = 86_400.0;

fn step(what: &'static str, source: f64, ours: f64) -> Step {
    Step { what, source, ours, loose: None }
}

fn loose(what: &'static str, source: f64, ours: f64, why: &'static str) -> Step {
    Step { what, source, ours, loose: Some(why) }
}

pub fn all() -> Vec<Example> {
    vec![chat_service(), in_flight(), queries(), error_budget(), bandwidth(), bytes_and_flops()]
}

/// From 1M daily users to dollars.
fn chat_service() -> Example {
    let assumptions = Assumptions::default().with(&[
        ("users", 1e6),
        ("sessions", 3.0),
        ("turns", 5.0),
        ("input_tokens", 800.0),
        ("output_tokens", 400.0),
        ("peak", 4.0),
        ("prefix_hit", 0.0),
        ("decode_tok_s", 1500.0),
        ("prefill_tok_s", 2500.0),
        ("utilization", 1.0),
        ("headroom", 1.0),
        ("tp", 1.0),
        ("price_h", 2.0),
    ]);
    let fleet = Fleet::plan(&assumptions);
    let mean_prefill = fleet.mean_requests_per_s * 800.0 / 2500.0;
    // The source rounds at every step and continues with the rounded numbers.
    let month = |gpus: f64| gpus * 2.0 * 720.0;
    let whole = fleet.clone_with_headroom(&assumptions, 1.3);
    Example {
        name: "i",
        about: "1M daily users × 3 sessions × 5 turns × (800 + 400 tokens), a 70B on H100",
        steps: vec![
            step("turns a day", 15e6, fleet.turns_per_day),
            step("output tokens a day", 6e9, fleet.output_tokens_per_day),
            step("output tokens/s, mean", 70e3, fleet.mean_output_tokens_per_s),
            step("output tokens/s, peak", 280e3, fleet.peak_output_tokens_per_s),
            step("GPUs to decode 280k at 1,500 tokens/s", 190.0, 280e3 / 1500.0),
            step("GPUs to prefill the mean at 2,500 tokens/s", 55.0, mean_prefill),
            loose(
                "GPUs, blended: max(190, 190 + 55 / 4)",
                210.0,
                190.0 + 55.0 / 4.0,
                "the sum is 203.75; the source rounds it up to 210. It also divides the mean load of prefill by 4 where decode is at its peak",
            ),
            loose(
                "GPUs, both roles at their peak",
                210.0,
                fleet.gpus,
                "prompts peak with answers: 555,556 tokens/s at 2,500 are 223 GPUs beside 187, if none is cached",
            ),
            step("GPUs with 30 % headroom", 275.0, 210.0 * 1.3),
            step("dollars a month at $2 and 720 h", 396e3, month(275.0)),
            step("dollars per million output tokens", 2.20, month(275.0) / (fleet.output_tokens_per_day * 30.0 / 1e6)),
            loose(
                "dollars a month, both roles at their peak, 730 h",
                396e3,
                whole.dollars_per_month,
                "what the two steps above make of it: the source's fleet would miss its limits at peak",
            ),
        ],
    }
}

/// Turns in flight and their memory.
fn in_flight() -> Example {
    // This number of turns per day gives 50,000 per second at a peak of 1.
    let base = Assumptions::default().with(&[
        ("users", 50_000.0 * DAY_S),
        ("sessions", 1.0),
        ("turns", 1.0),
        ("peak", 1.0),
        ("input_tokens", 3850.0),
        ("output_tokens", 300.0),
        ("ttft_s", 1.0),
        ("tpot_ms", 60.0),
        ("params_b", 70.0),
        ("active_b", 70.0),
        ("tp", 4.0),
    ]);
    let fleet = Fleet::plan(&base);
    let fp8 = Fleet::plan(&base.clone().with(&[("kv_bits", 8.0)]));
    let mqa = Fleet::plan(&base.clone().with(&[("layers", 32.0), ("kv_heads", 1.0)]));
    let gqa = Fleet::plan(&tables::model("qwen2.5-7b", base.clone()).expect("it is in the table"));
    Example {
        name: "ii",
        about: "50,000 requests/s, 300 output tokens, TTFT 1 s, TPOT 60 ms, sessions of 4,000 tokens",
        steps: vec![
            step("seconds per turn", 19.0, fleet.turns_in_flight / fleet.peak_requests_per_s),
            step("turns in flight", 950e3, fleet.turns_in_flight),
            step("KV of a 70B, KiB per token (80 layers, 8 KV heads, 16 bits)", 320.0, fleet.kv_bytes_per_token / 1024.0),
            step("KV of a session, GB", 1.3, fleet.kv_gb_per_turn),
            step("the same in 8 bits, GB", 0.65, fp8.kv_gb_per_turn),
            step("KV of a 7B free tier, KiB per token", 16.0, mqa.kv_bytes_per_token / 1024.0),
            loose(
                "KV of qwen2.5-7b, KiB per token",
                16.0,
                gqa.kv_bytes_per_token / 1024.0,
                "16 KiB takes one KV head for all (32 layers, 16 bits); today's 7B models have 4 to 8: 56 to 128 KiB, half of it in 8 bits",
            ),
            step("KV per GPU, GB: 80 − 2 × 70 / 4 − 4", 41.0, fleet.kv_gb_per_gpu),
            step("dollars per GPU and month at $3", 2190.0, 3.0 * HOURS_PER_MONTH),
            loose(
                "share of the peak's cost, autoscaled over a swing of 10",
                0.4,
                mean_over_peak(10.0),
                "depends on the shape of the day: a sine in the logarithm gives 0.43, a sine 0.55; 0.4 is a day with a sharper peak",
            ),
        ],
    }
}

/// From 10M daily users to dollars per query.
fn queries() -> Example {
    let fleet = Fleet::plan(&Assumptions::default().with(&[("users", 10e6), ("sessions", 1.0), ("turns", 5.0), ("peak", 5.0)]));
    let per_query = |dollars_h: f64| dollars_h / 3600.0 / 580.0;
    Example {
        name: "iii",
        about: "10M daily users × 5 queries on A100s",
        steps: vec![
            step("queries/s, mean", 580.0, fleet.mean_requests_per_s),
            loose("queries/s, peak", 3000.0, fleet.peak_requests_per_s, "580 × 5 is 2,900; the source rounds up"),
            step("replicas at 40 queries/s", 75.0, 3000.0 / 40.0),
            step("A100s, two per replica", 150.0, 3000.0 / 40.0 * 2.0),
            step("dollars an hour at $2.5", 375.0, 150.0 * 2.5),
            step("dollars per query", 0.00018, per_query(375.0)),
            step("dollars per query on spot machines, 60 % off", 0.000_072, per_query(375.0) * (1.0 - SPOT_DISCOUNT)),
        ],
    }
}

/// The time for which a service may be down.
fn error_budget() -> Example {
    let budget_s = |days: f64| 0.001 * days * DAY_S;
    let fast_burn = |days: f64| 0.02 * days * 24.0;
    Example {
        name: "iv",
        about: "99.9 % over 28 days",
        steps: vec![
            step("seconds of error budget", 2400.0, budget_s(28.0)),
            loose(
                "burn rate that spends 2 % of the budget in an hour",
                14.0,
                fast_burn(28.0),
                "13.4 over 28 days; the common 14.4 is for 30 days",
            ),
            step("hours until a burn of 14 has spent it all", 48.0, 28.0 * 24.0 / 14.0),
        ],
    }
}

/// The bytes that decoding reads.
fn bandwidth() -> Example {
    let h100 = tables::hardware("h100").expect("it is in the table");
    let per_s = |params_b: f64, efficiency: f64| h100.bandwidth_gb_s * efficiency / (2.0 * params_b);
    Example {
        name: "v",
        about: "decoding reads every weight in every step",
        steps: vec![
            step("GB per step of a 70B in 16 bits", 140.0, 2.0 * 70.0),
            step("tokens/s of a 7B on an H100 at batch 1, at most", 240.0, per_s(7.0, 1.0)),
            step("the same at 70 % of the bandwidth", 170.0, per_s(7.0, 0.7)),
        ],
    }
}

/// Commonly quoted numbers, and their meaning.
fn bytes_and_flops() -> Example {
    let mib = |kv_heads: f64, bits: f64| {
        let fleet = Fleet::plan(&Assumptions::default().with(&[("kv_heads", kv_heads), ("kv_bits", bits)]));
        fleet.kv_bytes_per_token / f64::from(1 << 20)
    };
    let tflops = |name: &str| tables::hardware(name).map_or(0.0, |row: HardwareRow| row.tflops);
    Example {
        name: "loose",
        about: "numbers that circulate, and what they are of",
        steps: vec![
            loose("KV of a 70B, MiB per token", 2.5, mib(8.0, 16.0), "2.5 MiB is with 64 KV heads (MHA); with 8 (GQA) it is 320 KiB"),
            step("the same with 64 KV heads", 2.5, mib(64.0, 16.0)),
            step("with 8 KV heads in 8 bits, KiB", 160.0, mib(8.0, 8.0) * 1024.0),
            loose(
                "H100 over A100, dense FLOP/s in bf16",
                6.0,
                tflops("h100") / tflops("a100"),
                "989 over 312 TFLOP/s; 6 compares H100's fp8 with A100's bf16",
            ),
        ],
    }
}

impl Fleet {
    fn clone_with_headroom(&self, assumptions: &Assumptions, headroom: f64) -> Fleet {
        Fleet::plan(&assumptions.clone().with(&[("headroom", headroom)]))
    }
}

pub fn text() -> String {
    let mut text = String::new();
    for Example { name, about, steps } in all() {
        text += &format!("({name}) {about}\n{:<66} {:>14} {:>14} {:>8}\n", "", "source", "ours", "%");
        for Step { what, source, ours, loose } in steps {
            text +=
                &format!("{what:<66} {:>14} {:>14} {:>+8.1}\n", super::short(source), super::short(ours), 100.0 * (ours / source - 1.0));
            if let Some(why) = loose {
                text += &format!("    {why}\n");
            }
        }
        text += "\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_is_the_sources_within_2_percent_or_says_why_not() {
        for example in all() {
            for Step { what, source, ours, loose } in &example.steps {
                let off = (ours / source - 1.0).abs();
                assert!(off <= TOLERANCE || loose.is_some(), "({}) {what}: {source}, ours {ours}", example.name);
                assert!(off > TOLERANCE || loose.is_none(), "({}) {what} is not loose: {source}, ours {ours}", example.name);
            }
        }
    }
}

//! `--validate`: the plan in the simulator, that is, under the production schedulers, at the peak's rate. A part of a large fleet is
//! simulated, with proportionally less traffic.

use super::{assumptions::Assumptions, fleet::Fleet, tables::MODELS};
use crate::sim::summary::Summary;
use anyhow::{Context, ensure};
use serde::Serialize;
use std::time::Duration;
use tidemill_sim::{
    hardware::GPUS,
    settings::{Arrivals, Class, ClusterShape, OnMiss, Settings, Stream, WorkloadSettings},
    shape::{SHAPES, Shape},
    workload,
    world::{Unwatched, World},
};

/// The most simulated instances: more take long, and show nothing new.
const INSTANCES_MAX: f64 = 24.0;
const REQUESTS: usize = 3000;
const SEED: u64 = 1;
const PREFIX_STEP: u32 = 512;
const HOST_GPUS: u32 = 8;

#[derive(Clone, Debug, Serialize)]
pub struct Validation {
    pub instances: u32,
    pub prefill: u32,
    /// The simulated part of the fleet and its traffic.
    pub part: f64,
    pub requests_per_s: f64,
    /// The share of requests that kept both limits.
    pub goodput_ratio: f64,
    pub ttft_ms_p50: f64,
    pub ttft_ms_p90: f64,
    pub tpot_ms_p50: f64,
    pub tpot_ms_p90: f64,
    pub cached_share: f64,
}

/// Validates a plan. `model` and `hardware` are the given names; the model itself is the simulator's.
pub fn run(model: &str, hardware: &str, a: &Assumptions, fleet: &Fleet) -> anyhow::Result<Validation> {
    let gpu = if hardware == "a100" { "a800" } else { hardware };
    let own = MODELS.iter().find(|row| row.name == model && Shape::find(model).is_some());
    let own = own.with_context(|| format!("--validate: the simulator knows {}", SHAPES.map(|shape| shape.name).join(", ")))?;
    ensure!(GPUS.iter().any(|known| known.name == gpu), "--validate: the simulator knows {}", GPUS.map(|gpu| gpu.name).join(", "));
    let as_published = a.get("kv_bits") == 16.0 && a.get("weight_bits") == own.weight_bits;
    ensure!(as_published, "--validate: the simulator computes with K and V in 16 bits, and with weights of {}", own.weight_bits);
    let all = (fleet.prefill_gpus + fleet.decode_gpus) / fleet.gpus_per_instance;
    ensure!(all >= 2.0, "--validate: a plan without an instance per role");
    let part = (INSTANCES_MAX / all).min(1.0);
    let count = |gpus: f64| (gpus / fleet.gpus_per_instance * part).round().max(1.0) as u32;
    let (prefill, decode) = (count(fleet.prefill_gpus), count(fleet.decode_gpus));
    // The traffic is reduced by the same factor as the rounded fleet.
    let part = f64::from(prefill + decode) / all;
    let requests_per_s = fleet.peak_requests_per_s * (1.0 - a.get("small_share")) * part;
    let [input, output] = ["input_tokens", "output_tokens"].map(|key| a.get(key).round().max(1.0) as u32);
    let class = Class {
        name: "all".into(),
        share: 1.0,
        ttft_ms: Some(a.get("ttft_s") * 1e3),
        tpot_ms: Some(a.get("tpot_ms")),
        priority: 1,
        weight: 1.0,
        on_miss: OnMiss::Late,
    };
    // The simulator shares prefixes in steps of 512 tokens: the number of requests that have one gives the planned share.
    let known = a.get("input_tokens") * a.get("prefix_hit");
    let prefix_tokens = (known.min(f64::from(input / PREFIX_STEP * PREFIX_STEP)) / f64::from(PREFIX_STEP)).ceil() as u32 * PREFIX_STEP;
    let with_prefix = if prefix_tokens > 0 { (known / f64::from(prefix_tokens)).min(1.0) } else { 0.0 };
    let stream = |share: f64, prefix_tokens: u32| Stream {
        rate: requests_per_s * share,
        input: [input, input],
        output: [output, output],
        prefix_tokens,
        class: None,
    };
    let streams = [stream(with_prefix, prefix_tokens), stream(1.0 - with_prefix, 0)].into_iter().filter(|stream| stream.rate > 0.0);
    let gpus_per_instance = fleet.gpus_per_instance as u32;
    let settings = Settings {
        model: model.into(),
        cluster: ClusterShape {
            instances: prefill + decode,
            prefill: Some(prefill),
            gpu: gpu.into(),
            gpus_per_instance,
            instances_per_host: (HOST_GPUS / gpus_per_instance).max(1),
            flops_efficiency: a.get("flops_efficiency"),
            memory_efficiency: a.get("memory_efficiency"),
            sequences_max: a.get("sequences_max") as usize,
            ..ClusterShape::default()
        },
        network: Default::default(),
        policy: Default::default(),
        workload: WorkloadSettings {
            requests: REQUESTS,
            arrivals: Arrivals::Poisson,
            streams: streams.collect(),
            classes: vec![class],
            warmup: 0.2,
            ..WorkloadSettings::default()
        },
    };
    let asks = workload::draw(&settings.workload, None, SEED)?;
    let run = World::new(&settings, asks, SEED)?.run(&mut Unwatched);
    let summary = Summary::new(&[(run, Duration::ZERO)], &settings.workload);
    let (ttft, tpot) = summary.ttft_ms.zip(summary.tpot_ms).context("--validate: nothing was answered")?;
    Ok(Validation {
        instances: prefill + decode,
        prefill,
        part,
        requests_per_s,
        goodput_ratio: summary.goodput_ratio,
        ttft_ms_p50: ttft.p50,
        ttft_ms_p90: ttft.p90,
        tpot_ms_p50: tpot.p50,
        tpot_ms_p90: tpot.p90,
        cached_share: summary.cached_share,
    })
}

impl std::fmt::Display for Validation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "simulated: {} prefill and {} decode instances ({:.0} % of the fleet) at {:.1} requests/s: {:.1} % of requests keep both limits; \
             TTFT p50 {:.0}, p90 {:.0} ms; TPOT p50 {:.1}, p90 {:.1} ms; {:.0} % of prompts cached",
            self.prefill,
            self.instances - self.prefill,
            100.0 * self.part,
            self.requests_per_s,
            100.0 * self.goodput_ratio,
            self.ttft_ms_p50,
            self.ttft_ms_p90,
            self.tpot_ms_p50,
            self.tpot_ms_p90,
            100.0 * self.cached_share
        )
    }
}

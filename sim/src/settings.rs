//! The settings of a simulation, as in a scenario file. Every key has a default except those that make no sense without a choice.

use crate::{
    hardware::{Gpu, StepCoefficients},
    shape::Shape,
};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tidemill_cluster::{
    autoscale::{AutoscaleSettings, steps::Range},
    class,
};
use tidemill_proto::step::DRAFT_TOKENS_MAX;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The name of one of [`SHAPES`](crate::shape::SHAPES).
    pub model: String,
    pub cluster: ClusterShape,
    #[serde(default)]
    pub network: NetworkSettings,
    #[serde(default)]
    pub policy: PolicySettings,
    #[serde(default)]
    pub workload: WorkloadSettings,
}

/// The engines of the cluster, and the properties that they share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterShape {
    /// The number of engines, prefill and decode together.
    pub instances: u32,
    /// The number of engines that prefill.
    pub prefill: Option<u32>,
    /// The share of engines that prefill, in place of `prefill`: at least one does not, and at least one does unless this is 0.
    pub prefill_share: Option<f64>,
    /// The device: `a800`, `h100`, `h200` or `l40s`.
    pub gpu: String,
    /// The number of GPUs of one engine (tensor parallelism).
    pub gpus_per_instance: u32,
    pub instances_per_host: u32,
    /// The share of the GPUs' peak that prompts reach, communication between GPUs included.
    pub flops_efficiency: f64,
    /// The share of the GPUs' memory bandwidth that decoding reaches.
    pub memory_efficiency: f64,
    /// The additional time of each step: launches, small all-reduces, sampling.
    pub overhead_ms: f64,
    /// The standard deviation of a step's time, as a share of it.
    pub noise: f64,
    /// The share of device memory that weights and KV may fill.
    pub memory_share: f64,
    /// The pool's DRAM on each host.
    pub pool_gib_per_host: f64,
    /// The eviction policy of pool nodes.
    pub eviction: String,
    /// The most tokens in a step of a prefill worker.
    pub prefill_step_tokens: usize,
    /// The most tokens in a step of a decode worker.
    pub decode_step_tokens: usize,
    /// The most sequences that decode together at one instance.
    pub sequences_max: usize,
    /// The most prompts that a prefill worker holds in device memory.
    pub admitted_max: usize,
    /// The most blocks on their way into the pool from one worker.
    pub putting_max: usize,
    /// Measured coefficients of prefill workers' steps, in place of the roofline.
    pub measured_prefill: Option<StepCoefficients>,
    /// Measured coefficients of decode workers' steps, in place of the roofline.
    pub measured_decode: Option<StepCoefficients>,
    /// The number of device blocks of each engine, in place of those that fit the rest of its memory.
    pub device_blocks: Option<u32>,
    /// Additional instances of other kinds.
    pub others: Vec<OtherInstances>,
    /// Autoscaling, up to the number of instances. Without it, all instances run all the time.
    pub autoscale: Option<Autoscale>,
    /// A draft model beside the model of each decode worker. Without it, a step draws one token of a sequence.
    pub speculation: Option<Speculation>,
}

/// A draft model, by what it is worth: its guesses and its time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Speculation {
    /// The probability that a guess is the token that the model draws, if the guesses before it are.
    pub right: f64,
    /// The time of one of its steps, as a share of the model's step with the same rows.
    pub step_share: f64,
    /// The most tokens guessed for a sequence in one step.
    pub tokens_max: usize,
    /// The most rows of a step in which tokens are guessed.
    pub rows_max: usize,
    /// The most tokens in one of its steps.
    pub step_tokens: usize,
}

impl Speculation {
    pub(crate) fn check(&self) -> Result<(), InvalidSetting> {
        let share = |name: &str, value: f64| match value {
            0.0..=1.0 => Ok(()),
            _ => Err(InvalidSetting::new(name, format!("{value} is not between 0 and 1"))),
        };
        share("cluster.speculation.right", self.right)?;
        share("cluster.speculation.step_share", self.step_share)?;
        if !(1..=DRAFT_TOKENS_MAX).contains(&self.tokens_max) {
            return Err(InvalidSetting::new("cluster.speculation.tokens_max", format!("must be between 1 and {DRAFT_TOKENS_MAX}")));
        }
        Ok(())
    }
}

/// The settings of autoscaling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Autoscale {
    /// The prefill instances that run in any case, and at the start.
    pub prefill_floor: u32,
    /// The decode instances that run in any case, and at the start.
    pub decode_floor: u32,
    /// The number of instances of each role beyond those that are needed.
    pub warm: u32,
    /// The time over which the coordinator averages the load.
    pub window_s: f64,
    /// The time from the decision until a new instance serves.
    pub start_s: f64,
    /// The time for which fewer must have been enough before an instance is given up.
    pub cooldown_s: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherInstances {
    pub prefill: u32,
    pub decode: u32,
    pub gpu: String,
    pub gpus_per_instance: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkSettings {
    /// The bandwidth of a host's network cards together, each way.
    pub nic_gb_per_s: f64,
    /// The bandwidth between a host's DRAM and one GPU, each way.
    pub bus_gb_per_s: f64,
    /// The one-way latency of messages between processes on different hosts.
    pub latency_us: f64,
    /// The one-way latency of messages between processes on one host.
    pub local_latency_us: f64,
}

/// The settings of the cluster's scheduling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicySettings {
    /// The name of one of the scheduler's policies.
    pub name: String,
    /// The most sequences given to one decode worker at a time. By default: as many as it asks for.
    pub decode_sequences_max: Option<u32>,
    /// The longest uncached suffix that the decode worker computes itself, in tokens. By default: by predicted time.
    pub local_tail_tokens: Option<u32>,
    /// The number of reads from other hosts after which a block gets a copy nearby; 0: never.
    pub replicate_after: u8,
    pub queue_max: usize,
    pub queue_wait_s: f64,
    pub request_timeout_s: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrivals {
    /// Requests arrive at the trace's times.
    Trace,
    Poisson,
    /// A Poisson process whose rate goes up and down.
    Diurnal,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkloadSettings {
    /// The path of a file in Mooncake's format.
    pub trace: Option<String>,
    /// The number of requests to send; 0: all of the trace. Beyond its end the trace is repeated, with different prompts.
    pub requests: usize,
    /// The number of requests of the trace to skip at its beginning.
    pub skip: usize,
    pub arrivals: Arrivals,
    /// With the trace's arrivals, a factor on their speed; for a Poisson process over a trace, requests per second; with streams, a factor
    /// on their rates.
    pub rate: f64,
    /// The time between two peaks of diurnal arrivals.
    pub period_s: f64,
    /// The amplitude of a diurnal rate around its middle, as a share of it.
    pub swing: f64,
    /// The narrowness of a diurnal peak: 1 for a sine, whose middle is its mean; more for a peak that is a smaller part of the day.
    pub sharpness: f64,
    pub streams: Vec<Stream>,
    pub classes: Vec<Class>,
    /// The leading share of the requests that warm the cluster up and are not counted.
    pub warmup: f64,
}

/// Requests of one kind, without a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// Requests per second.
    pub rate: f64,
    /// The range of prompts' lengths in tokens, drawn evenly from the first number to the second.
    pub input: [u32; 2],
    /// The range of answers' lengths in tokens, drawn evenly from the first number to the second.
    pub output: [u32; 2],
    /// The leading tokens that all its prompts share, in steps of 512.
    #[serde(default)]
    pub prefix_tokens: u32,
    #[serde(default)]
    pub class: Option<String>,
}

/// A class of requests, with the limits within which they count as good.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    pub name: String,
    /// The share of a trace's requests that belong to this class, drawn at random.
    #[serde(default = "one")]
    pub share: f64,
    /// The limit of the time to the first token; without it, any time is good.
    #[serde(default)]
    pub ttft_ms: Option<f64>,
    /// The limit of the mean time per further token; without it, any time is good.
    #[serde(default)]
    pub tpot_ms: Option<f64>,
    /// The priority; higher ones go first.
    #[serde(default = "standard")]
    pub priority: u8,
    /// The value of one request that keeps its limits.
    #[serde(default = "one")]
    pub weight: f64,
    /// The treatment of a request whose limits cannot be met.
    #[serde(default)]
    pub on_miss: OnMiss,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnMiss {
    Reject,
    Queue,
    #[default]
    Late,
}

fn one() -> f64 {
    1.0
}

fn standard() -> u8 {
    1
}

/// A setting that cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}`: {reason}")]
pub struct InvalidSetting {
    pub key: String,
    pub reason: String,
}

impl InvalidSetting {
    pub fn new(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { key: key.into(), reason: reason.into() }
    }
}

impl Settings {
    pub fn shape(&self) -> Result<Shape, InvalidSetting> {
        Shape::find(&self.model).ok_or_else(|| InvalidSetting::new("model", format!("there is no shape {:?}", self.model)))
    }
}

impl ClusterShape {
    /// The numbers of instances that prefill and that decode.
    pub fn split(&self) -> Result<(u32, u32), InvalidSetting> {
        let prefill = match (self.prefill, self.prefill_share) {
            (Some(prefill), None) => prefill,
            (None, Some(share)) if share <= 0.0 => 0,
            (None, Some(share)) => ((f64::from(self.instances) * share).round() as u32).clamp(1, self.instances.saturating_sub(1)),
            (None, None) => self.instances / 2,
            (Some(_), Some(_)) => return Err(InvalidSetting::new("cluster.prefill", "give `prefill` or `prefill_share`, not both")),
        };
        let others = self.others.iter().map(|others| others.decode).sum::<u32>();
        match self.instances.checked_sub(prefill) {
            Some(decode) if decode + others > 0 => Ok((prefill, decode)),
            _ => Err(InvalidSetting::new("cluster.prefill", "leaves no instance that decodes")),
        }
    }

    /// The coordinator's settings for autoscaling.
    pub fn autoscale(&self) -> Result<Option<AutoscaleSettings>, InvalidSetting> {
        let Some(settings) = self.autoscale else { return Ok(None) };
        let (prefill, decode) = self.split()?;
        let others = |of: fn(&OtherInstances) -> u32| self.others.iter().map(of).sum::<u32>();
        let range = |key: &str, floor: u32, ceiling: u32| match floor <= ceiling {
            true => Ok(Range { floor, ceiling }),
            false => {
                Err(InvalidSetting::new(format!("cluster.autoscale.{key}"), format!("is more than the {ceiling} instances that there are")))
            }
        };
        let seconds = |key: &str, s: f64| match Duration::try_from_secs_f64(s) {
            Ok(duration) => Ok(duration),
            Err(error) => Err(InvalidSetting::new(format!("cluster.autoscale.{key}"), error.to_string())),
        };
        let window = seconds("window_s", settings.window_s)?;
        if window.is_zero() {
            return Err(InvalidSetting::new("cluster.autoscale.window_s", "must be more than 0"));
        }
        Ok(Some(AutoscaleSettings {
            prefill: range("prefill_floor", settings.prefill_floor, prefill + others(|others| others.prefill))?,
            decode: range("decode_floor", settings.decode_floor.max(1), decode + others(|others| others.decode))?,
            warm: settings.warm,
            window,
            start: seconds("start_s", settings.start_s)?,
            cooldown: seconds("cooldown_s", settings.cooldown_s)?,
            schedules: Vec::new(),
            clock_zero: Duration::ZERO,
        }))
    }

    pub fn gpu(name: &str) -> Result<Gpu, InvalidSetting> {
        Gpu::find(name).ok_or_else(|| InvalidSetting::new("cluster.gpu", format!("there is no GPU {name:?}")))
    }
}

impl WorkloadSettings {
    /// The classes in the cluster's form: the first is for requests that choose none.
    pub fn cluster_classes(&self) -> Result<class::Classes, InvalidSetting> {
        let of = |(place, class): (usize, &Class)| class::Class {
            name: class.name.clone(),
            service_tier: if place == 0 { "default".into() } else { class.name.clone() },
            ttft_ms: class.ttft_ms,
            tpot_ms: class.tpot_ms,
            priority: class.priority,
            weight: class.weight as f32,
            on_miss: match class.on_miss {
                OnMiss::Reject => class::OnMiss::Reject,
                OnMiss::Queue => class::OnMiss::Queue,
                OnMiss::Late => class::OnMiss::Late,
            },
        };
        let limitless =
            Class { name: "all".into(), share: 1.0, ttft_ms: None, tpot_ms: None, priority: 1, weight: 1.0, on_miss: OnMiss::Late };
        let classes = if self.classes.is_empty() { std::slice::from_ref(&limitless) } else { &self.classes[..] };
        class::Classes::new(classes.iter().enumerate().map(of).collect())
            .map_err(|error| InvalidSetting::new("workload.classes", error.to_string()))
    }

    /// The place of a class by its name; the first for requests that name none.
    pub fn class(&self, name: Option<&str>) -> Result<usize, InvalidSetting> {
        let Some(name) = name else { return Ok(0) };
        let place = self.classes.iter().position(|class| class.name == name);
        place.ok_or_else(|| InvalidSetting::new("workload.streams.class", format!("there is no class {name:?}")))
    }
}

impl Default for ClusterShape {
    fn default() -> Self {
        Self {
            instances: 2,
            prefill: None,
            prefill_share: None,
            gpu: "h100".into(),
            gpus_per_instance: 1,
            instances_per_host: 1,
            flops_efficiency: 0.5,
            memory_efficiency: 0.8,
            overhead_ms: 3.0,
            noise: 0.0,
            memory_share: 0.9,
            pool_gib_per_host: 512.0,
            eviction: "hit-density".into(),
            prefill_step_tokens: 8192,
            decode_step_tokens: 2048,
            sequences_max: 256,
            admitted_max: 8,
            putting_max: 256,
            measured_prefill: None,
            measured_decode: None,
            device_blocks: None,
            others: Vec::new(),
            autoscale: None,
            speculation: None,
        }
    }
}

impl Default for Speculation {
    /// A draft model of a third of the size, as measured for chat (docs/results/speculation.md), with the decode worker's own defaults.
    fn default() -> Self {
        Self { right: 0.63, step_share: 0.2, tokens_max: 12, rows_max: 16, step_tokens: 512 }
    }
}

impl Default for Autoscale {
    fn default() -> Self {
        Self { prefill_floor: 1, decode_floor: 1, warm: 0, window_s: 30.0, start_s: 60.0, cooldown_s: 120.0 }
    }
}

impl Default for NetworkSettings {
    fn default() -> Self {
        // Four cards of 200 Gbit/s; PCIe 4.0.
        Self { nic_gb_per_s: 100.0, bus_gb_per_s: 20.0, latency_us: 50.0, local_latency_us: 20.0 }
    }
}

impl Default for PolicySettings {
    fn default() -> Self {
        Self {
            name: "goodput".into(),
            decode_sequences_max: None,
            local_tail_tokens: None,
            replicate_after: 3,
            queue_max: 1024,
            queue_wait_s: 60.0,
            request_timeout_s: 600.0,
        }
    }
}

impl Default for WorkloadSettings {
    fn default() -> Self {
        Self {
            trace: None,
            requests: 0,
            skip: 0,
            arrivals: Arrivals::Trace,
            rate: 1.0,
            period_s: 600.0,
            swing: 0.5,
            sharpness: 1.0,
            streams: Vec::new(),
            classes: Vec::new(),
            warmup: 0.0,
        }
    }
}

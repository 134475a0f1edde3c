//! The cost of a step on a device: a roofline per kind of GPU and shape of model, or coefficients measured on a CPU.
//!
//! ```text
//! ms = max(operations / (peak · efficiency), bytes / (bandwidth · efficiency)) + overhead
//! ```
//!
//! Operations: two per weight and token, and those of attention per pair of positions. Bytes: the weights that a step's tokens use, once,
//! and each sequence's K and V or state. The communication of tensor parallelism is included in the efficiency and the overhead.

use crate::{random::Random, shape::Shape};
use serde::Serialize;
use std::time::Duration;
pub use tidemill_cluster::cost::StepCoefficients;
use tidemill_engine::job::ScheduledChunk;
use tidemill_proto::message::StepSample;

/// A kind of GPU. Peaks are the vendor's, dense, with bf16 inputs and f32 sums.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Gpu {
    pub name: &'static str,
    pub tera_flops: f64,
    pub memory_gb_per_s: f64,
    pub memory_gib: f64,
}

pub const GPUS: [Gpu; 4] = [
    Gpu { name: "a800", tera_flops: 312.0, memory_gb_per_s: 2039.0, memory_gib: 80.0 },
    Gpu { name: "h100", tera_flops: 989.0, memory_gb_per_s: 3350.0, memory_gib: 80.0 },
    Gpu { name: "h200", tera_flops: 989.0, memory_gb_per_s: 4800.0, memory_gib: 141.0 },
    Gpu { name: "l40s", tera_flops: 362.0, memory_gb_per_s: 864.0, memory_gib: 48.0 },
];

/// The work of a step: the sums that are measured, and that the cost model learns from.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Work {
    pub prefill_tokens: u64,
    /// The number of pairs of positions that prompt tokens attend to.
    pub prefill_context: u64,
    pub decode_rows: u64,
    pub decode_context: u64,
    /// The number of sequences that decode, and of the tokens that they draw.
    pub sequences: u64,
    pub drawn: u64,
    /// The number of positions whose K and V are read.
    pub kv_tokens: u64,
    /// The number of rows of logits.
    pub logit_rows: u64,
}

/// The speed of an engine.
#[derive(Clone, Debug)]
pub struct Device {
    pub speed: Speed,
    /// The standard deviation of a step's time, relative to it.
    pub noise: f64,
    random: Random,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Speed {
    Roofline(Roofline),
    Measured(StepCoefficients),
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Roofline {
    pub shape: Shape,
    /// The operations per second of all GPUs of the instance, efficiency included.
    pub flops_per_s: f64,
    pub bytes_per_s: f64,
    pub overhead: Duration,
}

impl Gpu {
    pub fn find(name: &str) -> Option<Gpu> {
        GPUS.into_iter().find(|gpu| gpu.name == name)
    }
}

impl Work {
    /// Adds a chunk that has `decode_rows` rows that decode, or none if it belongs to a prompt.
    pub fn add(&mut self, chunk: &ScheduledChunk, decode_rows: usize, logit_rows: usize) {
        let (start, len, rows) = (chunk.start as u64, chunk.len as u64, decode_rows as u64);
        if rows > 0 {
            self.sequences += 1;
            self.decode_rows += rows;
            self.decode_context += rows * start;
        } else {
            self.prefill_tokens += len;
            self.prefill_context += start * len + len * len / 2;
        }
        self.kv_tokens += start + len;
        self.logit_rows += logit_rows as u64;
    }

    /// The sample that an engine reports for this work, before which its draft model took `drafting`.
    pub fn sample(&self, took: Duration, drafting: Duration) -> StepSample {
        StepSample {
            prefill_tokens: self.prefill_tokens as u32,
            prefill_context: self.prefill_context,
            decode_rows: self.decode_rows as u32,
            decode_context: self.decode_context,
            sequences: self.sequences as u32,
            drawn: self.drawn as u32,
            ms: took.as_secs_f32() * 1e3,
            drafting_ms: drafting.as_secs_f32() * 1e3,
        }
    }
}

impl Speed {
    pub fn step(&self, work: &Work) -> Duration {
        match self {
            Speed::Roofline(roofline) => roofline.step(work),
            Speed::Measured(measured) => {
                let ms = measured.predict_ms(&work.sample(Duration::ZERO, Duration::ZERO));
                Duration::from_secs_f64(ms.max(0.0) / 1e3)
            }
        }
    }
}

impl Roofline {
    fn step(&self, work: &Work) -> Duration {
        let shape = &self.shape;
        let (prompt, rows) = (work.prefill_tokens as f64, work.decode_rows as f64);
        let matrices = shape.active_weights() * (prompt + rows) + shape.head_weights() * work.logit_rows as f64;
        let attention =
            shape.attention_flops(prompt, work.prefill_context as f64) + shape.attention_flops(rows, work.decode_context as f64);
        let flops = 2.0 * matrices + attention;
        let head = if work.logit_rows > 0 { 2.0 * shape.head_weights() } else { 0.0 };
        let bytes = shape.bytes_read(prompt + rows) + head + shape.kv_read(prompt, rows, work.kv_tokens as f64);
        Duration::from_secs_f64((flops / self.flops_per_s).max(bytes / self.bytes_per_s)) + self.overhead
    }
}

impl Device {
    pub fn new(speed: Speed, noise: f64, seed: u64) -> Self {
        Self { speed, noise, random: Random::new(seed) }
    }

    /// The time of a step with this work.
    pub fn step(&mut self, work: &Work) -> Duration {
        let factor = if self.noise > 0.0 { (1.0 + self.noise * self.random.normal()).clamp(0.5, 2.0) } else { 1.0 };
        self.speed.step(work).mul_f64(factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefill_is_bound_by_arithmetic_and_decode_by_memory() {
        let shape = Shape::find("llama-3.1-8b").unwrap();
        let roofline = Roofline { shape, flops_per_s: 500e12, bytes_per_s: 2.5e12, overhead: Duration::ZERO };
        let prefill = Work { prefill_tokens: 8192, prefill_context: 8192 * 4096, kv_tokens: 8192, ..Work::default() };
        let ms = |work: &Work| roofline.step(work).as_secs_f64() * 1e3;
        let flops = 2.0 * shape.active_weights() * 8192.0 + 4.0 * 32.0 * 4096.0 * (8192.0 * 4096.0);
        assert!((ms(&prefill) - flops / 500e9).abs() < 1e-3);
        let decode = |rows: u64| Work {
            decode_rows: rows,
            decode_context: rows * 1000,
            kv_tokens: rows * 1001,
            logit_rows: rows,
            ..Work::default()
        };
        assert!((5.5..6.5).contains(&ms(&decode(1))), "15 GB at 2.5 TB/s: {}", ms(&decode(1)));
        assert!(ms(&decode(64)) < 2.0 * ms(&decode(1)), "rows share the weights");
    }
}

//! Work, and the least time for it under this machine's ceilings (the roofline model: Williams, Waterman & Patterson,
//! 2009).

use crate::model::shapes::{Experts, Shape};
use tidemill_kernels::cpu::gemm::groupwise::GROUP;
use tidemill_model::Quantization;

/// The work that the machine can do per second: a CPU with the measurement's threads, or a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    /// Additions and multiplications of f32 numbers. On a GPU all products are of bf16 numbers.
    pub f32_flops: f64,
    /// Multiplications of bf16 numbers and additions to f32 sums.
    pub bf16_flops: f64,
    /// Additions and multiplications of 8-bit integers.
    pub int8_ops: f64,
    /// Bytes read from memory.
    pub bytes: f64,
}

/// The work to do, regardless of the code.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    pub f32_flops: f64,
    pub bf16_flops: f64,
    pub int8_ops: f64,
    /// Bytes read from memory: weights, K and V, streamed operands. Activations between kernels stay in caches.
    pub bytes: f64,
}

impl Ceilings {
    /// The limit: `max(bytes / bandwidth, FLOPs / peak)`; all arithmetic shares the same units.
    pub fn seconds(&self, work: &Work) -> f64 {
        (work.bytes / self.bytes).max(self.arithmetic_seconds(work))
    }

    /// Whether memory takes longer than the arithmetic.
    pub fn is_memory_bound(&self, work: &Work) -> bool {
        work.bytes / self.bytes > self.arithmetic_seconds(work)
    }

    fn arithmetic_seconds(&self, work: &Work) -> f64 {
        work.f32_flops / self.f32_flops + work.bf16_flops / self.bf16_flops + work.int8_ops / self.int8_ops
    }
}

/// Rows of one sequence that go through a model together.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The position of the first row.
    pub start: usize,
    pub rows: usize,
    /// Whether the last row's logits are computed.
    pub logits: bool,
}

/// The type of projections' weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weights {
    /// bf16, multiplied with bf16.
    Bf16,
    /// 8-bit integers, multiplied with 8-bit integers.
    Int8,
    /// 4 bits in groups of 32 with a scale of 16 bits, multiplied with 8-bit integers. The head has 8 bits.
    Int4,
}

impl Weights {
    pub const ALL: [Weights; 3] = [Weights::Bf16, Weights::Int8, Weights::Int4];

    pub fn name(self) -> &'static str {
        match self {
            Weights::Bf16 => "bf16",
            Weights::Int8 => "int8",
            Weights::Int4 => "int4",
        }
    }

    pub fn quantization(self) -> Option<Quantization> {
        match self {
            Weights::Bf16 => None,
            Weights::Int8 => Some(Quantization::Int8),
            Weights::Int4 => Some(Quantization::Int4),
        }
    }

    /// The work of a matrix of `numbers`, applied to `rows` rows: it is read once.
    pub fn applied(self, numbers: f64, rows: usize) -> Work {
        let operations = 2.0 * numbers * rows as f64;
        let bytes = if rows == 0 { 0.0 } else { numbers };
        match self {
            Weights::Bf16 => Work { bf16_flops: operations, bytes: bytes * BF16_BYTES, ..Work::default() },
            Weights::Int8 => Work { int8_ops: operations, bytes, ..Work::default() },
            Weights::Int4 => Work { int8_ops: operations, bytes: bytes * (0.5 + SCALE_BYTES), ..Work::default() },
        }
    }

    /// The work of a layer's experts, applied to `rows` rows: the expected weights are read if rows choose independently.
    fn applied_experts(self, hidden: f64, experts: Experts, rows: usize) -> Work {
        let [count, chosen, intermediate] = [experts.count, experts.chosen, experts.intermediate].map(f64::from);
        let read = count * (1.0 - (1.0 - chosen / count).powf(rows as f64));
        let expert = 3.0 * hidden * intermediate;
        let mut work = self.applied(chosen * expert, rows);
        work.bytes = self.applied(read * expert, 1).bytes;
        // The router is in bf16, and multiplies in f32.
        work.f32_flops += 2.0 * count * hidden * rows as f64;
        work.bytes += if rows == 0 { 0.0 } else { count * hidden * BF16_BYTES };
        work
    }

    /// [`applied`](Self::applied) for the head's matrix, which has more bits in some forms.
    fn applied_to_head(self, numbers: f64, rows: usize) -> Work {
        let mut work = self.applied(numbers, rows);
        if self == Weights::Int4 && rows > 0 {
            work.bytes = numbers * (1.0 + SCALE_BYTES);
        }
        work
    }
}

/// The work of one batch for a model of this shape with bf16 KV.
///
/// - Operations: 2 per weight and row it applies to, and `4 × heads × head_dim` in bf16 per position that a row attends
///   to. The last layer computes K and V of all rows, everything else only for rows with logits.
/// - Bytes: each weight once if it is applied at all (of experts: the expected ones), and K and V of all attended positions once per
///   sequence. Embedding rows, norms, rotary embedding, activation and sampling are left out: less than a hundredth.
pub fn batch(shape: &Shape, weights: Weights, batch: &[Rows]) -> Work {
    let [vocab, hidden, intermediate, layers, heads, kv_heads, head_dim] =
        [shape.vocab, shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, shape.head_dim].map(f64::from);
    let kv_weights = 2.0 * hidden * kv_heads * head_dim;
    let rest = |rows| {
        let mut work = weights.applied(2.0 * hidden * heads * head_dim, rows);
        work += match shape.experts {
            Some(experts) => weights.applied_experts(hidden, experts, rows),
            None => weights.applied(3.0 * hidden * intermediate, rows),
        };
        work
    };
    let rows: usize = batch.iter().map(|rows| rows.rows).sum();
    let logit_rows = batch.iter().filter(|rows| rows.logits).count();

    let mut work = weights.applied(kv_weights * layers, rows);
    work += rest(rows).times(layers - 1.0);
    work += rest(logit_rows);
    work += weights.applied_to_head(vocab * hidden, logit_rows);
    for rows in batch {
        let end = rows.start + rows.rows;
        let attended = (rows.start + 1..=end).sum::<usize>() as f64;
        let last_layer = if rows.logits { end as f64 } else { 0.0 };
        let layers_read = layers - 1.0 + f64::from(u8::from(rows.logits));
        work += Work {
            bf16_flops: 4.0 * heads * head_dim * ((layers - 1.0) * attended + last_layer),
            bytes: 2.0 * kv_heads * head_dim * BF16_BYTES * end as f64 * layers_read,
            ..Work::default()
        };
    }
    work
}

const BF16_BYTES: f64 = 2.0;
/// Bytes per number of its group's scale.
const SCALE_BYTES: f64 = BF16_BYTES / GROUP as f64;

impl Work {
    fn times(self, factor: f64) -> Work {
        let [f32_flops, bf16_flops, int8_ops, bytes] = [self.f32_flops, self.bf16_flops, self.int8_ops, self.bytes].map(|n| n * factor);
        Work { f32_flops, bf16_flops, int8_ops, bytes }
    }
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, more: Work) {
        self.f32_flops += more.f32_flops;
        self.bf16_flops += more.bf16_flops;
        self.int8_ops += more.int8_ops;
        self.bytes += more.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shapes::by_name;

    #[test]
    fn the_slower_of_memory_and_arithmetic_is_the_limit() {
        let ceilings = Ceilings { f32_flops: 100.0, bf16_flops: 200.0, int8_ops: 400.0, bytes: 10.0 };
        let arithmetic = Work { f32_flops: 25.0, bf16_flops: 50.0, int8_ops: 200.0, bytes: 9.0 };
        assert_eq!((ceilings.seconds(&arithmetic), ceilings.is_memory_bound(&arithmetic)), (1.0, false));
        let memory = Work { bytes: 20.0, ..arithmetic };
        assert_eq!((ceilings.seconds(&memory), ceilings.is_memory_bound(&memory)), (2.0, true));
    }

    #[test]
    fn a_decode_step_reads_each_weight_once() {
        let shape = by_name("llama-3.2-1b").unwrap();
        let work = batch(shape, Weights::Bf16, &[Rows { start: 0, rows: 1, logits: true }]);
        let matrices: usize = shape.tensors().iter().filter(|(_, dims)| dims.len() == 2).map(|(_, dims)| dims[0] * dims[1]).sum();
        let kv = 2.0 * 2.0 * 8.0 * 64.0 * 16.0;
        assert_eq!(work.bytes, 2.0 * matrices as f64 + kv);
        assert_eq!((work.bf16_flops, work.f32_flops), (2.0 * matrices as f64 + 4.0 * 32.0 * 64.0 * 16.0, 0.0));
    }

    #[test]
    fn a_step_reads_the_experts_that_its_rows_choose() {
        let shape = by_name("qwen3-moe-1b").unwrap();
        let work = |rows| batch(shape, Weights::Bf16, &vec![Rows { start: 0, rows: 1, logits: true }; rows]);
        let (layers, expert) = (12.0, 3.0 * 1024.0 * 384.0);
        let kv = 12.0 * 2.0 * 2.0 * 2.0 * 128.0;
        let common = layers * (2.0 * 1024.0 * 2048.0 + 2.0 * 1024.0 * 256.0 + 64.0 * 1024.0) + 65_536.0 * 1024.0;
        let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 1e-9;
        assert!(near(work(1).bytes, 2.0 * (common + layers * 8.0 * expert) + kv), "{}", work(1).bytes);
        let two = 64.0 * (1.0 - (7.0f64 / 8.0).powi(2));
        assert!(near(work(2).bytes, 2.0 * (common + layers * two * expert) + 2.0 * kv));
        assert_eq!(work(1).f32_flops, layers * 2.0 * 64.0 * 1024.0);
        assert!(near(work(2).bf16_flops, 2.0 * work(1).bf16_flops), "each row passes eight");
    }

    #[test]
    fn int8_weights_are_half_the_bytes_and_attention_stays_bf16() {
        let shape = by_name("llama-3.2-1b").unwrap();
        let step = [Rows { start: 15, rows: 1, logits: true }];
        let (bf16, int8) = (batch(shape, Weights::Bf16, &step), batch(shape, Weights::Int8, &step));
        assert_eq!(int8.bf16_flops, 4.0 * 32.0 * 64.0 * 16.0 * 16.0);
        assert_eq!(int8.int8_ops, bf16.bf16_flops - int8.bf16_flops);
        assert_eq!(bf16.bytes - int8.bytes, int8.int8_ops / 2.0);
    }

    #[test]
    fn rows_without_logits_end_at_the_last_layers_keys_and_values() {
        let mut shape = by_name("smollm-135m").unwrap().clone();
        shape.layers = 1;
        let work = batch(&shape, Weights::Bf16, &[Rows { start: 16, rows: 2, logits: false }]);
        assert_eq!(work, Work { bf16_flops: 2.0 * 2.0 * 2.0 * 576.0 * 192.0, bytes: 2.0 * 2.0 * 576.0 * 192.0, ..Work::default() });
        shape.layers = 2;
        let more = batch(&shape, Weights::Bf16, &[Rows { start: 16, rows: 2, logits: false }]);
        let layer = 2.0 * 576.0 * (576.0 + 192.0) + 3.0 * 576.0 * 1536.0;
        assert_eq!(more.bf16_flops - work.bf16_flops, 2.0 * 2.0 * layer + 4.0 * 576.0 * (17.0 + 18.0));
        assert_eq!(more.bytes - work.bytes, 2.0 * layer + 2.0 * 192.0 * 2.0 * 18.0);
    }
}

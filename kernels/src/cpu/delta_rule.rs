//! The gated delta rule (Yang et al., 2024: "Gated Delta Networks", equation 10): linear attention whose state is a matrix that decays, and
//! in which a key's value replaces the one that the matrix has for it.
//!
//! ```text
//! S <- decay S                         for each value head, S is [key dim, value dim]
//! S <- S + k (rate (v - Sᵀ k))ᵀ        k, v: this token's
//! o  = Sᵀ q
//! ```
//!
//! **The order.** Rows go one by one, in order, through a state in f32. The rule can also be computed in blocks of rows (a later kernel may
//! do so), but that would be a different order with different bits. For one row, each column of the state is computed separately:
//!
//! ```text
//! m = decay (k[0] S[0] + k[1] S[1] + …)          one chain of fused multiply-adds, ascending
//! d = rate (v - m)
//! S[i] = fma(k[i], d, decay S[i])
//! o = q[0] S[0] + q[1] S[1] + …                  likewise
//! ```
//!
//! So the bits of an output and of a state do not depend on how the rows before were cut, on the other heads, or on threads, which share
//! the heads.

use crate::cpu::{
    Cpu,
    activation::{Activation, sigmoid, softplus},
    convolution::convolve_row,
    element::{load_part, load_up_to, store_part},
    elementwise::share_rows,
    exp::exp,
    simd::{Kernel, LANES, Simd},
    threads::disjoint::Disjoint,
};

/// The heads of a layer. Each key head serves the same number of consecutive value heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeltaHeads {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

impl DeltaHeads {
    /// The count of numbers in a mixed row: queries of all key heads, keys of all key heads, values of all value heads.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.outputs()
    }

    /// The count of numbers in an output row, of all value heads.
    pub fn outputs(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// The count of numbers in a state, `[value heads, key dim, value dim]`.
    pub fn state_numbers(&self) -> usize {
        self.value_heads * self.head_numbers()
    }

    fn head_numbers(&self) -> usize {
        self.key_dim * self.value_dim
    }
}

/// Computes mixed rows, each of which is a row of a causal convolution over all channels with `taps`, `[inputs, channels]`, through silu;
/// then queries and keys are scaled to length 1, and queries also by `1 / sqrt(key_dim)`. `input(row, tap)` is the input that a tap
/// multiplies, the oldest of a row first.
pub fn mix<'a>(cpu: &Cpu, heads: DeltaHeads, taps: &[f32], input: impl Fn(usize, usize) -> &'a [f32] + Sync + Send, rows: &mut [f32]) {
    let channels = heads.channels();
    assert!(!taps.is_empty() && taps.len().is_multiple_of(channels), "taps are [inputs, channels]");
    let count = taps.len() / channels;
    share_rows(cpu, rows, channels, |range, rows| {
        let mut inputs = Vec::with_capacity(count);
        for (row, y) in range.zip(rows.chunks_exact_mut(channels)) {
            inputs.clear();
            inputs.extend((0..count).map(|tap| input(row, tap)));
            convolve_row(cpu, &inputs, taps, None, Some(Activation::Silu), y);
            cpu.isa().dispatch(Normalize { heads, row: y });
        }
    });
}

/// Turns rows of `[value heads]` numbers for rates and as many for decays into these: `rate = sigmoid(x)`, and `decay = e^(factor
/// softplus(x + bias))` with a factor and a bias for each head.
pub fn rates_and_decays(cpu: &Cpu, factors: &[f32], biases: &[f32], rows: &mut [f32]) {
    assert_eq!(factors.len(), biases.len(), "a factor and a bias for each head");
    share_rows(cpu, rows, 2 * factors.len(), |_, rows| cpu.isa().dispatch(RatesAndDecays { factors, biases, rows }));
}

/// Consecutive rows of a sequence.
pub struct DeltaRows<'a> {
    /// `[rows, channels]`, from [`mix`].
    pub mixed: &'a [f32],
    /// `[rows, 2, value heads]`, from [`rates_and_decays`].
    pub rates: &'a [f32],
    /// The output rows, read from the state, `[rows, value heads, value dim]`.
    pub outputs: &'a mut [f32],
}

/// A sequence's state, and the rows that go through it in order.
pub struct DeltaChunk<'a> {
    /// `[value heads, key dim, value dim]`; replaced by the state after the rows.
    pub state: &'a mut [f32],
    pub pieces: Vec<DeltaRows<'a>>,
}

/// Takes each chunk's rows through its state. Threads share chunks and heads.
pub fn advance(cpu: &Cpu, heads: DeltaHeads, chunks: &mut [DeltaChunk<'_>]) {
    assert!(heads.key_heads > 0 && heads.value_heads.is_multiple_of(heads.key_heads), "as many value heads for each key head");
    let shared: Vec<SharedChunk<'_>> = chunks.iter_mut().map(|chunk| SharedChunk::new(heads, chunk)).collect();
    cpu.for_each(shared.len() * heads.value_heads, |task| {
        let (chunk, head) = (&shared[task / heads.value_heads], task % heads.value_heads);
        // SAFETY: each head of each chunk is one task, which alone uses this part.
        let state = unsafe { chunk.state.part(head * heads.head_numbers()..(head + 1) * heads.head_numbers()) };
        cpu.isa().dispatch(Advance { heads, head, state, pieces: &chunk.pieces });
    });
}

struct SharedChunk<'a> {
    state: Disjoint<'a, f32>,
    pieces: Vec<SharedRows<'a>>,
}

struct SharedRows<'a> {
    mixed: &'a [f32],
    rates: &'a [f32],
    outputs: Disjoint<'a, f32>,
    rows: usize,
}

impl<'a> SharedChunk<'a> {
    fn new(heads: DeltaHeads, chunk: &'a mut DeltaChunk<'_>) -> Self {
        assert_eq!(chunk.state.len(), heads.state_numbers(), "a state is [value heads, key dim, value dim]");
        let share = |piece: &'a mut DeltaRows<'_>| {
            let rows = piece.mixed.len() / heads.channels();
            assert_eq!(piece.mixed.len(), rows * heads.channels(), "whole mixed rows");
            assert_eq!(piece.rates.len(), rows * 2 * heads.value_heads, "a rate and a decay for each row and head");
            assert_eq!(piece.outputs.len(), rows * heads.outputs(), "an output for each row and head");
            SharedRows { mixed: piece.mixed, rates: piece.rates, outputs: Disjoint::new(piece.outputs), rows }
        };
        Self { state: Disjoint::new(chunk.state), pieces: chunk.pieces.iter_mut().map(share).collect() }
    }
}

/// The epsilon of the L2 norm of queries and keys, added to their sum of squares as in transformers.
const EPSILON: f32 = 1e-6;

struct Normalize<'a> {
    heads: DeltaHeads,
    row: &'a mut [f32],
}

impl Kernel for Normalize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let DeltaHeads { key_heads, key_dim, .. } = self.heads;
        let query_scale = 1.0 / (key_dim as f32).sqrt();
        for (head, x) in self.row.chunks_exact_mut(key_dim).take(2 * key_heads).enumerate() {
            let mut squares = simd.zero();
            for x in x.chunks(LANES) {
                let x = load_up_to(simd, x);
                squares = simd.fma(x, x, squares);
            }
            let length = 1.0 / (simd.sum(squares) + EPSILON).sqrt();
            let scale = simd.splat(if head < key_heads { length * query_scale } else { length });
            for x in x.chunks_mut(LANES) {
                let scaled = simd.mul(load_up_to(simd, x), scale);
                simd.store_part(scaled, x, false);
            }
        }
    }
}

struct RatesAndDecays<'a> {
    factors: &'a [f32],
    biases: &'a [f32],
    rows: &'a mut [f32],
}

impl Kernel for RatesAndDecays<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let heads = self.factors.len();
        for row in self.rows.chunks_exact_mut(2 * heads) {
            let (rates, decays) = row.split_at_mut(heads);
            for x in rates.chunks_mut(LANES) {
                let rate = sigmoid(simd, load_up_to(simd, x));
                simd.store_part(rate, x, false);
            }
            let parameters = self.factors.chunks(LANES).zip(self.biases.chunks(LANES));
            for (x, (factors, biases)) in decays.chunks_mut(LANES).zip(parameters) {
                let time = softplus(simd, simd.add(load_up_to(simd, x), load_up_to(simd, biases)));
                let decay = exp(simd, simd.mul(load_up_to(simd, factors), time));
                simd.store_part(decay, x, false);
            }
        }
    }
}

/// The computation of all rows of a chunk through one head's state.
struct Advance<'a> {
    heads: DeltaHeads,
    head: usize,
    state: &'a mut [f32],
    pieces: &'a [SharedRows<'a>],
}

/// The number of vectors of columns that go through the rows together: enough chains to hide the latency of an addition.
const TOGETHER: usize = 4;

impl Kernel for Advance<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let width = self.heads.value_dim;
        let mut first = 0;
        while first + TOGETHER * LANES <= width {
            self.columns::<S, TOGETHER>(simd, first);
            first += TOGETHER * LANES;
        }
        while first < width {
            self.columns::<S, 1>(simd, first);
            first += LANES;
        }
    }
}

impl Advance<'_> {
    /// All rows, in order, through `N` vectors of the state's columns from `first` on; a single one may be cut off.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, simd: S, first: usize) {
        let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = self.heads;
        let key_head = self.head / (value_heads / key_heads);
        let count = (N * LANES).min(value_dim - first);
        let values = 2 * key_heads * key_dim + self.head * value_dim;
        let values = values + first..values + value_dim;
        for piece in self.pieces {
            let rows = piece.mixed.chunks_exact(self.heads.channels()).zip(piece.rates.chunks_exact(2 * value_heads));
            for (row, (mixed, rates)) in rows.enumerate() {
                let q = &mixed[key_head * key_dim..][..key_dim];
                let k = &mixed[(key_heads + key_head) * key_dim..][..key_dim];
                let (rate, decay) = (simd.splat(rates[self.head]), simd.splat(rates[value_heads + self.head]));
                let mut memory = [simd.zero(); N];
                for (state, k) in self.state.chunks_exact(value_dim).zip(k) {
                    let (state, k) = (load::<S, N>(simd, &state[first..]), simd.splat(*k));
                    for (memory, state) in memory.iter_mut().zip(state) {
                        *memory = simd.fma(k, state, *memory);
                    }
                }
                let mut change = load::<S, N>(simd, &mixed[values.clone()]);
                for (change, memory) in change.iter_mut().zip(memory) {
                    *change = simd.mul(rate, simd.sub(*change, simd.mul(decay, memory)));
                }
                let mut output = [simd.zero(); N];
                for ((state, k), q) in self.state.chunks_exact_mut(value_dim).zip(k).zip(q) {
                    let state = &mut state[first..];
                    let (mut new, k, q) = (load::<S, N>(simd, state), simd.splat(*k), simd.splat(*q));
                    for ((new, change), output) in new.iter_mut().zip(change).zip(&mut output) {
                        *new = simd.fma(k, change, simd.mul(decay, *new));
                        *output = simd.fma(q, *new, *output);
                    }
                    store(simd, new, state);
                }
                debug_assert!(row < piece.rows);
                let start = row * self.heads.outputs() + self.head * value_dim + first;
                // SAFETY: each head of each chunk is one task, which alone uses these columns of its outputs.
                store(simd, output, unsafe { piece.outputs.part(start..start + count) });
            }
        }
    }
}

/// Loads the first `N` vectors of `x`; of a single one, as many lanes as `x` has.
#[inline(always)]
fn load<S: Simd, const N: usize>(simd: S, x: &[f32]) -> [S::V; N] {
    let mut vectors = [simd.zero(); N];
    match x.as_chunks::<LANES>().0.first_chunk::<N>() {
        Some(chunks) => {
            for (vector, chunk) in vectors.iter_mut().zip(chunks) {
                *vector = simd.load(chunk);
            }
        }
        None => vectors[0] = load_part(simd, x),
    }
    vectors
}

/// Stores what [`load`] loads.
#[inline(always)]
fn store<S: Simd, const N: usize>(simd: S, vectors: [S::V; N], x: &mut [f32]) {
    match x.as_chunks_mut::<LANES>().0.first_chunk_mut::<N>() {
        Some(chunks) => {
            for (vector, chunk) in vectors.into_iter().zip(chunks) {
                simd.store(vector, chunk);
            }
        }
        None => store_part(simd, vectors[0], x),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{
        shapes::config,
        testing::{close, cpus, numbers},
    };
    use proptest::prelude::*;

    /// Key and value dimensions of whole vectors and of parts, of one vector and of several together.
    const SHAPES: [DeltaHeads; 4] = [
        DeltaHeads { key_heads: 2, value_heads: 4, key_dim: 12, value_dim: 20 },
        DeltaHeads { key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1 },
        DeltaHeads { key_heads: 3, value_heads: 3, key_dim: 16, value_dim: 64 },
        DeltaHeads { key_heads: 1, value_heads: 2, key_dim: 40, value_dim: 90 },
    ];
    const TAPS: usize = 4;
    const ROWS: usize = 23;

    /// The parameters and the inputs of some rows, and their way through the layer.
    struct Layer {
        heads: DeltaHeads,
        taps: Vec<f32>,
        factors: Vec<f32>,
        biases: Vec<f32>,
        /// `[TAPS - 1 + ROWS, channels]`: those before the first row, too.
        inputs: Vec<f32>,
        /// `[ROWS, 2, value heads]`
        gates: Vec<f32>,
        state: Vec<f32>,
    }

    impl Layer {
        fn new(heads: DeltaHeads) -> Self {
            let of_heads = |seed| numbers(heads.value_heads, seed);
            Self {
                heads,
                taps: numbers(TAPS * heads.channels(), 1),
                factors: of_heads(2).iter().map(|x| x - 1.0).collect(),
                biases: of_heads(3),
                inputs: numbers((TAPS - 1 + ROWS) * heads.channels(), 4),
                gates: numbers(ROWS * 2 * heads.value_heads, 5).iter().map(|x| 3.0 * x).collect(),
                state: numbers(heads.state_numbers(), 6),
            }
        }

        /// The outputs of all rows and the state after them, in chunks of these sizes, each in two pieces where it has two rows.
        fn run(&self, cpu: &Cpu, chunks: &[usize]) -> (Vec<f32>, Vec<f32>) {
            let Self { heads, .. } = *self;
            let channels = heads.channels();
            let mut state = self.state.clone();
            let (mut outputs, mut start) = (Vec::new(), 0);
            for &size in chunks {
                let mut mixed = vec![f32::NAN; size * channels];
                let input = |row: usize, tap: usize| &self.inputs[(start + row + tap) * channels..][..channels];
                mix(cpu, heads, &self.taps, input, &mut mixed);
                let mut rates = self.gates[start * 2 * heads.value_heads..][..size * 2 * heads.value_heads].to_vec();
                rates_and_decays(cpu, &self.factors, &self.biases, &mut rates);
                let mut of_chunk = vec![f32::NAN; size * heads.outputs()];
                let half = size / 2;
                let (a, b) = of_chunk.split_at_mut(half * heads.outputs());
                let rates = rates.split_at(half * 2 * heads.value_heads);
                let mixed = mixed.split_at(half * channels);
                let pieces = vec![
                    DeltaRows { mixed: mixed.0, rates: rates.0, outputs: a },
                    DeltaRows { mixed: mixed.1, rates: rates.1, outputs: b },
                ];
                advance(cpu, heads, &mut [DeltaChunk { state: &mut state, pieces }]);
                outputs.extend(of_chunk);
                start += size;
            }
            (outputs, state)
        }

        /// The outputs of all rows and the state after them by the definition, in f64.
        fn reference(&self) -> (Vec<f64>, Vec<f64>) {
            let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = self.heads;
            let channels = self.heads.channels();
            let exact = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
            let (taps, inputs, gates) = (exact(&self.taps), exact(&self.inputs), exact(&self.gates));
            let mut state = exact(&self.state);
            let mut outputs = Vec::new();
            for row in 0..ROWS {
                let mixed: Vec<f64> = (0..channels)
                    .map(|c| (0..TAPS).map(|tap| taps[tap * channels + c] * inputs[(row + tap) * channels + c]).sum::<f64>())
                    .map(|x| x / (1.0 + (-x).exp()))
                    .collect();
                let unit = |head: usize| {
                    let x = &mixed[head * key_dim..(head + 1) * key_dim];
                    let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    x.iter().map(|x| x / length).collect::<Vec<f64>>()
                };
                for head in 0..value_heads {
                    let key_head = head / (value_heads / key_heads);
                    let (q, k) = (unit(key_head), unit(key_heads + key_head));
                    let gate = |nth: usize| gates[(2 * row + nth) * value_heads + head];
                    let rate = 1.0 / (1.0 + (-gate(0)).exp());
                    let time = (gate(1) + f64::from(self.biases[head])).exp().ln_1p();
                    let decay = (f64::from(self.factors[head]) * time).exp();
                    let state = &mut state[head * key_dim * value_dim..][..key_dim * value_dim];
                    state.iter_mut().for_each(|s| *s *= decay);
                    for c in 0..value_dim {
                        let v = mixed[2 * key_heads * key_dim + head * value_dim + c];
                        let memory: f64 = (0..key_dim).map(|i| k[i] * state[i * value_dim + c]).sum();
                        (0..key_dim).for_each(|i| state[i * value_dim + c] += k[i] * rate * (v - memory));
                        outputs.push((0..key_dim).map(|i| q[i] * state[i * value_dim + c]).sum::<f64>() / (key_dim as f64).sqrt());
                    }
                }
            }
            (outputs, state)
        }
    }

    #[test]
    fn outputs_and_states_are_those_of_the_definition() {
        for heads in SHAPES {
            let layer = Layer::new(heads);
            let (outputs, state) = layer.run(&Cpu::new(None, 1).unwrap(), &[ROWS]);
            let (expected, expected_state) = layer.reference();
            close(&outputs, expected.into_iter(), 5e-6);
            close(&state, expected_state.into_iter(), 5e-6);
        }
    }

    #[test]
    fn cuts_threads_and_instruction_sets_do_not_change_a_bit() {
        for heads in SHAPES {
            let layer = Layer::new(heads);
            let expected = layer.run(&Cpu::new(None, 1).unwrap(), &[ROWS]);
            for cpu in cpus() {
                for chunks in [vec![ROWS], vec![1; ROWS], vec![7, 1, 15]] {
                    assert!(
                        layer.run(&cpu, &chunks) == expected,
                        "{heads:?} in {chunks:?} on {} with {} threads",
                        cpu.isa(),
                        cpu.threads()
                    );
                }
            }
        }
    }

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn any_shapes_have_the_same_bits_in_any_cut(
            (key_heads, shared, key_dim, value_dim) in (1..4usize, 1..4usize, 1..80usize, 1..150usize),
            mut ends in prop::collection::btree_set(1..ROWS, 0..8),
        ) {
            let layer = Layer::new(DeltaHeads { key_heads, value_heads: key_heads * shared, key_dim, value_dim });
            let expected = layer.run(&Cpu::new(None, 1).unwrap(), &[ROWS]);
            prop_assert!(expected.0.iter().chain(&expected.1).all(|x| x.is_finite()));
            ends.insert(ROWS);
            let sizes: Vec<usize> = ends.iter().scan(0, |start, end| Some(end - std::mem::replace(start, *end))).collect();
            for cpu in cpus() {
                prop_assert!(layer.run(&cpu, &sizes) == expected, "{sizes:?} on {} with {} threads", cpu.isa(), cpu.threads());
            }
        }
    }

    #[test]
    fn the_chunks_of_other_sequences_do_not_change_a_bit() {
        let heads = SHAPES[0];
        let cpu = Cpu::new(None, 3).unwrap();
        let (mixed, rates) = (numbers(5 * heads.channels(), 7), numbers(5 * 2 * heads.value_heads, 8));
        let alone = |rows: usize, seed: u64| {
            let (mut state, mut outputs) = (numbers(heads.state_numbers(), seed), vec![f32::NAN; rows * heads.outputs()]);
            let (mixed, rates) = (&mixed[..rows * heads.channels()], &rates[..rows * 2 * heads.value_heads]);
            advance(&cpu, heads, &mut [DeltaChunk { state: &mut state, pieces: vec![DeltaRows { mixed, rates, outputs: &mut outputs }] }]);
            (state, outputs)
        };
        let mut together: Vec<(usize, Vec<f32>, Vec<f32>)> = [5, 1, 3]
            .into_iter()
            .zip(20..)
            .map(|(rows, seed)| (rows, numbers(heads.state_numbers(), seed), vec![f32::NAN; rows * heads.outputs()]))
            .collect();
        let chunks = together.iter_mut().map(|(rows, state, outputs)| {
            let (mixed, rates) = (&mixed[..*rows * heads.channels()], &rates[..*rows * 2 * heads.value_heads]);
            DeltaChunk { state, pieces: vec![DeltaRows { mixed, rates, outputs }] }
        });
        advance(&cpu, heads, &mut chunks.collect::<Vec<_>>());
        for ((rows, state, outputs), seed) in together.into_iter().zip(20..) {
            assert!((state, outputs) == alone(rows, seed), "{rows} rows");
        }
    }
}

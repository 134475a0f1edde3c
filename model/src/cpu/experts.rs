//! A feed-forward layer of experts, a few of which are applied to each row (Shazeer et al., 2017).
//!
//! **The arithmetic.** The router's products are in f32 regardless of the model's arithmetic, so that rounding does not change the choice;
//! so is the product that weights a shared expert. [`router`](super::router) chooses a row's experts and their weights. The experts'
//! outputs are summed in ascending order of the experts' numbers, each times its weight; then the shared expert's output is added, times
//! its weight. None of this depends on other rows: these only decide which products are computed together.
//!
//! The rows of a band are gathered by expert, so that the band reads the weights of each chosen expert once. If the experts' loads are
//! about equal, each thread takes one expert at a time; if one expert has most rows, or there are few loads, the threads share each
//! product. Bands run in parallel, and each reads the weights itself.

use super::{
    band::free,
    projection::{Activations, Arithmetic, Projection, project},
    router::{Choice, Router, RouterScratch, sigmoid},
};
use crate::{
    config::ExpertConfig,
    error::ModelError,
    tensors::{ExpertTensors, Linear},
};
use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};
use tidemill_kernels::{
    Cpu,
    cpu::{
        activation::Activation,
        elementwise,
        gemm::{Output, Product},
    },
};

pub(crate) struct Experts {
    /// `[experts, hidden]`, in f32.
    logits: Projection,
    router: Router,
    experts: Vec<Expert>,
    shared: Option<SharedExpert>,
}

struct Expert {
    /// The number of rows that went through it so far.
    rows: AtomicU64,
    gate_up: Projection,
    down: Projection,
}

/// The expert that every row goes through.
struct SharedExpert {
    /// `[1, hidden]`, in f32: the projection to the logit of the expert's weight. Without it, the weight is 1.
    gate: Option<Projection>,
    expert: Expert,
}

/// Intermediate results, kept from layer to layer.
pub(super) struct ExpertScratch {
    /// The layer's input, normed.
    pub(super) normed: Vec<f32>,
    router_input: Activations,
    logits: Vec<f32>,
    router: RouterScratch,
    /// The choices of all rows, `[rows, chosen]`.
    choices: Vec<Choice>,
    order: ByExpert,
    /// The outputs of the experts, in that order, `[rows * chosen, hidden]`; then those of the shared expert, `[rows, hidden]`.
    outputs: Vec<f32>,
    /// One set of buffers per thread.
    buffers: Vec<Mutex<ExpertBuffers>>,
    /// The weight of the shared expert's output, by row.
    shared_weights: Vec<f32>,
}

/// Intermediate results of one expert.
struct ExpertBuffers {
    gathered: Vec<f32>,
    input: Activations,
    activated: Activations,
}

/// The choices, sorted by expert and then by row.
#[derive(Default)]
struct ByExpert {
    /// The indices of the choices, sorted.
    choices: Vec<u32>,
    /// The position of each choice in the sorted order.
    places: Vec<u32>,
    /// The end of each expert's choices in the sorted order.
    ends: Vec<usize>,
}

/// An expert with the rows that chose it.
struct Load<'a> {
    expert: &'a Expert,
    /// The indices of the choices.
    choices: &'a [u32],
    outputs: &'a mut [f32],
}

/// The number of rows that take as long to compute as an expert's weights take to read.
const ROWS_OF_A_READ: usize = 8;
/// If each thread's share of the work is at least this many times the largest load, whole loads are distributed among threads.
const LOADS_OF_A_THREAD: usize = 2;
/// Rows that a thread sums up at a time.
const SUMMED_TOGETHER: usize = 8;

impl ByExpert {
    fn sort(&mut self, choices: &[Choice], experts: usize) {
        let Self { choices: sorted, places, ends } = self;
        ends.clear();
        ends.resize(experts, 0);
        choices.iter().for_each(|choice| ends[choice.expert] += 1);
        let mut before = 0;
        for end in ends.iter_mut() {
            before += std::mem::replace(end, before);
        }
        sorted.resize(choices.len(), 0);
        places.resize(choices.len(), 0);
        for (nth, choice) in choices.iter().enumerate() {
            let place = &mut ends[choice.expert];
            sorted[*place] = nth as u32;
            places[nth] = *place as u32;
            *place += 1;
        }
    }

    /// The experts that were chosen.
    fn loads<'a>(&'a self, experts: &'a [Expert], hidden: usize, mut outputs: &'a mut [f32]) -> Vec<Load<'a>> {
        let mut loads = Vec::with_capacity(experts.len().min(self.choices.len()));
        let mut start = 0;
        for (expert, &end) in experts.iter().zip(&self.ends) {
            let choices = &self.choices[start..end];
            start = end;
            let (of_expert, others) = std::mem::take(&mut outputs).split_at_mut(choices.len() * hidden);
            outputs = others;
            if !choices.is_empty() {
                loads.push(Load { expert, choices, outputs: of_expert });
            }
        }
        loads
    }
}

/// Whether threads that take one load at a time finish at about the same time.
fn are_even(loads: &[Load<'_>], threads: usize) -> bool {
    let time = |load: &Load<'_>| load.choices.len().max(ROWS_OF_A_READ);
    let largest = loads.iter().map(time).max().unwrap_or(0);
    loads.iter().map(time).sum::<usize>() >= LOADS_OF_A_THREAD * threads * largest
}

impl ExpertScratch {
    /// Creates the scratch for this arithmetic, for `threads` threads.
    pub(super) fn new(arithmetic: Arithmetic, threads: usize) -> Self {
        let buffers = || {
            let [input, activated] = std::array::from_fn(|_| Activations::new(arithmetic));
            Mutex::new(ExpertBuffers { gathered: Vec::new(), input, activated })
        };
        Self {
            normed: Vec::new(),
            router_input: Activations::new(Arithmetic::F32),
            logits: Vec::new(),
            router: RouterScratch::default(),
            choices: Vec::new(),
            order: ByExpert::default(),
            outputs: Vec::new(),
            buffers: std::iter::repeat_with(buffers).take(threads).collect(),
            shared_weights: Vec::new(),
        }
    }
}

impl Expert {
    fn pack([gate, up, down]: &[Linear; 3], cpu: &Cpu, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        Ok(Self { rows: AtomicU64::new(0), gate_up: gate.pack_gated(up, cpu, arithmetic)?, down: down.pack(cpu, arithmetic)? })
    }

    fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }

    /// Sets `outputs` to the expert's outputs for `input`.
    fn apply(&self, cpu: &Cpu, activation: Activation, input: &Activations, activated: &mut Activations, outputs: &mut [f32]) {
        project(cpu, input, [Product { weights: &self.gate_up, output: Output::Activated(activation, activated) }]);
        project(cpu, activated, [Product { weights: &self.down, output: Output::Set(outputs) }]);
    }
}

impl Experts {
    pub(crate) fn pack(tensors: &ExpertTensors, config: &ExpertConfig, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let shared = tensors.shared.as_ref().map(|shared| {
            let gate = shared.gate.as_ref().map(|gate| gate.pack(cpu, Arithmetic::F32)).transpose()?;
            Ok::<_, ModelError>(SharedExpert { gate, expert: Expert::pack(&shared.projections, cpu, arithmetic)? })
        });
        Ok(Self {
            logits: tensors.router.pack(cpu, Arithmetic::F32)?,
            router: Router::new(config, tensors.correction.clone()),
            experts: tensors.experts.iter().map(|expert| Expert::pack(expert, cpu, arithmetic)).collect::<Result<_, _>>()?,
            shared: shared.transpose()?,
        })
    }

    /// Bytes that a pass over all weights reads.
    pub(crate) fn bytes(&self) -> usize {
        let shared = self.shared.as_ref().map_or(0, |shared| shared.gate.as_ref().map_or(0, Projection::bytes) + shared.expert.bytes());
        self.logits.bytes() + self.experts.iter().map(Expert::bytes).sum::<usize>() + shared
    }

    /// Bytes of the experts that a row does not choose: all experts have the same shape.
    pub(crate) fn unread_by_a_row(&self) -> usize {
        let unchosen = self.experts.len() - self.router.chosen();
        self.experts.first().map_or(0, |expert| unchosen * expert.bytes())
    }

    /// Adds the number of rows that went through each expert so far to `rows`. The shared expert, which every row goes through, is left
    /// out.
    pub(crate) fn add_rows(&self, rows: &mut [u64]) {
        for (rows, expert) in rows.iter_mut().zip(&self.experts) {
            *rows += expert.rows.load(Ordering::Relaxed);
        }
    }

    /// Sets `sums` to the weighted sums of the experts' outputs for the rows of `scratch.normed`, of `hidden` numbers each.
    pub(super) fn apply(&self, cpu: &Cpu, hidden: usize, activation: Activation, scratch: &mut ExpertScratch, sums: &mut Vec<f32>) {
        self.choose(cpu, hidden, scratch);
        let ExpertScratch { normed, choices, order, outputs, buffers, .. } = scratch;
        let per_row = self.router.chosen();
        order.sort(choices, self.experts.len());
        outputs.resize(choices.len() * hidden, 0.0);
        let mut loads = order.loads(&self.experts, hidden, outputs);
        let take = |load: &mut Load<'_>| {
            let ExpertBuffers { gathered, input, activated } = &mut *free(buffers);
            gathered.clear();
            let rows = load.choices.iter().map(|&nth| nth as usize / per_row);
            rows.for_each(|row| gathered.extend_from_slice(&normed[row * hidden..][..hidden]));
            input.copy_from(cpu, gathered, hidden);
            load.expert.rows.fetch_add(load.choices.len() as u64, Ordering::Relaxed);
            load.expert.apply(cpu, activation, input, activated, load.outputs);
        };
        if are_even(&loads, cpu.threads()) {
            cpu.for_each_mut(&mut loads, take);
        } else {
            loads.iter_mut().for_each(take);
        }
        sums.clear();
        sums.resize(normed.len(), 0.0);
        sum_up(cpu, hidden, per_row, (choices, &order.places, outputs), sums);
        if let Some(shared) = &self.shared {
            shared.add(cpu, hidden, activation, scratch, sums);
        }
    }

    /// Chooses the experts of all rows.
    fn choose(&self, cpu: &Cpu, hidden: usize, scratch: &mut ExpertScratch) {
        let ExpertScratch { normed, router_input, logits, router, choices, .. } = scratch;
        logits.resize(normed.len() / hidden * self.experts.len(), 0.0);
        router_input.copy_from(cpu, normed, hidden);
        project(cpu, router_input, [Product { weights: &self.logits, output: Output::Set(logits) }]);
        choices.clear();
        logits.chunks_exact(self.experts.len()).for_each(|logits| self.router.choose(logits, router, choices));
    }
}

/// Adds the outputs of each row's experts to its sum, in ascending order of the experts' numbers, which is that of their places.
fn sum_up(cpu: &Cpu, hidden: usize, per_row: usize, (choices, places, outputs): (&[Choice], &[u32], &[f32]), sums: &mut [f32]) {
    let mut pieces: Vec<(usize, &mut [f32])> = sums.chunks_mut(SUMMED_TOGETHER * hidden).enumerate().collect();
    cpu.for_each_mut(&mut pieces, |(piece, sums)| {
        let mut of_row: Vec<(u32, f32)> = Vec::with_capacity(per_row);
        for (row, sum) in (*piece * SUMMED_TOGETHER..).zip(sums.chunks_exact_mut(hidden)) {
            let numbers = row * per_row..(row + 1) * per_row;
            of_row.clear();
            of_row.extend(places[numbers.clone()].iter().zip(&choices[numbers]).map(|(place, choice)| (*place, choice.weight)));
            of_row.sort_unstable_by_key(|(place, _)| *place);
            for &(place, weight) in &of_row {
                elementwise::add_scaled(cpu, sum, &outputs[place as usize * hidden..][..hidden], weight);
            }
        }
    });
}

impl SharedExpert {
    /// Adds the expert's outputs for all rows, which are still in `scratch.router_input`.
    fn add(&self, cpu: &Cpu, hidden: usize, activation: Activation, scratch: &mut ExpertScratch, sums: &mut [f32]) {
        let ExpertScratch { normed, router_input, logits, outputs, buffers, shared_weights, .. } = scratch;
        let ExpertBuffers { input, activated, .. } = &mut *free(buffers);
        input.copy_from(cpu, normed, hidden);
        outputs.resize(normed.len(), 0.0);
        self.expert.apply(cpu, activation, input, activated, outputs);
        let Some(gate) = &self.gate else { return elementwise::add_scaled(cpu, sums, outputs, 1.0) };
        let rows = normed.len() / hidden;
        logits.resize(rows, 0.0);
        project(cpu, router_input, [Product { weights: gate, output: Output::Set(logits) }]);
        shared_weights.resize(rows, 0.0);
        sigmoid(logits, shared_weights);
        for ((sums, output), weight) in sums.chunks_exact_mut(hidden).zip(outputs.chunks_exact(hidden)).zip(&*shared_weights) {
            elementwise::add_scaled(cpu, sums, output, *weight);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_sorted_by_expert_and_row() {
        let chosen = [2, 0, 2, 3, 0, 2].map(|expert| Choice { expert, weight: 1.0 });
        let mut order = ByExpert::default();
        for _ in 0..2 {
            order.sort(&chosen, 5);
            assert_eq!((&order.choices[..], &order.places[..]), (&[1, 4, 0, 2, 5, 3][..], &[2, 0, 3, 5, 1, 4][..]));
            assert_eq!(order.ends, [2, 2, 5, 6, 6]);
        }
    }
}

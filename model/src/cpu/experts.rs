//! A feed-forward layer of experts, a few of which are applied to each row (Shazeer et al., 2017).
//!
//! **The arithmetic.** The router's products are in f32 regardless of the model's arithmetic, so that rounding does not change the choice;
//! so is the product that weights a shared expert. [`router`](super::router) chooses a row's experts and their weights. The experts'
//! outputs are summed in ascending order of the experts' numbers, each times its weight; then the shared expert's output is added, times
//! its weight. None of this depends on other rows: these only decide which products are computed together.
//!
//! The rows of a band are gathered by expert, so that the band reads the weights of each chosen expert once. If the experts' [loads] are
//! about equal, each thread takes one expert at a time; if one expert has most rows, or there are few loads, the threads share each
//! product. Bands run in parallel, and each reads the weights itself.
//!
//! **On ranks** loads are spread, and each rank computes whole rows of outputs. Then it sums up its own columns of all rows, reading those of
//! other ranks where they are, and the sums are gathered: a rank reads `chosen * hidden / ranks + hidden` numbers for a row. The shared
//! expert is split as a dense layer is.
//!
//! [loads]: super::loads

use super::{
    band::free,
    dense::Dense,
    loads::{Load, Loads, Place, are_even},
    projection::{Activations, Arithmetic, Projection, project},
    ranks::{Columns, Rank},
    router::{Choice, Router, RouterScratch, sigmoid},
};
use crate::{
    config::ExpertConfig,
    error::ModelError,
    tensors::{ExpertTensors, Linear},
};
use std::{
    iter, mem,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};
use tidemill_kernels::{
    Cpu,
    cpu::{
        activation::Activation,
        elementwise,
        gemm::{Output, Product},
    },
};
use tidemill_proto::block::Shard;

pub(crate) struct Experts {
    /// `[experts, hidden]`, in f32.
    logits: Projection,
    router: Router,
    /// Those of all ranks, once these [share](Experts::share) them.
    experts: Vec<Arc<Expert>>,
    shared: Option<SharedExpert>,
}

struct Expert {
    /// The number of rows that went through it so far.
    rows: AtomicU64,
    layer: Dense,
}

/// The expert that every row goes through.
struct SharedExpert {
    /// `[1, hidden]`, in f32: the projection to the logit of the expert's weight. Without it, the weight is 1.
    gate: Option<Projection>,
    layer: Dense,
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
    loads: Loads,
    /// The outputs of the rank's loads, `[their rows, hidden]`; then those of the shared expert, `[rows, the rank's columns]`.
    outputs: Vec<f32>,
    /// The rank's columns of the sums.
    sums: Vec<f32>,
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

/// Rows that a thread sums up at a time.
const SUMMED_TOGETHER: usize = 8;

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
            loads: Loads::default(),
            outputs: Vec::new(),
            sums: Vec::new(),
            buffers: iter::repeat_with(buffers).take(threads).collect(),
            shared_weights: Vec::new(),
        }
    }
}

fn pack([gate, up, down]: &[Linear; 3], cpu: &Cpu, arithmetic: Arithmetic) -> Result<Dense, ModelError> {
    Dense::pack(Some(gate), up, down, cpu, arithmetic)
}

impl Experts {
    pub(crate) fn pack(tensors: &ExpertTensors, config: &ExpertConfig, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let expert = |tensors| Ok(Arc::new(Expert { rows: AtomicU64::new(0), layer: pack(tensors, cpu, arithmetic)? }));
        let shared = tensors.shared.as_ref().map(|shared| {
            let gate = shared.gate.as_ref().map(|gate| gate.pack(cpu, Arithmetic::F32)).transpose()?;
            Ok::<_, ModelError>(SharedExpert { gate, layer: pack(&shared.projections, cpu, arithmetic)? })
        });
        Ok(Self {
            logits: tensors.router.pack(cpu, Arithmetic::F32)?,
            router: Router::new(config, tensors.correction.clone()),
            experts: tensors.experts.iter().map(expert).collect::<Result<_, ModelError>>()?,
            shared: shared.transpose()?,
        })
    }

    /// Lets each rank compute the experts that all ranks of a layer have packed, which are in the order of ranks.
    pub(crate) fn share(ranks: &mut [&mut Self]) {
        let all: Vec<_> = ranks.iter_mut().flat_map(|rank| mem::take(&mut rank.experts)).collect();
        ranks.iter_mut().for_each(|rank| rank.experts.clone_from(&all));
    }

    /// Bytes that a pass over all weights reads.
    pub(crate) fn bytes(&self) -> usize {
        let shared = self.shared.as_ref().map_or(0, |shared| shared.gate.as_ref().map_or(0, Projection::bytes) + shared.layer.bytes());
        self.logits.bytes() + self.experts.iter().map(|expert| expert.layer.bytes()).sum::<usize>() + shared
    }

    /// Bytes of the experts that a row does not choose: all experts have the same shape.
    pub(crate) fn unread_by_a_row(&self) -> usize {
        let unchosen = self.experts.len() - self.router.chosen();
        self.experts.first().map_or(0, |expert| unchosen * expert.layer.bytes())
    }

    /// Adds the number of rows that went through each expert so far to `rows`. The shared expert, which every row goes through, is left
    /// out.
    pub(crate) fn add_rows(&self, rows: &mut [u64]) {
        for (rows, expert) in rows.iter_mut().zip(&self.experts) {
            *rows += expert.rows.load(Ordering::Relaxed);
        }
    }

    /// Sets `sums` to the weighted sums of the experts' outputs for the rows of `scratch.normed`, of `hidden` numbers each. Ranks share the
    /// work, and each has the sums of all.
    #[expect(clippy::too_many_arguments, reason = "what computes, the layer's settings, and where its parts go")]
    pub(super) fn apply(
        &self,
        cpu: &Cpu,
        rank: Option<&Rank>,
        hidden: usize,
        activation: Activation,
        scratch: &mut ExpertScratch,
        columns: &mut Columns,
        sums: &mut Vec<f32>,
    ) {
        self.choose(cpu, hidden, scratch);
        let shard = rank.map_or(Shard::WHOLE, Rank::shard);
        scratch.loads.spread(&scratch.choices, self.experts.len(), shard.count as usize);
        self.compute(cpu, shard.index as usize, hidden, activation, scratch);
        let rows = scratch.normed.len() / hidden;
        let own = rank.map_or(0..hidden, |rank| rank.own(hidden));
        let ExpertScratch { choices, loads, outputs, sums: own_sums, .. } = &mut *scratch;
        own_sums.clear();
        own_sums.resize(rows * own.len(), 0.0);
        let sum_up = |outputs: &[&[f32]]| sum_up(cpu, self.router.chosen(), (choices, loads.places(), outputs), (hidden, own), own_sums);
        match rank {
            None => sum_up(&[outputs]),
            Some(rank) => sum_up(&rank.exchange_parts(outputs).iter().map(|part| &part[..]).collect::<Vec<_>>()),
        }
        if let Some(shared) = &self.shared {
            shared.add(cpu, rank.map(|rank| (rank, columns)), activation, scratch);
        }
        match rank {
            None => mem::swap(sums, &mut scratch.sums),
            Some(rank) => rank.gather(cpu, rows, &mut scratch.sums, sums),
        }
    }

    /// Chooses the experts of all rows. Every rank does so: the router costs little, and all find the same choices.
    fn choose(&self, cpu: &Cpu, hidden: usize, scratch: &mut ExpertScratch) {
        let ExpertScratch { normed, router_input, logits, router, choices, .. } = scratch;
        logits.resize(normed.len() / hidden * self.experts.len(), 0.0);
        router_input.copy_from(cpu, normed, hidden);
        project(cpu, router_input, [Product { weights: &self.logits, output: Output::Set(logits) }]);
        choices.clear();
        logits.chunks_exact(self.experts.len()).for_each(|logits| self.router.choose(logits, router, choices));
    }

    /// Computes the outputs of a rank's loads.
    fn compute(&self, cpu: &Cpu, rank: usize, hidden: usize, activation: Activation, scratch: &mut ExpertScratch) {
        let ExpertScratch { normed, loads, outputs, buffers, .. } = scratch;
        let (loads, per_row) = (&*loads, self.router.chosen());
        outputs.resize(loads.of_rank(rank).map(Load::rows).sum::<usize>() * hidden, 0.0);
        let mut rest = &mut outputs[..];
        let with_outputs = |load| {
            let (of_load, others) = mem::take(&mut rest).split_at_mut(Load::rows(load) * hidden);
            rest = others;
            (load, of_load)
        };
        let mut tasks: Vec<(&Load, &mut [f32])> = loads.of_rank(rank).map(with_outputs).collect();
        let take = |(load, outputs): &mut (&Load, &mut [f32])| {
            let ExpertBuffers { gathered, input, activated } = &mut *free(buffers);
            gathered.clear();
            let rows = loads.choices(load).iter().map(|&nth| nth as usize / per_row);
            rows.for_each(|row| gathered.extend_from_slice(&normed[row * hidden..][..hidden]));
            input.copy_from(cpu, gathered, hidden);
            let Expert { rows, layer } = &*self.experts[load.expert];
            rows.fetch_add(load.rows() as u64, Ordering::Relaxed);
            layer.activate(cpu, None, activation, input, activated);
            layer.project_down(cpu, activated, outputs);
        };
        if are_even(loads.of_rank(rank), cpu.threads()) {
            cpu.for_each_mut(&mut tasks, take);
        } else {
            tasks.iter_mut().for_each(take);
        }
    }
}

/// Adds columns of the outputs of each row's experts, `[rows of a rank's loads, hidden]`, to its sum, in ascending order of the experts'
/// numbers. (An order by ranks would depend on how many these are.)
fn sum_up(
    cpu: &Cpu,
    per_row: usize,
    (choices, places, outputs): (&[Choice], &[Place], &[&[f32]]),
    (hidden, columns): (usize, Range<usize>),
    sums: &mut [f32],
) {
    let width = columns.len();
    let mut pieces: Vec<(usize, &mut [f32])> = sums.chunks_mut(SUMMED_TOGETHER * width).enumerate().collect();
    cpu.for_each_mut(&mut pieces, |(piece, sums)| {
        let mut of_row: Vec<(Choice, Place)> = Vec::with_capacity(per_row);
        for (row, sum) in (*piece * SUMMED_TOGETHER..).zip(sums.chunks_exact_mut(width)) {
            let numbers = row * per_row..(row + 1) * per_row;
            of_row.clear();
            of_row.extend(choices[numbers.clone()].iter().copied().zip(places[numbers].iter().copied()));
            of_row.sort_unstable_by_key(|(choice, _)| choice.expert);
            for (choice, Place { rank, index }) in &of_row {
                let output = &outputs[*rank as usize][*index as usize * hidden..][columns.clone()];
                elementwise::add_scaled(cpu, sum, output, choice.weight);
            }
        }
    });
}

impl SharedExpert {
    /// Adds the expert's outputs for all rows, which are still in `scratch.router_input`; a rank adds its own columns.
    fn add(&self, cpu: &Cpu, rank: Option<(&Rank, &mut Columns)>, activation: Activation, scratch: &mut ExpertScratch) {
        let ExpertScratch { normed, router_input, logits, outputs, sums, buffers, shared_weights, .. } = scratch;
        let ExpertBuffers { input, activated, .. } = &mut *free(buffers);
        let rows = router_input.rows();
        input.copy_from(cpu, normed, normed.len() / rows);
        self.layer.activate(cpu, rank, activation, input, activated);
        outputs.resize(sums.len(), 0.0);
        self.layer.project_down(cpu, activated, outputs);
        let Some(gate) = &self.gate else { return elementwise::add_scaled(cpu, sums, outputs, 1.0) };
        logits.resize(rows, 0.0);
        project(cpu, router_input, [Product { weights: gate, output: Output::Set(logits) }]);
        shared_weights.resize(rows, 0.0);
        sigmoid(logits, shared_weights);
        let width = sums.len() / rows;
        for ((sums, output), weight) in sums.chunks_exact_mut(width).zip(outputs.chunks_exact(width)).zip(&*shared_weights) {
            elementwise::add_scaled(cpu, sums, output, *weight);
        }
    }
}

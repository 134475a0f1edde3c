//! A feed-forward layer of experts, of which each row goes through a few (Shazeer et al., 2017).
//!
//! **The arithmetic.** The router's products are in f32 whatever the model's are, so that rounding chooses no expert; so is the product
//! that weighs a shared expert. [`router`](super::router) says which experts a row has, and with which weights. What they make of the row
//! is summed in ascending order of their numbers, each times its weight; then comes the shared expert's part, times its weight. None of
//! this depends on other rows: these only decide which products are computed together.
//!
//! The rows of a band are gathered by expert, so that it reads the weights of each chosen expert once. Bands go side by side, and each
//! reads for itself.

use super::{
    projection::{Activations, Arithmetic, Projection, project},
    router::{Choice, Router, RouterScratch, sigmoid},
};
use crate::{
    config::ExpertConfig,
    error::ModelError,
    tensors::{ExpertTensors, Linear},
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
    gate_up: Projection,
    down: Projection,
}

/// An expert that every row goes through.
struct SharedExpert {
    /// `[1, hidden]`, in f32: the logit of the expert's weight, which is 1 without this.
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
    gathered: Vec<f32>,
    input: Activations,
    activated: Activations,
    outputs: Vec<f32>,
    /// The weight of the shared expert's part, by row.
    shared_weights: Vec<f32>,
}

impl ExpertScratch {
    pub(super) fn new(arithmetic: Arithmetic) -> Self {
        Self {
            normed: Vec::new(),
            router_input: Activations::new(Arithmetic::F32),
            logits: Vec::new(),
            router: RouterScratch::default(),
            choices: Vec::new(),
            gathered: Vec::new(),
            input: Activations::new(arithmetic),
            activated: Activations::new(arithmetic),
            outputs: Vec::new(),
            shared_weights: Vec::new(),
        }
    }
}

impl Expert {
    fn pack([gate, up, down]: &[Linear; 3], cpu: &Cpu, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        Ok(Self { gate_up: gate.pack_gated(up, cpu, arithmetic)?, down: down.pack(cpu, arithmetic)? })
    }

    fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }

    /// Sets `outputs` to what the expert makes of `input`.
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

    /// Bytes of the experts that one row does not choose: all have the same shape.
    pub(crate) fn unread_by_a_row(&self) -> usize {
        let unchosen = self.experts.len() - self.router.chosen();
        self.experts.first().map_or(0, |expert| unchosen * expert.bytes())
    }

    /// Sets `sums` to what the experts make of the rows of `scratch.normed`, `hidden` numbers each.
    pub(super) fn apply(&self, cpu: &Cpu, hidden: usize, activation: Activation, scratch: &mut ExpertScratch, sums: &mut Vec<f32>) {
        self.choose(cpu, hidden, scratch);
        let ExpertScratch { normed, choices, gathered, input, activated, outputs, .. } = scratch;
        sums.clear();
        sums.resize(normed.len(), 0.0);
        let per_row = self.router.chosen();
        for (index, expert) in self.experts.iter().enumerate() {
            let chosen = || choices.iter().enumerate().filter(move |(_, choice)| choice.expert == index);
            let row_of = |nth: usize| nth / per_row * hidden..(nth / per_row + 1) * hidden;
            gathered.clear();
            chosen().for_each(|(nth, _)| gathered.extend_from_slice(&normed[row_of(nth)]));
            if gathered.is_empty() {
                continue;
            }
            input.copy_from(cpu, gathered, hidden);
            outputs.resize(gathered.len(), 0.0);
            expert.apply(cpu, activation, input, activated, outputs);
            for ((nth, choice), output) in chosen().zip(outputs.chunks_exact(hidden)) {
                elementwise::add_scaled(cpu, &mut sums[row_of(nth)], output, choice.weight);
            }
        }
        if let Some(shared) = &self.shared {
            shared.add(cpu, hidden, activation, scratch, sums);
        }
    }

    /// The choices of all rows.
    fn choose(&self, cpu: &Cpu, hidden: usize, scratch: &mut ExpertScratch) {
        let ExpertScratch { normed, router_input, logits, router, choices, .. } = scratch;
        logits.resize(normed.len() / hidden * self.experts.len(), 0.0);
        router_input.copy_from(cpu, normed, hidden);
        project(cpu, router_input, [Product { weights: &self.logits, output: Output::Set(logits) }]);
        choices.clear();
        logits.chunks_exact(self.experts.len()).for_each(|logits| self.router.choose(logits, router, choices));
    }
}

impl SharedExpert {
    /// Adds what the expert makes of all rows; `scratch.router_input` still holds them.
    fn add(&self, cpu: &Cpu, hidden: usize, activation: Activation, scratch: &mut ExpertScratch, sums: &mut [f32]) {
        let ExpertScratch { normed, router_input, logits, input, activated, outputs, shared_weights, .. } = scratch;
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

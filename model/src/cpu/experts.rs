//! A feed-forward layer of experts, of which each row goes through a few (Shazeer et al., 2017).
//!
//! **The arithmetic.** The router's products are in f32 whatever the model's are, so that rounding chooses no expert. A row's experts are
//! those with the largest probabilities, the lower number among equals; a probability is `softmax` over all of the row's logits. What the
//! chosen experts make of the row is summed in ascending order of their numbers, each times its probability, or its share of the chosen
//! ones' sum. None of this depends on other rows: these only decide which products are computed together.
//!
//! The rows of a band are gathered by expert, so that it reads the weights of each chosen expert once. Bands go side by side, and each
//! reads for itself.

use super::projection::{Activations, Arithmetic, Projection, project};
use crate::{
    error::ModelError,
    tensors::{ExpertTensors, Linear},
};
use tidemill_kernels::{
    Cpu,
    cpu::{
        activation::Activation,
        elementwise,
        gemm::{Output, Product},
        vocab::exp_shifted,
    },
};

pub(crate) struct Experts {
    /// `[experts, hidden]`, in f32.
    router: Projection,
    experts: Vec<Expert>,
    rule: Routing,
}

struct Expert {
    gate_up: Projection,
    down: Projection,
}

/// How rows choose their experts.
#[derive(Clone, Copy)]
pub(crate) struct Routing {
    /// Experts of a row.
    pub(crate) chosen: usize,
    /// Their probabilities are scaled so that they sum to 1.
    pub(crate) is_normalized: bool,
}

/// Intermediate results, kept from layer to layer.
pub(super) struct ExpertScratch {
    /// The layer's input, normed.
    pub(super) normed: Vec<f32>,
    router_input: Activations,
    logits: Vec<f32>,
    /// The powers of one row's logits, by expert.
    powers: Vec<f32>,
    /// The choices of all rows, `[rows, chosen]`.
    choices: Vec<Choice>,
    gathered: Vec<f32>,
    input: Activations,
    activated: Activations,
    outputs: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Choice {
    expert: usize,
    weight: f32,
}

impl ExpertScratch {
    pub(super) fn new(arithmetic: Arithmetic) -> Self {
        Self {
            normed: Vec::new(),
            router_input: Activations::new(Arithmetic::F32),
            logits: Vec::new(),
            powers: Vec::new(),
            choices: Vec::new(),
            gathered: Vec::new(),
            input: Activations::new(arithmetic),
            activated: Activations::new(arithmetic),
            outputs: Vec::new(),
        }
    }
}

impl Experts {
    pub(crate) fn pack(tensors: &ExpertTensors, rule: Routing, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let pack = |[gate, up, down]: &[Linear; 3]| {
            Ok::<_, ModelError>(Expert { gate_up: gate.pack_gated(up, cpu, arithmetic)?, down: down.pack(cpu, arithmetic)? })
        };
        let experts = tensors.experts.iter().map(pack).collect::<Result<_, _>>()?;
        Ok(Self { router: tensors.router.pack(cpu, Arithmetic::F32)?, experts, rule })
    }

    /// Bytes that a pass over all weights reads.
    pub(crate) fn bytes(&self) -> usize {
        self.router.bytes() + self.experts.iter().map(|expert| expert.gate_up.bytes() + expert.down.bytes()).sum::<usize>()
    }

    /// Sets `sums` to what the experts make of the rows of `scratch.normed`, `hidden` numbers each.
    pub(super) fn apply(&self, cpu: &Cpu, hidden: usize, activation: Activation, scratch: &mut ExpertScratch, sums: &mut Vec<f32>) {
        let ExpertScratch { normed, router_input, logits, powers, choices, gathered, input, activated, outputs } = scratch;
        let rows = normed.len() / hidden;
        logits.resize(rows * self.experts.len(), 0.0);
        router_input.copy_from(cpu, normed, hidden);
        project(cpu, router_input, [Product { weights: &self.router, output: Output::Set(logits) }]);
        choices.clear();
        powers.resize(self.experts.len(), 0.0);
        logits.chunks_exact(self.experts.len()).for_each(|logits| self.rule.choose(logits, powers, choices));

        sums.clear();
        sums.resize(normed.len(), 0.0);
        for (index, expert) in self.experts.iter().enumerate() {
            let chosen = || choices.iter().enumerate().filter(move |(_, choice)| choice.expert == index);
            let row_of = |nth: usize| nth / self.rule.chosen * hidden..(nth / self.rule.chosen + 1) * hidden;
            gathered.clear();
            chosen().for_each(|(nth, _)| gathered.extend_from_slice(&normed[row_of(nth)]));
            if gathered.is_empty() {
                continue;
            }
            input.copy_from(cpu, gathered, hidden);
            project(cpu, input, [Product { weights: &expert.gate_up, output: Output::Activated(activation, activated) }]);
            outputs.resize(gathered.len(), 0.0);
            project(cpu, activated, [Product { weights: &expert.down, output: Output::Set(outputs) }]);
            for ((nth, choice), output) in chosen().zip(outputs.chunks_exact(hidden)) {
                elementwise::add_scaled(cpu, &mut sums[row_of(nth)], output, choice.weight);
            }
        }
    }
}

impl Routing {
    /// Appends the choices of a row with these logits; overwrites `powers`, as many.
    fn choose(&self, logits: &[f32], powers: &mut [f32], choices: &mut Vec<Choice>) {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total = exp_shifted(logits, largest, 1.0, powers);
        let first = choices.len();
        for _ in 0..self.chosen {
            let is_free = |expert: &usize| choices[first..].iter().all(|choice| choice.expert != *expert);
            let free = (0..powers.len()).filter(is_free);
            let best = free.reduce(|best, expert| if powers[expert] > powers[best] { expert } else { best });
            let expert = best.expect("no more are chosen than there are");
            choices.push(Choice { expert, weight: powers[expert] / total });
        }
        if self.is_normalized {
            let sum: f32 = choices[first..].iter().map(|choice| choice.weight).sum();
            choices[first..].iter_mut().for_each(|choice| choice.weight /= sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(rule: Routing, logits: Vec<f32>) -> Vec<(usize, f32)> {
        let mut choices = Vec::new();
        rule.choose(&logits, &mut vec![0.0; logits.len()], &mut choices);
        choices.into_iter().map(|choice| (choice.expert, choice.weight)).collect()
    }

    #[test]
    fn the_likeliest_are_chosen_and_the_lower_among_equals() {
        let rule = Routing { chosen: 2, is_normalized: false };
        let chosen = choices(rule, vec![0.0, 1.0, -1.0, 1.0, 1.0]);
        assert_eq!(chosen.iter().map(|(expert, _)| *expert).collect::<Vec<_>>(), [1, 3]);
        let total: f32 = [0.0f32, 1.0, -1.0, 1.0, 1.0].iter().map(|x| x.exp()).sum();
        assert!(chosen.iter().all(|(_, weight)| (weight - 1f32.exp() / total).abs() < 1e-6));
        let normalized = choices(Routing { is_normalized: true, ..rule }, vec![3.0, 1.0, -1.0]);
        assert!((normalized[0].1 + normalized[1].1 - 1.0).abs() < 1e-6 && normalized[0].0 == 0);
    }

    #[test]
    fn logits_that_are_no_numbers_choose_something() {
        let rule = Routing { chosen: 2, is_normalized: true };
        assert_eq!(choices(rule, vec![f32::NAN; 3]).len(), 2);
        assert_eq!(choices(rule, vec![f32::INFINITY, 0.0, f32::NEG_INFINITY]).len(), 2);
    }
}

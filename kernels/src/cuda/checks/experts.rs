//! Layers of experts. The choices are judged by the device's logits, and the products by the device's choices: different rounding may
//! change a choice, which is no error of a product.

use super::{Checks, Extent, TestGpu, doubles, widened};
use crate::cuda::{
    CudaError, NO_POSITION,
    experts::{ExpertActivation, ExpertInput, ExpertKernels, ExpertScores, ExpertScratch, ExpertSizes, ExpertWeights, RoutingRule},
};
use std::cmp::Ordering;

/// The bound for results in which the activations, an expert's output and the sum are rounded to bf16, each by 2^-9 at most.
const ROUNDED: f64 = 6e-3;
/// The bound for sums of f32 products, and exponentials within 2 ulp.
const F32: f64 = 1e-5;
/// The share of choices that may differ, because the device and f64 round close scores to a different order.
const CHOSEN_OTHERWISE: f64 = 2e-3;
/// A number of rows that is multiplied in a different form from many rows, with the same bits.
const FEW: usize = 4;
/// The expert of a padding row.
const NO_EXPERT: u32 = u32::MAX;

/// A layer of experts, and the rows that go through it.
struct Case {
    what: &'static str,
    sizes: ExpertSizes,
    rows: usize,
    rule: RoutingRule,
    routing: Routing,
    shared: bool,
    biases: bool,
    activation: ExpertActivation,
}

#[derive(Clone, Copy, PartialEq)]
enum Routing {
    Random,
    Corrected,
    /// Corrections fix the choice: all rows have the last experts.
    AllToLast,
    /// Groups of three experts have the same logits.
    Ties,
}

const SOFTMAX: RoutingRule = RoutingRule { scores: ExpertScores::Softmax, groups: None, is_normalized: true, factor: 1.0 };

fn case(what: &'static str, [experts, chosen, hidden, inner, rows]: [usize; 5]) -> Case {
    Case {
        what,
        sizes: ExpertSizes { experts, chosen, hidden, inner, ranks: 1, router_outputs: experts },
        rows,
        rule: SOFTMAX,
        routing: Routing::Random,
        shared: false,
        biases: false,
        activation: ExpertActivation::Silu,
    }
}

fn cases() -> Vec<Case> {
    let sigmoid = RoutingRule { scores: ExpertScores::Sigmoid, groups: None, is_normalized: true, factor: 2.5 };
    let gated = |mut case: Case| {
        case.sizes.router_outputs += 1;
        Case { shared: true, ..case }
    };
    vec![
        gated(case("a shared expert with a gate", [6, 2, 72, 40, 16])),
        case("one row", [6, 3, 72, 24, 1]),
        Case { routing: Routing::Ties, ..case("equal logits", [9, 4, 64, 16, 5]) },
        Case {
            rule: RoutingRule { groups: Some((8, 4)), ..sigmoid },
            routing: Routing::Corrected,
            shared: true,
            ..case("groups and corrections", [160, 8, 64, 16, 21])
        },
        Case { rule: sigmoid, routing: Routing::AllToLast, ..case("all rows to one expert", [5, 1, 136, 72, 70]) },
        Case {
            rule: RoutingRule { scores: ExpertScores::ChosenSoftmax, is_normalized: false, ..sigmoid },
            biases: true,
            activation: ExpertActivation::Clamped { alpha: 1.702, limit: 0.7 },
            ..case("biases and a clamped gate", [8, 4, 64, 32, 7])
        },
        Case { rule: RoutingRule { is_normalized: false, ..SOFTMAX }, ..case("large tiles, of odd sizes", [2, 2, 72, 136, 130]) },
        case("every row to every expert", [4, 4, 64, 16, 300]),
        Case { routing: Routing::AllToLast, rule: sigmoid, ..case("more rows than a small tile has", [40, 2, 520, 8, 67]) },
    ]
}

pub fn all(gpu: &mut TestGpu, checks: &mut Checks, extent: Extent) -> Result<(), CudaError> {
    let kernels = ExpertKernels::load(&gpu.device)?;
    for case in extent.of(&cases()) {
        checks.case(gpu, "experts", case.what.to_owned(), |gpu, checks| layer(gpu, checks, &kernels, case))?;
    }
    Ok(())
}

/// One small layer of each form of the products.
pub fn one_of_each_form(gpu: &mut TestGpu, checks: &mut Checks) -> Result<(), CudaError> {
    let kernels = ExpertKernels::load(&gpu.device)?;
    let small = [
        Case { routing: Routing::Ties, ..case("few", [9, 4, 136, 16, 5]) },
        case("some", [6, 2, 136, 24, 20]),
        case("many", [2, 2, 328, 24, 80]),
    ];
    small.iter().try_for_each(|case| layer(gpu, checks, &kernels, case))
}

/// Random numbers of a layer, on the host.
struct Numbers {
    residual: Vec<f32>,
    norm: Vec<f32>,
    normed: Vec<u16>,
    positions: Vec<u32>,
    router: Vec<f32>,
    correction: Option<Vec<f32>>,
    gate_up: Vec<u16>,
    down: Vec<u16>,
    biases: Option<[Vec<u16>; 2]>,
    shared: Option<Vec<u16>>,
}

const EPSILON: f32 = 1e-5;

impl Numbers {
    fn new(gpu: &mut TestGpu, case: &Case) -> Self {
        let ExpertSizes { experts, chosen, hidden, inner, router_outputs, .. } = case.sizes;
        let mut router = gpu.f32s(router_outputs * hidden, 0.5);
        if case.routing == Routing::Ties {
            for expert in 0..experts {
                router.copy_within(expert / 3 * 3 * hidden..(expert / 3 * 3 + 1) * hidden, expert * hidden);
            }
        }
        let correction = match case.routing {
            Routing::Random | Routing::Ties => None,
            Routing::Corrected => Some(gpu.f32s(experts, 0.3)),
            Routing::AllToLast => Some((0..experts).map(|expert| if expert + chosen < experts { 0.0 } else { 4.0 }).collect()),
        };
        // The last of several rows is padding.
        let positions = (0..case.rows).map(|row| if row > 0 && row + 1 == case.rows { NO_POSITION } else { row as u32 });
        Self {
            residual: gpu.f32s(case.rows * hidden, 2.0),
            norm: gpu.f32s(hidden, 1.0),
            normed: gpu.bf16s(case.rows * hidden, 2.0),
            positions: positions.collect(),
            router,
            correction,
            gate_up: gpu.bf16s(experts * 2 * inner * hidden, 0.5),
            down: gpu.bf16s(experts * hidden * inner, 0.5),
            biases: case.biases.then(|| [gpu.bf16s(experts * 2 * inner, 1.0), gpu.bf16s(experts * hidden, 1.0)]),
            shared: case.shared.then(|| gpu.bf16s(case.rows * hidden, 4.0)),
        }
    }

    /// The logits in f64.
    fn logits(&self, case: &Case) -> Vec<f64> {
        let hidden = case.sizes.hidden;
        let rows = self.residual.chunks(hidden).map(|row| {
            let scale = (row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / hidden as f64 + f64::from(EPSILON)).sqrt();
            row.iter().zip(&self.norm).map(|(&x, &w)| f64::from(w) * f64::from(x) / scale).collect::<Vec<_>>()
        });
        let dot = |row: &[f64], weight: &[f32]| row.iter().zip(weight).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
        rows.flat_map(|row| self.router.chunks(hidden).map(|weight| dot(&row, weight)).collect::<Vec<_>>()).collect()
    }

    /// The layer's outputs for rows that have these experts with these weights.
    fn sums(&self, case: &Case, logits: &[f32], experts: &[u32], weights: &[f32]) -> Vec<f64> {
        let ExpertSizes { chosen, hidden, router_outputs, .. } = case.sizes;
        let (normed, shared) = (widened(&self.normed), self.shared.as_ref().map(|shared| widened(shared)));
        let (gate_up, down) = (widened(&self.gate_up), widened(&self.down));
        let biases = self.biases.as_ref().map(|biases| biases.each_ref().map(|bias| widened(bias)));
        let mut sums = vec![0.0; case.rows * hidden];
        for (row, sums) in sums.chunks_mut(hidden).enumerate() {
            let mut entries = (row * chosen..(row + 1) * chosen).filter(|&entry| experts[entry] != NO_EXPERT).peekable();
            if entries.peek().is_none() {
                continue;
            }
            for entry in entries {
                let made = of_expert(case, experts[entry] as usize, &normed[row * hidden..][..hidden], &gate_up, &down, biases.as_ref());
                sums.iter_mut().zip(made).for_each(|(sum, x)| *sum += f64::from(weights[entry]) * x);
            }
            if let Some(shared) = &shared {
                let is_gated = router_outputs > case.sizes.experts;
                let weight = if is_gated { sigmoid(f64::from(logits[(row + 1) * router_outputs - 1])) } else { 1.0 };
                sums.iter_mut().zip(&shared[row * hidden..]).for_each(|(sum, x)| *sum += weight * x);
            }
        }
        sums
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn of_expert(case: &Case, expert: usize, x: &[f64], gate_up: &[f64], down: &[f64], biases: Option<&[Vec<f64>; 2]>) -> Vec<f64> {
    let ExpertSizes { hidden, inner, .. } = case.sizes;
    let product = |weight: &[f64], x: &[f64], bias: Option<&[f64]>| -> Vec<f64> {
        let dots = weight.chunks(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>());
        dots.enumerate().map(|(i, dot)| dot + bias.map_or(0.0, |bias| bias[i])).collect()
    };
    let bias = |which: usize, width: usize| biases.map(|biases| &biases[which][expert * width..][..width]);
    let both = product(&gate_up[expert * 2 * inner * hidden..][..2 * inner * hidden], x, bias(0, 2 * inner));
    let activated: Vec<f64> = both
        .chunks(2)
        .map(|pair| match case.activation {
            ExpertActivation::Silu => pair[0] * sigmoid(pair[0]) * pair[1],
            ExpertActivation::Clamped { alpha, limit } => {
                let (gate, up) = (pair[0].min(f64::from(limit)), pair[1].clamp(-f64::from(limit), f64::from(limit)));
                gate * sigmoid(f64::from(alpha) * gate) * (up + 1.0)
            }
        })
        .collect();
    product(&down[expert * hidden * inner..][..hidden * inner], &activated, bias(1, hidden))
}

/// The experts of a row with these logits, ascending, and their weights.
fn choose(case: &Case, logits: &[f32], correction: Option<&[f32]>) -> Vec<(u32, f64)> {
    let (RoutingRule { scores, groups, is_normalized, factor }, chosen) = (case.rule, case.sizes.chosen);
    let logits = doubles(&logits[..case.sizes.experts]);
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
    let scored: Vec<f64> = match scores {
        ExpertScores::Softmax => logits.iter().map(|x| (x - largest).exp() / total).collect(),
        ExpertScores::Sigmoid => logits.iter().map(|&x| sigmoid(x)).collect(),
        ExpertScores::ChosenSoftmax => logits,
    };
    let ranks: Vec<f64> = (0..scored.len()).map(|i| scored[i] + correction.map_or(0.0, |correction| f64::from(correction[i]))).collect();
    // Sorts are stable, so the lower expert comes first among equals.
    let descending = |a: &f64, b: &f64| b.partial_cmp(a).unwrap_or(Ordering::Equal);
    let mut candidates: Vec<usize> = (0..ranks.len()).collect();
    if let Some((count, kept)) = groups {
        let size = ranks.len() / count;
        let sum_of_best = |group: usize| {
            let mut ranks = ranks[group * size..][..size].to_vec();
            ranks.sort_by(descending);
            ranks[0] + ranks[1]
        };
        let mut of_groups: Vec<(usize, f64)> = (0..count).map(|group| (group, sum_of_best(group))).collect();
        of_groups.sort_by(|a, b| descending(&a.1, &b.1));
        candidates.retain(|expert| of_groups[..kept].iter().any(|(group, _)| *group == expert / size));
    }
    candidates.sort_by(|&a, &b| descending(&ranks[a], &ranks[b]));
    candidates.truncate(chosen);
    let mut weights: Vec<f64> = candidates.iter().map(|&expert| scored[expert]).collect();
    if scores == ExpertScores::ChosenSoftmax {
        let powers: Vec<f64> = weights.iter().map(|x| (x - weights[0]).exp()).collect();
        weights = powers.iter().map(|x| x / powers.iter().sum::<f64>()).collect();
    }
    if is_normalized {
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
    let mut choices: Vec<(u32, f64)> =
        candidates.into_iter().zip(weights).map(|(expert, weight)| (expert as u32, f64::from(factor) * weight)).collect();
    choices.sort_by_key(|(expert, _)| *expert);
    choices
}

fn layer(gpu: &mut TestGpu, checks: &mut Checks, kernels: &ExpertKernels, case: &Case) -> Result<(), CudaError> {
    let ExpertSizes { experts, chosen, hidden, inner, router_outputs, .. } = case.sizes;
    let numbers = Numbers::new(gpu, case);
    let (residual, norm, normed) = (gpu.upload(&numbers.residual)?, gpu.upload(&numbers.norm)?, gpu.upload(&numbers.normed)?);
    let (positions, router) = (gpu.upload(&numbers.positions)?, gpu.upload(&numbers.router)?);
    let correction = numbers.correction.as_ref().map(|correction| gpu.upload(correction)).transpose()?;
    let (gate_up, down) = (gpu.upload(&numbers.gate_up)?, gpu.upload(&numbers.down)?);
    let shared = numbers.shared.as_ref().map(|shared| gpu.upload(shared)).transpose()?;
    let biases = match &numbers.biases {
        Some([gate_up, down]) => Some((gpu.upload(gate_up)?, gpu.upload(down)?)),
        None => None,
    };
    let (correction, shared) = (correction.as_ref().map(|x| x.as_view()), shared.as_ref());
    let biases = biases.as_ref().map(|(gate_up, down)| (gate_up.as_view(), down.as_view()));
    let weights = ExpertWeights {
        router: &router.as_view(),
        correction: correction.as_ref(),
        gate_up: &gate_up.as_view(),
        gate_up_bias: biases.as_ref().map(|(gate_up, _)| gate_up),
        down: &down.as_view(),
        down_bias: biases.as_ref().map(|(_, down)| down),
    };
    let mut scratch = ExpertScratch::new(&gpu.device, case.sizes, case.rows)?;
    let mut first_rows = |gpu: &TestGpu, rows: usize| {
        let input = ExpertInput {
            residual: &residual.slice(..rows * hidden),
            norm: &norm.as_view(),
            epsilon: EPSILON,
            normed: &normed.slice(..rows * hidden),
            positions: &positions.slice(..rows),
        };
        let shared = shared.map(|shared| shared.slice(..rows * hidden));
        let mut out = gpu.poisoned::<u16>(rows * hidden)?;
        let to = &mut out.as_view_mut();
        kernels.apply(&gpu.stream, to, &input, &case.rule, &weights, case.activation, shared.as_ref(), &mut scratch)?;
        gpu.download(&out)
    };
    // The last run has all rows, whose choices are checked below.
    let few = first_rows(gpu, case.rows.min(FEW))?;
    let out = first_rows(gpu, case.rows)?;

    let (logits, chosen_experts, chosen_weights) = scratch.choices();
    let (logits, chosen_experts, chosen_weights) = (gpu.download(logits)?, gpu.download(chosen_experts)?, gpu.download(chosen_weights)?);
    let name = format!("{}: {} rows to {chosen} of {experts}, {hidden} × {inner}", case.what, case.rows);
    checks.near("experts: router", name.clone(), &doubles(&logits), &numbers.logits(case), F32);
    let mut expected: Vec<(u32, f64)> = Vec::new();
    for (logits, &position) in logits.chunks(router_outputs).zip(&numbers.positions) {
        match position {
            NO_POSITION => expected.extend(vec![(NO_EXPERT, 0.0); chosen]),
            _ => expected.extend(choose(case, logits, numbers.correction.as_deref())),
        }
    }
    let (expected_experts, expected_weights): (Vec<u32>, Vec<f64>) = expected.into_iter().unzip();
    let exact = matches!(case.routing, Routing::Ties | Routing::AllToLast);
    let limit = if exact { 0.0 } else { CHOSEN_OTHERWISE };
    checks.same("experts: chosen", name.clone(), &chosen_experts, &expected_experts, limit);
    if chosen_experts == expected_experts {
        checks.near("experts: weights", name.clone(), &doubles(&chosen_weights), &expected_weights, F32);
    }
    let sums = numbers.sums(case, &logits, &chosen_experts, &chosen_weights);
    checks.near("experts: sums", name.clone(), &widened(&out), &sums, ROUNDED);
    // The last row may be padding in only one of the two.
    let alone = (case.rows.min(FEW) - 1).max(1) * hidden;
    checks.same("experts: the same bits with fewer rows", name, &few[..alone], &out[..alone], 0.0);
    Ok(())
}

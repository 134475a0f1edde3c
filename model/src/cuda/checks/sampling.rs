//! Penalties and sampling, against the CPU's sampler with the same random numbers.

use crate::{
    penalties::penalized,
    sampler::{SamplerScratch, sample},
};
use rand::Rng;
use tidemill_kernels::cuda::{
    CudaError,
    checks::{Checks, Extent, TestGpu},
    sampling::{LogitEdit, LogitEntry, LogitPenalty, SampleRequest},
};
use tidemill_proto::{
    block::Token,
    sampling::Sampling,
    step::{History, Mask},
};

/// The share of draws that may differ: at the border between two tokens, the last bits of exponentials decide.
const BORDERLINE: f64 = 0.05;

pub fn all(gpu: &mut TestGpu, checks: &mut Checks, extent: Extent) -> Result<(), CudaError> {
    let case = |vocab: usize| format!("{vocab} tokens");
    for &vocab in extent.of(&[1000, 7, 32_003, 128_256]) {
        checks.case(gpu, "sample", case(vocab), |gpu, checks| draws(gpu, checks, vocab))?;
    }
    extent
        .of(&[999, 32_003])
        .iter()
        .try_for_each(|&vocab| checks.case(gpu, "penalties", case(vocab), |gpu, checks| edited_draws(gpu, checks, vocab)))
}

fn request(sampling: &Sampling, index: u64) -> SampleRequest {
    let Sampling { seed, temperature, top_p, min_p, top_k, .. } = *sampling;
    SampleRequest { seed, index, temperature, top_p, min_p, top_k }
}

/// Compares one row for each way of sampling and each of several draws.
fn draws(gpu: &mut TestGpu, checks: &mut Checks, vocab: usize) -> Result<(), CudaError> {
    let neutral = Sampling::default();
    let ways = [
        ("greedy", Sampling { temperature: 0.0, ..neutral.clone() }),
        ("plain", neutral.clone()),
        ("temperature", Sampling { temperature: 0.7, ..neutral.clone() }),
        ("top_k", Sampling { top_k: 40, ..neutral.clone() }),
        ("top_p", Sampling { top_p: 0.9, ..neutral.clone() }),
        ("min_p", Sampling { min_p: 0.05, ..neutral.clone() }),
        ("all", Sampling { temperature: 0.8, top_k: 50, top_p: 0.95, min_p: 0.01, ..neutral.clone() }),
        // Few tokens are likely.
        ("cold top_p", Sampling { temperature: 0.04, top_p: 0.9, ..neutral.clone() }),
        ("cold top_k", Sampling { temperature: 0.04, top_k: 300, ..neutral }),
    ];
    const DRAWS: usize = 64;
    for (way, sampling) in ways {
        // Quantizing to quarters makes ties in every row. One logit is NaN.
        let mut logits: Vec<f32> = gpu.f32s(DRAWS * vocab, 9.0).iter().map(|x| (x * 4.0).round() / 4.0).collect();
        logits[vocab / 2] = f32::NAN;
        let samplings: Vec<Sampling> = (0..DRAWS).map(|_| Sampling { seed: gpu.rng.random(), ..sampling.clone() }).collect();
        let requests: Vec<SampleRequest> = samplings.iter().enumerate().map(|(i, s)| request(s, i as u64)).collect();
        let (on_logits, on_requests, mut tokens) = (gpu.upload(&logits)?, gpu.upload(&requests)?, gpu.poisoned::<u32>(DRAWS)?);
        gpu.kernels(128)?.sample(&gpu.stream, &mut tokens.as_view_mut(), &on_logits.as_view(), &on_requests.as_view(), vocab)?;
        let mut scratch = SamplerScratch::new();
        let expected: Vec<u32> = logits
            .chunks(vocab)
            .zip(&samplings)
            .enumerate()
            .map(|(i, (row, sampling))| sample(&mut row.to_vec(), sampling, &History::default(), i as u64, &[], None, &mut scratch).0)
            .collect();
        let limit = if way == "greedy" { 0.0 } else { BORDERLINE };
        checks.same("sample", format!("{vocab} tokens, {way}"), &gpu.download(&tokens)?, &expected, limit);
    }
    Ok(())
}

/// Compares rows with penalties; every second one with a bias and bans, every third with a mask. Edited logits must have the CPU's bits.
fn edited_draws(gpu: &mut TestGpu, checks: &mut Checks, vocab: usize) -> Result<(), CudaError> {
    const ROWS: usize = 48;
    let neutral = Sampling::default();
    let penalties = [
        ("repetition", Sampling { repetition_penalty: 1.3, ..neutral.clone() }),
        ("repetition below 1", Sampling { repetition_penalty: 0.7, ..neutral.clone() }),
        ("presence", Sampling { presence_penalty: 0.9, ..neutral.clone() }),
        ("frequency", Sampling { frequency_penalty: -0.35, ..neutral.clone() }),
        ("all penalties", Sampling { repetition_penalty: 1.1, presence_penalty: 0.3, frequency_penalty: 0.7, ..neutral }),
    ];
    for (what, sampling) in penalties {
        for temperature in [0.0, 0.8] {
            let logits = gpu.f32s(ROWS * vocab, 5.0);
            let rows: Vec<Row> = (0..ROWS).map(|i| Row::random(gpu, &sampling, temperature, vocab, i)).collect();
            let (tokens, edited) = drawn(gpu, &logits, &rows, vocab)?;
            let mut expected = logits;
            let mut scratch = SamplerScratch::new();
            let drawn: Vec<Token> = expected
                .chunks_mut(vocab)
                .zip(&rows)
                .map(|(logits, row)| sample(logits, &row.sampling, &row.history, 0, &row.banned, row.mask.as_ref(), &mut scratch).0)
                .collect();
            let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let case = format!("{vocab} tokens, {what}, temperature {temperature}");
            checks.same("penalized logits", case.clone(), &bits(&edited), &bits(&expected), 0.0);
            checks.same("draws with penalties", case, &tokens, &drawn, if temperature == 0.0 { 0.0 } else { BORDERLINE });
        }
    }
    Ok(())
}

/// The sampling of a row of logits.
struct Row {
    sampling: Sampling,
    history: History,
    banned: Vec<Token>,
    mask: Option<Mask>,
}

impl Row {
    fn random(gpu: &mut TestGpu, sampling: &Sampling, temperature: f32, vocab: usize, i: usize) -> Self {
        // Some tokens are outside the vocabulary.
        let mut tokens = |count: usize| (0..count).map(|_| gpu.rng.random_range(0..vocab as Token + 5)).collect::<Vec<_>>();
        let mut history = History::new(&tokens(150));
        // Ids are few enough for some tokens to repeat.
        tokens(90).iter().for_each(|token| history.push(token % 40));
        let biased = i.is_multiple_of(2);
        let (logit_bias, banned) = if biased { (vec![(3, 2.5), (4, -1.0), (vocab as Token, 1.0)], tokens(3)) } else { (vec![], vec![]) };
        let mask = i.is_multiple_of(3).then(|| {
            let mut mask = Mask::none(vocab);
            tokens(vocab / 3).iter().for_each(|&token| mask.allow(token));
            mask.allow(1);
            mask
        });
        let sampling = Sampling { temperature, seed: gpu.rng.random(), logit_bias, ..sampling.clone() };
        Self { sampling, history, banned, mask }
    }
}

/// Edits and draws on the device, in the order in which the model does it.
fn drawn(gpu: &mut TestGpu, logits: &[f32], rows: &[Row], vocab: usize) -> Result<(Vec<Token>, Vec<f32>), CudaError> {
    let (mut biases, mut penalties, mut bans, mut masks, mut masked) = (vec![], vec![], vec![], vec![], vec![]);
    for (row, Row { sampling, history, banned, mask }) in (0u32..).zip(rows) {
        let repetition = sampling.repetition_penalty;
        biases.extend(sampling.logit_bias.iter().map(|&(token, value)| LogitEntry { row, token, value }));
        penalties.extend(penalized(history, sampling).map(|(token, subtracted)| LogitPenalty { row, token, repetition, subtracted }));
        bans.extend(banned.iter().map(|&token| LogitEntry { row, token, value: 0.0 }));
        masks.extend(mask.iter().flat_map(|mask| mask.words().iter().copied()));
        masked.extend(mask.as_ref().map(|_| row));
    }
    let requests: Vec<SampleRequest> = rows.iter().map(|row| request(&row.sampling, 0)).collect();
    let kernels = gpu.kernels(128)?;
    let (mut logits, mut tokens) = (gpu.upload(logits)?, gpu.poisoned::<Token>(rows.len())?);
    let (biases, penalties, bans) = (gpu.upload(&biases)?, gpu.upload(&penalties)?, gpu.upload(&bans)?);
    let (masks, masked, requests) = (gpu.upload(&masks)?, gpu.upload(&masked)?, gpu.upload(&requests)?);
    kernels.edit_logits(&gpu.stream, LogitEdit::Add, &mut logits.as_view_mut(), &biases.as_view(), vocab)?;
    kernels.penalize(&gpu.stream, &mut logits.as_view_mut(), &penalties.as_view(), vocab)?;
    kernels.edit_logits(&gpu.stream, LogitEdit::Ban, &mut logits.as_view_mut(), &bans.as_view(), vocab)?;
    kernels.mask_logits(&gpu.stream, &mut logits.as_view_mut(), &masks.as_view(), &masked.as_view(), vocab)?;
    kernels.sample(&gpu.stream, &mut tokens.as_view_mut(), &logits.as_view(), &requests.as_view(), vocab)?;
    Ok((gpu.download(&tokens)?, gpu.download(&logits)?))
}

//! Penalties and sampling, against the CPU's sampler with the same random numbers.

use crate::sampler::{SamplerScratch, sample};
use rand::Rng;
use tidemill_kernels::cuda::{
    CudaError, NO_POSITION,
    checks::{Checks, TestGpu, doubles},
    sampling::{LogitEdit, LogitEntry, RowPenalties, SampleRequest},
};
use tidemill_proto::sampling::Sampling;
use tidemill_proto::step::History;

/// Share of draws that may differ: at the border between two tokens, the last bits of exponentials decide.
const BORDERLINE: f64 = 0.05;

pub fn all(gpu: &mut TestGpu, checks: &mut Checks) -> Result<(), CudaError> {
    for vocab in [7, 1000, 32_003, 128_256] {
        draws(gpu, checks, vocab)?;
    }
    penalties(gpu, checks)
}

fn request(sampling: &Sampling, index: u64) -> SampleRequest {
    let Sampling { seed, temperature, top_p, min_p, top_k, .. } = *sampling;
    SampleRequest { seed, index, temperature, top_p, min_p, top_k }
}

/// One row for each way of sampling and each of several draws.
fn draws(gpu: &mut TestGpu, checks: &mut Checks, vocab: usize) -> Result<(), CudaError> {
    let neutral = Sampling::default();
    let ways = [
        ("greedy", Sampling { temperature: 0.0, ..neutral.clone() }),
        ("plain", neutral.clone()),
        ("temperature", Sampling { temperature: 0.7, ..neutral.clone() }),
        ("top_k", Sampling { top_k: 40, ..neutral.clone() }),
        ("top_p", Sampling { top_p: 0.9, ..neutral.clone() }),
        ("min_p", Sampling { min_p: 0.05, ..neutral.clone() }),
        ("all", Sampling { temperature: 0.8, top_k: 50, top_p: 0.95, min_p: 0.01, ..neutral }),
    ];
    const DRAWS: usize = 64;
    for (way, sampling) in ways {
        // Steps of a quarter make ties in every row. One logit is NaN.
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

fn penalties(gpu: &mut TestGpu, checks: &mut Checks) -> Result<(), CudaError> {
    const VOCAB: usize = 999;
    const HISTORIES: usize = 3;
    let logits = gpu.f32s(2 * VOCAB, 5.0);
    let prompt: Vec<u32> = (0..200).map(|_| gpu.rng.random_range(0..VOCAB as u32 + 5)).collect();
    // Three steps, one token for each row.
    let drawn: [[u32; 2]; 3] = [[5, 3], [5, 3], [900, 3]];
    let penalties = [
        RowPenalties { history: 2, repetition: 1.3, frequency: 0.25, presence: 0.5 },
        RowPenalties { history: 0, repetition: 1.0, frequency: 0.0, presence: 0.0 },
    ];
    // The second row is padding.
    let positions = gpu.upload(&[4, NO_POSITION])?;
    let bias = [LogitEntry { row: 1, token: 17, value: 2.5 }, LogitEntry { row: 0, token: VOCAB as u32, value: 1.0 }];
    let bans = [LogitEntry { row: 0, token: 44, value: 0.0 }];

    let kernels = gpu.kernels(128)?;
    let stream = &gpu.stream;
    let (mut on_logits, mut occurred) = (gpu.upload(&logits)?, gpu.poisoned::<u32>(HISTORIES * VOCAB)?);
    let (on_prompt, on_penalties) = (gpu.upload(&prompt)?, gpu.upload(&penalties)?);
    let (on_bias, on_bans) = (gpu.upload(&bias)?, gpu.upload(&bans)?);
    kernels.begin_history(stream, &mut occurred.as_view_mut(), 2, &on_prompt.as_view(), VOCAB)?;
    for tokens in &drawn {
        let tokens = gpu.upload(tokens)?;
        let mut view = occurred.as_view_mut();
        kernels.extend_history(stream, &mut view, &on_penalties.as_view(), &tokens.as_view(), &positions.as_view(), VOCAB)?;
    }
    kernels.edit_logits(stream, LogitEdit::Add, &mut on_logits.as_view_mut(), &on_bias.as_view(), VOCAB)?;
    kernels.penalize(stream, &mut on_logits.as_view_mut(), &on_penalties.as_view(), &occurred.as_view(), VOCAB)?;
    kernels.edit_logits(stream, LogitEdit::Ban, &mut on_logits.as_view_mut(), &on_bans.as_view(), VOCAB)?;

    let mut expected = doubles(&logits);
    expected[VOCAB + 17] += 2.5;
    for token in 0..VOCAB as u32 {
        let generated = drawn.iter().filter(|tokens| tokens[0] == token).count();
        let logit = &mut expected[token as usize];
        if generated > 0 || prompt.contains(&token) {
            *logit = if *logit > 0.0 { *logit / f64::from(1.3f32) } else { *logit * f64::from(1.3f32) };
        }
        if generated > 0 {
            *logit -= 0.25 * generated as f64 + 0.5;
        }
    }
    let mut got = doubles(&gpu.download(&on_logits)?);
    checks.same("ban", "one token".to_owned(), &[got[44]], &[f64::NEG_INFINITY], 0.0);
    (got[44], expected[44]) = (0.0, 0.0);
    checks.near("penalties", "two rows".to_owned(), &got, &expected, 1e-6);
    Ok(())
}

//! Operations on rows: embedding, norms, activations, FP8; and rotary embedding with the KV write.

use super::{Checks, Extent, TestGpu, doubles, widened};
use crate::{
    KvLayout, KvStorage,
    cuda::{
        CudaError, DeviceKv, NO_POSITION,
        compile::Heads,
        elementwise::{Activation, AddAndNorm, Added, HeadNorms, Norm, NormWeights, NormedOver, Rope, RowPlaces},
        kv::BlockSlot,
        peers::{Part as Columns, RANKS_MAX, own_width},
    },
    kv::Part,
};
use rand::Rng;
use std::ops::Range;

/// The error of rounding to bf16: at most 2^-9 of each number.
pub const BF16: f64 = 3e-3;
/// The error of rounding to 127 steps: at most 1/254 of the largest number, and these are spread evenly up to it.
const INT8: f64 = 8e-3;
const EXACT: f64 = 0.0;
const F32: f64 = 1e-6;

pub fn all(gpu: &mut TestGpu, checks: &mut Checks, extent: Extent) -> Result<(), CudaError> {
    for &(rows, width) in extent.of(&[(3, 520), (1, 8), (67, 2056), (33, 4096), (5, 16384)]) {
        let case = || format!("{rows} × {width}");
        checks.case(gpu, "embedding", case(), |gpu, checks| embedding(gpu, checks, rows, width))?;
        for (delta, chosen) in [(false, false), (true, false), (true, true)] {
            checks.case(gpu, "rms_norm", case(), |gpu, checks| rms_norm(gpu, checks, rows, width, delta, chosen))?;
        }
        for (adds, normed) in NORMS {
            checks.case(gpu, "norm", case(), |gpu, checks| norm(gpu, checks, rows, width, adds, normed))?;
        }
        for (function, is_gated) in ACTIVATIONS {
            checks.case(gpu, "activate", case(), |gpu, checks| activate(gpu, checks, rows, width, function, is_gated))?;
        }
        checks.case(gpu, "cap_logits", case(), |gpu, checks| cap_logits(gpu, checks, rows, width))?;
        checks.case(gpu, "quantize", case(), |gpu, checks| quantize(gpu, checks, rows, width))?;
        for parts in [1, 3, RANKS_MAX].into_iter().filter(|&parts| own_width(width, parts, 8) * (parts - 1) < width) {
            checks.case(gpu, "gather", case(), |gpu, checks| gather(gpu, checks, rows, width, parts))?;
        }
    }
    let (plain, normed) = (Turn::default(), Turn { norms: Norms::Heads, ..Turn::default() });
    let all_normed = Turn { norms: Norms::All, ..Turn::default() };
    let growing = Turn { grows: true, ..all_normed };
    let still = Turn { is_still: true, ..normed };
    for &(head_dim, kv_heads, group, turn) in extent.of(&[
        (128, 8, 4, plain),
        (16, 1, 1, plain),
        (64, 2, 7, normed),
        (80, 3, 1, plain),
        (96, 2, 3, normed),
        (256, 1, 8, normed),
        (128, 2, 3, growing),
        (32, 3, 5, all_normed),
        (64, 1, 4, still),
        (96, 2, 2, Turn { grows: true, is_still: true, ..plain }),
    ]) {
        for heads in [Heads::bf16(head_dim), Heads { dim: head_dim, kv: KvStorage::Int8 }] {
            checks.case(gpu, "rope_kv_write", format!("head_dim {head_dim}"), |gpu, checks| {
                rope_kv_write(gpu, checks, heads, kv_heads, group, turn)
            })?;
        }
    }
    Ok(())
}

/// The outputs that [`norm`] adds first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adds {
    Nothing,
    One,
    Two,
    /// One output, after a norm of its own, and scaled.
    Normed,
}

/// The norm of the rows after the addition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Normed {
    Not,
    Rms,
    Centered { has_bias: bool },
}

const NORMS: [(Adds, Normed); 6] = [
    (Adds::Normed, Normed::Rms),
    (Adds::Nothing, Normed::Not),
    (Adds::Normed, Normed::Not),
    (Adds::Two, Normed::Centered { has_bias: false }),
    (Adds::One, Normed::Centered { has_bias: true }),
    (Adds::Nothing, Normed::Centered { has_bias: true }),
];

const ACTIVATIONS: [(Activation, bool); 6] = [
    (Activation::Silu, true),
    (Activation::Gelu, true),
    (Activation::GeluTanh, true),
    (Activation::Silu, false),
    (Activation::Gelu, false),
    (Activation::GeluTanh, false),
];

/// The operations on queries and keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Turn {
    pub norms: Norms,
    /// Whether nothing rotates.
    pub is_still: bool,
    /// Whether queries grow with their position.
    pub grows: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Norms {
    #[default]
    None,
    Heads,
    All,
}

/// `weight * x / sqrt(mean(x²) + epsilon)`
fn normed_by_rms(x: &[f64], weight: &[f32], epsilon: f64) -> Vec<f64> {
    let root = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + epsilon).sqrt();
    x.iter().zip(weight).map(|(x, &w)| f64::from(w) * x / root).collect()
}

fn embedding(gpu: &mut TestGpu, checks: &mut Checks, rows: usize, width: usize) -> Result<(), CudaError> {
    const VOCAB: usize = 321;
    let table = gpu.bf16s(VOCAB * width, 1.0);
    let tokens: Vec<u32> = (0..rows).map(|_| gpu.rng.random_range(0..VOCAB as u32)).collect();
    let (on_device, ids) = (gpu.upload(&table)?, gpu.upload(&tokens)?);
    let table = widened(&table);
    // The second factor is exact in f32, times a number in bf16.
    for factor in [1.0, 8.5] {
        let mut out = gpu.poisoned::<f32>(rows * width)?;
        gpu.kernels(128)?.embedding(&gpu.stream, &mut out.as_view_mut(), &on_device.as_view(), &ids.as_view(), width, factor)?;
        let reference: Vec<f64> =
            tokens.iter().flat_map(|&t| table[t as usize * width..][..width].iter().map(|x| f64::from(factor) * x)).collect();
        checks.near("embedding", format!("{rows} × {width}, times {factor}"), &doubles(&gpu.download(&out)?), &reference, EXACT);
    }
    Ok(())
}

/// All forms of adding to the residual stream and norming it.
pub fn norm(gpu: &mut TestGpu, checks: &mut Checks, rows: usize, width: usize, adds: Adds, normed: Normed) -> Result<(), CudaError> {
    let epsilon = 1e-5f32;
    // Numbers are off center, so that a mean matters.
    let residual: Vec<f32> = gpu.f32s(rows * width, 2.0).into_iter().map(|x| x + 0.7).collect();
    let [delta, beside] = [2.0, 1.0].map(|scale| gpu.bf16s(rows * width, scale));
    let [after, weight, bias] = [(); 3].map(|()| gpu.f32s(width, 1.0));
    let factor = if adds == Adds::Normed { 0.22 } else { 1.0 };
    let picked: Vec<u32> = (0..rows as u32).filter(|row| adds == Adds::Nothing || row % 3 != 1).collect();

    let (mut on_residual, on_rows, mut out) = (gpu.upload(&residual)?, gpu.upload(&picked)?, gpu.poisoned(picked.len() * width)?);
    let (on_delta, on_beside) = (gpu.upload(&delta)?, gpu.upload(&beside)?);
    let (on_after, on_weight, on_bias) = (gpu.upload(&after)?, gpu.upload(&weight)?, gpu.upload(&bias)?);
    let added = Added {
        delta: on_delta.as_view(),
        beside: (adds == Adds::Two).then(|| on_beside.as_view()),
        norm: (adds == Adds::Normed).then(|| on_after.as_view()),
        factor,
    };
    let has_bias = normed == Normed::Centered { has_bias: true };
    let weights = NormWeights {
        weight: on_weight.as_view(),
        bias: has_bias.then(|| on_bias.as_view()),
        is_centered: matches!(normed, Normed::Centered { .. }),
    };
    let rows_view = on_rows.as_view();
    let operands = AddAndNorm {
        added: (adds != Adds::Nothing).then_some(&added),
        norm: (normed != Normed::Not).then_some(&weights),
        width,
        epsilon,
        rows: (picked.len() < rows).then_some(&rows_view),
    };
    gpu.kernels(128)?.norm(&gpu.stream, &mut out.as_view_mut(), &mut on_residual.as_view_mut(), &operands)?;

    let (mut sums, delta, beside, epsilon) = (doubles(&residual), widened(&delta), widened(&beside), f64::from(epsilon));
    let mut reference = Vec::new();
    for &row in &picked {
        let range = row as usize * width..(row as usize + 1) * width;
        let delta = &delta[range.clone()];
        let added: Vec<f64> = match adds {
            Adds::Nothing => vec![0.0; width],
            Adds::One => delta.to_vec(),
            Adds::Two => delta.iter().zip(&beside[range.clone()]).map(|(a, b)| a + b).collect(),
            Adds::Normed => normed_by_rms(delta, &after, epsilon),
        };
        let x = &mut sums[range];
        x.iter_mut().zip(added).for_each(|(x, added)| *x += f64::from(factor) * added);
        let mean = if matches!(normed, Normed::Centered { .. }) { x.iter().sum::<f64>() / width as f64 } else { 0.0 };
        let centered: Vec<f64> = x.iter().map(|x| x - mean).collect();
        match normed {
            Normed::Not => reference.extend(centered),
            _ => {
                let bias = bias.iter().map(|&bias| if has_bias { f64::from(bias) } else { 0.0 });
                reference.extend(normed_by_rms(&centered, &weight, epsilon).into_iter().zip(bias).map(|(x, bias)| x + bias));
            }
        }
    }
    let case = format!("{rows} × {width}, adds {adds:?}, normed {normed:?}");
    checks.near("norm", case.clone(), &widened(&gpu.download(&out)?), &reference, BF16);
    checks.near("norm residual", case, &doubles(&gpu.download(&on_residual)?), &sums, F32);
    Ok(())
}

pub fn rms_norm(gpu: &mut TestGpu, checks: &mut Checks, rows: usize, width: usize, delta: bool, chosen: bool) -> Result<(), CudaError> {
    let (residual, weight) = (gpu.f32s(rows * width, 2.0), gpu.f32s(width, 1.0));
    let deltas = delta.then(|| gpu.bf16s(rows * width, 2.0));
    let picked: Vec<u32> = (0..rows as u32).filter(|row| !chosen || row % 3 == 0).collect();
    let epsilon = 1e-5;

    let (mut on_device, on_device_weight) = (gpu.upload(&residual)?, gpu.upload(&weight)?);
    let on_device_delta = deltas.as_ref().map(|d| gpu.upload(d)).transpose()?;
    let on_device_rows = gpu.upload(&picked)?;
    let mut out = gpu.poisoned(picked.len() * width)?;
    let (weight_view, rows_view) = (on_device_weight.as_view(), on_device_rows.as_view());
    let delta_view = on_device_delta.as_ref().map(|d| d.as_view());
    let norm = Norm { delta: delta_view.as_ref(), weight: &weight_view, epsilon, rows: chosen.then_some(&rows_view) };
    gpu.kernels(128)?.rms_norm(&gpu.stream, &mut out.as_view_mut(), &mut on_device.as_view_mut(), &norm)?;

    let mut sums = doubles(&residual);
    if let Some(deltas) = &deltas {
        let deltas = widened(deltas);
        for &row in &picked {
            let range = row as usize * width..(row as usize + 1) * width;
            sums[range.clone()].iter_mut().zip(&deltas[range]).for_each(|(x, d)| *x += d);
        }
    }
    let mut reference = Vec::new();
    for &row in &picked {
        let x = &sums[row as usize * width..][..width];
        let scale = (x.iter().map(|x| x * x).sum::<f64>() / width as f64 + f64::from(epsilon)).sqrt();
        reference.extend(x.iter().zip(&weight).map(|(x, &w)| f64::from(w) * x / scale));
    }
    let case = format!("{rows} × {width}{}{}", if delta { ", delta" } else { "" }, if chosen { ", some rows" } else { "" });
    checks.near("rms_norm", case.clone(), &widened(&gpu.download(&out)?), &reference, BF16);
    checks.near("rms_norm residual", case, &doubles(&gpu.download(&on_device)?), &sums, F32);
    Ok(())
}

/// The complementary error function, by its series where that converges fast, else by its continued fraction.
fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    let to_pi = std::f64::consts::FRAC_2_SQRT_PI;
    if x < 2.5 {
        let terms = (0..80).scan(x, |term, n| {
            let this = *term / f64::from(2 * n + 1);
            *term *= -x * x / f64::from(n + 1);
            Some(this)
        });
        return 1.0 - to_pi * terms.sum::<f64>();
    }
    let below = (1..60).rev().fold(x, |below, n| x + f64::from(n) / 2.0 / below);
    (-x * x).exp() / below * to_pi / 2.0
}

pub fn activate(
    gpu: &mut TestGpu,
    checks: &mut Checks,
    rows: usize,
    width: usize,
    function: Activation,
    is_gated: bool,
) -> Result<(), CudaError> {
    let parts = if is_gated { 2 } else { 1 };
    let from = gpu.bf16s(rows * parts * width, 8.0);
    let (on_device, mut out) = (gpu.upload(&from)?, gpu.poisoned(rows * width)?);
    gpu.kernels(128)?.activate(&gpu.stream, &mut out.as_view_mut(), &on_device.as_view(), width, function, is_gated)?;
    let activated = |x: f64| match function {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => x * erfc(-x * std::f64::consts::FRAC_1_SQRT_2) / 2.0,
        Activation::GeluTanh => x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()) / 2.0,
    };
    let reference: Vec<f64> = widened(&from)
        .chunks(parts * width)
        .flat_map(|row| (0..width).map(|i| activated(row[i]) * if is_gated { row[width + i] } else { 1.0 }).collect::<Vec<_>>())
        .collect();
    let case = format!("{rows} × {width}, {function:?}{}", if is_gated { " of a gate" } else { "" });
    checks.near("activate", case, &widened(&gpu.download(&out)?), &reference, BF16);
    Ok(())
}

fn cap_logits(gpu: &mut TestGpu, checks: &mut Checks, rows: usize, width: usize) -> Result<(), CudaError> {
    let (cap, logits) = (30.0f32, gpu.f32s(rows * width, 70.0));
    let mut on_device = gpu.upload(&logits)?;
    gpu.kernels(128)?.cap_logits(&gpu.stream, &mut on_device.as_view_mut(), cap)?;
    let reference: Vec<f64> = doubles(&logits).iter().map(|x| f64::from(cap) * (x / f64::from(cap)).tanh()).collect();
    checks.near("cap_logits", format!("{rows} × {width}"), &doubles(&gpu.download(&on_device)?), &reference, F32);
    Ok(())
}

/// The number that an e4m3 byte represents.
pub fn e4m3(byte: u8) -> f64 {
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * mantissa / 8.0 * 2f64.powi(-6),
        _ => sign * (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// Whether `byte` is nearest to `x`: within half the distance between neighbours, which is 2^-10 where they are closest.
fn is_nearest(x: f64, byte: u8) -> bool {
    let got = e4m3(byte);
    let exponent = x.abs().max(2f64.powi(-6)).log2().floor();
    (got - x).abs() <= 0.5001 * 2f64.powf(exponent - 3.0) || (x.abs() > 448.0 && got.abs() == 448.0)
}

/// Columns in parts, as several devices compute them, all on this one. The last part is narrower if they are not equal.
fn gather(gpu: &mut TestGpu, checks: &mut Checks, rows: usize, width: usize, parts: usize) -> Result<(), CudaError> {
    let (expected, own) = (gpu.bf16s(rows * width, 4.0), own_width(width, parts, 8));
    let columns = |part: usize| part * own..((part + 1) * own).min(width);
    let of_part = |part| expected.chunks(width).flat_map(|row| row[columns(part)].iter().copied()).collect::<Vec<_>>();
    let memory = (0..parts).map(|part| gpu.upload(&of_part(part))).collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<Columns> = memory.iter().map(Columns::from).collect();
    let kernels = gpu.kernels(128)?;
    let mut out = gpu.poisoned::<u16>(rows * width)?;
    // SAFETY: the parts are this device's, and complete; they are alive until the download below has waited.
    unsafe { kernels.gather(&gpu.stream, &mut out.as_view_mut(), &addresses, rows, 8) }?;
    checks.same("gather", format!("{rows} × {width} in {parts}"), &gpu.download(&out)?, &expected, EXACT);
    Ok(())
}

fn quantize(gpu: &mut TestGpu, checks: &mut Checks, rows: usize, width: usize) -> Result<(), CudaError> {
    let x = gpu.bf16s(rows * width, 3.0);
    let kernels = gpu.kernels(128)?;
    let (on_device, mut out, mut scales) = (gpu.upload(&x)?, gpu.poisoned(rows * width)?, gpu.poisoned::<f32>(rows)?);
    let x_view = on_device.as_view();
    kernels.quantize_fp8_rows(&gpu.stream, &mut out.as_view_mut(), &mut scales.as_view_mut(), &x_view, None)?;
    let (x, of_rows) = (widened(&x), doubles(&gpu.download(&scales)?));
    let largest: Vec<f64> = x.chunks(width).map(|row| row.iter().fold(0.0, |max: f64, x| max.max(x.abs())) / 448.0).collect();
    checks.near("quantize_fp8 scales", format!("{rows} × {width}"), &of_rows, &largest, F32);
    let nearest = |bytes: &[u8], scale: &dyn Fn(usize) -> f64| -> Vec<bool> {
        bytes.iter().enumerate().map(|(i, &byte)| is_nearest(x[i] / scale(i / width), byte)).collect()
    };
    let all_nearest = vec![true; x.len()];
    let by_row = nearest(&gpu.download(&out)?, &|row| of_rows[row]);
    checks.same("quantize_fp8", format!("{rows} × {width}, by row"), &by_row, &all_nearest, EXACT);

    let (bound, mut clipped, mut bounded) = (2.0f32, gpu.poisoned(rows * width)?, gpu.poisoned::<f32>(rows)?);
    kernels.quantize_fp8_rows(&gpu.stream, &mut clipped.as_view_mut(), &mut bounded.as_view_mut(), &x_view, Some(bound))?;
    let (clipped, bounded) = (gpu.download(&clipped)?, doubles(&gpu.download(&bounded)?));
    let smaller: Vec<f64> = largest.iter().map(|scale| scale.min(f64::from(bound) / 448.0)).collect();
    checks.near("quantize_fp8 scales", format!("{rows} × {width}, bounded"), &bounded, &smaller, F32);
    checks.same("quantize_fp8", format!("{rows} × {width}, by row, clipped"), &nearest(&clipped, &|row| bounded[row]), &all_nearest, EXACT);

    let scale = 0.004f32;
    let (on_device_scale, mut out) = (gpu.upload(&[scale])?, gpu.poisoned(rows * width)?);
    kernels.quantize_fp8_tensor(&gpu.stream, &mut out.as_view_mut(), &on_device_scale.as_view(), &on_device.as_view(), width)?;
    let by_tensor = nearest(&gpu.download(&out)?, &|_| f64::from(scale));
    checks.same("quantize_fp8", format!("{rows} × {width}, by tensor"), &by_tensor, &all_nearest, EXACT);
    Ok(())
}

pub fn rope_kv_write(
    gpu: &mut TestGpu,
    checks: &mut Checks,
    of: Heads,
    kv_heads: usize,
    group: usize,
    turn: Turn,
) -> Result<(), CudaError> {
    let d = of.dim;
    const LAYERS: usize = 3;
    const LAYER: usize = 1;
    const POSITIONS: usize = 70;
    const TABLE: usize = 5;
    let heads = kv_heads * group;
    // Two sequences; the last row is padding.
    let places: Vec<(u32, u32)> = (0..23).map(|i| (0, 11 + i)).chain((0..40).map(|i| (1, 29 + i))).chain([(0, NO_POSITION)]).collect();
    let tables: Vec<u32> = vec![7, 2, 9, 4, 0, 1, 8, 3, 6, 5];
    let (rows, width, half) = (places.len(), heads + 2 * kv_heads, d / 2);
    let qkv = gpu.bf16s(rows * width * d, 2.0);
    let angles = gpu.f32s(POSITIONS * half, 3.1);
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let normed = |heads: usize| if turn.norms == Norms::All { heads * d } else { d };
    let weights = [gpu.f32s(normed(heads), 1.0), gpu.f32s(normed(kv_heads), 1.0)];
    let growth: Vec<f32> = (0..POSITIONS).map(|position| 1.0 + position as f32 / 50.0).collect();
    let epsilon = 1e-6;

    let kernels = gpu.kernels_of(of)?;
    let layout = KvLayout { layers: LAYERS, kv_heads, head_dim: d, dtype: of.kv, latent: None };
    let mut kv = DeviceKv::new(&gpu.device, layout, tables.len())?;
    // Every block has a slot, poisoned: unwritten bytes must stay so.
    let slots = gpu.poisoned::<u8>(tables.len() * layout.block_bytes())?;
    let placed: Vec<BlockSlot> =
        (0..tables.len()).map(|i| BlockSlot { block: i as u32, slot: gpu.address(&slots) + (i * layout.block_bytes()) as u64 }).collect();
    // SAFETY: the slots are live memory of that many blocks, used by this stream alone.
    unsafe { kernels.kv_scatter(&gpu.stream, &mut kv, &placed, 0..LAYERS) }?;

    let mut on_device = gpu.upload(&qkv)?;
    let (on_tables, on_cos, on_sin) = (gpu.upload(&tables)?, gpu.upload(&cos)?, gpu.upload(&sin)?);
    let (q_norm, k_norm) = (gpu.upload(&weights[0])?, gpu.upload(&weights[1])?);
    let sequences = gpu.upload(&places.iter().map(|p| p.0).collect::<Vec<_>>())?;
    let positions = gpu.upload(&places.iter().map(|p| p.1).collect::<Vec<_>>())?;
    let (q_view, k_view, tables_view) = (q_norm.as_view(), k_norm.as_view(), on_tables.as_view());
    let (on_growth, mut scales) = (gpu.upload(&growth)?, gpu.poisoned::<f32>(2 * rows)?);
    let (cos_view, sin_view, growth_view) = (on_cos.as_view(), on_sin.as_view(), on_growth.as_view());
    if turn.norms == Norms::All {
        kernels.qk_scales(&gpu.stream, &mut scales.as_view_mut(), &on_device.as_view(), heads, kv_heads, d, epsilon)?;
    }
    let scales_view = scales.as_view();
    let over = match turn.norms {
        Norms::All => NormedOver::Heads(&scales_view),
        Norms::Heads | Norms::None => NormedOver::Head { epsilon },
    };
    let rope = Rope {
        angles: (!turn.is_still).then_some((&cos_view, &sin_view)),
        norms: (turn.norms != Norms::None).then_some(HeadNorms { queries: &q_view, keys: &k_view, over }),
        growth: turn.grows.then_some(&growth_view),
    };
    kernels.rope_kv_write(
        &gpu.stream,
        &mut on_device.as_view_mut(),
        heads,
        &mut kv.layer(LAYER, &tables_view, TABLE),
        &RowPlaces { sequences: &sequences.as_view(), positions: &positions.as_view() },
        &rope,
    )?;
    // SAFETY: as above.
    unsafe { kernels.kv_gather(&gpu.stream, &kv, &placed, 0..LAYERS) }?;

    let written = gpu.download(&slots)?;
    let mut untouched = written.clone();
    let (mut expected_rows, mut numbers, mut expected_numbers) = (widened(&qkv), Vec::new(), Vec::new());
    let (mut scales, mut expected_scales, mut nearest) = (Vec::new(), Vec::new(), Vec::new());
    for (row, &(sequence, position)) in places.iter().enumerate() {
        if position == NO_POSITION {
            continue;
        }
        let position = position as usize;
        let of_row = expected_rows[row * width * d..][..(heads + kv_heads) * d].to_vec();
        for head in 0..width {
            let at = (row * width + head) * d;
            let mut x = expected_rows[at..at + d].to_vec();
            if head < heads + kv_heads {
                let (weight, in_part, part) = match head.checked_sub(heads) {
                    None => (&weights[0], head, &of_row[..heads * d]),
                    Some(head) => (&weights[1], head, &of_row[heads * d..]),
                };
                match turn.norms {
                    Norms::None => {}
                    Norms::Heads => x = normed_by_rms(&x, weight, epsilon.into()),
                    Norms::All => x = normed_by_rms(part, weight, epsilon.into())[in_part * d..][..d].to_vec(),
                }
                for i in (0..half).filter(|_| !turn.is_still) {
                    let (c, s) = (f64::from(cos[position * half + i]), f64::from(sin[position * half + i]));
                    (x[i], x[i + half]) = (x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s);
                }
            }
            if head < heads {
                let grown = if turn.grows { f64::from(growth[position]) } else { 1.0 };
                x.iter_mut().for_each(|x| *x *= grown);
                expected_rows[at..at + d].copy_from_slice(&x);
            } else {
                let block = tables[sequence as usize * TABLE + position / 16] as usize;
                let (part, head) = if head < heads + kv_heads { (Part::K, head - heads) } else { (Part::V, head - heads - kv_heads) };
                let mut take = |range: Range<usize>, each: usize| -> Vec<u8> {
                    let at = block * layout.block_bytes() + range.start + position % 16 * each;
                    untouched[at..at + each].fill(0xff);
                    written[at..at + each].to_vec()
                };
                let of_numbers = layout.numbers(LAYER, part, head);
                let bytes = take(of_numbers.clone(), of_numbers.len() / 16);
                if of.kv == KvStorage::Int8 {
                    let bits = take(layout.scales(LAYER, part, head), size_of::<f32>());
                    let scale = f64::from(f32::from_le_bytes(bits.try_into().expect("four bytes")));
                    let integers = bytes.iter().map(|byte| f64::from(byte.cast_signed()));
                    // The bound is half the distance between neighbours, and the rounding in f32 before that.
                    nearest.extend(integers.clone().zip(&x).map(|(integer, x)| (integer - x / scale).abs() < 0.501));
                    numbers.extend(integers.map(|integer| integer * scale));
                    scales.push(scale);
                    expected_scales.push(x.iter().fold(0.0f64, |largest, x| largest.max(x.abs())) / 127.0);
                } else {
                    let bits: Vec<u16> = bytes.as_chunks().0.iter().map(|&bytes| u16::from_le_bytes(bytes)).collect();
                    numbers.extend(widened(&bits));
                }
                expected_numbers.extend(x);
            }
        }
    }
    let in_8_bits = if of.kv == KvStorage::Int8 { ", K and V in 8 bits" } else { "" };
    let case = format!("{heads} heads of {d}, {kv_heads} of keys{in_8_bits}, {turn:?}");
    checks.near("rope", case.clone(), &widened(&gpu.download(&on_device)?), &expected_rows, BF16);
    // Bytes are at their places, and nowhere else.
    checks.same("kv_write elsewhere", case.clone(), &untouched, &vec![0xff; written.len()], EXACT);
    if of.kv == KvStorage::Int8 {
        checks.near("kv_write scales", case.clone(), &scales, &expected_scales, 10.0 * F32);
        checks.same("kv_write to the nearest", case.clone(), &nearest, &vec![true; nearest.len()], EXACT);
    }
    checks.near("kv_write", case, &numbers, &expected_numbers, if of.kv == KvStorage::Int8 { INT8 } else { BF16 });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_bytes_stand_for_their_numbers() {
        assert_eq!([e4m3(0x7e), e4m3(0x08), e4m3(0x01), e4m3(0xb8), e4m3(0x80)], [448.0, 1.0 / 64.0, 1.0 / 512.0, -1.0, 0.0]);
        assert!(e4m3(0x7f).is_nan());
        assert!(is_nearest(1.0624, 0x38) && !is_nearest(1.07, 0x38) && is_nearest(500.0, 0x7e) && is_nearest(0.0009, 0));
    }
}

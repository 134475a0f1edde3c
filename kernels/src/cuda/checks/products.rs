//! Matrix products in bf16 and FP8.

use super::{
    Checks, Extent, TestGpu, doubles,
    rows::{BF16, e4m3},
    widened,
};
use crate::cuda::{
    CudaError,
    compile::Arch,
    gemm::{Operands, Output, Scales},
};
use cudarc::driver::CudaSlice;
use rand::Rng;
use rayon::prelude::*;

/// The error of tensor cores, which accumulate in f32, but truncate instead of rounding.
const F32: f64 = 1e-4;

/// The error of Hopper's products of FP8, which are accumulated with 14 bits (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section
/// 3.3.2).
const FP8: f64 = 2e-2;

pub fn all(gpu: &mut TestGpu, checks: &mut Checks, extent: Extent) -> Result<(), CudaError> {
    for &(rows, inner, columns) in extent.of(&[(7, 264, 1032), (1, 8, 8), (1, 4096, 520), (133, 1096, 520), (256, 2048, 1024)]) {
        checks.case(gpu, "multiply bf16", case(rows, inner, columns), |gpu, checks| bf16(gpu, checks, rows, inner, columns))?;
    }
    let Arch { major, minor } = gpu.device.properties().arch;
    if (major, minor) < (8, 9) {
        checks.left_out.push("FP8 products: the device has none".to_owned());
        return Ok(());
    }
    let by_row = gpu.gemm.fp8_rows().clone();
    if !by_row.multiply(true) {
        checks.left_out.push(by_row.to_string());
    }
    for &(rows, inner, columns) in extent.of(&[(16, 512, 512), (133, 1040, 528), (256, 4096, 1024)]) {
        let sizes = (rows, inner, columns);
        checks.case(gpu, "multiply fp8", case(rows, inner, columns), |gpu, checks| fp8(gpu, checks, sizes, Per::Tensor, true))?;
        if by_row.multiply(false) {
            let with_bias = by_row.multiply(true);
            checks.case(gpu, "multiply fp8", case(rows, inner, columns), |gpu, checks| fp8(gpu, checks, sizes, Per::Row, with_bias))?;
        }
    }
    Ok(())
}

fn case(rows: usize, inner: usize, columns: usize) -> String {
    format!("{rows} × {inner} × {columns}")
}

/// The numbers that share a scale.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Per {
    Tensor,
    Row,
}

/// x weightᵀ, `[rows, columns]`.
fn multiplied(x: &[f64], weight: &[f64], inner: usize) -> Vec<f64> {
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
    x.par_chunks(inner).flat_map_iter(|x| weight.chunks(inner).map(move |w| dot(x, w))).collect()
}

fn bf16(gpu: &mut TestGpu, checks: &mut Checks, rows: usize, inner: usize, columns: usize) -> Result<(), CudaError> {
    let (x, weight, bias) = (gpu.bf16s(rows * inner, 1.0), gpu.bf16s(columns * inner, 1.0), gpu.bf16s(columns, 4.0));
    let (on_x, on_weight, on_bias) = (gpu.upload(&x)?, gpu.upload(&weight)?, gpu.upload(&bias)?);
    let (x_view, weight_view, bias_view) = (on_x.as_view(), on_weight.as_view(), on_bias.as_view());
    let operands = Operands::Bf16 { x: &x_view, weight: &weight_view };
    let stream = gpu.stream.clone();
    let reference = multiplied(&widened(&x), &widened(&weight), inner);
    let case = case(rows, inner, columns);

    let mut y = gpu.poisoned::<u16>(rows * columns)?;
    gpu.gemm.multiply(&stream, Output::Bf16(&mut y.as_view_mut()), operands, None, inner)?;
    checks.near("multiply bf16", case.clone(), &widened(&gpu.download(&y)?), &reference, BF16);

    let mut y: CudaSlice<f32> = gpu.poisoned(rows * columns)?;
    gpu.gemm.multiply(&stream, Output::F32(&mut y.as_view_mut()), operands, None, inner)?;
    checks.near("multiply bf16 to f32", case.clone(), &doubles(&gpu.download(&y)?), &reference, F32);

    let mut y = gpu.poisoned::<u16>(rows * columns)?;
    gpu.gemm.multiply(&stream, Output::Bf16(&mut y.as_view_mut()), operands, Some(&bias_view), inner)?;
    let bias = widened(&bias);
    let with_bias: Vec<f64> = reference.iter().enumerate().map(|(i, y)| y + bias[i % columns]).collect();
    checks.near("multiply bf16 with bias", case, &widened(&gpu.download(&y)?), &with_bias, BF16);
    Ok(())
}

fn fp8(
    gpu: &mut TestGpu,
    checks: &mut Checks,
    (rows, inner, columns): (usize, usize, usize),
    per: Per,
    with_bias: bool,
) -> Result<(), CudaError> {
    let by_row = per == Per::Row;
    // Any bytes except the two NaNs.
    let mut bytes =
        |count: usize| -> Vec<u8> { (0..count).map(|_| gpu.rng.random_range(0..=0x76u8) | (gpu.rng.random::<u8>() & 0x80)).collect() };
    let (x, weight) = (bytes(rows * inner), bytes(columns * inner));
    let (x_count, weight_count) = if by_row { (rows, columns) } else { (1, 1) };
    let mut positive = |count: usize| -> Vec<f32> { (0..count).map(|_| gpu.rng.random_range(0.001..0.01)).collect() };
    let (x_scales, weight_scales) = (positive(x_count), positive(weight_count));
    let (on_x, on_weight) = (gpu.upload(&x)?, gpu.upload(&weight)?);
    let (on_x_scales, on_weight_scales) = (gpu.upload(&x_scales)?, gpu.upload(&weight_scales)?);
    let (x_view, weight_view) = (on_x.as_view(), on_weight.as_view());
    let (x_scale, weight_scale) = (on_x_scales.as_view(), on_weight_scales.as_view());
    let scales =
        if by_row { Scales::Rows { x: &x_scale, weight: &weight_scale } } else { Scales::Tensor { x: &x_scale, weight: &weight_scale } };
    let mut y = gpu.poisoned::<u16>(rows * columns)?;
    let stream = gpu.stream.clone();
    let operands = Operands::Fp8 { x: &x_view, weight: &weight_view, scales };
    gpu.gemm.multiply(&stream, Output::Bf16(&mut y.as_view_mut()), operands, None, inner)?;

    let numbers = |bytes: &[u8]| bytes.iter().map(|&byte| e4m3(byte)).collect::<Vec<_>>();
    let mut reference = multiplied(&numbers(&x), &numbers(&weight), inner);
    for (i, y) in reference.iter_mut().enumerate() {
        *y *= f64::from(x_scales[i / columns % x_count]) * f64::from(weight_scales[i % columns % weight_count]);
    }
    let case = format!("{}, scales by {}", case(rows, inner, columns), if by_row { "row" } else { "tensor" });
    checks.near("multiply fp8", case.clone(), &widened(&gpu.download(&y)?), &reference, FP8);
    if with_bias {
        let bias = gpu.bf16s(columns, 4.0);
        let (on_bias, mut y) = (gpu.upload(&bias)?, gpu.poisoned::<u16>(rows * columns)?);
        gpu.gemm.multiply(&stream, Output::Bf16(&mut y.as_view_mut()), operands, Some(&on_bias.as_view()), inner)?;
        let bias = widened(&bias);
        let with_bias: Vec<f64> = reference.iter().enumerate().map(|(i, y)| y + bias[i % columns]).collect();
        checks.near("multiply fp8 with bias", case, &widened(&gpu.download(&y)?), &with_bias, FP8);
    }
    Ok(())
}

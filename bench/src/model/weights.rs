//! Random tensors in a safetensors file. One tensor is in memory at a time; its numbers are drawn by all cores.

use anyhow::Context;
use half::{bf16, f16};
use indicatif::ProgressBar;
use rand::{
    Rng, RngCore, SeedableRng,
    rngs::{SmallRng, StdRng},
};
use rayon::prelude::*;
use safetensors::{Dtype as StoredDtype, View};
use serde::Serialize;
use std::{borrow::Cow, fs, os::unix::fs::PermissionsExt, path::Path};

/// The type of stored weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
pub enum Dtype {
    Bf16,
    F16,
    F32,
}

impl Dtype {
    pub fn bytes(self) -> usize {
        self.stored().bitsize() / 8
    }

    /// The type's name in `config.json`.
    pub fn torch_name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
            Dtype::F32 => "float32",
        }
    }

    fn stored(self) -> StoredDtype {
        match self {
            Dtype::Bf16 => StoredDtype::BF16,
            Dtype::F16 => StoredDtype::F16,
            Dtype::F32 => StoredDtype::F32,
        }
    }

    fn encode(self, value: f32, bytes: &mut [u8]) {
        match self {
            Dtype::Bf16 => bytes.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            Dtype::F16 => bytes.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            Dtype::F32 => bytes.copy_from_slice(&value.to_le_bytes()),
        }
    }
}

/// Writes `tensors` (names and dimensions): norms are 1, everything else is near normal with deviation 0.02, as initialized by
/// transformers. The file appears once it is complete.
pub fn write(path: &Path, tensors: &[(String, Vec<usize>)], dtype: Dtype, seed: u64, progress: &ProgressBar) -> anyhow::Result<()> {
    let mut seeds = StdRng::seed_from_u64(seed);
    let tensors = tensors.iter().map(|(name, shape)| {
        let fill = if name.ends_with("norm.weight") { Fill::One } else { Fill::Normal { seed: seeds.random() } };
        (name, Tensor { shape, dtype, fill, progress })
    });
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize_to_file(tensors, Some(metadata), path).with_context(|| format!("cannot write {}", path.display()))?;
    // It was a temporary file, which other users may not read.
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))?;
    Ok(())
}

/// A tensor whose numbers exist only while they are written.
struct Tensor<'a> {
    shape: &'a [usize],
    dtype: Dtype,
    fill: Fill,
    progress: &'a ProgressBar,
}

enum Fill {
    One,
    Normal { seed: u64 },
}

impl View for Tensor<'_> {
    fn dtype(&self) -> StoredDtype {
        self.dtype.stored()
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bytes()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let size = self.dtype.bytes();
        let mut bytes = vec![0; self.data_len()];
        bytes.par_chunks_mut(CHUNK * size).enumerate().for_each(|(index, chunk)| {
            let values = chunk.chunks_exact_mut(size);
            match self.fill {
                Fill::One => values.for_each(|value| self.dtype.encode(1.0, value)),
                Fill::Normal { seed } => {
                    // Each chunk has a generator of its own, so that the numbers do not depend on the number of cores.
                    let mut rng = SmallRng::seed_from_u64(seed.wrapping_add(index as u64));
                    values.for_each(|value| self.dtype.encode(STD * near_normal(rng.next_u64()), value));
                }
            }
            self.progress.inc(chunk.len() as u64);
        });
        Cow::Owned(bytes)
    }
}

/// Mean 0 and deviation 1 from 64 random bits: the sum of four uniform numbers (Irwin-Hall) is bell-shaped enough for
/// weights, and costs no logarithm.
fn near_normal(bits: u64) -> f32 {
    let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u32 & 0xffff).sum();
    (sum as f32 - 2.0 * 65_535.0) / (65_536.0 / 3f32.sqrt())
}

const STD: f32 = 0.02;

/// The count of numbers that one generator draws.
const CHUNK: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_normal_has_mean_0_and_deviation_1() {
        let mut rng = SmallRng::seed_from_u64(1);
        let values: Vec<f64> = (0..200_000).map(|_| near_normal(rng.next_u64()).into()).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
        let within_one = values.iter().filter(|value| value.abs() < 1.0).count() as f64 / values.len() as f64;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.01, "{mean} {variance}");
        assert!((within_one - 0.68).abs() < 0.03, "{within_one}");
    }
}

//! Kernels compiled in advance, on a machine without a GPU, which saves a minute on the GPU.

use std::{path::Path, time::Instant};
use tidemill_kernels::{
    KvStorage,
    cuda::{
        cache::KernelCache,
        compile::{Arch, Heads, SOURCES},
    },
};

/// A GPU architecture to compile for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Target {
    /// A100.
    Sm80,
    /// H100 and H200.
    Sm90a,
}

/// Head sizes of the checks, the measured models and the tiny checkpoints.
const HEAD_DIMS: [usize; 8] = [16, 32, 64, 80, 96, 112, 128, 256];

/// Head sizes of checks and tiny checkpoints whose attention has a cap or sinks.
const HEAD_DIMS_OF_FORMS: [usize; 4] = [32, 64, 128, 256];

pub fn compile(target: Target, cache: &Path) -> anyhow::Result<()> {
    let arch = match target {
        Target::Sm80 => Arch::SM_80,
        Target::Sm90a => Arch::SM_90A,
    };
    let (folder, started) = (cache, Instant::now());
    let cache = KernelCache::open(folder)?;
    let heads = HEAD_DIMS.iter().flat_map(|&dim| [Heads::bf16(dim), Heads { dim, kv: KvStorage::Int8 }]);
    let wanted: Vec<_> = SOURCES
        .iter()
        .flat_map(|source| heads.clone().take(if source.by_heads { usize::MAX } else { 1 }).map(move |heads| (source, heads)))
        .filter(|(source, heads)| source.suits(arch, heads.dim) && (source.defines.is_empty() || HEAD_DIMS_OF_FORMS.contains(&heads.dim)))
        .collect();
    for (source, heads) in &wanted {
        cache.load(source, arch, *heads)?;
    }
    println!("{} modules for {arch} in {} after {:.0} s", wanted.len(), folder.display(), started.elapsed().as_secs_f64());
    Ok(())
}

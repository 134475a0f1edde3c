//! The choice of a prefill attention kernel for a device, and its launch parameters.

use super::{
    compile::{self, Arch, Scoring, Source},
    device::Bf16,
};

/// Rows per tile in both prefill kernels.
pub(super) fn tile_rows(head_dim: usize) -> usize {
    if head_dim <= 128 { 128 } else { 64 }
}

/// One of the prefill kernels. All take the same arguments.
pub(super) struct PrefillKernel {
    pub(super) source: &'static Source,
    pub(super) name: &'static str,
    pub(super) threads: usize,
    pub(super) shared_bytes: usize,
}

impl PrefillKernel {
    /// The best kernel for a device and head size. Threads and bytes are those of the sources.
    pub(super) fn choose(arch: Arch, head_dim: usize, scoring: Scoring) -> Self {
        let row_bytes = head_dim * size_of::<Bf16>();
        if compile::ATTENTION_PREFILL_HOPPER.suits(arch, head_dim) {
            let (operands, alignment) = (5 * 128 * row_bytes, 1024);
            let (source, name) = (scoring.of(&compile::ATTENTION_PREFILL_HOPPER), "attention_prefill_hopper");
            return Self { source, name, threads: 384, shared_bytes: operands + alignment };
        }
        let positions = if (81..=128).contains(&head_dim) { 32 } else { 64 };
        let shared_bytes = (tile_rows(head_dim) + 2 * positions) * (row_bytes + 16);
        Self { source: scoring.of(&compile::ATTENTION_PREFILL), name: "attention_prefill", threads: 128, shared_bytes }
    }
}

//! All kernels, loaded for one kind of heads and of scoring.

use super::{
    CudaError,
    compile::{self, Heads, Scoring, Source},
    device::{Device, function},
    prefill_kernel::PrefillKernel,
};
use cudarc::driver::CudaFunction;

/// Every kernel that a model with these heads needs. The operations document them:
/// [`elementwise`](super::elementwise), [`attention`](super::attention), [`sampling`](super::sampling),
/// [`kv`](super::kv).
pub struct Kernels {
    pub(super) heads: Heads,
    pub(super) scoring: Scoring,
    pub(super) width_max: usize,
    pub(super) multiprocessors: usize,
    pub(super) prefill: PrefillKernel,
    pub(super) attention_decode: CudaFunction,
    pub(super) attention_combine: CudaFunction,
    pub(super) attention_prefill: CudaFunction,
    pub(super) embedding: CudaFunction,
    pub(super) rms_norm: CudaFunction,
    pub(super) norm: CudaFunction,
    pub(super) qk_scales: CudaFunction,
    pub(super) rope_kv_write: CudaFunction,
    pub(super) swiglu: CudaFunction,
    pub(super) activate: CudaFunction,
    pub(super) quantize_fp8_rows: CudaFunction,
    pub(super) quantize_fp8_tensor: CudaFunction,
    pub(super) gather: CudaFunction,
    pub(super) kv_gather: CudaFunction,
    pub(super) kv_scatter: CudaFunction,
    pub(super) cap_logits: CudaFunction,
    pub(super) add_to_logits: CudaFunction,
    pub(super) penalize: CudaFunction,
    pub(super) ban: CudaFunction,
    pub(super) mask_logits: CudaFunction,
    pub(super) sample: CudaFunction,
}

impl Kernels {
    /// Compiles the kernels that the cache does not hold.
    pub fn load(device: &Device, heads: Heads, scoring: Scoring) -> Result<Self, CudaError> {
        heads.assert_supported();
        let module = |source: &Source| device.module(source, heads);
        let prefill = PrefillKernel::choose(device.properties().arch, heads.dim, scoring);
        let decode = module(scoring.of(&compile::ATTENTION_DECODE))?;
        let kv_copy = module(&compile::KV_COPY)?;
        let norm = module(&compile::NORM)?;
        let penalties = module(&compile::PENALTIES)?;
        let quantize = module(&compile::QUANTIZE_FP8)?;
        // All shared memory of a block of threads, less what the kernel declares itself.
        let norm_bytes = device.properties().shared_bytes_max - (1 << 10);
        Ok(Self {
            heads,
            scoring,
            width_max: norm_bytes / size_of::<f32>(),
            multiprocessors: device.properties().multiprocessors,
            attention_decode: function(&decode, "attention_decode", 0)?,
            attention_combine: function(&decode, "attention_combine", 0)?,
            attention_prefill: function(&module(prefill.source)?, prefill.name, prefill.shared_bytes)?,
            prefill,
            embedding: function(&module(&compile::EMBEDDING)?, "embedding", 0)?,
            rms_norm: function(&module(&compile::RMS_NORM)?, "rms_norm", norm_bytes)?,
            norm: function(&norm, "add_and_norm", norm_bytes)?,
            qk_scales: function(&norm, "qk_scales", 0)?,
            rope_kv_write: function(&module(&compile::ROPE_KV_WRITE)?, "rope_kv_write", 0)?,
            swiglu: function(&module(&compile::SWIGLU)?, "swiglu", 0)?,
            activate: function(&module(&compile::ACTIVATION)?, "activate", 0)?,
            quantize_fp8_rows: function(&quantize, "quantize_fp8_rows", 0)?,
            quantize_fp8_tensor: function(&quantize, "quantize_fp8_tensor", 0)?,
            gather: function(&module(&compile::GATHER)?, "gather", 0)?,
            kv_gather: function(&kv_copy, "kv_gather", 0)?,
            kv_scatter: function(&kv_copy, "kv_scatter", 0)?,
            cap_logits: function(&penalties, "cap_logits", 0)?,
            add_to_logits: function(&penalties, "add_to_logits", 0)?,
            penalize: function(&penalties, "penalize", 0)?,
            ban: function(&penalties, "ban", 0)?,
            mask_logits: function(&penalties, "mask_logits", 0)?,
            sample: function(&module(&compile::SAMPLE)?, "sample", 0)?,
        })
    }

    pub fn head_dim(&self) -> usize {
        self.heads.dim
    }
}

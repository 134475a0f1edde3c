//! Operations with little work per number: embedding, norm, rotary embedding with the KV write, SwiGLU, FP8. Memory
//! bounds them all, so they are fused where one pass can do.

use super::{
    CudaError,
    device::Bf16,
    kernels::Kernels,
    kv::PagedLayer,
    launch::{Shape, launch, optional},
};
use cudarc::driver::{CudaStream, CudaView, CudaViewMut};

const THREADS: usize = 256;

/// The other operands of [`Kernels::rms_norm`].
pub struct Norm<'a> {
    /// A layer's output, added to the residual stream first, `[.., width]`.
    pub delta: Option<&'a CudaView<'a, Bf16>>,
    /// `[width]`, a multiple of 8.
    pub weight: &'a CudaView<'a, f32>,
    pub epsilon: f32,
    /// The rows to compute; `None`: all. Other rows get no delta.
    pub rows: Option<&'a CudaView<'a, u32>>,
}

/// The rotation of queries and keys.
pub struct Rope<'a> {
    /// `[positions, head_dim / 2]`
    pub cos: &'a CudaView<'a, f32>,
    pub sin: &'a CudaView<'a, f32>,
    /// Norms of each head's query and key, `[head_dim]`, if the model has them.
    pub norms: Option<(&'a CudaView<'a, f32>, &'a CudaView<'a, f32>)>,
    pub epsilon: f32,
}

/// Where each row of a batch belongs, both `[rows]`.
pub struct RowPlaces<'a> {
    /// Row of the block tables.
    pub sequences: &'a CudaView<'a, u32>,
    /// [`NO_POSITION`](super::NO_POSITION) for padding rows.
    pub positions: &'a CudaView<'a, u32>,
}

impl Kernels {
    /// `out[row] = table[tokens[row]]`. Tokens must be rows of the table. out: `[tokens, width]`, table: `[vocab,
    /// width]`, width a multiple of 8.
    pub fn embedding(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, f32>,
        table: &CudaView<'_, Bf16>,
        tokens: &CudaView<'_, u32>,
        width: usize,
    ) -> Result<(), CudaError> {
        assert!(width > 0 && width.is_multiple_of(8) && table.len().is_multiple_of(width), "table is [vocab, width]");
        assert_eq!(out.len(), tokens.len() * width, "out is [tokens, width]");
        let shape = Shape::new((tokens.len(), 1, 1), THREADS);
        // SAFETY: shapes asserted; tokens are below the vocabulary, by the caller's contract.
        unsafe { launch(stream, &self.embedding, shape, &[out.into(), table.into(), tokens.into(), width.into()]) }
    }

    /// `residual += delta; out = weight * residual / sqrt(mean(residual²) + epsilon)`. out: `[rows, width]`, residual:
    /// `[.., width]`.
    pub fn rms_norm(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, Bf16>,
        residual: &mut CudaViewMut<'_, f32>,
        norm: &Norm<'_>,
    ) -> Result<(), CudaError> {
        let width = norm.weight.len();
        assert!(width > 0 && width.is_multiple_of(8) && width <= self.width_max, "rows of a multiple of 8, up to {}", self.width_max);
        assert!(norm.delta.is_none_or(|delta| delta.len() == residual.len()), "delta and residual have one shape");
        let rows = norm.rows.map_or(residual.len() / width, CudaView::len);
        assert!(residual.len().is_multiple_of(width) && out.len() == rows * width, "out is [rows, width]");
        let shape = Shape { shared_bytes: width * size_of::<f32>(), ..Shape::new((rows, 1, 1), THREADS) };
        let args =
            [out.into(), residual.into(), optional(norm.delta), norm.weight.into(), optional(norm.rows), width.into(), norm.epsilon.into()];
        // SAFETY: shapes asserted; `rows` are rows of the residual stream, by the caller's contract.
        unsafe { launch(stream, &self.rms_norm, shape, &args) }
    }

    /// Rotates queries and keys to their positions, in place, and stores K and V. qkv: `[rows, heads + 2 kv_heads,
    /// head_dim]`.
    pub fn rope_kv_write(
        &self,
        stream: &CudaStream,
        qkv: &mut CudaViewMut<'_, Bf16>,
        heads: usize,
        paged: &mut PagedLayer<'_>,
        places: &RowPlaces<'_>,
        rope: &Rope<'_>,
    ) -> Result<(), CudaError> {
        let all_heads = heads + 2 * paged.kv_heads;
        let rows = places.positions.len();
        assert_eq!(qkv.len(), rows * all_heads * self.heads.dim, "qkv is [rows, heads + 2 kv_heads, head_dim]");
        assert_eq!(places.sequences.len(), rows, "a sequence for each row");
        assert!(rope.cos.len() == rope.sin.len() && rope.cos.len().is_multiple_of(self.heads.dim / 2), "[positions, head_dim / 2]");
        assert!(rope.norms.is_none_or(|(q, k)| q.len() == self.heads.dim && k.len() == self.heads.dim), "norms are [head_dim]");
        assert_eq!(paged.heads, self.heads, "kernels and memory have the same heads");
        let shape = Shape::new((rows, all_heads.div_ceil(THREADS / 32), 1), THREADS);
        let args = [
            qkv.into(),
            (&mut paged.memory).into(),
            paged.tables.into(),
            places.sequences.into(),
            places.positions.into(),
            rope.cos.into(),
            rope.sin.into(),
            optional(rope.norms.map(|(q, _)| q)),
            optional(rope.norms.map(|(_, k)| k)),
            rope.epsilon.into(),
            heads.into(),
            paged.kv_heads.into(),
            paged.table_stride.into(),
        ];
        // SAFETY: shapes asserted. The caller's contract: angles and tables cover all positions, and tables name blocks
        // of the memory.
        unsafe { launch(stream, &self.rope_kv_write, shape, &args) }
    }

    /// `out = gate * sigmoid(gate) * up`. gate_up: `[rows, 2, width]`, out: `[rows, width]`, width a multiple of 8.
    pub fn swiglu(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, Bf16>,
        gate_up: &CudaView<'_, Bf16>,
        width: usize,
    ) -> Result<(), CudaError> {
        assert!(width > 0 && width.is_multiple_of(8) && out.len().is_multiple_of(width), "out is [rows, width]");
        assert_eq!(gate_up.len(), 2 * out.len(), "gate_up is [rows, 2, width]");
        let shape = Shape::new(((width / 8).div_ceil(THREADS), out.len() / width, 1), THREADS);
        // SAFETY: shapes asserted.
        unsafe { launch(stream, &self.swiglu, shape, &[out.into(), gate_up.into(), width.into()]) }
    }

    /// `x ≈ scales[row] * out`, each row's largest number, or `largest_max` if that is smaller, at the end of e4m3's range;
    /// larger numbers are clipped. x and out: `[rows, width]`, scales: `[rows]`.
    pub fn quantize_fp8_rows(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, u8>,
        scales: &mut CudaViewMut<'_, f32>,
        x: &CudaView<'_, Bf16>,
        largest_max: Option<f32>,
    ) -> Result<(), CudaError> {
        let rows = scales.len();
        let width = x.len().checked_div(rows).unwrap_or(0);
        assert!(x.len() == out.len() && x.len() == rows * width && width.is_multiple_of(8), "x and out are [rows, width]");
        let shape = Shape::new((rows, 1, 1), THREADS);
        let args = [out.into(), scales.into(), x.into(), width.into(), largest_max.unwrap_or(f32::INFINITY).into()];
        // SAFETY: shapes asserted.
        unsafe { launch(stream, &self.quantize_fp8_rows, shape, &args) }
    }

    /// `x ≈ scale * out` with one given scale. x and out: `[rows, width]`.
    pub fn quantize_fp8_tensor(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, u8>,
        scale: &CudaView<'_, f32>,
        x: &CudaView<'_, Bf16>,
        width: usize,
    ) -> Result<(), CudaError> {
        assert!(width > 0 && width.is_multiple_of(8) && x.len().is_multiple_of(width), "x is [rows, width]");
        assert!(x.len() == out.len() && scale.len() == 1, "x and out have one shape, scale is one number");
        let shape = Shape::new((x.len() / width, 1, 1), THREADS);
        // SAFETY: shapes asserted.
        unsafe { launch(stream, &self.quantize_fp8_tensor, shape, &[out.into(), scale.into(), x.into(), width.into()]) }
    }
}

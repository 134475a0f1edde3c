//! Operations with little work per number: embedding, norms, rotary embedding with the KV write, activations, FP8. Memory bounds them all,
//! so they are fused if one pass suffices.

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
    /// The rows to compute; all if `None`. Other rows get no delta.
    pub rows: Option<&'a CudaView<'a, u32>>,
}

/// The outputs that [`Kernels::norm`] adds to the residual stream first.
pub struct Added<'a> {
    /// A layer's output, `[.., width]`.
    pub delta: CudaView<'a, Bf16>,
    /// The output of another part, added to `delta`.
    pub beside: Option<CudaView<'a, Bf16>>,
    /// The weight of a norm over their sum, `[width]`.
    pub norm: Option<CudaView<'a, f32>>,
    /// The factor of the added numbers.
    pub factor: f32,
}

/// A norm of the residual stream.
pub struct NormWeights<'a> {
    /// `[width]`
    pub weight: CudaView<'a, f32>,
    /// `[width]`
    pub bias: Option<CudaView<'a, f32>>,
    /// Whether the mean is subtracted first.
    pub is_centered: bool,
}

/// The other operands of [`Kernels::norm`].
pub struct AddAndNorm<'a> {
    pub added: Option<&'a Added<'a>>,
    /// The norm; if `None`, the rows are only rounded.
    pub norm: Option<&'a NormWeights<'a>>,
    /// A multiple of 8.
    pub width: usize,
    /// The epsilon of both norms.
    pub epsilon: f32,
    /// The rows to compute; all if `None`. Nothing is added to other rows.
    pub rows: Option<&'a CudaView<'a, u32>>,
}

/// The operations on queries and keys before they are used.
#[derive(Default)]
pub struct Rope<'a> {
    /// Cosines and sines of the rotation, `[positions, head_dim / 2]` each; if `None`, nothing rotates.
    pub angles: Option<(&'a CudaView<'a, f32>, &'a CudaView<'a, f32>)>,
    pub norms: Option<HeadNorms<'a>>,
    /// Factors of queries, `[positions]`.
    pub growth: Option<&'a CudaView<'a, f32>>,
}

/// Norms of queries and keys, before the rotation.
pub struct HeadNorms<'a> {
    /// The weights: of norms over each head `[head_dim]`, else `[heads, head_dim]`.
    pub queries: &'a CudaView<'a, f32>,
    /// `[head_dim]` or `[kv_heads, head_dim]`
    pub keys: &'a CudaView<'a, f32>,
    pub over: NormedOver<'a>,
}

/// The numbers that are normed together.
pub enum NormedOver<'a> {
    Head {
        epsilon: f32,
    },
    /// All heads of a row, with these factors, `[rows, 2]`: see [`Kernels::qk_scales`].
    Heads(&'a CudaView<'a, f32>),
}

/// The function between the two projections of a feed-forward layer, with its number in activation.cu.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// `x sigmoid(x)`
    Silu = 0,
    /// `x Φ(x)`, with the normal distribution's Φ.
    Gelu = 1,
    /// `x Φ(x)`, with an approximation of Φ by tanh.
    GeluTanh = 2,
}

/// The places of a batch's rows, `[rows]` each.
pub struct RowPlaces<'a> {
    /// The index of each row's block table.
    pub sequences: &'a CudaView<'a, u32>,
    /// The positions; [`NO_POSITION`](super::NO_POSITION) for padding rows.
    pub positions: &'a CudaView<'a, u32>,
}

impl Kernels {
    /// `out[row] = factor * table[tokens[row]]`. Tokens must be rows of the table. out: `[tokens, width]`, table: `[vocab,
    /// width]`, width a multiple of 8.
    pub fn embedding(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, f32>,
        table: &CudaView<'_, Bf16>,
        tokens: &CudaView<'_, u32>,
        width: usize,
        factor: f32,
    ) -> Result<(), CudaError> {
        assert!(width > 0 && width.is_multiple_of(8) && table.len().is_multiple_of(width), "table is [vocab, width]");
        assert_eq!(out.len(), tokens.len() * width, "out is [tokens, width]");
        let shape = Shape::new((tokens.len(), 1, 1), THREADS);
        // SAFETY: shapes asserted; tokens are below the vocabulary, by the caller's contract.
        unsafe { launch(stream, &self.embedding, shape, &[out.into(), table.into(), tokens.into(), width.into(), factor.into()]) }
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

    /// Adds to the residual stream, and norms its rows, in the forms that [`rms_norm`](Self::rms_norm) does not have. out: `[rows, width]`,
    /// residual: `[.., width]`.
    pub fn norm(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, Bf16>,
        residual: &mut CudaViewMut<'_, f32>,
        operands: &AddAndNorm<'_>,
    ) -> Result<(), CudaError> {
        let AddAndNorm { added, norm, width, epsilon, rows: chosen } = *operands;
        assert!(width > 0 && width.is_multiple_of(8) && width <= self.width_max, "rows of a multiple of 8, up to {}", self.width_max);
        let (delta, beside) = (added.map(|added| &added.delta), added.and_then(|added| added.beside.as_ref()));
        assert!([delta, beside].into_iter().flatten().all(|delta| delta.len() == residual.len()), "what is added has the residual's shape");
        let after = added.and_then(|added| added.norm.as_ref());
        let (weight, bias) = (norm.map(|norm| &norm.weight), norm.and_then(|norm| norm.bias.as_ref()));
        assert!([after, weight, bias].into_iter().flatten().all(|vector| vector.len() == width), "norms are [width]");
        let rows = chosen.map_or(residual.len() / width, CudaView::len);
        assert!(residual.len().is_multiple_of(width) && out.len() == rows * width, "out is [rows, width]");
        let shape = Shape { shared_bytes: width * size_of::<f32>(), ..Shape::new((rows, 1, 1), THREADS) };
        let args = [
            out.into(),
            residual.into(),
            optional(delta),
            optional(beside),
            optional(after),
            optional(weight),
            optional(bias),
            optional(chosen),
            width.into(),
            usize::from(norm.is_some_and(|norm| norm.is_centered)).into(),
            added.map_or(1.0, |added| added.factor).into(),
            epsilon.into(),
        ];
        // SAFETY: shapes asserted; `rows` are rows of the residual stream, by the caller's contract.
        unsafe { launch(stream, &self.norm, shape, &args) }
    }

    /// The factors that norm queries and keys of a row over all heads. out: `[rows, 2]`, qkv: `[rows, heads + 2 kv_heads, head_dim]`.
    /// `used`: the count of a head's numbers that are not padding; the others are zeros.
    #[expect(clippy::too_many_arguments, reason = "each is another thing")]
    pub fn qk_scales(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, f32>,
        qkv: &CudaView<'_, Bf16>,
        heads: usize,
        kv_heads: usize,
        used: usize,
        epsilon: f32,
    ) -> Result<(), CudaError> {
        let (q_width, k_width) = (heads * self.heads.dim, kv_heads * self.heads.dim);
        let rows = out.len() / 2;
        assert!(out.len() == 2 * rows && qkv.len() == rows * (q_width + 2 * k_width), "qkv is [rows, heads + 2 kv_heads, head_dim]");
        let numbers = |heads: usize| ((heads * used) as f32).into();
        let args = [out.into(), qkv.into(), q_width.into(), k_width.into(), numbers(heads), numbers(kv_heads), epsilon.into()];
        // SAFETY: shapes asserted.
        unsafe { launch(stream, &self.qk_scales, Shape::new((rows, 2, 1), THREADS), &args) }
    }

    /// Norms and rotates queries and keys, in place, and stores K and V. qkv: `[rows, heads + 2 kv_heads,
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
        let half = self.heads.dim / 2;
        assert!(rope.angles.is_none_or(|(cos, sin)| cos.len() == sin.len() && cos.len().is_multiple_of(half)), "[positions, head_dim / 2]");
        let norms = rope.norms.as_ref();
        let (scales, epsilon) = match norms.map(|norms| &norms.over) {
            Some(NormedOver::Heads(scales)) => (Some(*scales), 0.0),
            Some(NormedOver::Head { epsilon }) => (None, *epsilon),
            None => (None, 0.0),
        };
        let normed = |heads: usize| if scales.is_some() { heads * self.heads.dim } else { self.heads.dim };
        assert!(
            norms.is_none_or(|norms| norms.queries.len() == normed(heads) && norms.keys.len() == normed(paged.kv_heads)),
            "norms are [head_dim], or of all heads"
        );
        assert!(scales.is_none_or(|scales| scales.len() == 2 * rows), "two factors for each row");
        assert_eq!(paged.heads, self.heads, "kernels and memory have the same heads");
        let shape = Shape::new((rows, all_heads.div_ceil(THREADS / 32), 1), THREADS);
        let args = [
            qkv.into(),
            (&mut paged.memory).into(),
            paged.tables.into(),
            places.sequences.into(),
            places.positions.into(),
            optional(rope.angles.map(|(cos, _)| cos)),
            optional(rope.angles.map(|(_, sin)| sin)),
            optional(norms.map(|norms| norms.queries)),
            optional(norms.map(|norms| norms.keys)),
            optional(scales),
            optional(rope.growth),
            epsilon.into(),
            heads.into(),
            paged.kv_heads.into(),
            paged.table_stride.into(),
        ];
        // SAFETY: shapes asserted. The caller's contract: angles, growth and tables cover all positions, and tables name blocks
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

    /// `out = f(gate) * up`, or `out = f(from)` without a gate. from: `[rows, 2, width]`, or `[rows, width]`; out: `[rows, width]`, width a
    /// multiple of 8.
    pub fn activate(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, Bf16>,
        from: &CudaView<'_, Bf16>,
        width: usize,
        function: Activation,
        is_gated: bool,
    ) -> Result<(), CudaError> {
        assert!(width > 0 && width.is_multiple_of(8) && out.len().is_multiple_of(width), "out is [rows, width]");
        assert_eq!(from.len(), out.len() * if is_gated { 2 } else { 1 }, "from is [rows, 2, width], or [rows, width] without a gate");
        if is_gated && function == Activation::Silu {
            return self.swiglu(stream, out, from, width);
        }
        let shape = Shape::new(((width / 8).div_ceil(THREADS), out.len() / width, 1), THREADS);
        let args = [out.into(), from.into(), width.into(), (function as usize).into(), usize::from(is_gated).into()];
        // SAFETY: shapes asserted.
        unsafe { launch(stream, &self.activate, shape, &args) }
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

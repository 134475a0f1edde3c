//! Instruction sets.

use std::fmt;

/// Instruction sets that kernels are compiled for. All give the same bits, but for products with bf16 weights: see [`Bf16Products`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Isa {
    /// [`Avx512Bf16`](Self::Avx512Bf16), and AMX, which multiplies tiles of bf16 at eight times the rate of f32. Linux grants it.
    Amx,
    /// AVX-512 F, BW, VL, DQ, VNNI, and BF16, whose `vdpbf16ps` takes two products at once where weights are bf16. It is available only
    /// if it was found to compute what the others compute. Nothing measures whether it is faster: some processors run it at half
    /// the rate of others, where it gains nothing over [`Avx512`](Self::Avx512) or is the slower, which can be chosen instead.
    Avx512Bf16,
    /// AVX-512 F, BW, VL, DQ.
    Avx512,
    /// AVX2, FMA, F16C.
    Avx2,
    /// NEON of aarch64.
    Neon,
    /// Whatever the compiler's base target has.
    Portable,
}

impl Isa {
    /// Best first.
    pub const ALL: [Isa; 6] = [Isa::Amx, Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];

    /// How products in bf16 are added up.
    pub fn bf16_products(self) -> Bf16Products {
        if self == Isa::Amx { Bf16Products::Blocks } else { Bf16Products::Chain }
    }
}

/// The order in which products in bf16 are added up, with weights or in attention. KV that was computed in one is not mixed with KV of the other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bf16Products {
    /// One by one, in twos of which the odd one comes first.
    Chain,
    /// In blocks of 32 inputs, of which the even and the odd ones are chains of their own: AMX's.
    Blocks,
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Amx => "amx",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        })
    }
}

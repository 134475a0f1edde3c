//! The instruction sets that kernels are compiled for.

use std::fmt;

/// Instruction sets. All give the same bits, except for products of bf16: see [`Bf16Products`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Isa {
    /// [`Avx512Bf16`](Self::Avx512Bf16) and AMX, which multiplies tiles of bf16 at eight times the rate of f32. Linux
    /// only.
    Amx,
    /// AVX-512 F, BW, VL, DQ, VNNI, and BF16, whose `vdpbf16ps` adds two products at once. Available only if a test shows that it computes
    /// the same bits as the others. Its speed is not measured: some processors run it at half rate, on which [`Avx512`](Self::Avx512) is as
    /// fast or faster and can be chosen instead.
    Avx512Bf16,
    /// AVX-512 F, BW, VL, DQ.
    Avx512,
    /// AVX2, FMA, F16C.
    Avx2,
    /// NEON of aarch64.
    Neon,
    /// The compiler's base target.
    Portable,
    /// [`Amx`](Self::Amx) for tests, on processors with AVX2: where there are no tiles, a signal handler executes their instructions,
    /// thousands of times as slowly. It has no name that settings accept.
    EmulatedAmx,
}

impl Isa {
    /// All instruction sets to serve with, best first.
    pub const ALL: [Isa; 6] = [Isa::Amx, Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];

    /// The instruction sets of this machine that tests compare: those to serve with, and emulated tiles.
    pub fn testable() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().chain([Isa::EmulatedAmx]).filter(|isa| isa.is_available())
    }

    /// The order in which products of bf16 are added.
    pub fn bf16_products(self) -> Bf16Products {
        if matches!(self, Isa::Amx | Isa::EmulatedAmx) { Bf16Products::Blocks } else { Bf16Products::Chain }
    }
}

/// The order in which products of bf16 are added, with weights or in attention. KV of one order never mixes with KV of
/// the other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bf16Products {
    /// One chain, in pairs whose odd product comes first.
    Chain,
    /// Blocks of 32 inputs, whose even and odd products are chains of their own: AMX's order.
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
            Isa::EmulatedAmx => "emulated amx",
        })
    }
}

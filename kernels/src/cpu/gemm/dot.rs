//! Sums of 8-bit products for 16 outputs at a time. All units compute the same integers.

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::cpu::gemm::amx;
use crate::cpu::{
    isa::Isa,
    simd::{LANES, Simd, portable},
};

/// Four inputs of 16 outputs, unsigned as `vpdpbusd` requires.
pub(super) type Line = [[u8; 4]; LANES];

/// An instruction set's dot products. A value of an implementing type is the proof that this machine has the
/// instructions.
pub(super) trait Dot: Copy {
    /// 16 sums of 32 bits.
    type Sums: Copy;
    type Weights: Copy;
    type Simd: Simd;
    /// Rows of a tile whose sums fit the registers, with [`LINES`](Self::LINES) lines of weights each.
    const TILE_ROWS: usize;
    /// Lines of weights per step: 1 or 2.
    const LINES: usize;
    /// Rows of a tile whose sums fit the registers twice.
    const GROUPWISE_ROWS: usize;

    /// f32 arithmetic on the same machine.
    fn simd(self) -> Self::Simd;
    fn splat(self, sum: i32) -> Self::Sums;
    fn load(self, line: &Line) -> Self::Weights;
    /// The low and the high halves of each byte.
    fn nibbles(self, line: &Line) -> [Self::Weights; 2];
    /// The entry of `table` for each byte, all of which are below 16.
    fn look_up(self, bytes: Self::Weights, table: &[u8; 16]) -> Self::Weights;
    /// `sums[o] + Σ weights[o][i] * x[i]`, unsigned times signed, without saturation.
    fn add_products(self, sums: Self::Sums, weights: Self::Weights, x: [i8; 4]) -> Self::Sums;
    /// Rounds each sum to the nearest f32.
    fn to_f32(self, sums: Self::Sums) -> <Self::Simd as Simd>::V;
}

/// A computation that is compiled for every unit.
pub(super) trait DotKernel {
    /// Must be `#[inline(always)]`, like everything below it that uses `dot`.
    fn run<D: Dot>(self, dot: D);
}

/// Instruction sets with 8-bit dot products.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum DotUnit {
    /// Tiles for two rows or more, `Avx512Vnni` for one.
    Amx,
    Avx512Vnni,
    AvxVnni,
    Avx2,
    #[default]
    Portable,
    /// As `Amx`, on [`Isa::EmulatedAmx`].
    EmulatedAmx,
}

impl DotUnit {
    /// All units, best first.
    pub(super) const ALL: [DotUnit; 6] =
        [DotUnit::EmulatedAmx, DotUnit::Amx, DotUnit::Avx512Vnni, DotUnit::AvxVnni, DotUnit::Avx2, DotUnit::Portable];

    /// The best unit that this machine has and `isa` includes.
    pub(super) fn of(isa: Isa) -> DotUnit {
        let included = DotUnit::ALL.into_iter().filter(|unit| match unit {
            DotUnit::EmulatedAmx => isa == Isa::EmulatedAmx,
            DotUnit::Amx => isa == Isa::Amx,
            DotUnit::Avx512Vnni => matches!(isa, Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512),
            DotUnit::AvxVnni | DotUnit::Avx2 => isa != Isa::Portable,
            DotUnit::Portable => true,
        });
        included.into_iter().find(|unit| unit.is_available()).expect("portable code is always available")
    }

    /// Whether two rows or more are multiplied on tiles.
    pub(super) fn has_tiles(self) -> bool {
        matches!(self, DotUnit::Amx | DotUnit::EmulatedAmx)
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_available(self) -> bool {
        match self {
            DotUnit::EmulatedAmx => Isa::EmulatedAmx.is_available(),
            #[cfg(target_os = "linux")]
            DotUnit::Amx => DotUnit::Avx512Vnni.is_available() && Isa::Amx.is_available() && amx::has_int8(),
            #[cfg(not(target_os = "linux"))]
            DotUnit::Amx => false,
            DotUnit::Avx512Vnni => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            DotUnit::AvxVnni => Isa::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            DotUnit::Avx2 => Isa::Avx2.is_available(),
            DotUnit::Portable => true,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn is_available(self) -> bool {
        self == DotUnit::Portable
    }

    /// The unit's [`Dot::TILE_ROWS`], or 1 if rows are stored one after the other.
    pub(super) fn tile_rows(self) -> usize {
        match self {
            DotUnit::Amx | DotUnit::EmulatedAmx => 1,
            #[cfg(target_arch = "x86_64")]
            DotUnit::Avx512Vnni => x86::Avx512Vnni::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            DotUnit::AvxVnni => x86::AvxVnni::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            DotUnit::Avx2 => x86::Avx2::TILE_ROWS,
            _ => Portable::TILE_ROWS,
        }
    }

    /// Runs `kernel` on this unit, which must be available.
    pub(super) fn dispatch<K: DotKernel>(self, kernel: K) {
        debug_assert!(self.is_available());
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: units come from `of`, or were found available.
            DotUnit::Amx | DotUnit::Avx512Vnni => unsafe { x86::run_avx512_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            DotUnit::EmulatedAmx if DotUnit::Avx512Vnni.is_available() => DotUnit::Avx512Vnni.dispatch(kernel),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            DotUnit::AvxVnni => unsafe { x86::run_avx_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            DotUnit::Avx2 | DotUnit::EmulatedAmx => unsafe { x86::run_avx2(kernel) },
            _ => kernel.run(Portable),
        }
    }
}

/// The compiler's base target.
#[derive(Clone, Copy)]
struct Portable;

impl Dot for Portable {
    type Sums = [i32; LANES];
    type Weights = Line;
    type Simd = portable::Portable;
    const TILE_ROWS: usize = 2;
    const LINES: usize = 1;
    const GROUPWISE_ROWS: usize = 2;

    #[inline(always)]
    fn simd(self) -> portable::Portable {
        portable::Portable
    }

    #[inline(always)]
    fn splat(self, sum: i32) -> Self::Sums {
        [sum; LANES]
    }

    #[inline(always)]
    fn load(self, line: &Line) -> Line {
        *line
    }

    #[inline(always)]
    fn nibbles(self, line: &Line) -> [Line; 2] {
        [line.map(|bytes| bytes.map(|byte| byte & 0xf)), line.map(|bytes| bytes.map(|byte| byte >> 4))]
    }

    #[inline(always)]
    fn look_up(self, bytes: Line, table: &[u8; 16]) -> Line {
        bytes.map(|bytes| bytes.map(|byte| table[usize::from(byte & 0xf)]))
    }

    #[inline(always)]
    fn add_products(self, mut sums: Self::Sums, weights: Line, x: [i8; 4]) -> Self::Sums {
        let x = x.map(i32::from);
        for (sum, weights) in sums.iter_mut().zip(weights) {
            let products = weights.iter().zip(x).map(|(w, x)| i32::from(*w) * x);
            *sum = sum.wrapping_add(products.sum());
        }
        sums
    }

    #[inline(always)]
    fn to_f32(self, sums: Self::Sums) -> [f32; LANES] {
        sums.map(|sum| sum as f32)
    }
}

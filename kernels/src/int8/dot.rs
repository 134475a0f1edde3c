//! Sums of 8-bit products for 16 outputs at a time. All units compute the same integers.

#[cfg(target_arch = "x86_64")]
mod x86;

use super::weights::{LINE_BYTES, Line};
use crate::{cpu::Isa, simd::LANES};

/// What multiplies and adds. A value of an implementing type is the proof that this machine has the instructions.
pub(super) trait Dot: Copy {
    /// 16 sums of 32 bits.
    type Sums: Copy;
    type Weights: Copy;
    /// Rows of a tile, for which there are registers.
    const ROWS: usize;

    fn splat(self, sum: i32) -> Self::Sums;
    fn load(self, line: &Line) -> Self::Weights;
    /// Asks for what will be read later to be brought near.
    fn prefetch(self, at: *const Line);
    /// `sums[o] + Σ weights[o][i] * x[i]`, unsigned times signed, without saturation.
    fn add_products(self, sums: Self::Sums, weights: Self::Weights, x: [i8; 4]) -> Self::Sums;
    /// `sums[o] as f32 * scales[o] * scale`, from left to right.
    fn scaled(self, sums: Self::Sums, scales: &[f32; LANES], scale: f32) -> [f32; LANES];
}

/// A computation that can be compiled for every unit.
pub(super) trait DotKernel {
    /// Must be `#[inline(always)]`, as everything below it that uses `dot`.
    fn run<D: Dot>(self, dot: D);
}

/// The units there are.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum DotUnit {
    Avx512Vnni,
    AvxVnni,
    Avx2,
    #[default]
    Portable,
}

impl DotUnit {
    pub(super) const ALL: [DotUnit; 4] = [DotUnit::Avx512Vnni, DotUnit::AvxVnni, DotUnit::Avx2, DotUnit::Portable];

    /// The best that this machine has and `isa` includes.
    pub(super) fn of(isa: Isa) -> DotUnit {
        let included = DotUnit::ALL.into_iter().filter(|unit| match unit {
            DotUnit::Avx512Vnni => isa == Isa::Avx512,
            DotUnit::AvxVnni | DotUnit::Avx2 => isa != Isa::Portable,
            DotUnit::Portable => true,
        });
        included.into_iter().find(|unit| unit.is_available()).expect("portable code is always available")
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_available(self) -> bool {
        match self {
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

    pub(super) fn tile_rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            DotUnit::Avx512Vnni => x86::Avx512Vnni::ROWS,
            #[cfg(target_arch = "x86_64")]
            DotUnit::AvxVnni => x86::AvxVnni::ROWS,
            #[cfg(target_arch = "x86_64")]
            DotUnit::Avx2 => x86::Avx2::ROWS,
            _ => Portable::ROWS,
        }
    }

    /// Runs `kernel` on this unit, which must be available.
    pub(super) fn dispatch<K: DotKernel>(self, kernel: K) {
        debug_assert!(self.is_available());
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: units are taken from `of` or found available.
            DotUnit::Avx512Vnni => unsafe { x86::run_avx512_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            DotUnit::AvxVnni => unsafe { x86::run_avx_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            DotUnit::Avx2 => unsafe { x86::run_avx2(kernel) },
            _ => kernel.run(Portable),
        }
    }
}

/// Whatever the compiler's base target has.
#[derive(Clone, Copy)]
struct Portable;

impl Dot for Portable {
    type Sums = [i32; LANES];
    type Weights = [u8; LINE_BYTES];
    const ROWS: usize = 2;

    #[inline(always)]
    fn splat(self, sum: i32) -> Self::Sums {
        [sum; LANES]
    }

    #[inline(always)]
    fn load(self, line: &Line) -> Self::Weights {
        line.0
    }

    #[inline(always)]
    fn prefetch(self, _: *const Line) {}

    #[inline(always)]
    fn add_products(self, mut sums: Self::Sums, weights: Self::Weights, x: [i8; 4]) -> Self::Sums {
        let x = x.map(i32::from);
        for (sum, weights) in sums.iter_mut().zip(weights.as_chunks::<4>().0) {
            let products = weights.iter().zip(x).map(|(w, x)| i32::from(*w) * x);
            *sum = sum.wrapping_add(products.sum());
        }
        sums
    }

    #[inline(always)]
    fn scaled(self, sums: Self::Sums, scales: &[f32; LANES], scale: f32) -> [f32; LANES] {
        let mut y = [0.0; LANES];
        for (y, (sum, weight_scale)) in y.iter_mut().zip(sums.iter().zip(scales)) {
            *y = *sum as f32 * weight_scale * scale;
        }
        y
    }
}

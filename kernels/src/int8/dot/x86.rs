//! `vpdpbusd` on 512 and 256 bits, and multiplications of 16-bit pairs where there is neither.

use super::{Dot, DotKernel, Line};
use crate::simd::LANES;
use std::arch::x86_64::*;

/// Proof of AVX-512 VNNI: made only by [`run_avx512_vnni`].
#[derive(Clone, Copy)]
pub(in crate::int8) struct Avx512Vnni(());

/// Proof of AVX-VNNI: made only by [`run_avx_vnni`].
#[derive(Clone, Copy)]
pub(in crate::int8) struct AvxVnni(());

/// Proof of AVX2: made only by [`run_avx2`].
#[derive(Clone, Copy)]
pub(in crate::int8) struct Avx2(());

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")]
pub(super) fn run_avx512_vnni<K: DotKernel>(kernel: K) {
    kernel.run(Avx512Vnni(()));
}

#[target_feature(enable = "avx2,fma,avxvnni")]
pub(super) fn run_avx_vnni<K: DotKernel>(kernel: K) {
    kernel.run(AvxVnni(()));
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn run_avx2<K: DotKernel>(kernel: K) {
    kernel.run(Avx2(()));
}

/// An expression of intrinsics inside a method of a unit.
macro_rules! intrinsics {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where its instructions are enabled; pointers come from references to arrays of the full width,
        // but for those that are only prefetched, which no address can harm.
        unsafe { $($body)* }
    };
}

impl Dot for Avx512Vnni {
    type Sums = __m512i;
    type Weights = __m512i;
    const ROWS: usize = 12;

    #[inline(always)]
    fn splat(self, sum: i32) -> __m512i {
        intrinsics!(_mm512_set1_epi32(sum))
    }

    #[inline(always)]
    fn load(self, line: &Line) -> __m512i {
        intrinsics!(_mm512_loadu_si512(line.0.as_ptr().cast()))
    }

    #[inline(always)]
    fn prefetch(self, at: *const Line) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T1>(at.cast()))
    }

    #[inline(always)]
    fn add_products(self, sums: __m512i, weights: __m512i, x: [i8; 4]) -> __m512i {
        intrinsics!(_mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(word(x))))
    }

    #[inline(always)]
    fn scaled(self, sums: __m512i, scales: &[f32; LANES], scale: f32) -> [f32; LANES] {
        let mut y = [0.0; LANES];
        intrinsics! {
            let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_loadu_ps(scales.as_ptr()));
            _mm512_storeu_ps(y.as_mut_ptr(), _mm512_mul_ps(scaled, _mm512_set1_ps(scale)));
        }
        y
    }
}

/// Outputs 0 to 7 and 8 to 15.
type Halves = [__m256i; 2];

/// What [`AvxVnni`] and [`Avx2`] share.
macro_rules! halves {
    () => {
        type Sums = Halves;
        type Weights = Halves;
        const ROWS: usize = 4;

        #[inline(always)]
        fn splat(self, sum: i32) -> Halves {
            intrinsics!([_mm256_set1_epi32(sum); 2])
        }

        #[inline(always)]
        fn load(self, line: &Line) -> Halves {
            let (halves, _) = line.0.as_chunks::<32>();
            intrinsics!([_mm256_loadu_si256(halves[0].as_ptr().cast()), _mm256_loadu_si256(halves[1].as_ptr().cast())])
        }

        #[inline(always)]
        fn prefetch(self, at: *const Line) {
            intrinsics!(_mm_prefetch::<_MM_HINT_T1>(at.cast()))
        }

        #[inline(always)]
        fn scaled(self, sums: Halves, scales: &[f32; LANES], scale: f32) -> [f32; LANES] {
            let mut y = [0.0; LANES];
            let (scales, _) = scales.as_chunks::<8>();
            for ((y, scales), sums) in y.as_chunks_mut::<8>().0.iter_mut().zip(scales).zip(sums) {
                intrinsics! {
                    let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_loadu_ps(scales.as_ptr()));
                    _mm256_storeu_ps(y.as_mut_ptr(), _mm256_mul_ps(scaled, _mm256_set1_ps(scale)));
                }
            }
            y
        }
    };
}

impl Dot for AvxVnni {
    halves!();

    #[inline(always)]
    fn add_products(self, sums: Halves, weights: Halves, x: [i8; 4]) -> Halves {
        intrinsics! {
            let x = _mm256_set1_epi32(word(x));
            [_mm256_dpbusd_avx_epi32(sums[0], weights[0], x), _mm256_dpbusd_avx_epi32(sums[1], weights[1], x)]
        }
    }
}

impl Dot for Avx2 {
    halves!();

    /// Inputs 0 and 2 of an output as a pair of 16-bit numbers, then 1 and 3: `vpmaddubsw`, which would take four at once, saturates.
    #[inline(always)]
    fn add_products(self, sums: Halves, weights: Halves, x: [i8; 4]) -> Halves {
        intrinsics! {
            let x = _mm256_set1_epi32(word(x));
            let (x_even, x_odd) = (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x));
            let low = _mm256_set1_epi16(0xff);
            let mut result = sums;
            for (sums, weights) in result.iter_mut().zip(weights) {
                let even = _mm256_madd_epi16(_mm256_and_si256(weights, low), x_even);
                let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(weights), x_odd);
                *sums = _mm256_add_epi32(*sums, _mm256_add_epi32(even, odd));
            }
            result
        }
    }
}

#[inline(always)]
fn word(x: [i8; 4]) -> i32 {
    i32::from_ne_bytes(x.map(|x| x as u8))
}

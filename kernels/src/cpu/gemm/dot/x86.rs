//! `vpdpbusd` on 512 and 256 bits; without it, multiplications of 16-bit pairs.

use super::{Dot, DotKernel, Line};
use crate::cpu::simd::{avx2, avx512::Avx512};
use std::arch::x86_64::*;

/// Proof of AVX-512 VNNI; only [`run_avx512_vnni`] makes one.
#[derive(Clone, Copy)]
pub(super) struct Avx512Vnni(Avx512);

/// Proof of AVX-VNNI; only [`run_avx_vnni`] makes one.
#[derive(Clone, Copy)]
pub(super) struct AvxVnni(avx2::Avx2);

/// Proof of AVX2; only [`run_avx2`] makes one.
#[derive(Clone, Copy)]
pub(super) struct Avx2(avx2::Avx2);

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn run_avx512_vnni<K: DotKernel>(kernel: K) {
    // SAFETY: enabled for this function.
    kernel.run(Avx512Vnni(unsafe { Avx512::enabled() }));
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) fn run_avx_vnni<K: DotKernel>(kernel: K) {
    // SAFETY: enabled for this function.
    kernel.run(AvxVnni(unsafe { avx2::Avx2::enabled() }));
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn run_avx2<K: DotKernel>(kernel: K) {
    // SAFETY: enabled for this function.
    kernel.run(Avx2(unsafe { avx2::Avx2::enabled() }));
}

/// An expression of intrinsics inside a method of a unit.
macro_rules! intrinsics {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where its instructions are enabled; pointers come from references to arrays of the
        // full width.
        unsafe { $($body)* }
    };
}

impl Dot for Avx512Vnni {
    type Sums = __m512i;
    type Weights = __m512i;
    type Simd = Avx512;
    const TILE_ROWS: usize = 12;
    const LINES: usize = 2;
    const GROUPWISE_ROWS: usize = 6;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    fn splat(self, sum: i32) -> __m512i {
        intrinsics!(_mm512_set1_epi32(sum))
    }

    #[inline(always)]
    fn load(self, line: &Line) -> __m512i {
        intrinsics!(_mm512_loadu_si512(line.as_ptr().cast()))
    }

    #[inline(always)]
    fn nibbles(self, line: &Line) -> [__m512i; 2] {
        intrinsics! {
            let (bytes, low) = (self.load(line), _mm512_set1_epi8(0xf));
            [_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low)]
        }
    }

    #[inline(always)]
    fn look_up(self, bytes: __m512i, table: &[u8; 16]) -> __m512i {
        intrinsics!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), bytes))
    }

    #[inline(always)]
    fn add_products(self, sums: __m512i, weights: __m512i, x: [i8; 4]) -> __m512i {
        intrinsics!(_mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(word(x))))
    }

    #[inline(always)]
    fn to_f32(self, sums: __m512i) -> __m512 {
        intrinsics!(_mm512_cvtepi32_ps(sums))
    }
}

/// Outputs 0 to 7 and 8 to 15.
type Halves = [__m256i; 2];

/// The items that [`AvxVnni`] and [`Avx2`] share.
macro_rules! halves {
    () => {
        type Sums = Halves;
        type Weights = Halves;
        type Simd = avx2::Avx2;
        const TILE_ROWS: usize = 4;
        const LINES: usize = 1;
        const GROUPWISE_ROWS: usize = 2;

        #[inline(always)]
        fn simd(self) -> avx2::Avx2 {
            self.0
        }

        #[inline(always)]
        fn splat(self, sum: i32) -> Halves {
            intrinsics!([_mm256_set1_epi32(sum); 2])
        }

        #[inline(always)]
        fn load(self, line: &Line) -> Halves {
            let (low, high) = line.split_at(8);
            intrinsics!([_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())])
        }

        #[inline(always)]
        fn nibbles(self, line: &Line) -> [Halves; 2] {
            intrinsics! {
                let ([a, b], low) = (self.load(line), _mm256_set1_epi8(0xf));
                let high = [_mm256_srli_epi16::<4>(a), _mm256_srli_epi16::<4>(b)];
                [[_mm256_and_si256(a, low), _mm256_and_si256(b, low)], [_mm256_and_si256(high[0], low), _mm256_and_si256(high[1], low)]]
            }
        }

        #[inline(always)]
        fn look_up(self, [a, b]: Halves, table: &[u8; 16]) -> Halves {
            intrinsics! {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                [_mm256_shuffle_epi8(table, a), _mm256_shuffle_epi8(table, b)]
            }
        }

        #[inline(always)]
        fn to_f32(self, sums: Halves) -> [__m256; 2] {
            intrinsics!([_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])])
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

    /// Inputs 0 and 2 of an output as a pair of 16-bit numbers, then 1 and 3: `vpmaddubsw` would take all four at once,
    /// but saturates.
    #[inline(always)]
    fn add_products(self, mut sums: Halves, weights: Halves, x: [i8; 4]) -> Halves {
        intrinsics! {
            let x = _mm256_set1_epi32(word(x));
            let (x_even, x_odd) = (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x));
            for (sums, weights) in sums.iter_mut().zip(weights) {
                let even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(0xff)), x_even);
                let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(weights), x_odd);
                *sums = _mm256_add_epi32(*sums, _mm256_add_epi32(even, odd));
            }
        }
        sums
    }
}

#[inline(always)]
fn word(x: [i8; 4]) -> i32 {
    i32::from_ne_bytes(x.map(|x| x as u8))
}

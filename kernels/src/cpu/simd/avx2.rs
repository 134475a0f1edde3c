//! The 16 lanes as two 256-bit registers: lanes 0 to 7 and 8 to 15.

use super::{Kernel, LANES, Simd};
use std::arch::x86_64::*;

/// Proof of AVX2, FMA and F16C; only [`run`] and [`enabled`](Self::enabled) make one.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// AVX2, FMA and F16C must be enabled where it is used.
    #[inline(always)]
    pub(crate) unsafe fn enabled() -> Self {
        Self(())
    }
}

/// Whether this machine has AVX2, FMA and F16C.
pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Runs `kernel` with AVX2, FMA and F16C enabled.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

/// An expression of intrinsics inside a method of [`Avx2`].
macro_rules! intrinsics {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where AVX2, FMA and F16C are enabled, and pointers come from references to arrays
        // of the full width.
        unsafe { $($body)* }
    };
}

type V = [__m256; 2];

/// Eight bf16 to f32.
#[inline(always)]
fn bf16x8(_: Avx2, x: &[u8; 16]) -> __m256 {
    intrinsics!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast())))))
}

/// Eight pairs of 8-bit integers to 16 bits.
#[inline(always)]
fn i8_pairs_x8(_: Avx2, x: &[u8; 16]) -> __m256 {
    intrinsics!(_mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_loadu_si128(x.as_ptr().cast()))))
}

/// [`Simd::add_i16_products`] of eight lanes.
#[inline(always)]
fn add_i16_products_x8(_: Avx2, a: __m256, b: __m256, sum: __m256) -> __m256 {
    intrinsics! {
        let products = _mm256_madd_epi16(_mm256_castps_si256(a), _mm256_castps_si256(b));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), products))
    }
}

/// The even numbers of 16 bf16, as f32.
#[inline(always)]
fn bf16_even_x8(_: Avx2, x: &[u8; 32]) -> __m256 {
    intrinsics!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_loadu_si256(x.as_ptr().cast()))))
}

/// The odd numbers of 16 bf16, as f32.
#[inline(always)]
fn bf16_odd_x8(_: Avx2, x: &[u8; 32]) -> __m256 {
    intrinsics! {
        let high_halves = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(x.as_ptr().cast()), high_halves))
    }
}

/// Eight f32, rounded to bf16, as the low halves of 32-bit lanes.
#[inline(always)]
fn to_bf16x8(_: Avx2, v: __m256) -> __m256i {
    intrinsics! {
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))))
    }
}

/// As [`to_bf16x8`], with NaN kept and denormals flushed to zero.
#[inline(always)]
fn normal_bf16x8(simd: Avx2, v: __m256) -> __m256i {
    let nearest = to_bf16x8(simd, v);
    intrinsics! {
        let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(v));
        let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x0040));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let rounded = _mm256_blendv_epi8(nearest, quiet, is_nan);
        let is_flushed = _mm256_cmpeq_epi32(_mm256_and_si256(high, _mm256_set1_epi32(0x7f80)), _mm256_setzero_si256());
        _mm256_blendv_epi8(rounded, _mm256_and_si256(high, _mm256_set1_epi32(0x8000)), is_flushed)
    }
}

/// [`Simd::exp2_of_shifted`] of eight lanes.
#[inline(always)]
fn exp2_of_shifted_x8(_: Avx2, v: __m256) -> __m256 {
    intrinsics!(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32::<23>(_mm256_castps_si256(v)), _mm256_set1_epi32(0x3f80_0000))))
}

/// Both halves of 32 bytes.
#[inline(always)]
fn halves(x: &[u8; 32]) -> (&[u8; 16], &[u8; 16]) {
    let (halves, _) = x.as_chunks::<16>();
    (&halves[0], &halves[1])
}

impl Simd for Avx2 {
    type V = V;

    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` exists only where AVX2, FMA and F16C are enabled.
        unsafe { run(kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        intrinsics!([_mm256_set1_ps(x); 2])
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        intrinsics!([_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))])
    }

    #[inline(always)]
    fn store(self, v: V, to: &mut [f32; LANES]) {
        intrinsics! {
            _mm256_storeu_ps(to.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), v[1]);
        }
    }

    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> V {
        intrinsics!([_mm256_loadu_ps(x.as_ptr().cast()), _mm256_loadu_ps(x.as_ptr().add(32).cast())])
    }

    #[inline(always)]
    fn load_f16_bytes(self, x: &[u8; 32]) -> V {
        let (lo, hi) = halves(x);
        intrinsics!([_mm256_cvtph_ps(_mm_loadu_si128(lo.as_ptr().cast())), _mm256_cvtph_ps(_mm_loadu_si128(hi.as_ptr().cast()))])
    }

    #[inline(always)]
    fn load_bf16_bytes(self, x: &[u8; 32]) -> V {
        let (lo, hi) = halves(x);
        [bf16x8(self, lo), bf16x8(self, hi)]
    }

    #[inline(always)]
    fn load_bf16_even(self, x: &[u8; 64]) -> V {
        let (halves, _) = x.as_chunks();
        [bf16_even_x8(self, &halves[0]), bf16_even_x8(self, &halves[1])]
    }

    #[inline(always)]
    fn load_bf16_odd(self, x: &[u8; 64]) -> V {
        let (halves, _) = x.as_chunks();
        [bf16_odd_x8(self, &halves[0]), bf16_odd_x8(self, &halves[1])]
    }

    #[inline(always)]
    fn load_i8_pairs(self, pairs: &[u8; 32]) -> V {
        let (low, high) = halves(pairs);
        [i8_pairs_x8(self, low), i8_pairs_x8(self, high)]
    }

    #[inline(always)]
    fn to_i16_pairs(self, v: V) -> [u32; LANES / 2] {
        let mut pairs = [0; LANES / 2];
        // As in `to_bf16_pairs`.
        intrinsics!(_mm256_storeu_si256(
            pairs.as_mut_ptr().cast(),
            _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1])))
        ));
        pairs
    }

    #[inline(always)]
    fn add_i16_products(self, a: V, b: V, sum: V) -> V {
        [add_i16_products_x8(self, a[0], b[0], sum[0]), add_i16_products_x8(self, a[1], b[1], sum[1])]
    }

    #[inline(always)]
    fn i32_to_f32(self, integers: V) -> V {
        intrinsics!([_mm256_cvtepi32_ps(_mm256_castps_si256(integers[0])), _mm256_cvtepi32_ps(_mm256_castps_si256(integers[1]))])
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T1>(address.cast()))
    }

    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T0>(address.cast()))
    }

    #[inline(always)]
    fn store_f32_bytes(self, v: V, to: &mut [u8; 64]) {
        intrinsics! {
            _mm256_storeu_ps(to.as_mut_ptr().cast(), v[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(32).cast(), v[1]);
        }
    }

    #[inline(always)]
    fn store_f16_bytes(self, v: V, to: &mut [u8; 32]) {
        intrinsics! {
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(to.as_mut_ptr().add(16).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        }
    }

    #[inline(always)]
    fn to_bf16_pairs(self, v: V) -> [u32; LANES / 2] {
        let (low, high) = (normal_bf16x8(self, v[0]), normal_bf16x8(self, v[1]));
        let mut pairs = [0; LANES / 2];
        // The pack works within 128-bit halves, so the middle quarters are swapped afterwards.
        intrinsics!(_mm256_storeu_si256(
            pairs.as_mut_ptr().cast(),
            _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))
        ));
        pairs
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        intrinsics!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        intrinsics!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        intrinsics!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        intrinsics!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        intrinsics!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        intrinsics!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        intrinsics!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn select_less(self, x: V, limit: V, a: V, b: V) -> V {
        intrinsics! {
            let less = [_mm256_cmp_ps::<_CMP_LT_OQ>(x[0], limit[0]), _mm256_cmp_ps::<_CMP_LT_OQ>(x[1], limit[1])];
            [_mm256_blendv_ps(b[0], a[0], less[0]), _mm256_blendv_ps(b[1], a[1], less[1])]
        }
    }

    #[inline(always)]
    fn exp2_of_shifted(self, v: V) -> V {
        [exp2_of_shifted_x8(self, v[0]), exp2_of_shifted_x8(self, v[1])]
    }

    #[inline(always)]
    fn swap_lanes<const STRIDE: usize>(self, [low, high]: V) -> V {
        intrinsics! {
            match STRIDE {
                1 => [_mm256_permute_ps::<0b10_11_00_01>(low), _mm256_permute_ps::<0b10_11_00_01>(high)],
                2 => [_mm256_permute_ps::<0b01_00_11_10>(low), _mm256_permute_ps::<0b01_00_11_10>(high)],
                4 => [_mm256_permute2f128_ps::<1>(low, low), _mm256_permute2f128_ps::<1>(high, high)],
                _ => [high, low],
            }
        }
    }

    #[inline(always)]
    fn max_lane(self, v: V) -> f32 {
        intrinsics! {
            let v = _mm256_max_ps(v[0], v[1]);
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        intrinsics! {
            let v = _mm256_add_ps(v[0], v[1]);
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
}

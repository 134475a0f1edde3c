//! The 16 lanes as one 512-bit register.

use super::{Kernel, LANES, Simd, avx2};
use std::arch::x86_64::*;

/// Proof of AVX-512 F, and of AVX-512 BF16 and VNNI if `PAIRS`; only [`run`], [`run_pairs`] and
/// [`enabled`](Self::enabled) make one.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const PAIRS: bool = false>(());

impl Avx512 {
    /// # Safety
    /// AVX-512 F, BW, VL and DQ must be enabled where it is used.
    #[inline(always)]
    pub(crate) unsafe fn enabled() -> Self {
        Self(())
    }
}

/// Whether this machine has AVX-512 F, BW, VL and DQ, and the instructions that [`avx2`] needs.
pub(crate) fn is_available() -> bool {
    avx2::is_available()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
}

/// Runs `kernel` with AVX-512 enabled.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<false>(()))
}

/// Runs `kernel` with AVX-512 and its instructions for pairs of 16 bits enabled.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c")]
pub(crate) fn run_pairs<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<true>(()))
}

/// An expression of intrinsics inside a method of [`Avx512`].
macro_rules! intrinsics {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where AVX-512 is enabled, and pointers come from references to arrays of the full
        // width.
        unsafe { $($body)* }
    };
}

impl<const PAIRS: bool> Simd for Avx512<PAIRS> {
    type V = __m512;

    const TILE_ROWS: usize = 12;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` exists only where AVX-512 is enabled, with instructions for pairs if `PAIRS`.
        unsafe { if PAIRS { run_pairs(kernel) } else { run(kernel) } }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        intrinsics!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> __m512 {
        intrinsics!(_mm512_loadu_ps(x.as_ptr()))
    }

    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32; LANES]) {
        intrinsics!(_mm512_storeu_ps(to.as_mut_ptr(), v))
    }

    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> __m512 {
        intrinsics!(_mm512_loadu_ps(x.as_ptr().cast()))
    }

    #[inline(always)]
    fn load_f16_bytes(self, x: &[u8; 32]) -> __m512 {
        intrinsics!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16_bytes(self, x: &[u8; 32]) -> __m512 {
        intrinsics!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast())))))
    }

    #[inline(always)]
    fn load_bf16_even(self, x: &[u8; 64]) -> __m512 {
        intrinsics!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_loadu_si512(x.as_ptr().cast()))))
    }

    #[inline(always)]
    fn load_bf16_odd(self, x: &[u8; 64]) -> __m512 {
        intrinsics! {
            let high_halves = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(x.as_ptr().cast()), high_halves))
        }
    }

    const BF16_STEPS: usize = if PAIRS { 1 } else { 2 };

    #[inline(always)]
    fn load_bf16_pairs<const STEP: usize>(self, pairs: &[u8; 64]) -> __m512 {
        match (PAIRS, STEP) {
            (true, _) => self.load_f32_bytes(pairs),
            (false, 0) => self.load_bf16_odd(pairs),
            (false, _) => self.load_bf16_even(pairs),
        }
    }

    #[inline(always)]
    fn splat_bf16_pair<const STEP: usize>(self, pair: u32) -> __m512 {
        self.splat(f32::from_bits(match (PAIRS, STEP) {
            (true, _) => pair,
            (false, 0) => pair & 0xffff_0000,
            (false, _) => pair << 16,
        }))
    }

    #[inline(always)]
    fn add_bf16_products(self, a: __m512, b: __m512, sum: __m512) -> __m512 {
        if PAIRS {
            // SAFETY: a register of pairs is a register of bf16; `self` exists only where the instruction is enabled.
            intrinsics!(_mm512_dpbf16_ps(sum, std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b)))
        } else {
            self.fma(a, b, sum)
        }
    }

    #[inline(always)]
    fn load_i8_pairs(self, pairs: &[u8; 32]) -> __m512 {
        intrinsics!(_mm512_castsi512_ps(_mm512_cvtepi8_epi16(_mm256_loadu_si256(pairs.as_ptr().cast()))))
    }

    #[inline(always)]
    fn to_i16_pairs(self, v: __m512) -> [u32; LANES / 2] {
        let mut pairs = [0; LANES / 2];
        intrinsics!(_mm256_storeu_si256(pairs.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v))));
        pairs
    }

    #[inline(always)]
    fn add_i16_products(self, a: __m512, b: __m512, sum: __m512) -> __m512 {
        intrinsics! {
            let (a, b, sum) = (_mm512_castps_si512(a), _mm512_castps_si512(b), _mm512_castps_si512(sum));
            _mm512_castsi512_ps(if PAIRS { _mm512_dpwssd_epi32(sum, a, b) } else { _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)) })
        }
    }

    #[inline(always)]
    fn i32_to_f32(self, integers: __m512) -> __m512 {
        intrinsics!(_mm512_cvtepi32_ps(_mm512_castps_si512(integers)))
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
    fn store_f32_bytes(self, v: __m512, to: &mut [u8; 64]) {
        intrinsics!(_mm512_storeu_ps(to.as_mut_ptr().cast(), v))
    }

    #[inline(always)]
    fn store_f16_bytes(self, v: __m512, to: &mut [u8; 32]) {
        intrinsics!(_mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }

    #[inline(always)]
    fn to_bf16_pairs(self, v: __m512) -> [u32; LANES / 2] {
        let mut pairs = [0; LANES / 2];
        intrinsics! {
            let rounded = if PAIRS {
                // SAFETY: both types are 256 bits wide.
                std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v))
            } else {
                let bits = _mm512_castps_si512(v);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
                let rounded = _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v), quiet);
                let is_normal = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7f80_0000));
                let sign = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MIN));
                _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(sign, is_normal, rounded)))
            };
            _mm256_storeu_si256(pairs.as_mut_ptr().cast(), rounded);
        }
        pairs
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsics!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn select_less(self, x: __m512, limit: __m512, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_mask_mov_ps(b, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, limit), a))
    }

    #[inline(always)]
    fn exp2_of_shifted(self, v: __m512) -> __m512 {
        intrinsics!(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32::<23>(_mm512_castps_si512(v)), _mm512_set1_epi32(0x3f80_0000))))
    }

    #[inline(always)]
    fn swap_lanes<const STRIDE: usize>(self, v: __m512) -> __m512 {
        intrinsics! {
            match STRIDE {
                1 => _mm512_permute_ps::<0b10_11_00_01>(v),
                2 => _mm512_permute_ps::<0b01_00_11_10>(v),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v),
            }
        }
    }

    #[inline(always)]
    fn max_lane(self, v: __m512) -> f32 {
        intrinsics!(_mm512_reduce_max_ps(v))
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        intrinsics! {
            let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
}

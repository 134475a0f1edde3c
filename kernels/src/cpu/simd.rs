//! The virtual machine that all kernels are written for: vectors of 16 f32 lanes.
//!
//! [`Simd`] is a set of operations; a value of an implementing type is the proof that this machine has them. A kernel
//! is a value that can [`run`](Kernel::run) on any of them; [`Isa::dispatch`](crate::cpu::Isa::dispatch) compiles it
//! once per instruction set, inside a function with that instruction set enabled, so that everything marked
//! `inline(always)` below it uses it. Closures cannot be marked, and one that is not inlined loses the instruction set:
//! kernels use no closures on vectors.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;
#[cfg(target_arch = "x86_64")]
pub(crate) mod proof;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Operations on vectors of 16 f32 lanes. Every implementation gives the same bits.
pub(crate) trait Simd: Copy + Send + Sync {
    type V: Copy;

    /// Rows of a tile whose sums, with [`TILE_VECTORS`](Self::TILE_VECTORS) vectors of weights each, fit the registers.
    const TILE_ROWS: usize;
    /// Vectors of weights per row: 1 or 2.
    const TILE_VECTORS: usize;

    /// Runs `kernel` as a function of its own, for inner loops of many sizes: inlining them all into one function would take the compiler
    /// minutes.
    fn call<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, x: &[f32; LANES]) -> Self::V;
    fn store(self, v: Self::V, to: &mut [f32; LANES]);

    fn load_f32_bytes(self, x: &[u8; 64]) -> Self::V;
    fn load_f16_bytes(self, x: &[u8; 32]) -> Self::V;
    fn load_bf16_bytes(self, x: &[u8; 32]) -> Self::V;
    /// The even or the odd ones of 32 bf16.
    fn load_bf16_even(self, x: &[u8; 64]) -> Self::V;
    fn load_bf16_odd(self, x: &[u8; 64]) -> Self::V;

    /// Steps that add products of bf16 pairs: 2 if each pair's odd product is added before the even one, by fused multiply-adds; 1 if one
    /// instruction does both. Then vectors of pairs are meaningless as f32.
    const BF16_STEPS: usize = 2;

    /// The right operand of step `STEP`, from 16 pairs.
    #[inline(always)]
    fn load_bf16_pairs<const STEP: usize>(self, pairs: &[u8; 64]) -> Self::V {
        if STEP == 0 { self.load_bf16_odd(pairs) } else { self.load_bf16_even(pairs) }
    }

    /// The left operand of step `STEP`: one pair in all lanes. The even number is in the low half.
    #[inline(always)]
    fn splat_bf16_pair<const STEP: usize>(self, pair: u32) -> Self::V {
        self.splat(f32::from_bits(if STEP == 0 { pair & 0xffff_0000 } else { pair << 16 }))
    }

    /// Adds the products of one step to `sum`.
    #[inline(always)]
    fn add_bf16_products(self, a: Self::V, b: Self::V, sum: Self::V) -> Self::V {
        self.fma(a, b, sum)
    }

    /// 16 pairs of 8-bit integers as pairs of 16 bits, the first in the low half; meaningless as f32.
    fn load_i8_pairs(self, pairs: &[u8; 32]) -> Self::V;

    /// The lanes, rounded to nearest, ties to even, as pairs of 16-bit integers. They are within ±32,767.
    fn to_i16_pairs(self, v: Self::V) -> [u32; LANES / 2];

    /// In each 32-bit lane, `sum` plus the two products of two pairs of 16 bits: integers that wrap around.
    fn add_i16_products(self, a: Self::V, b: Self::V, sum: Self::V) -> Self::V;

    /// 32-bit integers to the nearest f32, ties to even.
    fn i32_to_f32(self, integers: Self::V) -> Self::V;

    fn store_f32_bytes(self, v: Self::V, to: &mut [u8; 64]);
    /// Rounds to nearest, ties to even.
    fn store_f16_bytes(self, v: Self::V, to: &mut [u8; 32]);

    /// The lanes as [`bf16::pair`](crate::cpu::bf16::pair)s.
    fn to_bf16_pairs(self, v: Self::V) -> [u32; LANES / 2];

    /// The lanes, rounded as by [`bf16::round`](crate::cpu::bf16::round).
    #[inline(always)]
    fn round_to_bf16(self, v: Self::V) -> Self::V {
        let pairs = self.to_bf16_pairs(v).map(u32::to_le_bytes);
        self.load_bf16_bytes(pairs.as_flattened().as_array().expect("two bytes for each lane"))
    }

    /// Prefetches the cache line at `address`, which may be anywhere, into the second-level cache.
    ///
    /// For kernels bound by memory: a core has more lines in flight to its second-level cache than to its first (Zen 4,
    /// two threads: scattered pieces of 2 KiB arrive at 20 GB/s in the first, at 31 to 40 in the second).
    #[inline(always)]
    fn prefetch(self, _address: *const u8) {}

    /// Prefetches into the first-level cache, for kernels bound by arithmetic.
    #[inline(always)]
    fn prefetch_near(self, _address: *const u8) {}

    /// Prefetches for writing: takes the line from other cores.
    #[inline(always)]
    fn prefetch_to_write<T>(self, _address: *const T) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, harmless at any address; every 64-bit processor executes it or ignores it.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) _address, options(nostack, preserves_flags))
        };
    }

    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`, so `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { a } else { b }`, so `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if x < limit { a } else { b }`.
    fn select_less(self, x: Self::V, limit: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// `2^n` where `v` holds `1.5 * 2^23 + n` and `-126 <= n <= 127`, 0 where `n` is -127: shifts the low bits of the
    /// mantissa into the exponent.
    fn exp2_of_shifted(self, v: Self::V) -> Self::V;

    /// Sets each lane `i` from lane `i ^ STRIDE`. `STRIDE` is 1, 2, 4 or 8.
    fn swap_lanes<const STRIDE: usize>(self, v: Self::V) -> Self::V;

    /// The largest lane. Unspecified if one is NaN.
    fn max_lane(self, v: Self::V) -> f32;

    /// Sum of the lanes: lane `i` with lane `i + 8`, then `+ 4`, `+ 2`, `+ 1`.
    fn sum(self, v: Self::V) -> f32;

    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(0.0)
    }

    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut a = [0.0; LANES];
        self.store(v, &mut a);
        a
    }

    /// Stores as many lanes as `to` has, at most 16; with `add`, adds them to the present numbers.
    #[inline(always)]
    fn store_part(self, v: Self::V, to: &mut [f32], add: bool) {
        match <&mut [f32; LANES]>::try_from(&mut *to) {
            Ok(to) if add => self.store(self.add(self.load(to), v), to),
            Ok(to) => self.store(v, to),
            Err(_) => {
                for (to, v) in to.iter_mut().zip(self.to_array(v)) {
                    *to = if add { *to + v } else { v };
                }
            }
        }
    }
}

/// A computation that is compiled for every instruction set.
pub(crate) trait Kernel {
    type Output;
    /// Must be `#[inline(always)]`, like everything below it that uses `simd`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

//! Products of bf16, and of 8-bit integers, on tiles: Intel's Advanced Matrix Extensions.
//!
//! **The arithmetic** of integers is exact. That of bf16 is that of `TDPBF16PS` (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2): inputs are cut at
//! multiples of 32. Of each 32, the products of the even inputs are a chain of fused multiply-adds from 0, and so are those of the odd
//! ones; then the two are added to each other, and that to the sum. It is not what `vdpbf16ps` computes, and neither can be had from
//! the other at a tolerable rate: so it is an arithmetic of its own, with a layout fingerprint of its own.
//!
//! Each process tries it before it relies on it. The system grants the state of tiles to processes that ask (`arch_prctl`).

use crate::{
    dtype::Bf16,
    lines::Lines,
    simd::{Kernel, Simd},
    tile::{Ahead, PANEL},
};
use nix::libc;
use std::{arch::asm, arch::x86_64::__cpuid_count, marker::PhantomData, sync::LazyLock};

/// Rows of a tile, and lines of weights: pairs of inputs in bf16, fours of integers.
pub(crate) const TILE: usize = 16;

/// 32 outputs of a word of inputs: half a tile's width each.
type Line = <Bf16 as Lines>::Line;

/// Whether this process may use tiles, and they compute what is stated above. Asks and tries once, which takes microseconds.
pub(crate) fn is_available() -> bool {
    static ANSWER: LazyLock<bool> = LazyLock::new(|| has_instructions() && is_granted() && is_exact());
    *ANSWER
}

/// Whether tiles also multiply integers, where they are [available](is_available).
pub(crate) fn has_int8() -> bool {
    has(AMX_INT8)
}

fn has_instructions() -> bool {
    has(AMX_BF16) && has(AMX_TILE)
}

fn has(bit: u32) -> bool {
    __cpuid_count(7, 0).edx >> bit & 1 == 1
}

const AMX_BF16: u32 = 22;
const AMX_TILE: u32 = 24;
const AMX_INT8: u32 = 25;

/// Asks the system for this process's permission. There is none where it does not know of tiles.
fn is_granted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: it changes nothing but what this process may do.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// This thread's tiles, ready: with 16 rows of 64 bytes, but for activations and sums of fewer rows. Given back in the end: the system
/// saves what is in use at each switch of threads.
pub(crate) struct Amx {
    of_this_thread: PhantomData<*const ()>,
}

/// What tiles multiply. The numbers of a word are of neighbouring inputs.
pub(crate) trait Packed {
    /// Of activations, 32 bits.
    type Word;
    /// 32 bits.
    type Sum;

    /// Products of 32 rows.
    ///
    /// # Safety
    /// There are tiles ready. In each round 16 rows of 64 bytes from `x` on, `stride` bytes apart, and as many behind them, can be read,
    /// each time 64 bytes further; 16 lines of weights for each round; 32 rows of sums can be read and written.
    unsafe fn two(x: *const Self::Word, stride: usize, weights: *const Line, rounds: usize, sums: *mut [Self::Sum; PANEL]);

    /// Products of 16 rows.
    ///
    /// # Safety
    /// As `two`, with 16 rows.
    unsafe fn one(x: *const Self::Word, stride: usize, weights: *const Line, rounds: usize, sums: *mut [Self::Sum; PANEL]);
}

/// Two bf16, whose products are added up in f32 as stated above.
pub(crate) struct Bf16Pairs;

/// Four integers of 8 bits, signed in activations, unsigned in weights, whose products are added up in 32 bits.
pub(crate) struct Int8Fours;

/// What `LDTILECFG` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// For 1 to 16 rows.
static CONFIGS: [Config; TILE] = {
    let (mut configs, mut rows) = ([const { Config::of(TILE) }; TILE], 1);
    while rows < TILE {
        configs[rows - 1] = Config::of(rows);
        rows += 1;
    }
    configs
};

impl Config {
    const fn of(rows: usize) -> Self {
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut tile = 0;
        while tile < 8 {
            config.row_bytes[tile] = 64;
            config.rows[tile] = if tile < WEIGHTS { rows } else { TILE } as u8;
            tile += 1;
        }
        config
    }
}

/// The first tile that holds weights.
const WEIGHTS: usize = 6;

impl Amx {
    /// For so many rows. For up to 16 no more are read: a few rows would else be read with garbage that pushes weights out of the caches.
    ///
    /// # Safety
    /// [`is_available`] says so. A thread has one at a time.
    pub(crate) unsafe fn new(rows: usize) -> Self {
        let config = &raw const CONFIGS[rows.clamp(1, TILE) - 1];
        // SAFETY: the caller knows that there are tiles; the configuration is valid, and no compiled code uses them by itself.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, preserves_flags)) };
        Self { of_this_thread: PhantomData }
    }

    /// `sums[i][j] += x.row(i) * weights.column(j)`. Row `i` of `x` begins at word `i * stride`, and has as many words as there are
    /// lines: a multiple of 16, as there are rows of sums, even where the last ones are not computed.
    pub(crate) fn add_products<P: Packed>(&self, x: &[P::Word], stride: usize, weights: &[Line], sums: &mut [[P::Sum; PANEL]]) {
        assert!(weights.len().is_multiple_of(TILE) && sums.len().is_multiple_of(TILE), "whole tiles");
        if weights.is_empty() || sums.is_empty() {
            return;
        }
        assert!(x.len() >= (sums.len() - 1) * stride + weights.len(), "all rows are there");
        let (step, rounds) = (stride * size_of::<P::Word>(), weights.len() / TILE);
        let mut pairs = sums.chunks_exact_mut(2 * TILE);
        let mut first = 0;
        for sums in pairs.by_ref() {
            // SAFETY: there are tiles, as `self` says. Of 32 rows from `first` on, as many words as there are lines are within `x`, by the
            // assertion; there are 32 rows of sums.
            unsafe { P::two(x[first * stride..].as_ptr(), step, weights.as_ptr(), rounds, sums.as_mut_ptr()) };
            first += 2 * TILE;
        }
        let rest = pairs.into_remainder();
        if !rest.is_empty() {
            // SAFETY: as above, with 16 rows.
            unsafe { P::one(x[first * stride..].as_ptr(), step, weights.as_ptr(), rounds, rest.as_mut_ptr()) };
        }
    }
}

impl Drop for Amx {
    fn drop(&mut self) {
        // SAFETY: there are tiles, as there were when this was made.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// Asks memory for the weights of a later round: a tile's rows are every second cache line.
macro_rules! ask_ahead {
    () => {
        ".irp half, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960
            prefetcht0 [{weights} + 8192 + \\half]
            prefetcht0 [{weights} + 9216 + \\half]
        .endr"
    };
}

macro_rules! packed {
    ($packed:ty, $word:ty, $sum:ty, $products:literal) => {
        impl Packed for $packed {
            type Word = $word;
            type Sum = $sum;

            unsafe fn two(x: *const $word, stride: usize, weights: *const Line, rounds: usize, sums: *mut [$sum; PANEL]) {
                // SAFETY: reads and writes what the caller vouches for.
                unsafe {
                    asm!(
                        "tileloadd tmm0, [{sums} + {line}]",
                        "tileloadd tmm1, [{sums} + {line} + 64]",
                        "tileloadd tmm2, [{sums} + {line} + 2048]",
                        "tileloadd tmm3, [{sums} + {line} + 2112]",
                        "2:",
                        ask_ahead!(),
                        "tileloadd tmm6, [{weights} + {line}]",
                        "tileloadd tmm4, [{upper} + {row}]",
                        concat!($products, " tmm0, tmm4, tmm6"),
                        "tileloadd tmm7, [{weights} + {line} + 64]",
                        concat!($products, " tmm1, tmm4, tmm7"),
                        "tileloadd tmm5, [{lower} + {row}]",
                        concat!($products, " tmm2, tmm5, tmm6"),
                        concat!($products, " tmm3, tmm5, tmm7"),
                        "add {upper}, 64",
                        "add {lower}, 64",
                        "add {weights}, 2048",
                        "dec {rounds}",
                        "jnz 2b",
                        "tilestored [{sums} + {line}], tmm0",
                        "tilestored [{sums} + {line} + 64], tmm1",
                        "tilestored [{sums} + {line} + 2048], tmm2",
                        "tilestored [{sums} + {line} + 2112], tmm3",
                        upper = inout(reg) x => _,
                        lower = inout(reg) x.wrapping_byte_add(TILE * stride) => _,
                        row = in(reg) stride,
                        weights = inout(reg) weights => _,
                        line = in(reg) size_of::<Line>(),
                        rounds = inout(reg) rounds => _,
                        sums = in(reg) sums,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            }

            unsafe fn one(x: *const $word, stride: usize, weights: *const Line, rounds: usize, sums: *mut [$sum; PANEL]) {
                // SAFETY: as in `two`, of 16 rows.
                unsafe {
                    asm!(
                        "tileloadd tmm0, [{sums} + {line}]",
                        "tileloadd tmm1, [{sums} + {line} + 64]",
                        "2:",
                        ask_ahead!(),
                        "tileloadd tmm6, [{weights} + {line}]",
                        "tileloadd tmm4, [{x} + {row}]",
                        concat!($products, " tmm0, tmm4, tmm6"),
                        "tileloadd tmm7, [{weights} + {line} + 64]",
                        concat!($products, " tmm1, tmm4, tmm7"),
                        "add {x}, 64",
                        "add {weights}, 2048",
                        "dec {rounds}",
                        "jnz 2b",
                        "tilestored [{sums} + {line}], tmm0",
                        "tilestored [{sums} + {line} + 64], tmm1",
                        x = inout(reg) x => _,
                        row = in(reg) stride,
                        weights = inout(reg) weights => _,
                        line = in(reg) size_of::<Line>(),
                        rounds = inout(reg) rounds => _,
                        sums = in(reg) sums,
                        out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            }
        }
    };
}

packed!(Bf16Pairs, u32, f32, "tdpbf16ps");
packed!(Int8Fours, [i8; 4], i32, "tdpbsud");

/// The same for one row and `P` panels, in vectors: tiles with a single row wait for memory more often than they compute.
/// `sums[p][j] += x * weights[p].column(j)`.
///
/// Lines of the panels take turns. A core that reads one stream has to wait at each of its pages until the prefetcher has
/// followed; with several, there is always one that goes on.
pub(crate) struct Row<'a, const P: usize> {
    pub(crate) x: &'a [u32],
    pub(crate) weights: [&'a [Line]; P],
    pub(crate) sums: [&'a mut [f32; PANEL]; P],
}

impl<const P: usize> Kernel for Row<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut acc = [[simd.zero(); 2]; P];
        let mut ahead = [Ahead::within(self.weights[0]); P];
        let mut weights = [self.weights[0].as_chunks::<TILE>().0; P];
        let (x, _) = self.x.as_chunks::<TILE>();
        for p in 0..P {
            let (sums, _) = self.sums[p].as_chunks();
            acc[p] = [simd.load(&sums[0]), simd.load(&sums[1])];
            ahead[p] = Ahead::within(self.weights[p]);
            weights[p] = &self.weights[p].as_chunks().0[..x.len()];
        }
        for (block, x) in x.iter().enumerate() {
            let (mut even, mut odd) = ([[simd.zero(); 2]; P], [[simd.zero(); 2]; P]);
            for (l, &word) in x.iter().enumerate() {
                let (x_even, x_odd) = (simd.splat(f32::from_bits(word << 16)), simd.splat(f32::from_bits(word & 0xffff_0000)));
                for p in 0..P {
                    ahead[p].ask(simd);
                    let (halves, _) = weights[p][block][l].as_chunks();
                    for j in 0..2 {
                        even[p][j] = simd.fma(simd.load_bf16_even(&halves[j]), x_even, even[p][j]);
                        odd[p][j] = simd.fma(simd.load_bf16_odd(&halves[j]), x_odd, odd[p][j]);
                    }
                }
            }
            for p in 0..P {
                for j in 0..2 {
                    acc[p][j] = simd.add(acc[p][j], simd.add(even[p][j], odd[p][j]));
                }
            }
        }
        for (sums, acc) in self.sums.into_iter().zip(acc) {
            let (sums, _) = sums.as_chunks_mut();
            simd.store(acc[0], &mut sums[0]);
            simd.store(acc[1], &mut sums[1]);
        }
    }
}

/// The stated arithmetic, number by number: `sum` and the products of pairs, `(even, odd)` each.
pub(crate) fn sum_in_blocks(sum: f32, pairs: impl Iterator<Item = ([f32; 2], [f32; 2])>) -> f32 {
    let (mut sum, mut chains, mut count) = (sum, [0.0f32; 2], 0);
    for (a, b) in pairs {
        chains = [a[0].mul_add(b[0], chains[0]), a[1].mul_add(b[1], chains[1])];
        count += 1;
        if count % TILE == 0 {
            sum += chains[0] + chains[1];
            chains = [0.0; 2];
        }
    }
    if count % TILE == 0 { sum } else { sum + (chains[0] + chains[1]) }
}

/// Tries it on numbers of either sign and of sizes that differ by up to 2^15, so that every rounding decides about some bits.
fn is_exact() -> bool {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut number = || {
        // xorshift (Marsaglia, 2003)
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let bits = (state >> 32) as u32;
        // Sign, exponent of 2^-8 to 2^7, fraction, as a bf16.
        (bits & 0x807f_0000 | (119 + (bits >> 23 & 15)) << 23) >> 16
    };
    let mut word = || number() | number() << 16;
    const LINES: usize = 2 * TILE;
    let x: Vec<u32> = (0..3 * TILE * LINES).map(|_| word()).collect();
    let weights: Vec<[u32; PANEL]> = (0..LINES).map(|_| std::array::from_fn(|_| word())).collect();
    let start = |i: usize, j: usize| f32::from_bits(x[i] ^ weights[0][j]).clamp(-1.0, 1.0);
    let mut sums: Vec<[f32; PANEL]> = (0..3 * TILE).map(|i| std::array::from_fn(|j| start(i, j))).collect();
    let lines: Vec<Line> = weights.iter().map(|line| std::array::from_fn(|byte| line[byte / 4].to_le_bytes()[byte % 4])).collect();
    // SAFETY: the instructions are there, and granted: that was asked before.
    unsafe { Amx::new(3 * TILE) }.add_products::<Bf16Pairs>(&x, LINES, &lines, &mut sums);
    let halves = |word: u32| [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)];
    let expected = |i: usize, j: usize| sum_in_blocks(start(i, j), (0..LINES).map(|l| (halves(x[i * LINES + l]), halves(weights[l][j]))));
    (0..3 * TILE).all(|i| (0..PANEL).all(|j| sums[i][j].to_bits() == expected(i, j).to_bits()))
}

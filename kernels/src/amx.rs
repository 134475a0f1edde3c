//! Products of bf16 on tiles: Intel's Advanced Matrix Extensions.
//!
//! **The arithmetic** is that of `TDPBF16PS` (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2): inputs are cut at
//! multiples of 32. Of each 32, the products of the even inputs are a chain of fused multiply-adds from 0, and so are those of the odd
//! ones; then the two are added to each other, and that to the sum. It is not what `vdpbf16ps` computes, and neither can be had from
//! the other at a tolerable rate: so it is an arithmetic of its own, with a layout fingerprint of its own.
//!
//! Each process tries it before it relies on it. The system grants the state of tiles to processes that ask (`arch_prctl`).

use crate::{
    dtype::Bf16,
    lines::Lines,
    simd::{Kernel, LANES, Simd},
    tile::{Ahead, PANEL},
};
use nix::libc;
use std::{arch::asm, arch::x86_64::__cpuid_count, sync::LazyLock};

/// Rows of a tile, and lines of weights: pairs of inputs.
pub(crate) const TILE: usize = 16;

/// 32 outputs of a pair of inputs: half a tile's width each.
type Line = <Bf16 as Lines>::Line;

/// Whether this process may use tiles, and they compute what is stated above. Asks and tries once, which takes microseconds.
pub(crate) fn is_available() -> bool {
    static ANSWER: LazyLock<bool> = LazyLock::new(|| has_instructions() && is_granted() && is_exact());
    *ANSWER
}

fn has_instructions() -> bool {
    let features = __cpuid_count(7, 0).edx;
    [AMX_BF16, AMX_TILE].iter().all(|bit| features >> bit & 1 == 1)
}

const AMX_BF16: u32 = 22;
const AMX_TILE: u32 = 24;

/// Asks the system for this process's permission. There is none where it does not know of tiles.
fn is_granted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: it changes nothing but what this process may do.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// Tiles, ready on this thread: with 16 rows of 64 bytes, but for activations and sums of fewer rows.
pub(crate) struct Amx(());

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
    /// Gives `work` this thread's tiles, for so many rows, and gives them back after it: the system saves what is in use at each switch of
    /// threads. For up to 16 rows no more are read: a few rows would else be read with garbage that pushes weights out of the caches.
    ///
    /// # Safety
    /// [`is_available`] says so.
    pub(crate) unsafe fn with(rows: usize, work: impl FnOnce(&Self)) {
        let config = &raw const CONFIGS[rows.clamp(1, TILE) - 1];
        // SAFETY: the caller knows that there are tiles; the configuration is valid, and no compiled code uses them by itself.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, preserves_flags)) };
        work(&Self(()));
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }

    /// `sums[i][j] += x.row(i) * weights.column(j)`. Row `i` of `x` begins at word `i * stride`, and has as many words as there are
    /// lines: a multiple of 16, as there are rows of sums, even where the last ones are not computed.
    pub(crate) fn add_products(&self, x: &[u32], stride: usize, weights: &[Line], sums: &mut [[f32; PANEL]]) {
        assert!(weights.len().is_multiple_of(TILE) && sums.len().is_multiple_of(TILE), "whole tiles");
        if weights.is_empty() || sums.is_empty() {
            return;
        }
        assert!(x.len() >= (sums.len() - 1) * stride + weights.len(), "all rows are there");
        let mut pairs = sums.chunks_exact_mut(2 * TILE);
        let mut first = 0;
        for sums in pairs.by_ref() {
            // SAFETY: there are tiles, as `self` says. Of 32 rows from `first` on, as many words as there are lines are within `x`, by the
            // assertion; there are 32 rows of sums.
            unsafe { two(x[first * stride..].as_ptr(), stride, weights, sums.as_mut_ptr()) };
            first += 2 * TILE;
        }
        let rest = pairs.into_remainder();
        if !rest.is_empty() {
            // SAFETY: as above, with 16 rows.
            unsafe { one(x[first * stride..].as_ptr(), stride, weights, rest.as_mut_ptr()) };
        }
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

/// Products of 32 rows.
///
/// # Safety
/// As the callers argue.
unsafe fn two(x: *const u32, stride: usize, weights: &[Line], sums: *mut [f32; PANEL]) {
    // SAFETY: reads and writes what the caller vouches for: 16 rows of 64 bytes each from `x`, `x` and 16 rows, in each round 64 bytes
    // further; 16 lines of weights in each round, as many rounds as there are 16 lines; 32 rows of sums.
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
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{weights} + {line} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{lower} + {row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
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
            lower = inout(reg) x.wrapping_add(TILE * stride) => _,
            row = in(reg) stride * size_of::<u32>(),
            weights = inout(reg) weights.as_ptr() => _,
            line = in(reg) size_of::<Line>(),
            rounds = inout(reg) weights.len() / TILE => _,
            sums = in(reg) sums,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Products of 16 rows.
///
/// # Safety
/// As the callers argue.
unsafe fn one(x: *const u32, stride: usize, weights: &[Line], sums: *mut [f32; PANEL]) {
    // SAFETY: as in `two`, of 16 rows.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {line}]",
            "tileloadd tmm1, [{sums} + {line} + 64]",
            "2:",
            ask_ahead!(),
            "tileloadd tmm6, [{weights} + {line}]",
            "tileloadd tmm4, [{x} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{weights} + {line} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {x}, 64",
            "add {weights}, 2048",
            "dec {rounds}",
            "jnz 2b",
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + 64], tmm1",
            x = inout(reg) x => _,
            row = in(reg) stride * size_of::<u32>(),
            weights = inout(reg) weights.as_ptr() => _,
            line = in(reg) size_of::<Line>(),
            rounds = inout(reg) weights.len() / TILE => _,
            sums = in(reg) sums,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The same for one row, in vectors: tiles with a single row wait for memory more often than they compute. `sums[j] += x * weights.column(j)`.
pub(crate) struct Row<'a> {
    pub(crate) x: &'a [u32],
    pub(crate) weights: &'a [Line],
    pub(crate) sums: &'a mut [f32; PANEL],
}

impl Kernel for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (sums, _) = self.sums.as_chunks_mut::<LANES>();
        let mut acc = [simd.load(&sums[0]), simd.load(&sums[1])];
        let mut ahead = Ahead::within(self.weights);
        let (x, _) = self.x.as_chunks::<TILE>();
        let (weights, _) = self.weights.as_chunks::<TILE>();
        for (x, weights) in x.iter().zip(weights) {
            let (mut even, mut odd) = ([simd.zero(); 2], [simd.zero(); 2]);
            for (&word, line) in x.iter().zip(weights) {
                ahead.ask(simd);
                let (x_even, x_odd) = (simd.splat(f32::from_bits(word << 16)), simd.splat(f32::from_bits(word & 0xffff_0000)));
                let (halves, _) = line.as_chunks();
                for j in 0..2 {
                    even[j] = simd.fma(simd.load_bf16_even(&halves[j]), x_even, even[j]);
                    odd[j] = simd.fma(simd.load_bf16_odd(&halves[j]), x_odd, odd[j]);
                }
            }
            for j in 0..2 {
                acc[j] = simd.add(acc[j], simd.add(even[j], odd[j]));
            }
        }
        for j in 0..2 {
            simd.store(acc[j], &mut sums[j]);
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
    unsafe { Amx::with(3 * TILE, |amx| amx.add_products(&x, LINES, &lines, &mut sums)) };
    let halves = |word: u32| [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)];
    let expected = |i: usize, j: usize| sum_in_blocks(start(i, j), (0..LINES).map(|l| (halves(x[i * LINES + l]), halves(weights[l][j]))));
    (0..3 * TILE).all(|i| (0..PANEL).all(|j| sums[i][j].to_bits() == expected(i, j).to_bits()))
}

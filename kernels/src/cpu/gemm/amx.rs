//! Products of bf16 and of 8-bit integers on matrix tiles: Intel's Advanced Matrix Extensions.
//!
//! **The arithmetic** of integers is exact. That of bf16 is `TDPBF16PS`'s (Intel 64 and IA-32 Architectures Software Developer's Manual,
//! volume 2): inputs are cut at multiples of 32. In each block of 32, the products of the even inputs are a chain of fused multiply-adds
//! from 0, and so are those of the odd inputs; the two are added, and then the result is added to the sum. `vdpbf16ps` adds in a different
//! order, and neither can emulate the other at a useful rate: so this is an arithmetic of its own, with a layout fingerprint of its own.
//!
//! Each process tests it before use. The system grants tile state to processes that request it (`arch_prctl`).

mod emulated;

use crate::cpu::{
    element::Bf16,
    gemm::{
        micro_kernel::Start,
        panel::{PANEL, PanelFormat},
        prefetch::{self, CACHE_LINE, WeightPrefetch},
    },
    simd::{Kernel, Simd},
};
use nix::libc;
use std::{arch::asm, arch::x86_64::__cpuid_count, marker::PhantomData, ops::RangeInclusive, sync::LazyLock};

/// Rows of a tile, and lines of weights: pairs of bf16 inputs, or groups of four integers.
pub(crate) const TILE: usize = 16;

/// 32 outputs of a word of inputs, half from each of two tiles.
type Line = <Bf16 as PanelFormat>::Line;

/// Whether this process may use tiles, and they compute as stated above. Requests and tests once, which takes microseconds.
pub(crate) fn is_available() -> bool {
    static ANSWER: LazyLock<bool> = LazyLock::new(|| are_there() && is_exact());
    *ANSWER
}

/// Whether tiles can be used by tests: this machine's, or emulated ones, from then on.
pub(crate) fn is_emulated() -> bool {
    static ANSWER: LazyLock<bool> = LazyLock::new(|| (are_there() && has_int8() || emulated::stand_in()) && is_exact());
    *ANSWER
}

/// Whether tiles also multiply integers, if they are [available](is_available). The answer is cached, as `cpuid` takes microseconds in a
/// virtual machine.
pub(crate) fn has_int8() -> bool {
    static ANSWER: LazyLock<bool> = LazyLock::new(|| has(AMX_INT8));
    *ANSWER
}

/// Whether there are tiles of bf16.
fn are_there() -> bool {
    has(AMX_BF16) && has(AMX_TILE) && is_granted()
}

fn has(bit: u32) -> bool {
    __cpuid_count(7, 0).edx >> bit & 1 == 1
}

const AMX_BF16: u32 = 22;
const AMX_TILE: u32 = 24;
const AMX_INT8: u32 = 25;

/// Requests this process's permission from the system. A system that does not know tiles grants none.
fn is_granted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: changes only this process's permissions.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// This thread's configured tiles: 16 rows of 64 bytes, or fewer rows of activations and sums. Released on drop: the
/// system saves tiles in use at each context switch.
pub(crate) struct Amx {
    of_this_thread: PhantomData<*const ()>,
}

/// A number format that tiles multiply. A word holds numbers of neighbouring inputs.
pub(crate) trait TileFormat {
    /// A word of activations, 32 bits.
    type Word;
    /// A sum, 32 bits.
    type Sum;

    /// `sums[i][j] += x.row(i) * weights.column(j)` for 16 rows, or `=`. `LINES`: that of `weights.ahead`.
    ///
    /// # Safety
    /// Tiles are configured. Each round reads 16 rows of 64 bytes from `x` on, `stride` bytes apart, 64 bytes further
    /// each time, and 16 lines of weights; there is at least one round. 16 rows of sums can be read and written.
    unsafe fn multiply<const LINES: usize>(
        x: *const Self::Word,
        stride: usize,
        weights: Piece<'_>,
        sums: *mut [Self::Sum; PANEL],
        start: Start,
    );
}

/// Two bf16, whose products are added in f32 as stated above.
pub(crate) struct Bf16Pairs;

/// Four 8-bit integers, signed in activations, unsigned in weights, whose products are added in 32 bits.
pub(crate) struct Int8Fours;

/// The operand of `LDTILECFG`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The configurations for 1 to 16 rows.
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
        while tile < TILES {
            config.row_bytes[tile] = 64;
            config.rows[tile] = if tile == WEIGHTS { TILE } else { rows } as u8;
            tile += 1;
        }
        config
    }
}

/// Tiles in use: two of sums, one of activations, one of weights.
///
/// If another thread shares the core, each further tile slows down loading them: with four tiles of sums and two of either operand, a
/// product of two tiles in the first-level cache took 33 ns, with these four 14, and 7 without loading any; alone on a core, 7 to 11 in
/// either case.
const TILES: usize = 4;
const WEIGHTS: usize = 3;

/// The most rounds of weights, 24 KiB, that several tiles of rows multiply in turn while they are in the first-level cache. Two tiles also
/// return to their activations before these are evicted: with half as many rounds, everything fits.
const ROUNDS_SHARED: usize = 12;
const ROUNDS_SHARED_BY_TWO: usize = 6;

impl Amx {
    /// Configures tiles for `rows` rows. Up to 16, no more are read: padding rows would evict weights from the caches.
    ///
    /// # Safety
    /// [`is_available`] is true, or [`is_emulated`]. A thread has one of these at a time.
    pub(crate) unsafe fn new(rows: usize) -> Self {
        let config = &raw const CONFIGS[rows.clamp(1, TILE) - 1];
        // SAFETY: tiles are available, as the caller promises; the configuration is valid, and compiled code uses no
        // tiles by itself.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, preserves_flags)) };
        Self { of_this_thread: PhantomData }
    }

    /// `sums[i][j] += x.row(i) * weights.column(j)`, or `=`. Row `i` of `x` begins at word `i * stride`, and has a word
    /// per line. Lines and rows of sums are multiples of 16, even where the last rows are not computed.
    pub(crate) fn multiply<P: TileFormat>(
        &self,
        x: &[P::Word],
        stride: usize,
        weights: Piece<'_>,
        sums: &mut [[P::Sum; PANEL]],
        start: Start,
    ) {
        let lines = weights.lines;
        assert!(lines.len().is_multiple_of(TILE) && sums.len().is_multiple_of(TILE), "whole tiles");
        if lines.is_empty() || sums.is_empty() {
            return;
        }
        assert!(x.len() >= (sums.len() - 1) * stride + lines.len(), "all rows are there");
        let tiles = sums.len() / TILE;
        let rounds = lines.len() / TILE;
        let most = match tiles {
            1 => rounds,
            2 => ROUNDS_SHARED_BY_TWO,
            _ => ROUNDS_SHARED,
        };
        let piece = rounds.div_ceil(rounds.div_ceil(most)) * TILE;
        for (first, lines) in (0..).step_by(piece).zip(lines.chunks(piece)) {
            for (i, sums) in sums.chunks_exact_mut(TILE).enumerate() {
                let ahead = weights.ahead.after(first / TILE).share_of(i, tiles);
                let start = if first == 0 { start } else { Start::Sums };
                let x = x[i * TILE * stride + first..].as_ptr();
                let (weights, stride) = (Piece { lines, ahead }, stride * size_of::<P::Word>());
                // SAFETY: `self` has configured tiles. By the assertion, `x` holds a word per line for each of 16 rows;
                // there are 16 rows of sums.
                unsafe {
                    match ahead.lines {
                        0 => P::multiply::<0>(x, stride, weights, sums.as_mut_ptr(), start),
                        LINES_OF_HALF => P::multiply::<LINES_OF_HALF>(x, stride, weights, sums.as_mut_ptr(), start),
                        _ => P::multiply::<LINES_OF_ALL>(x, stride, weights, sums.as_mut_ptr(), start),
                    }
                };
            }
        }
    }
}

impl Drop for Amx {
    fn drop(&mut self) {
        // SAFETY: tiles were configured when this was made.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// Some lines of a panel, and the prefetching to do while they are multiplied.
#[derive(Clone, Copy)]
pub(crate) struct Piece<'a> {
    lines: &'a [Line],
    ahead: RoundPrefetch,
}

impl<'a> Piece<'a> {
    pub(crate) fn len(&self) -> usize {
        self.lines.len()
    }

    /// A piece of lines that several tiles of rows multiply; the weights a little further on are prefetched.
    pub(crate) fn of_many_rows(lines: &'a [Line]) -> Self {
        let next = lines.as_ptr().cast::<u8>().wrapping_add(prefetch::STREAM_AHEAD_BYTES);
        Self { lines, ahead: RoundPrefetch { next, apart: ROUND_BYTES / STREAMS, step: ROUND_BYTES, lines: LINES_OF_ALL } }
    }

    /// A piece of lines in the caches, followed by more such lines.
    pub(crate) fn in_caches(lines: &'a [Line]) -> Self {
        Self { lines, ahead: RoundPrefetch::NONE }
    }
}

/// The prefetching of each round: some cache lines at `next` and at seven more places, `apart` bytes from each other; those of the next
/// round are `step` bytes further.
#[derive(Clone, Copy)]
struct RoundPrefetch {
    next: *const u8,
    apart: usize,
    step: usize,
    /// 0, [`LINES_OF_ALL`] or half of these.
    lines: usize,
}

impl RoundPrefetch {
    const NONE: Self = Self { next: std::ptr::null(), apart: 0, step: 0, lines: 0 };

    /// The prefetching left after `rounds` rounds.
    #[inline(always)]
    fn after(self, rounds: usize) -> Self {
        Self { next: self.next.wrapping_add(rounds * self.step), ..self }
    }

    /// The share of tile `nth` among tiles of rows that multiply the same weights one after the other. The first two
    /// share everything: memory idles while the others compute, which with two tiles, bound by memory, would be half of
    /// the time.
    #[inline(always)]
    fn share_of(self, nth: usize, tiles: usize) -> Self {
        match nth {
            _ if tiles == 1 || self.lines == 0 => self,
            0 => Self { lines: LINES_OF_HALF, ..self },
            1 => Self { next: self.next.wrapping_add(LINES_OF_HALF * CACHE_LINE), lines: LINES_OF_HALF, ..self },
            _ => Self::NONE,
        }
    }
}

/// Bytes of weights that a round multiplies.
const ROUND_BYTES: usize = TILE * size_of::<Line>();
const STREAMS: usize = 8;
/// With this many lines per stream, a round prefetches as much as it multiplies.
const LINES_OF_ALL: usize = ROUND_BYTES / STREAMS / CACHE_LINE;
const LINES_OF_HALF: usize = LINES_OF_ALL / 2;

/// Panels for a few rows, read once from memory.
///
/// The tiles hold the sums of one panel, and with a single stream of weights a core stalls at each page until the
/// hardware prefetcher follows (see [`OneRow`]). So each piece is prefetched in eight streams while the one before is
/// multiplied, which is much faster than memory. The first piece is prefetched at once; during the last one, the lines
/// behind it, where a thread's next task mostly begins.
pub(crate) struct Stream<'a> {
    /// The panels' lines, and what follows them.
    lines: &'a [Line],
    rounds: usize,
    panel_rounds: usize,
    piece_rounds: usize,
    /// Rounds handed out so far.
    done: usize,
}

/// The size of a piece. A task's first piece may arrive with nothing to multiply meanwhile, so it is a small part of the task; but below
/// half of this minimum, streams are too short for the prefetcher. Two of the largest fit the second-level cache beside activations.
const PIECE_BYTES: RangeInclusive<usize> = 48 << 10..=128 << 10;
const PIECES: usize = 8;

impl<'a> Stream<'a> {
    /// The stream of the first `panels` whole panels of `panel_lines` lines each, one after the other.
    #[inline(always)]
    pub(crate) fn of<S: Simd>(simd: S, lines: &'a [Line], panel_lines: usize, panels: usize) -> Self {
        assert!(panel_lines.is_multiple_of(TILE) && lines.len() >= panels * panel_lines, "whole tiles and panels");
        let rounds = panels * panel_lines / TILE;
        let bytes = rounds * ROUND_BYTES;
        let pieces = bytes.div_ceil((bytes / PIECES).clamp(*PIECE_BYTES.start(), *PIECE_BYTES.end())).max(1);
        let stream = Self { lines, rounds, panel_rounds: panel_lines / TILE, piece_rounds: rounds.div_ceil(pieces).max(1), done: 0 };
        let ahead = stream.ahead(0);
        for at in (0..ahead.apart).step_by(CACHE_LINE) {
            for nth in 0..STREAMS {
                simd.prefetch(ahead.next.wrapping_add(nth * ahead.apart + at));
            }
        }
        stream
    }

    /// Prefetches the piece that begins with round `start`.
    #[inline(always)]
    fn ahead(&self, start: usize) -> RoundPrefetch {
        match self.lines.get(start * TILE..) {
            Some(lines @ [_, ..]) => {
                let bytes = size_of_val(&lines[..lines.len().min(self.piece_rounds * TILE)]);
                RoundPrefetch { next: lines.as_ptr().cast(), apart: bytes / STREAMS, step: ROUND_BYTES / STREAMS, lines: LINES_OF_ALL }
            }
            _ => RoundPrefetch::NONE,
        }
    }
}

/// Yields a panel's index, the first line within it, and a piece.
impl<'a> Iterator for Stream<'a> {
    type Item = (usize, usize, Piece<'a>);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        let start = self.done;
        let (panel, first) = (start / self.panel_rounds, start % self.panel_rounds);
        let within = start % self.piece_rounds;
        let left = self.rounds - start;
        let rounds = left.min(self.panel_rounds - first).min(self.piece_rounds - within);
        if rounds == 0 {
            return None;
        }
        self.done += rounds;
        let ahead = self.ahead(start - within + self.piece_rounds).after(within);
        Some((panel, first * TILE, Piece { lines: &self.lines[start * TILE..self.done * TILE], ahead }))
    }
}

/// Prefetches the round's lines at these places.
macro_rules! prefetch {
    ($($place:literal),*) => {
        concat!(".irp at, 0, 1, 2, 3\n.if \\at < {lines}\n", $("prefetcht1 [", $place, " + 64 * \\at]\n",)* ".endif\n.endr")
    };
}

macro_rules! tile_format {
    ($format:ty, $word:ty, $sum:ty, $products:literal) => {
        impl TileFormat for $format {
            type Word = $word;
            type Sum = $sum;

            unsafe fn multiply<const LINES: usize>(
                x: *const $word,
                stride: usize,
                weights: Piece<'_>,
                sums: *mut [$sum; PANEL],
                start: Start,
            ) {
                // SAFETY: reads and writes what the caller vouches for. Prefetches lie evenly between tiles: all at
                // once, they would take all line-fill buffers, also those that tiles wait for. They go to the
                // second-level cache only.
                unsafe {
                    asm!(
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "test {from_zero}, {from_zero}",
                        "jnz 2f",
                        "tileloadd tmm0, [{sums} + {line}]",
                        "tileloadd tmm1, [{sums} + {line} + 64]",
                        "2:",
                        "tileloadd tmm2, [{x} + {row}]",
                        prefetch!("{near}", "{near} + {apart}"),
                        "tileloadd tmm3, [{weights} + {line}]",
                        concat!($products, " tmm0, tmm2, tmm3"),
                        prefetch!("{near} + 2 * {apart}", "{near} + {apart_3}", "{near} + 4 * {apart}"),
                        "tileloadd tmm3, [{weights} + {line} + 64]",
                        concat!($products, " tmm1, tmm2, tmm3"),
                        prefetch!("{far}", "{near} + 2 * {apart_3}", "{far} + 2 * {apart}"),
                        "add {near}, {step}",
                        "add {far}, {step}",
                        "add {x}, 64",
                        "add {weights}, 2048",
                        "dec {rounds}",
                        "jnz 2b",
                        "tilestored [{sums} + {line}], tmm0",
                        "tilestored [{sums} + {line} + 64], tmm1",
                        lines = const LINES,
                        x = inout(reg) x => _,
                        row = in(reg) stride,
                        weights = inout(reg) weights.lines.as_ptr() => _,
                        line = in(reg) size_of::<Line>(),
                        rounds = inout(reg) weights.lines.len() / TILE => _,
                        near = inout(reg) weights.ahead.next => _,
                        far = inout(reg) weights.ahead.next.wrapping_add(5 * weights.ahead.apart) => _,
                        apart = in(reg) weights.ahead.apart,
                        apart_3 = in(reg) 3 * weights.ahead.apart,
                        step = in(reg) weights.ahead.step,
                        sums = in(reg) sums,
                        from_zero = in(reg) usize::from(start == Start::Zero),
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        options(nostack),
                    );
                }
            }
        }
    };
}

tile_format!(Bf16Pairs, u32, f32, "tdpbf16ps");
tile_format!(Int8Fours, [i8; 4], i32, "tdpbsud");

/// Multiplies one row by `P` panels, in vectors: tiles with a single row wait for memory more often than they compute.
/// `sums[p][j] += x * weights[p].column(j)`.
///
/// The panels' lines take turns. A core that reads one stream stalls at each page until the hardware prefetcher follows; of several
/// streams, one always continues.
pub(crate) struct OneRow<'a, const P: usize> {
    pub(crate) x: &'a [u32],
    pub(crate) weights: [&'a [Line]; P],
    pub(crate) sums: [&'a mut [f32; PANEL]; P],
}

impl<const P: usize> Kernel for OneRow<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut acc = [[simd.zero(); 2]; P];
        let mut ahead = [WeightPrefetch::within(self.weights[0]); P];
        let mut weights = [self.weights[0].as_chunks::<TILE>().0; P];
        let (x, _) = self.x.as_chunks::<TILE>();
        for p in 0..P {
            let (sums, _) = self.sums[p].as_chunks();
            acc[p] = [simd.load(&sums[0]), simd.load(&sums[1])];
            ahead[p] = WeightPrefetch::within(self.weights[p]);
            weights[p] = &self.weights[p].as_chunks().0[..x.len()];
        }
        for (block, x) in x.iter().enumerate() {
            let (mut even, mut odd) = ([[simd.zero(); 2]; P], [[simd.zero(); 2]; P]);
            for (l, &word) in x.iter().enumerate() {
                let (x_even, x_odd) = (simd.splat(f32::from_bits(word << 16)), simd.splat(f32::from_bits(word & 0xffff_0000)));
                for p in 0..P {
                    ahead[p].issue(simd);
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

/// The arithmetic stated above, number by number: `sum` plus products of pairs, `(even, odd)` each.
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

/// Tests the arithmetic on numbers of either sign and of sizes that differ by up to 2^15, so that every rounding decides some bits.
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
    // SAFETY: the instructions are present and granted, as was tested before.
    unsafe { Amx::new(3 * TILE) }.multiply::<Bf16Pairs>(&x, LINES, Piece::of_many_rows(&lines), &mut sums, Start::Sums);
    let halves = |word: u32| [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)];
    let expected = |i: usize, j: usize| sum_in_blocks(start(i, j), (0..LINES).map(|l| (halves(x[i * LINES + l]), halves(weights[l][j]))));
    (0..3 * TILE).all(|i| (0..PANEL).all(|j| sums[i][j].to_bits() == expected(i, j).to_bits()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{isa::Isa, simd::portable::Portable};

    #[test]
    fn tiles_are_tested_wherever_there_is_avx2() {
        assert_eq!(Isa::EmulatedAmx.is_available(), Isa::Avx2.is_available());
    }

    #[test]
    fn a_stream_hands_out_every_line_once_and_asks_for_each_piece_while_the_one_before_is_multiplied() {
        for (panel_lines, panels) in [(16, 1), (288, 12), (448, 16), (1024, 1), (1024, 16), (4096, 3), (16, 0)] {
            let lines = vec![[0; size_of::<Line>()]; panel_lines * (panels + 2)];
            let (mut next, mut asked) = (0, vec![false; lines.len() * size_of::<Line>() / CACHE_LINE]);
            let stream = Stream::of(Portable, &lines, panel_lines, panels);
            let first_piece = stream.piece_rounds * ROUND_BYTES / CACHE_LINE;
            for (panel, line, piece) in stream {
                assert_eq!(panel * panel_lines + line, next, "in their order");
                assert!(line + piece.len() <= panel_lines, "of one panel");
                next += piece.len();
                // The prefetching is that of one tile of rows, and of two.
                let tiles = 1 + panels % 2;
                for ahead in (0..tiles).map(|nth| piece.ahead.share_of(nth, tiles)) {
                    for (round, nth) in (0..piece.len() / TILE).flat_map(|round| (0..STREAMS).map(move |nth| (round, nth))) {
                        let at = ahead.next.addr() + round * ahead.step + nth * ahead.apart - lines.as_ptr().addr();
                        asked.iter_mut().skip(at / CACHE_LINE).take(ahead.lines).for_each(|asked| *asked = true);
                    }
                }
            }
            assert_eq!(next, panel_lines * panels);
            let multiplied = asked.iter().take(next * size_of::<Line>() / CACHE_LINE);
            assert!(multiplied.skip(first_piece).all(|asked| *asked), "all but what is asked for at once: {panels} of {panel_lines}");
        }
    }
}

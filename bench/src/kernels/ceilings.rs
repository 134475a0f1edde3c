//! The best performance of this machine: multiply-adds in registers, and reading memory that no cache holds.
//!
//! Each ceiling is the best of several short runs, and of several methods, as other load can only slow them down. Threads start together,
//! and the slowest one's time counts. Memory that is shared with other load may be twice as fast in one minute as in the next, so it is
//! read again beside every row.

use super::limits::Ceilings;
use anyhow::Context;
#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::MmapMut;
use std::{
    hint::black_box,
    io,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};
#[cfg(target_arch = "x86_64")]
use tidemill_kernels::Isa;

/// Measures with `threads` at once, and returns the means to read memory again. `shrink` divides the work of a proper measurement.
pub fn measure(threads: usize, shrink: usize) -> anyhow::Result<(Ceilings, Reading)> {
    let (reading, bytes) = Reading::new(threads, (SPAN_BYTES / shrink).max(1 << 20)).context("cannot map memory to read")?;
    let rounds = 1_000_000 / shrink as u64;
    let best = |kernels: Vec<Arithmetic>| kernels.into_iter().map(|kernel| arithmetic(threads, kernel, rounds)).fold(0.0, f64::max);
    let f32_flops = best(f32_kernels());
    // bf16 numbers are also f32 numbers.
    let bf16_flops = best(bf16_kernels()).max(f32_flops);
    Ok((Ceilings { f32_flops, bf16_flops, int8_ops: best(int8_kernels()), bytes }, reading))
}

/// The number of runs of some milliseconds, short enough for all threads to be undisturbed in one of them.
const ARITHMETIC_RUNS: usize = 50;
const READ_RUNS: usize = 5;
/// The bytes read by all threads together, far more than any cache holds.
const SPAN_BYTES: usize = 512 << 20;

/// A loop of independent multiply-adds.
#[derive(Clone, Copy)]
struct Arithmetic {
    /// Runs this many rounds. Safe to call if the instructions are available; only then is the kernel listed.
    run: unsafe fn(u64),
    /// The additions and multiplications of one round.
    per_round: f64,
}

/// The additions and multiplications per second of all threads.
fn arithmetic(threads: usize, kernel: Arithmetic, rounds: u64) -> f64 {
    // SAFETY: kernels are listed only where this machine has their instructions.
    let run = || together(threads, |_| unsafe { (kernel.run)(rounds) }).as_secs_f64();
    let best = (0..ARITHMETIC_RUNS).map(|_| run()).fold(f64::INFINITY, f64::min);
    threads as f64 * kernel.per_round * rounds as f64 / best
}

/// Memory that no cache holds; each thread reads its own part.
pub struct Reading {
    threads: usize,
    span: MmapMut,
    /// The fastest way of reading.
    way: Way,
}

impl Reading {
    /// Allocates the memory. Also returns the best bytes per second.
    fn new(threads: usize, span_bytes: usize) -> io::Result<(Self, f64)> {
        let mut span = MmapMut::map_anon(span_bytes / LINE_BYTES / threads * threads * LINE_BYTES)?;
        // In huge pages if possible, like weights. This is a hint: small ones will do.
        #[cfg(target_os = "linux")]
        let _ = span.advise(Advice::HugePage);
        // Writing makes every page present.
        span.fill(1);
        let mut reading = Self { threads, span, way: Way { streams: 1, ahead: None } };
        let mut best = (0.0, reading.way);
        for _ in 0..READ_RUNS {
            for way in ways() {
                reading.way = way;
                let bytes = reading.bytes_per_second();
                if bytes > best.0 {
                    best = (bytes, way);
                }
            }
        }
        reading.way = best.1;
        Ok((reading, best.0))
    }

    /// Reads the whole memory once.
    pub fn bytes_per_second(&self) -> f64 {
        let lines: &[Line] = self.span.as_chunks().0;
        let parts: Vec<&[Line]> = lines.chunks_exact(lines.len() / self.threads).collect();
        let spent = together(self.threads, |thread| {
            black_box(read(parts[thread], self.way));
        });
        self.span.len() as f64 / spent.as_secs_f64()
    }
}

/// A way of reading memory: the number of parts that are read in turn, and the distance of prefetching, if any.
#[derive(Clone, Copy)]
struct Way {
    streams: usize,
    ahead: Option<usize>,
}

/// All ways tried. Lines are prefetched a page ahead or further, beyond the hardware's prefetcher, which stays within a page. The fastest
/// way depends on the processor, by a third.
fn ways() -> impl Iterator<Item = Way> {
    [1, 2, 4, 8].into_iter().flat_map(|streams| [None, Some(4 << 10), Some(32 << 10)].map(|ahead| Way { streams, ahead }))
}

/// A cache line.
type Line = [u8; LINE_BYTES];
const LINE_BYTES: usize = 64;

fn read(lines: &[Line], way: Way) -> Line {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: just found available.
        return unsafe { x86::read_avx512(lines, way) };
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: just found available.
        return unsafe { x86::read_avx2(lines, way) };
    }
    read_streams(lines, way)
}

/// Folds all lines, going through `streams` equal parts in parallel and prefetching `ahead` bytes further on.
#[inline(always)]
fn read_streams(lines: &[Line], Way { streams, ahead }: Way) -> Line {
    let part = lines.len() / streams;
    let mut sums = [0; LINE_BYTES];
    for i in 0..part {
        for stream in 0..streams {
            let line = &lines[stream * part + i];
            if let Some(ahead) = ahead {
                prefetch(std::ptr::from_ref(line).wrapping_byte_add(ahead));
            }
            for (sum, byte) in sums.iter_mut().zip(line) {
                *sum ^= byte;
            }
        }
    }
    sums
}

/// Prefetches a line into the second-level cache. Any address will do.
#[inline(always)]
fn prefetch(line: *const Line) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, harmless at any address, and an instruction of the base target.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Runs `work` on every thread at once; returns the time from when all are ready until the last is done.
fn together(threads: usize, work: impl Fn(usize) + Sync) -> Duration {
    let ready = Barrier::new(threads);
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| {
                let (ready, work) = (&ready, &work);
                scope.spawn(move || {
                    ready.wait();
                    let started = Instant::now();
                    work(thread);
                    started.elapsed()
                })
            })
            .collect();
        running.into_iter().map(|thread| thread.join().expect("measuring does not panic")).max().expect("at least one thread")
    })
}

/// The f32 loops available on this machine.
fn f32_kernels() -> Vec<Arithmetic> {
    let mut kernels = vec![Arithmetic { run: fma_portable, per_round: (2 * PORTABLE_LANES) as f64 }];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            kernels.push(Arithmetic { run: x86::fma_avx2, per_round: (2 * 8 * x86::REGISTERS_AVX2) as f64 });
        }
        if is_x86_feature_detected!("avx512f") {
            kernels.push(Arithmetic { run: x86::fma_avx512, per_round: (2 * 16 * x86::REGISTERS_AVX512) as f64 });
        }
    }
    kernels
}

/// The bf16 loops available on this machine.
fn bf16_kernels() -> Vec<Arithmetic> {
    let mut kernels: Vec<Arithmetic> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
            kernels.push(Arithmetic { run: x86::bf16_avx512, per_round: (2 * 32 * x86::REGISTERS_AVX512) as f64 });
        }
        if Isa::Amx.is_available() {
            kernels.push(Arithmetic { run: x86::bf16_amx, per_round: (2 * 16 * 16 * 32 * x86::TILES) as f64 / 8.0 });
        }
    }
    kernels
}

/// The 8-bit integer loops available on this machine.
fn int8_kernels() -> Vec<Arithmetic> {
    let mut kernels = vec![Arithmetic { run: int8_portable, per_round: (2 * PORTABLE_LANES) as f64 }];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") {
            kernels.push(Arithmetic { run: x86::int8_avx2, per_round: (2 * 16 * x86::REGISTERS_AVX2) as f64 });
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("avxvnni") {
            kernels.push(Arithmetic { run: x86::int8_avxvnni, per_round: (2 * 32 * x86::REGISTERS_AVX2) as f64 });
        }
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
            kernels.push(Arithmetic { run: x86::int8_avx512vnni, per_round: (2 * 64 * x86::REGISTERS_AVX512) as f64 });
        }
    }
    kernels
}

const PORTABLE_LANES: usize = 32;

fn fma_portable(rounds: u64) {
    let (a, b) = black_box((0.5f32, 1.0f32));
    let mut sums = [0.0f32; PORTABLE_LANES];
    for _ in 0..rounds {
        // Fused only if the base target has an instruction for it: elsewhere that is a library call.
        sums.iter_mut().for_each(|sum| *sum = if cfg!(target_arch = "aarch64") { sum.mul_add(a, b) } else { *sum * a + b });
    }
    black_box(sums);
}

fn int8_portable(rounds: u64) {
    let a = black_box([3i8; PORTABLE_LANES]);
    let mut b = black_box([5i8; PORTABLE_LANES]);
    let mut sums = [0i32; PORTABLE_LANES];
    for _ in 0..rounds {
        for i in 0..PORTABLE_LANES {
            sums[i] = sums[i].wrapping_add(i32::from(a[i]) * i32::from(b[i]));
            // This keeps the product inside the loop.
            b[i] ^= 1;
        }
    }
    black_box(sums);
}

/// Loops with as many accumulators as registers hold, each an independent chain: enough to fill the units' pipelines.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Line, Way, read_streams};
    use std::{arch::x86_64::*, hint::black_box};

    pub(super) const REGISTERS_AVX512: usize = 24;
    pub(super) const REGISTERS_AVX2: usize = 12;

    #[target_feature(enable = "avx512f")]
    pub(super) fn read_avx512(lines: &[Line], way: Way) -> Line {
        read_streams(lines, way)
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn read_avx2(lines: &[Line], way: Way) -> Line {
        read_streams(lines, way)
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn fma_avx512(rounds: u64) {
        let (a, b) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(1.0)));
        let mut sums = [b; REGISTERS_AVX512];
        for _ in 0..rounds {
            sums.iter_mut().for_each(|sum| *sum = _mm512_fmadd_ps(*sum, a, b));
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn fma_avx2(rounds: u64) {
        let (a, b) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(1.0)));
        let mut sums = [b; REGISTERS_AVX2];
        for _ in 0..rounds {
            sums.iter_mut().for_each(|sum| *sum = _mm256_fmadd_ps(*sum, a, b));
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn bf16_avx512(rounds: u64) {
        // The numbers are 0.5 and 0.25, twice in each lane: sums grow to some thousands.
        // SAFETY: vectors of one size are plain bits.
        let pairs = |pair| unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(black_box(pair))) };
        let (a, b) = (pairs(0x3f00_3f00), pairs(0x3e80_3e80));
        let mut sums = [_mm512_setzero_ps(); REGISTERS_AVX512];
        for _ in 0..rounds {
            sums.iter_mut().for_each(|sum| *sum = _mm512_dpbf16_ps(*sum, a, b));
        }
        black_box(sums);
    }

    /// The number of independent sums of tiles in the loop.
    pub(super) const TILES: usize = 4;

    /// Runs an eighth of `rounds`: a product of tiles takes that much longer than one of registers.
    ///
    /// # Safety
    /// This process may use tiles.
    pub(super) unsafe fn bf16_amx(rounds: u64) {
        // Palette 1: tiles of 16 rows of 64 bytes.
        let mut config = [0u8; 64];
        config[0] = 1;
        config[16..32].as_chunks_mut::<2>().0.fill(64u16.to_le_bytes());
        config[48..56].fill(16);
        // SAFETY: there are tiles, as the caller promises; only registers change, and the configuration is valid.
        unsafe {
            std::arch::asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                "tilerelease",
                config = in(reg) config.as_ptr(),
                rounds = inout(reg) (rounds / 8).max(1) => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn int8_avx512vnni(rounds: u64) {
        let (a, b) = (_mm512_set1_epi8(black_box(3)), _mm512_set1_epi8(black_box(5)));
        let mut sums = [_mm512_setzero_si512(); REGISTERS_AVX512];
        for _ in 0..rounds {
            sums.iter_mut().for_each(|sum| *sum = _mm512_dpbusd_epi32(*sum, a, b));
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,avxvnni")]
    pub(super) fn int8_avxvnni(rounds: u64) {
        let (a, b) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(5)));
        let mut sums = [_mm256_setzero_si256(); REGISTERS_AVX2];
        for _ in 0..rounds {
            sums.iter_mut().for_each(|sum| *sum = _mm256_dpbusd_avx_epi32(*sum, a, b));
        }
        black_box(sums);
    }

    /// Pairs of 16-bit numbers, multiplied and added: the method without VNNI that cannot overflow.
    #[target_feature(enable = "avx2")]
    pub(super) fn int8_avx2(rounds: u64) {
        let (a, b) = (_mm256_set1_epi16(black_box(3)), _mm256_set1_epi16(black_box(5)));
        let mut sums = [a; REGISTERS_AVX2];
        for _ in 0..rounds {
            // Each product depends on its own chain, so that none is hoisted out of the loop.
            sums.iter_mut().for_each(|sum| *sum = _mm256_add_epi32(a, _mm256_madd_epi16(*sum, b)));
        }
        black_box(sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_ceiling_for_everything() {
        let (Ceilings { f32_flops, bf16_flops, int8_ops, bytes }, reading) = measure(2, 10_000).unwrap();
        assert!(f32_flops.is_finite() && f32_flops > 0.0);
        assert!(bf16_flops.is_finite() && bf16_flops >= f32_flops);
        assert!(int8_ops.is_finite() && int8_ops > 0.0);
        assert!([bytes, reading.bytes_per_second()].iter().all(|bytes| bytes.is_finite() && *bytes > 0.0));
    }

    #[test]
    fn every_line_is_read_in_every_way() {
        // Each line sets one byte of its own.
        let lines: Vec<Line> = (0..LINE_BYTES).map(|i| std::array::from_fn(|at| u8::from(at == i))).collect();
        for way in ways() {
            assert_eq!(read(&lines, way), [1; LINE_BYTES]);
            assert_eq!(read_streams(&lines, way), [1; LINE_BYTES]);
        }
    }
}

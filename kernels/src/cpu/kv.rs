//! The paged memory for K and V on a CPU, and writing into it. `element`: types of stored numbers.

pub(crate) mod element;

pub use element::INT8_HEAD_DIM_MAX;

use crate::{
    cpu::{
        Cpu,
        element::load_part,
        gemm::int8::quantize,
        hadamard::{self, block_of},
        memory::Memory,
        simd::{Kernel, LANES, Simd},
        threads::disjoint::Disjoint,
    },
    kv::{BLOCK_POSITIONS, KvLayout, Part},
};
use element::{INT8_HEAD_VECTORS, KvElement, KvPanelFormat, inputs, with_kv_element};
use std::ops::Range;

/// Consecutive positions of one sequence, and the blocks that hold the sequence from position 0 on.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// Blocks of positions 0..16, 16..32, …, at least up to the span's end.
    pub blocks: &'a [u32],
    /// Position of the first row.
    pub start: usize,
    pub rows: usize,
}

/// The bytes of block `id` among `blocks` of `size` bytes each.
fn block_range(id: u32, blocks: usize, size: usize) -> Range<usize> {
    assert!((id as usize) < blocks, "block {id} is not one of {blocks}");
    id as usize * size..(id as usize + 1) * size
}

/// K and V of some spans.
#[derive(Clone, Copy, Debug)]
pub struct KvRows<'a> {
    pub spans: &'a [Span<'a>],
    /// `[rows of all spans, kv_heads, head_dim]`, and `v` likewise; in a latent layout `v` is empty.
    pub k: &'a [f32],
    pub v: &'a [f32],
}

/// A fixed number of blocks. Pages cost nothing until they are touched.
pub struct KvMemory {
    layout: KvLayout,
    blocks: usize,
    memory: Memory<u8>,
}

impl KvMemory {
    pub fn new(layout: KvLayout, blocks: usize) -> Self {
        Self { layout, blocks, memory: Memory::new(layout.block_bytes() * blocks) }
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The bytes of all blocks, one after the other.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.memory.as_slice()
    }

    /// The same bytes, for registering them with a device. Blocks are written one at a time.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }

    /// The bytes of block `id`, to copy it out.
    pub fn block(&self, id: u32) -> &[u8] {
        &self.memory.as_slice()[self.range(id)]
    }

    /// The bytes of block `id`, to copy it in.
    pub fn block_mut(&mut self, id: u32) -> &mut [u8] {
        let range = self.range(id);
        &mut self.memory.as_mut_slice()[range]
    }

    /// The bytes of these blocks, which must all differ, in the order of `ids`, to write them in parallel.
    pub fn blocks_mut(&mut self, ids: &[u32]) -> Vec<&mut [u8]> {
        let size = self.layout.block_bytes();
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_unstable_by_key(|&nth| ids[nth]);
        let (mut rest, mut passed) = (self.memory.as_mut_slice(), 0);
        let mut found: Vec<(usize, &mut [u8])> = Vec::with_capacity(ids.len());
        for nth in order {
            let id = ids[nth] as usize;
            assert!(id >= passed && id < self.blocks, "block {id} is named once, and one of {}", self.blocks);
            let (block, after) = rest[(id - passed) * size..].split_at_mut(size);
            (rest, passed) = (after, id + 1);
            found.push((nth, block));
        }
        found.sort_unstable_by_key(|(nth, _)| *nth);
        found.into_iter().map(|(_, block)| block).collect()
    }

    fn range(&self, id: u32) -> Range<usize> {
        block_range(id, self.blocks, self.layout.block_bytes())
    }
}

/// Stores K and V of all rows at the positions of their spans, in `layer`. No two spans may hold the same position of
/// the same block.
///
/// In bf16 and int8, V of an even position leaves a zero for the next one, whose number shares its word: so the positions of a block must
/// be written in ascending order. In bf16, denormals become zeros.
///
/// In int8, a head's numbers are transformed, in blocks of `2^n` (`hadamard`), and become `round(t * (127 / max |t|))`,
/// ties to even, with the scale `max |t| / 127 / 2^n`; all are 0 if no `|t|` reaches 1e-30.
pub fn write<'a>(cpu: &Cpu, kv: &mut KvMemory, layer: usize, rows: impl Iterator<Item = KvRows<'a>> + Clone + Sync) {
    let layout = kv.layout;
    let width = layout.kv_heads * layout.head_dim;
    let mut total = 0;
    for KvRows { spans, k, v } in rows.clone() {
        let rows: usize = spans.iter().map(|span| span.rows).sum();
        let v_len = if layout.latent.is_some() { 0 } else { k.len() };
        assert!(k.len() == rows * width && v.len() == v_len, "k and v are [rows, kv_heads, head_dim]");
        for span in spans {
            assert!(span.blocks.len() * BLOCK_POSITIONS >= span.start + span.rows, "the block table ends before the span");
        }
        total += rows;
    }
    let tasks = total.div_ceil(cpu.rows_per_task(2 * width)).min(cpu.threads());
    let blocks = kv.blocks;
    let memory = Disjoint::new(kv.memory.as_mut_slice());
    cpu.for_each(tasks, |task| {
        for KvRows { spans, k, v } in rows.clone() {
            let mut row = 0;
            for span in spans {
                for position in span.start..span.start + span.rows {
                    let id = span.blocks[position / BLOCK_POSITIONS];
                    if task_of(id, tasks) == task {
                        // SAFETY: each block belongs to one task, and this is its only part alive.
                        let block = unsafe { memory.part(block_range(id, blocks, layout.block_bytes())) };
                        for (part, from) in [(Part::K, k), (Part::V, v)].into_iter().filter(|(_, from)| !from.is_empty()) {
                            let from = &from[row * width..(row + 1) * width];
                            cpu.isa().dispatch(Store { layout, layer, part, slot: position % BLOCK_POSITIONS, from, block: &mut *block });
                        }
                    }
                    row += 1;
                }
            }
        }
    });
}

/// The task that writes block `id`. Ids are hashed first (Knuth, The Art of Computer Programming, volume 3, section
/// 6.4): ids that are written together may all be multiples of the same number.
fn task_of(id: u32, tasks: usize) -> usize {
    (id.wrapping_mul(0x9e37_79b9) >> 16) as usize % tasks
}

/// Stores one position's K or V of all heads.
struct Store<'a> {
    layout: KvLayout,
    layer: usize,
    part: Part,
    slot: usize,
    from: &'a [f32],
    block: &'a mut [u8],
}

impl Kernel for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let width = self.layout.head_dim;
        for (head, from) in self.from.chunks_exact(width).enumerate() {
            with_kv_element!(self.layout.dtype, E => self.head::<S, E>(simd, head, from));
        }
    }
}

impl Store<'_> {
    #[inline(always)]
    fn head<S: Simd, E: KvElement>(&mut self, simd: S, head: usize, from: &[f32]) {
        let Self { layout, layer, part, slot, .. } = *self;
        let (mut transformed, mut from, mut factor) = ([[0.0; LANES]; INT8_HEAD_VECTORS], from, 1.0);
        if const { E::PanelFormat::HAS_SCALES } {
            from = hadamard::transformed(simd, from, &mut transformed);
            let (scale, inverse) = quantize::scale_of(simd, from);
            let (scales, _) = self.block[layout.scales(layer, part, head)].as_chunks_mut();
            scales[slot] = (scale / block_of(from.len()) as f32).to_le_bytes();
            factor = inverse;
        }
        let numbers = &mut self.block[layout.numbers(layer, part, head)];
        for (i, from) in from.chunks(LANES).enumerate() {
            let mut bytes = [0; _];
            E::put(simd, simd.mul(load_part(simd, from), simd.splat(factor)), &mut bytes);
            let bytes = &bytes[..from.len() * E::BYTES];
            match part {
                Part::K => put_across::<E>(bytes, &mut numbers[i * LANES * BLOCK_POSITIONS * E::BYTES..], slot),
                Part::V => {
                    let line = &mut numbers[slot / inputs::<E>() * layout.head_dim * word_bytes::<E>()..];
                    put_along::<E>(bytes, &mut line[i * LANES * word_bytes::<E>()..], slot % inputs::<E>());
                }
            }
        }
    }
}

/// Bytes of a word: neighbouring dimensions in K, neighbouring positions in V.
const fn word_bytes<E: KvElement>() -> usize {
    inputs::<E>() * E::BYTES
}

/// Stores words of K, one for each of the `[head_dim / inputs][16 positions]`.
#[inline(always)]
fn put_across<E: KvElement>(words: &[u8], positions: &mut [u8], slot: usize) {
    let word = const { word_bytes::<E>() };
    for (from, to) in words.chunks_exact(word).zip(positions.chunks_exact_mut(word * BLOCK_POSITIONS)) {
        to[slot * word..][..word].copy_from_slice(from);
    }
}

/// Stores numbers of V, each into place `nth` of a word, with zeros in the places after it.
#[inline(always)]
fn put_along<E: KvElement>(numbers: &[u8], words: &mut [u8], nth: usize) {
    for (from, word) in numbers.chunks_exact(E::BYTES).zip(words.chunks_exact_mut(word_bytes::<E>())) {
        let places = &mut word[nth * E::BYTES..];
        places.fill(0);
        places[..E::BYTES].copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::testing::{cpus, numbers, stored, transformed},
        dtype::{Dtype, decode, encode},
        kv::KvStorage,
    };

    #[test]
    fn blocks_are_apart_aligned_and_zero() {
        let layout = KvLayout { layers: 2, kv_heads: 3, head_dim: 20, dtype: KvStorage::Float(Dtype::Bf16), latent: None };
        assert_eq!(layout.block_bytes(), 2 * 2 * 3 * 16 * 20 * 2);
        let mut kv = KvMemory::new(layout, 5);
        assert!(kv.block(0).as_ptr().addr().is_multiple_of(64));
        for id in 0..5 {
            assert!(kv.block(id).iter().all(|b| *b == 0));
            kv.block_mut(id).fill(id as u8 + 1);
        }
        for id in 0..5 {
            assert!(kv.block(id).iter().all(|b| *b == id as u8 + 1));
        }
        for (block, first) in kv.blocks_mut(&[4, 0, 2]).into_iter().zip([5, 1, 3]) {
            assert!(block.iter().all(|b| *b == first));
            block.fill(9);
        }
        assert_eq!([0, 1, 2, 3, 4].map(|id| kv.block(id)[0]), [9, 2, 9, 4, 9]);
    }

    #[test]
    #[should_panic(expected = "block 2 is named once")]
    fn a_block_cannot_be_written_side_by_side_with_itself() {
        let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 2, dtype: KvStorage::Float(Dtype::F32), latent: None };
        KvMemory::new(layout, 3).blocks_mut(&[2, 0, 2]);
    }

    /// Writes 20 rows of two sequences and compares them with the numbers that `expected` gives for a head.
    fn assert_written(layout: KvLayout, expected: impl Fn(&[f32]) -> Vec<f64>) {
        let width = layout.kv_heads * layout.head_dim;
        let (k, v) = (numbers(20 * width, 1), numbers(20 * width, 2));
        let mut first = None;
        for cpu in cpus() {
            let mut kv = KvMemory::new(layout, 4);
            let spans = [Span { blocks: &[3, 1], start: 13, rows: 18 }, Span { blocks: &[2], start: 0, rows: 2 }];
            let rows = [
                KvRows { spans: &spans[..1], k: &k[..18 * width], v: &v[..18 * width] },
                KvRows { spans: &spans[1..], k: &k[18 * width..], v: &v[18 * width..] },
            ];
            write(&cpu, &mut kv, 1, rows.into_iter());
            let positions = (13..31).map(|p| ([3, 1][p / 16], p % 16)).chain([(2, 0), (2, 1)]);
            for (row, (block, slot)) in positions.enumerate() {
                for (part, from) in [(Part::K, &k), (Part::V, &v)] {
                    for head in 0..layout.kv_heads {
                        let from = &from[row * width + head * layout.head_dim..][..layout.head_dim];
                        assert_eq!(stored(&kv, block, 1, part, head)[slot], expected(from), "{layout:?} on {}", cpu.isa());
                    }
                }
            }
            assert!(
                kv.block(3)[..layout.numbers(0, Part::V, layout.kv_heads - 1).end].iter().all(|b| *b == 0),
                "other layers are untouched"
            );
            assert!(kv.block(0).iter().all(|b| *b == 0), "other blocks are untouched");
            let all: Vec<u8> = (0..4).flat_map(|id| kv.block(id).to_vec()).collect();
            assert!(*first.get_or_insert_with(|| all.clone()) == all, "the same bytes on {}", cpu.isa());
        }
    }

    #[test]
    fn a_written_row_lands_at_its_position_rounded_to_nearest() {
        for (kv_dtype, dtype) in [
            (KvStorage::Float(Dtype::F32), Dtype::F32),
            (KvStorage::Float(Dtype::F16), Dtype::F16),
            (KvStorage::Float(Dtype::Bf16), Dtype::Bf16),
        ] {
            for head_dim in [8, 16, 40] {
                let layout = KvLayout { layers: 3, kv_heads: 2, head_dim, dtype: kv_dtype, latent: None };
                assert_written(layout, |from| decode(dtype, &encode(dtype, from)).into_iter().map(f64::from).collect());
            }
        }
    }

    #[test]
    fn several_threads_write_what_one_does() {
        let width = 2 * 64;
        let (k, v) = (numbers(1100 * width, 1), numbers(1100 * width, 2));
        // Sequences that begin and end within a block, with blocks in any order.
        let blocks: Vec<u32> = (0..80).map(|i| i * 37 % 80).collect();
        let span = |first: usize, start, rows| Span { blocks: &blocks[first..], start, rows };
        let spans = [span(0, 3, 400), span(30, 7, 690), span(79, 0, 10)];
        for dtype in [KvStorage::Float(Dtype::F32), KvStorage::Float(Dtype::Bf16), KvStorage::Int8] {
            let layout = KvLayout { layers: 1, kv_heads: 2, head_dim: 64, dtype, latent: None };
            let written = |threads| {
                let cpu = Cpu::new(None, threads).unwrap();
                assert!(threads == 1 || cpu.rows_per_task(2 * width) * threads <= 1100, "each thread has a share");
                let mut kv = KvMemory::new(layout, 80);
                write(&cpu, &mut kv, 0, [KvRows { spans: &spans, k: &k, v: &v }].into_iter());
                (0..80).flat_map(|id| kv.block(id).to_vec()).collect::<Vec<u8>>()
            };
            let expected = written(1);
            assert!(expected.iter().any(|byte| *byte != 0));
            assert!([2, 3, 4].into_iter().all(|threads| written(threads) == expected), "{dtype:?}");
        }
    }

    #[test]
    fn in_pairs_an_even_position_leaves_a_zero_for_the_next_one() {
        let dtypes = [KvStorage::Float(Dtype::Bf16), KvStorage::Int8];
        for (cpu, dtype) in cpus().iter().flat_map(|cpu| dtypes.map(|dtype| (cpu, dtype))) {
            let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 20, dtype, latent: None };
            let mut kv = KvMemory::new(layout, 1);
            kv.block_mut(0).fill(0xff);
            let spans = &[Span { blocks: &[0], start: 6, rows: 1 }];
            // All numbers are ones, also after a transform in blocks of four.
            let ones: [f32; 20] = std::array::from_fn(|i| if dtype == KvStorage::Int8 && i % 4 > 0 { 0.0 } else { 1.0 });
            write(cpu, &mut kv, 0, [KvRows { spans, k: &ones, v: &ones }].into_iter());
            let numbers = layout.numbers(0, Part::V, 0);
            let line = &kv.block(0)[numbers.start + 3 * 2 * numbers.len() / BLOCK_POSITIONS..][..2 * numbers.len() / BLOCK_POSITIONS];
            let (one, places) = if dtype == KvStorage::Float(Dtype::Bf16) { (&[0x80, 0x3f][..], 4) } else { (&[127][..], 2) };
            assert!(line.chunks(places).all(|word| word.starts_with(one) && word[one.len()..].iter().all(|byte| *byte == 0)));
        }
    }

    #[test]
    fn in_int8_the_largest_number_of_a_head_is_127() {
        for head_dim in [2, 6, 16, 40, 64] {
            assert_written(KvLayout { layers: 3, kv_heads: 2, head_dim, dtype: KvStorage::Int8, latent: None }, |from| {
                let from = transformed(from);
                let largest = from.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                let integers = from.iter().map(|x| (x * (127.0 / largest)).round_ties_even());
                integers.map(|integer| f64::from(integer) * f64::from(largest / 127.0 / block_of(from.len()) as f32)).collect()
            });
        }
    }

    #[test]
    fn in_int8_nothing_is_zero_and_needs_no_division() {
        let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 20, dtype: KvStorage::Int8, latent: None };
        for nothing in [0.0, -0.0, 1e-40, -2e-31] {
            for cpu in cpus() {
                let mut kv = KvMemory::new(layout, 1);
                kv.block_mut(0).fill(0xff);
                let spans = &[Span { blocks: &[0], start: 3, rows: 1 }];
                write(&cpu, &mut kv, 0, [KvRows { spans, k: &[nothing; 20], v: &[nothing; 20] }].into_iter());
                for part in [Part::K, Part::V] {
                    assert_eq!(stored(&kv, 0, 0, part, 0)[3], [0.0; 20]);
                }
            }
        }
    }
}

//! The layout of a block of K and V.

use crate::dtype::Dtype;
use std::ops::Range;

/// Positions in a block: as many as a vector holds attention scores.
pub const BLOCK_POSITIONS: usize = 16;

/// The storage of K and V.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KvStorage {
    Float(Dtype),
    /// 8-bit integers, and for each position and head an f32 scale that makes the largest number 127. On a CPU, they represent a head's
    /// Hadamard transform.
    Int8,
}

impl KvStorage {
    /// Bytes of one number.
    fn bytes(self) -> usize {
        match self {
            KvStorage::Float(dtype) => dtype.bytes(),
            KvStorage::Int8 => size_of::<i8>(),
        }
    }

    /// Whether positions have scales.
    pub(crate) fn is_scaled(self) -> bool {
        self == KvStorage::Int8
    }
}

/// A block: `[layer][K, V][kv head]`, and for each head on a CPU (`cuda::kv` gives the differences on a GPU)
///
/// ```text
///           f32, f16                      bf16                                   int8
/// scales    none                          none                                   [16 positions] f32, 64 bytes
/// numbers   K [head_dim][16 positions]    [head_dim / 2][16 positions][2]        as in bf16
///           V [16 positions][head_dim]    [8 pairs of positions][head_dim][2]    as in bf16
/// padding   none, as head_dim is even     none                                   to a multiple of 64 bytes
/// ```
///
/// In K a vector holds one dimension of 16 positions, so that their scores need no sums across lanes. In bf16 and int8
/// a word holds two numbers that one instruction multiplies: two dimensions in K, two positions in V. Scales and
/// numbers start on cache lines. In a latent layout there is K alone (DeepSeek-V2, 2024, section 2.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvLayout {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: KvStorage,
    /// The count of K's first numbers, an even number, that are also V, which is not stored separately; `None` if V is stored, with
    /// `head_dim` numbers.
    pub latent: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    K,
    V,
}

impl KvLayout {
    pub fn block_bytes(&self) -> usize {
        self.parts() * self.layers * self.kv_heads * self.head_bytes()
    }

    /// Numbers of V for each position and head.
    pub fn value_dim(&self) -> usize {
        self.latent.unwrap_or(self.head_dim)
    }

    /// The number of parts: K and V, or K alone.
    pub(crate) fn parts(&self) -> usize {
        if self.latent.is_some() { 1 } else { 2 }
    }

    /// Bytes of one head's 16 positions.
    pub(crate) fn head_bytes(&self) -> usize {
        (self.scales_bytes() + self.numbers_bytes()).next_multiple_of(CACHE_LINE)
    }

    fn scales_bytes(&self) -> usize {
        if self.dtype.is_scaled() { SCALES_BYTES } else { 0 }
    }

    fn numbers_bytes(&self) -> usize {
        BLOCK_POSITIONS * self.head_dim * self.dtype.bytes()
    }

    /// Bytes of a block that hold the scales of a head's 16 positions; empty if there are none.
    #[inline(always)]
    pub(crate) fn scales(&self, layer: usize, part: Part, head: usize) -> Range<usize> {
        let start = self.head(layer, part, head);
        start..start + self.scales_bytes()
    }

    /// Bytes of a block that hold the numbers of a head's 16 positions.
    #[inline(always)]
    pub(crate) fn numbers(&self, layer: usize, part: Part, head: usize) -> Range<usize> {
        let start = self.head(layer, part, head) + self.scales_bytes();
        start..start + self.numbers_bytes()
    }

    #[inline(always)]
    fn head(&self, layer: usize, part: Part, head: usize) -> usize {
        assert!(layer < self.layers && head < self.kv_heads && (part as usize) < self.parts());
        ((self.parts() * layer + part as usize) * self.kv_heads + head) * self.head_bytes()
    }
}

const SCALES_BYTES: usize = BLOCK_POSITIONS * size_of::<f32>();
const CACHE_LINE: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_on_cache_lines_and_int8_is_about_half_of_bf16() {
        for head_dim in [2, 6, 64, 128] {
            for dtype in [KvStorage::Float(Dtype::F32), KvStorage::Float(Dtype::F16), KvStorage::Float(Dtype::Bf16), KvStorage::Int8] {
                let layout = KvLayout { layers: 2, kv_heads: 3, head_dim, dtype, latent: None };
                let mut end = 0;
                for (layer, part, head) in (0..2)
                    .flat_map(|layer| [Part::K, Part::V].into_iter().flat_map(move |part| (0..3).map(move |head| (layer, part, head))))
                {
                    let (scales, numbers) = (layout.scales(layer, part, head), layout.numbers(layer, part, head));
                    assert_eq!((scales.start, numbers.start), (end, scales.end));
                    assert_eq!((scales.len(), numbers.len()), (if dtype.is_scaled() { 64 } else { 0 }, 16 * head_dim * dtype.bytes()));
                    assert!(scales.start.is_multiple_of(64) && numbers.start.is_multiple_of(64));
                    end = numbers.end.next_multiple_of(64);
                }
                assert_eq!(end, layout.block_bytes());
            }
        }
        let bytes = |dtype| KvLayout { layers: 16, kv_heads: 8, head_dim: 128, dtype, latent: None }.block_bytes() as f64;
        assert_eq!(bytes(KvStorage::Int8) / bytes(KvStorage::Float(Dtype::Bf16)), 33.0 / 64.0);
    }

    #[test]
    fn a_latent_layout_has_one_part() {
        let layout = KvLayout { layers: 61, kv_heads: 1, head_dim: 576, dtype: KvStorage::Float(Dtype::Bf16), latent: Some(512) };
        assert_eq!(layout.block_bytes(), 61 * 16 * 576 * 2);
        assert_eq!(layout.numbers(2, Part::K, 0).start, 2 * 16 * 576 * 2);
        assert_eq!(layout.value_dim(), 512);
    }
}

//! Blocks of quantized numbers (ggml's), expanded to f32 in the order of operations of ggml's own reference, so that each number has the
//! same bits: `d * q - m` with products and differences rounded to f32.

use half::{bf16, f16};

/// The storage of a tensor's numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(non_camel_case_types, reason = "the format's own names")]
pub enum BlockType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

use BlockType::*;

/// Each type, its number in files, and a block's numbers and bytes.
const KINDS: [(BlockType, u32, usize, usize); 16] = [
    (F32, 0, 1, 4),
    (F16, 1, 1, 2),
    (BF16, 30, 1, 2),
    (Q4_0, 2, 32, 18),
    (Q4_1, 3, 32, 20),
    (Q5_0, 6, 32, 22),
    (Q5_1, 7, 32, 24),
    (Q8_0, 8, 32, 34),
    (Q2_K, 10, 256, 84),
    (Q3_K, 11, 256, 110),
    (Q4_K, 12, 256, 144),
    (Q5_K, 13, 256, 176),
    (Q6_K, 14, 256, 210),
    (IQ4_NL, 20, 32, 18),
    (IQ4_XS, 23, 256, 136),
    (MXFP4, 39, 32, 17),
];

/// The values of four bits in IQ4_NL and IQ4_XS, and twice those of MXFP4.
const NON_LINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
const E2M1_TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl BlockType {
    /// The type with this number in files.
    pub(crate) fn of(number: u32) -> Result<Self, String> {
        let known = || KINDS.map(|(kind, ..)| format!("{kind:?}")).join(", ");
        let found = KINDS.iter().find(|kind| kind.1 == number);
        found.map(|kind| kind.0).ok_or_else(|| format!("its type has number {number}, which is not supported; supported are {}", known()))
    }

    fn row(self) -> (BlockType, u32, usize, usize) {
        *KINDS.iter().find(|kind| kind.0 == self).expect("each kind is in the table")
    }

    /// The count of numbers in a block.
    pub fn numbers(self) -> usize {
        self.row().2
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        self.row().3
    }

    /// Whether numbers are stored unquantized.
    pub fn is_plain(self) -> bool {
        self.numbers() == 1
    }

    /// Expands whole blocks: `bytes` to as many numbers as they hold.
    ///
    /// # Panics
    /// If the lengths do not match.
    pub fn expand(self, bytes: &[u8], to: &mut [f32]) {
        let (_, _, numbers, block) = self.row();
        assert!(bytes.len().is_multiple_of(block) && to.len() == bytes.len() / block * numbers, "whole blocks");
        let blocks = bytes.chunks_exact(block).zip(to.chunks_exact_mut(numbers));
        let expand: fn(&[u8], &mut [f32]) = match self {
            F32 => |b, to| to[0] = f32::from_le_bytes(*b.first_chunk().expect("4 bytes")),
            F16 => |b, to| to[0] = half_at(b, 0),
            BF16 => |b, to| to[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            Q4_0 => |b, to| nibbles(&b[2..], to, |q| f32::from(i16::from(q) - 8) * half_at(b, 0)),
            Q4_1 => |b, to| nibbles(&b[4..], to, |q| f32::from(q) * half_at(b, 0) + half_at(b, 2)),
            Q5_0 => |b, to| five_bits(&b[2..], to, |q| f32::from(i16::from(q) - 16) * half_at(b, 0)),
            Q5_1 => |b, to| five_bits(&b[4..], to, |q| f32::from(q) * half_at(b, 0) + half_at(b, 2)),
            Q8_0 => |b, to| b[2..].iter().zip(to).for_each(|(&q, to)| *to = f32::from(q as i8) * half_at(b, 0)),
            Q2_K => q2_k,
            Q3_K => q3_k,
            Q4_K => |b, to| q45_k(b, None, &b[16..], to),
            Q5_K => |b, to| q45_k(b, Some(&b[16..48]), &b[48..], to),
            Q6_K => q6_k,
            IQ4_NL => |b, to| nibbles(&b[2..], to, |q| half_at(b, 0) * f32::from(NON_LINEAR[usize::from(q)])),
            IQ4_XS => iq4_xs,
            MXFP4 => |b, to| nibbles(&b[1..], to, |q| f32::from(E2M1_TWICE[usize::from(q)]) * half_of_power(b[0])),
        };
        blocks.for_each(|(block, to)| expand(block, to));
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Half of the power of two that an E8M0 scale represents.
fn half_of_power(exponent: u8) -> f32 {
    match exponent {
        // The result is below f32's normal numbers.
        0 => f32::from_bits(0x0020_0000),
        1 => f32::from_bits(0x0040_0000),
        _ => f32::from_bits(u32::from(exponent - 1) << 23),
    }
}

/// Expands the lower halves of 16 bytes, then the upper ones.
fn nibbles(bytes: &[u8], to: &mut [f32], number: impl Fn(u8) -> f32) {
    for (i, &byte) in bytes[..16].iter().enumerate() {
        to[i] = number(byte & 15);
        to[i + 16] = number(byte >> 4);
    }
}

/// As [`nibbles`], with a fifth bit of each number from the four bytes before them.
fn five_bits(bytes: &[u8], to: &mut [f32], number: impl Fn(u8) -> f32) {
    let high = u32::from_le_bytes(*bytes.first_chunk().expect("4 bytes"));
    let bit = |i: usize| ((high >> i & 1) << 4) as u8;
    for (i, &byte) in bytes[4..20].iter().enumerate() {
        to[i] = number(byte & 15 | bit(i));
        to[i + 16] = number(byte >> 4 | bit(i + 16));
    }
}

/// `[scales and minimums 16][quants 64][d][dmin]`
fn q2_k(b: &[u8], to: &mut [f32]) {
    let (scales, quants) = (&b[..16], &b[16..80]);
    let (d, dmin) = (half_at(b, 80), half_at(b, 82));
    for (i, to) in to.chunks_exact_mut(16).enumerate() {
        // 128 numbers share 32 bytes, with two bits each.
        let (half, shift, part) = (i / 8, i % 8 / 2 * 2, i % 2);
        let (scale, min) = (d * f32::from(scales[i] & 15), dmin * f32::from(scales[i] >> 4));
        for (to, q) in to.iter_mut().zip(&quants[32 * half + 16 * part..]) {
            *to = scale * f32::from(q >> shift & 3) - min;
        }
    }
}

/// `[third bits 32][quants 64][scales 12][d]`
fn q3_k(b: &[u8], to: &mut [f32]) {
    let (high, quants, scales) = (&b[..32], &b[32..96], &b[96..108]);
    let d = half_at(b, 108);
    for (i, to) in to.chunks_exact_mut(16).enumerate() {
        let low = if i < 8 { scales[i] & 15 } else { scales[i - 8] >> 4 };
        let scale = i16::from(low | (scales[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32;
        let dl = d * f32::from(scale);
        let (half, shift, part) = (i / 8, i % 8 / 2 * 2, i % 2);
        let bit = 1 << (i / 2);
        for (l, to) in to.iter_mut().enumerate() {
            let q = i16::from(quants[32 * half + 16 * part + l] >> shift & 3);
            *to = dl * f32::from(if high[16 * part + l] & bit == 0 { q - 4 } else { q });
        }
    }
}

/// `[d][dmin][scales and minimums of six bits 12]`, then fifth bits if there are any, then quants.
fn q45_k(b: &[u8], fifth: Option<&[u8]>, quants: &[u8], to: &mut [f32]) {
    let (d, dmin, scales) = (half_at(b, 0), half_at(b, 2), &b[4..16]);
    for (i, to) in to.chunks_exact_mut(32).enumerate() {
        let (scale, min) = match i {
            0..4 => (scales[i] & 63, scales[i + 4] & 63),
            _ => (scales[i + 4] & 15 | scales[i - 4] >> 6 << 4, scales[i + 4] >> 4 | scales[i] >> 6 << 4),
        };
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        for (l, to) in to.iter_mut().enumerate() {
            let q = quants[32 * (i / 2) + l] >> (4 * (i % 2)) & 15;
            let high = fifth.map_or(0, |fifth| (fifth[l] >> i & 1) << 4);
            *to = scale * f32::from(q | high) - min;
        }
    }
}

/// `[lower bits 128][upper bits 64][scales 16][d]`
fn q6_k(b: &[u8], to: &mut [f32]) {
    let (low, high, scales) = (&b[..128], &b[128..192], &b[192..208]);
    let d = half_at(b, 208);
    for (i, to) in to.chunks_exact_mut(16).enumerate() {
        let (half, quarter, part) = (i / 8, i % 8 / 2, i % 2);
        let dl = d * f32::from(scales[i] as i8);
        for (l, to) in to.iter_mut().enumerate() {
            let at = 16 * part + l;
            let low = low[64 * half + 32 * (quarter % 2) + at] >> (4 * (quarter / 2)) & 15;
            let high = (high[32 * half + at] >> (2 * quarter) & 3) << 4;
            *to = dl * f32::from(i16::from(low | high) - 32);
        }
    }
}

/// `[d][upper bits of scales 2][lower bits 4][quants 128]`
fn iq4_xs(b: &[u8], to: &mut [f32]) {
    let (d, high) = (half_at(b, 0), u16::from_le_bytes([b[2], b[3]]));
    for (i, to) in to.chunks_exact_mut(32).enumerate() {
        let low = u16::from(b[4 + i / 2] >> (4 * (i % 2)) & 15);
        let scale = (low | (high >> (2 * i) & 3) << 4) as i16 - 32;
        let dl = d * f32::from(scale);
        nibbles(&b[8 + 16 * i..], to, |q| dl * f32::from(NON_LINEAR[usize::from(q)]));
    }
}

//! f32, f16 and bf16 in memory, little-endian; and FP8, which is widened before it is used.

/// The type of stored numbers. Sums are always f32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }
}

/// `numbers`, rounded to nearest and stored in `dtype`.
pub fn encode(dtype: Dtype, numbers: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::F16 => numbers.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::Bf16 => numbers.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// The numbers stored in `bytes`.
pub fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|&b| half::f16::from_le_bytes(b).to_f32()).collect(),
        Dtype::Bf16 => bytes.as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect(),
    }
}

/// An e4m3 number (4 bits of exponent, 3 of mantissa, no infinities; Micikevicius et al., "FP8 Formats for Deep Learning",
/// 2022) times `scale`, rounded to the bits of bf16. Both steps round, as PyTorch's do: the product to f32, which holds it
/// exactly if the scale has at most 20 significant bits, and that to bf16. The byte is not NaN, and the product finite.
///
/// There are no branches or tables, so that the compiler can vectorize it.
#[inline(always)]
pub fn e4m3_to_bf16(byte: u8, scale: f32) -> u16 {
    let magnitude = u32::from(byte & 0x7f);
    // Exponents are biased by 7, those of f32 by 127. The smallest numbers have no leading one, so it is subtracted again.
    let (bias, leading) = if magnitude < 8 { (121 << 23, 1.0 / 64.0) } else { (120 << 23, 0.0) };
    let number = f32::from_bits((magnitude << 20) + bias) - leading;
    let product = (number * scale).to_bits() | u32::from(byte & 0x80) << 24;
    // Rounds to nearest, ties to even.
    ((product + 0x7fff + (product >> 16 & 1)) >> 16) as u16
}

/// The largest number in e4m3.
pub const E4M3_MAX: f32 = 448.0;

/// Whether a byte is one of e4m3's two NaNs.
#[inline(always)]
pub fn is_e4m3_nan(byte: u8) -> bool {
    byte & 0x7f == 0x7f
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number by definition of the format.
    fn e4m3(byte: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
        let magnitude = if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
        if byte < 128 { magnitude } else { -magnitude }
    }

    #[test]
    fn e4m3_times_a_scale_is_rounded_to_nearest() {
        assert_eq!([e4m3(0x7e), e4m3(0x08), e4m3(0x01), e4m3(0xb8)], [E4M3_MAX, 1.0 / 64.0, 1.0 / 512.0, -1.0]);
        for scale in [1.0, 1.0 + 1.0 / 128.0, 0.002_345_678, 3.3e-38, 1e-40, 1e30] {
            for byte in (0..=255).filter(|&byte| !is_e4m3_nan(byte)) {
                let expected = half::bf16::from_f32(e4m3(byte) * scale).to_bits();
                assert_eq!(e4m3_to_bf16(byte, scale), expected, "{byte:#04x} × {scale}");
            }
        }
        assert!((0..=255).filter(|&byte| is_e4m3_nan(byte)).eq([0x7f, 0xff]));
    }
}

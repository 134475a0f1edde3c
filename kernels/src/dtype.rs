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

/// FP8 numbers times `scale`, rounded to the bits of bf16. Both steps round, as PyTorch's do: the product to f32, which
/// holds it exactly if the scale has at most 20 significant bits, and that to bf16.
pub fn e4m3_to_bf16(bytes: &[u8], scale: f32) -> impl Iterator<Item = u16> {
    bytes.iter().map(move |&byte| half::bf16::from_f32(E4M3[usize::from(byte)] * scale).to_bits())
}

/// The largest number in e4m3.
pub const E4M3_MAX: f32 = 448.0;

/// Whether a byte is one of e4m3's two NaNs.
pub fn is_e4m3_nan(byte: u8) -> bool {
    byte & 0x7f == 0x7f
}

/// What each byte stands for in e4m3: 4 bits of exponent, 3 of mantissa, no infinities (Micikevicius et al., "FP8 Formats
/// for Deep Learning", 2022).
static E4M3: [f32; 256] = {
    let (mut numbers, mut byte) = ([0.0; 256], 0);
    while byte < 256 {
        let (exponent, mantissa) = (byte as i32 >> 3 & 15, (byte & 7) as f32);
        // Below 2^-6 come multiples of 2^-9.
        let magnitude = match exponent {
            0 => mantissa / 512.0,
            15 if byte & 7 == 7 => f32::NAN,
            // Exponents are biased by 7, f32's by 127.
            _ => f32::from_bits(((exponent + 120) as u32) << 23) * (1.0 + mantissa / 8.0),
        };
        numbers[byte] = if byte < 128 { magnitude } else { -magnitude };
        byte += 1;
    }
    numbers
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_bytes_stand_for_their_numbers() {
        let of = |byte: u8| E4M3[usize::from(byte)];
        assert_eq!([of(0x7e), of(0x08), of(0x01), of(0xb8), of(0x38)], [E4M3_MAX, 1.0 / 64.0, 1.0 / 512.0, -1.0, 1.0]);
        assert!(of(0x00) == 0.0 && of(0x80) == 0.0 && of(0x80).is_sign_negative());
        assert!((0..=255).all(|byte| is_e4m3_nan(byte) == of(byte).is_nan()));
        // Bytes of one sign are ordered as their numbers are.
        assert!((0..0x7e).all(|byte| of(byte) < of(byte + 1) && of(byte + 128) > of(byte + 129)));
    }

    #[test]
    fn scaled_numbers_are_rounded_to_nearest() {
        let scaled = |byte, scale| half::bf16::from_bits(e4m3_to_bf16(&[byte], scale).next().unwrap()).to_f32();
        assert_eq!(scaled(0x7e, 1.0), 448.0);
        // 1.125 × (1 + 2^-7) lies between two neighbours, nearer to the upper one: 1.1328125.
        assert_eq!(scaled(0x39, 1.0 + 1.0 / 128.0), 1.132_812_5);
        assert_eq!(scaled(0xb9, 1.0 + 1.0 / 128.0), -1.132_812_5);
    }
}

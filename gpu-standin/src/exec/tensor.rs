//! The tensor cores' operations on a warp's registers, by the layouts of the PTX manual ("Matrix Fragments").

/// bf16 bits to f32.
#[inline]
pub(crate) fn widen(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

/// f32 to bf16 bits, to nearest even.
#[inline]
pub(crate) fn narrow(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { 0x7fff } else { rounded }
}

type Lanes = [u32; 32];

/// c += a b: a is 16x16, b 16x8, c 16x8. With g = lane / 4 and t = lane % 4: register i of a holds columns 2t and 2t+1
/// (+8 for registers 2 and 3) of row g (+8 for odd registers); register i of b rows 2t and 2t+1 (+8) of column g;
/// registers 0, 1 of c columns 2t and 2t+1 of row g, registers 2, 3 those of row g+8.
#[inline(always)]
pub(crate) fn mma(a: [&Lanes; 4], b: [&Lanes; 2], c: [&Lanes; 4]) -> [Lanes; 4] {
    let mut left = [[0.0f32; 16]; 16];
    for (i, register) in a.into_iter().enumerate() {
        for (lane, pair) in register.iter().enumerate() {
            let (row, column) = (lane / 4 + i % 2 * 8, lane % 4 * 2 + i / 2 * 8);
            left[row][column] = widen(pair & 0xffff);
            left[row][column + 1] = widen(pair >> 16);
        }
    }
    let mut right = [[0.0f32; 8]; 16];
    for (i, register) in b.into_iter().enumerate() {
        for (lane, pair) in register.iter().enumerate() {
            let (row, column) = (lane % 4 * 2 + i * 8, lane / 4);
            right[row][column] = widen(pair & 0xffff);
            right[row + 1][column] = widen(pair >> 16);
        }
    }
    let mut sums = [[0.0f32; 8]; 16];
    for lane in 0..32 {
        let (row, column) = (lane / 4, lane % 4 * 2);
        for (i, register) in c.into_iter().enumerate() {
            sums[row + i / 2 * 8][column + i % 2] = f32::from_bits(register[lane]);
        }
    }
    for row in 0..16 {
        for k in 0..16 {
            for column in 0..8 {
                sums[row][column] += left[row][k] * right[k][column];
            }
        }
    }
    let mut out = [[0; 32]; 4];
    for lane in 0..32 {
        let (row, column) = (lane / 4, lane % 4 * 2);
        for (i, register) in out.iter_mut().enumerate() {
            register[lane] = sums[row + i / 2 * 8][column + i % 2].to_bits();
        }
    }
    out
}

/// Lane i holds columns 2t and 2t+1 of row g of an 8x8 matrix; returns those of its transpose.
pub(crate) fn transpose(from: &Lanes) -> Lanes {
    let at = |row: usize, column: usize| from[row * 4 + column / 2] >> (column % 2 * 16) & 0xffff;
    std::array::from_fn(|lane| {
        let (row, column) = (lane / 4, lane % 4 * 2);
        at(column, row) | at(column + 1, row) << 16
    })
}

/// An operand of a warpgroup product in shared memory (PTX manual, "Matrix Descriptor Format").
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    start: u64,
    /// The distance between panels of 64 columns, for an operand that is stored transposed.
    leading: u64,
    /// The distance between groups of 8 rows.
    stride: u64,
    transposed: bool,
}

impl Operand {
    /// Decodes a descriptor; `None` for a layout that is not supported. Only the swizzle of 128 bytes without a base offset is.
    pub(crate) fn new(descriptor: u64, transposed: bool) -> Option<Self> {
        let field = |from: u32| (descriptor >> from & 0x3fff) << 4;
        let (swizzle, base) = (descriptor >> 62, descriptor >> 49 & 7);
        (swizzle == 1 && base == 0).then(|| Self { start: field(0), leading: field(16), stride: field(32), transposed })
    }

    /// The address of inner index `k` of row (or column) `i`.
    pub(crate) fn address(&self, i: u64, k: u64) -> u64 {
        let linear = if self.transposed {
            // There are 64 adjacent numbers, then 8 of the inner index, 128 bytes apart.
            self.start + i / 64 * self.leading + k / 8 * self.stride + k % 8 * 128 + i % 64 * 2
        } else {
            self.start + i / 8 * self.stride + i % 8 * 128 + k * 2
        };
        linear ^ (linear >> 7 & 7) << 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_bf16_goes_to_the_nearest_even() {
        assert_eq!(narrow(1.0), 0x3f80);
        assert_eq!(narrow(f32::from_bits(0x3f80_8000)), 0x3f80, "a tie goes to even");
        assert_eq!(narrow(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(narrow(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert_eq!(narrow(f32::NAN), 0x7fff);
        assert_eq!(narrow(f32::NEG_INFINITY), 0xff80);
    }

    #[test]
    fn a_product_of_fragments_is_the_product_of_the_matrices() {
        let a = |row: usize, k: usize| (row * 3 + k) as f32 - 20.0;
        let b = |k: usize, column: usize| (k as f32 - 4.0) * (column as f32 + 1.0) * 0.5;
        let pair = |low: f32, high: f32| narrow(low) | narrow(high) << 16;
        let lanes = |f: &dyn Fn(usize, usize) -> u32| -> Lanes { std::array::from_fn(|lane| f(lane / 4, lane % 4)) };
        let left = [
            lanes(&|g, t| pair(a(g, 2 * t), a(g, 2 * t + 1))),
            lanes(&|g, t| pair(a(g + 8, 2 * t), a(g + 8, 2 * t + 1))),
            lanes(&|g, t| pair(a(g, 2 * t + 8), a(g, 2 * t + 9))),
            lanes(&|g, t| pair(a(g + 8, 2 * t + 8), a(g + 8, 2 * t + 9))),
        ];
        let right = [lanes(&|g, t| pair(b(2 * t, g), b(2 * t + 1, g))), lanes(&|g, t| pair(b(2 * t + 8, g), b(2 * t + 9, g)))];
        let one = [1.0f32.to_bits(); 32];
        let out = mma([&left[0], &left[1], &left[2], &left[3]], [&right[0], &right[1]], [&one, &one, &one, &one]);
        for (i, register) in out.iter().enumerate() {
            for (lane, bits) in register.iter().enumerate() {
                let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
                let expected: f32 = 1.0 + (0..16).map(|k| a(row, k) * b(k, column)).sum::<f32>();
                assert_eq!(f32::from_bits(*bits), expected);
            }
        }
    }

    #[test]
    fn a_transpose_is_its_own_inverse() {
        let from: Lanes = std::array::from_fn(|i| (i as u32 * 2) | (i as u32 * 2 + 1) << 16);
        let turned = transpose(&from);
        assert_eq!(turned[0], 8 << 16, "rows 0 and 1 of column 0");
        assert_eq!(transpose(&turned), from);
    }

    #[test]
    fn swizzled_operands_lie_where_the_manual_says() {
        let descriptor = 1u64 << 62 | 64 << 32 | 1024 << 16 | 0x2000 >> 4;
        let plain = Operand::new(descriptor, false).unwrap();
        assert_eq!(plain.address(0, 0), 0x2000);
        assert_eq!(plain.address(1, 0), 0x2000 + 128 + 16, "row 1's vectors are swapped in pairs");
        assert_eq!(plain.address(8, 8), 0x2000 + 1024 + 16);
        let turned = Operand::new(descriptor, true).unwrap();
        assert_eq!(turned.address(64, 0), 0x2000 + 1024 * 16);
        assert_eq!(turned.address(0, 8), 0x2000 + 1024);
        assert!(Operand::new(2 << 62, false).is_none());
    }
}

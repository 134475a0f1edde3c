//! Instructions that only compute, over all lanes at once. Inactive lanes keep their registers.

use super::{
    tensor::{narrow, widen},
    warp::Registers,
};
use crate::ptx::program::{Instr, Op};

/// Executes the instruction if it is one of these, and returns whether it was. The error is its violation of a rule.
#[inline(always)]
pub(crate) fn compute(r: &mut Registers, lists: &[u16], instr: &Instr, mask: u32) -> Result<bool, &'static str> {
    let Instr { op, d, a, b, c, .. } = *instr;
    macro_rules! r32 {
        (|$x:ident| $value:expr) => {{
            let x = *r.r32(a);
            r.set32(
                d,
                std::array::from_fn(|i| {
                    let $x = x[i];
                    $value
                }),
                mask,
            );
        }};
        (|$x:ident, $y:ident| $value:expr) => {{
            let (x, y) = (*r.r32(a), *r.r32(b));
            r.set32(
                d,
                std::array::from_fn(|i| {
                    let ($x, $y) = (x[i], y[i]);
                    $value
                }),
                mask,
            );
        }};
        (|$x:ident, $y:ident, $z:ident| $value:expr) => {{
            let (x, y, z) = (*r.r32(a), *r.r32(b), *r.r32(c));
            r.set32(
                d,
                std::array::from_fn(|i| {
                    let ($x, $y, $z) = (x[i], y[i], z[i]);
                    $value
                }),
                mask,
            );
        }};
    }
    macro_rules! float {
        (|$x:ident| $value:expr) => {
            r32!(|$x| {
                let $x = f32::from_bits($x);
                f32::to_bits($value)
            })
        };
        (|$x:ident, $y:ident| $value:expr) => {
            r32!(|$x, $y| {
                let ($x, $y) = (f32::from_bits($x), f32::from_bits($y));
                f32::to_bits($value)
            })
        };
        (|$x:ident, $y:ident, $z:ident| $value:expr) => {
            r32!(|$x, $y, $z| {
                let ($x, $y, $z) = (f32::from_bits($x), f32::from_bits($y), f32::from_bits($z));
                f32::to_bits($value)
            })
        };
    }
    macro_rules! r64 {
        (|$x:ident| $value:expr) => {{
            let x = *r.r64(a);
            r.set64(
                d,
                std::array::from_fn(|i| {
                    let $x = x[i];
                    $value
                }),
                mask,
            );
        }};
        (|$x:ident, $y:ident| $value:expr) => {{
            let (x, y) = (*r.r64(a), *r.r64(b));
            r.set64(
                d,
                std::array::from_fn(|i| {
                    let ($x, $y) = (x[i], y[i]);
                    $value
                }),
                mask,
            );
        }};
    }
    // This converts 64 bits from 32, and the other way round.
    macro_rules! widen {
        (|$x:ident| $value:expr) => {{
            let x = *r.r32(a);
            r.set64(
                d,
                std::array::from_fn(|i| {
                    let $x = x[i];
                    $value
                }),
                mask,
            );
        }};
        (|$x:ident, $y:ident| $value:expr) => {{
            let (x, y) = (*r.r32(a), *r.r32(b));
            r.set64(
                d,
                std::array::from_fn(|i| {
                    let ($x, $y) = (x[i], y[i]);
                    $value
                }),
                mask,
            );
        }};
    }
    macro_rules! compare {
        ($file:ident, $type:ty, |$x:ident, $y:ident| $value:expr) => {{
            let (x, y) = (r.$file(a), r.$file(b));
            let mut bits = 0u32;
            for i in 0..32 {
                let ($x, $y) = (x[i] as $type, y[i] as $type);
                bits |= u32::from($value) << i;
            }
            r.set_predicate(d, bits, mask);
        }};
    }
    macro_rules! compare_floats {
        (|$x:ident, $y:ident| $value:expr) => {{
            let (x, y) = (r.r32(a), r.r32(b));
            let mut bits = 0u32;
            for i in 0..32 {
                let ($x, $y) = (f32::from_bits(x[i]), f32::from_bits(y[i]));
                bits |= u32::from($value) << i;
            }
            r.set_predicate(d, bits, mask);
        }};
    }
    let shift32 = |x: u32, by: u32| if by < 32 { x << by } else { 0 };
    let shift64 = |x: u64, by: u32| if by < 64 { x << by } else { 0 };
    match op {
        Op::Mov32 => r32!(|x| x),
        Op::Add32 => r32!(|x, y| x.wrapping_add(y)),
        Op::Sub32 => r32!(|x, y| x.wrapping_sub(y)),
        Op::Mul32 => r32!(|x, y| x.wrapping_mul(y)),
        Op::Mad32 => r32!(|x, y, z| x.wrapping_mul(y).wrapping_add(z)),
        Op::And32 => r32!(|x, y| x & y),
        Op::Or32 => r32!(|x, y| x | y),
        Op::Xor32 => r32!(|x, y| x ^ y),
        Op::Not32 => r32!(|x| !x),
        Op::Neg32 => r32!(|x| x.wrapping_neg()),
        Op::Shl32 => r32!(|x, y| shift32(x, y)),
        Op::ShrU32 => r32!(|x, y| if y < 32 { x >> y } else { 0 }),
        Op::ShrS32 => r32!(|x, y| (x as i32 >> y.min(31)) as u32),
        Op::MinU32 => r32!(|x, y| x.min(y)),
        Op::MaxU32 => r32!(|x, y| x.max(y)),
        Op::MinS32 => r32!(|x, y| (x as i32).min(y as i32) as u32),
        Op::MaxS32 => r32!(|x, y| (x as i32).max(y as i32) as u32),
        Op::DivU32 | Op::RemU32 => {
            if (0..32).any(|i| mask >> i & 1 == 1 && r.r32(b)[i] == 0) {
                return Err("divides by zero");
            }
            if op == Op::DivU32 {
                r32!(|x, y| x.checked_div(y).unwrap_or(0));
            } else {
                r32!(|x, y| x.checked_rem(y).unwrap_or(0));
            }
        }
        Op::Prmt => r32!(|x, y, z| permute(x, y, z)),
        Op::Brev32 => r32!(|x| x.reverse_bits()),
        Op::BfindShift32 => r32!(|x| if x == 0 { u32::MAX } else { x.leading_zeros() }),
        Op::Bfi32 => {
            let lens = *r.r32(lists[instr.list as usize]);
            let (x, y, z) = (*r.r32(a), *r.r32(b), *r.r32(c));
            let insert = |i: usize| insert_bits(u64::from(x[i]), u64::from(y[i]), z[i], lens[i], 32) as u32;
            r.set32(d, std::array::from_fn(insert), mask);
        }
        Op::Popc32 => r32!(|x| x.count_ones()),
        Op::Sel32 => {
            let (x, y, chosen) = (*r.r32(a), *r.r32(b), r.predicate(c));
            r.set32(d, std::array::from_fn(|i| if chosen >> i & 1 == 1 { x[i] } else { y[i] }), mask);
        }
        Op::Sub16 => r32!(|x, y| x.wrapping_sub(y) & 0xffff),
        Op::Add16 => r32!(|x, y| x.wrapping_add(y) & 0xffff),
        Op::Shl16 => r32!(|x, y| shift32(x & 0xffff, y) & 0xffff),
        Op::Shr16 => r32!(|x, y| if y < 16 { (x & 0xffff) >> y } else { 0 }),
        Op::Mul16 => r32!(|x, y| (x & 0xffff).wrapping_mul(y & 0xffff) & 0xffff),
        Op::MulWide16 => r32!(|x, y| (x & 0xffff).wrapping_mul(y & 0xffff)),
        Op::CvtU16U32 => r32!(|x| x & 0xffff),
        Op::AddF32 => float!(|x, y| x + y),
        Op::SubF32 => float!(|x, y| x - y),
        Op::MulF32 => float!(|x, y| x * y),
        Op::DivF32 => float!(|x, y| x / y),
        Op::FmaF32 => float!(|x, y, z| x.mul_add(y, z)),
        Op::MaxF32 => float!(|x, y| x.max(y)),
        Op::MinF32 => float!(|x, y| x.min(y)),
        Op::AbsF32 => r32!(|x| x & 0x7fff_ffff),
        Op::NegF32 => r32!(|x| x ^ 0x8000_0000),
        Op::RcpF32 => float!(|x| 1.0 / x),
        Op::RsqrtF32 => float!(|x| 1.0 / x.sqrt()),
        Op::SqrtF32 => float!(|x| x.sqrt()),
        Op::Ex2F32 | Op::Ex2FtzF32 => float!(|x| exp2(x)),
        Op::TruncF32 => float!(|x| x.trunc()),
        // The result has the sign of the first and the size of the second.
        Op::CopysignF32 => r32!(|x, y| x & 0x8000_0000 | y & 0x7fff_ffff),
        Op::CvtF32U32 => r32!(|x| (x as f32).to_bits()),
        Op::CvtF32S32 => r32!(|x| (x as i32 as f32).to_bits()),
        // The conversion saturates; NaN becomes zero.
        Op::CvtU32F32Rz => r32!(|x| f32::from_bits(x) as u32),
        Op::CvtS32F32Rn => r32!(|x| f32::from_bits(x).round_ties_even() as i32 as u32),
        Op::CvtBf16x2 => r32!(|x, y| narrow(f32::from_bits(x)) << 16 | narrow(f32::from_bits(y))),
        // This first rounds to f32, which is exact for sums of a few more bits than bf16's.
        Op::FmaBf16x2 => r32!(|x, y, z| {
            let half = |by: u32| narrow(widen(x >> by & 0xffff).mul_add(widen(y >> by & 0xffff), widen(z >> by & 0xffff)));
            half(16) << 16 | half(0)
        }),
        Op::Mov64 => r64!(|x| x),
        Op::Add64 => r64!(|x, y| x.wrapping_add(y)),
        Op::Sub64 => r64!(|x, y| x.wrapping_sub(y)),
        Op::Mul64 => r64!(|x, y| x.wrapping_mul(y)),
        Op::MulHi64 => r64!(|x, y| ((u128::from(x) * u128::from(y)) >> 64) as u64),
        Op::And64 => r64!(|x, y| x & y),
        Op::Or64 => r64!(|x, y| x | y),
        Op::Xor64 => r64!(|x, y| x ^ y),
        Op::Not64 => r64!(|x| !x),
        Op::Shl64 | Op::ShrU64 => {
            let (x, by) = (*r.r64(a), *r.r32(b));
            let shifted = |i: usize| {
                if op == Op::Shl64 {
                    shift64(x[i], by[i])
                } else if by[i] < 64 {
                    x[i] >> by[i]
                } else {
                    0
                }
            };
            r.set64(d, std::array::from_fn(shifted), mask);
        }
        Op::MinU64 => r64!(|x, y| x.min(y)),
        Op::MaxU64 => r64!(|x, y| x.max(y)),
        Op::DivU64 | Op::RemU64 => {
            if (0..32).any(|i| mask >> i & 1 == 1 && r.r64(b)[i] == 0) {
                return Err("divides by zero");
            }
            if op == Op::DivU64 {
                r64!(|x, y| x.checked_div(y).unwrap_or(0));
            } else {
                r64!(|x, y| x.checked_rem(y).unwrap_or(0));
            }
        }
        Op::Bfi64 => {
            let lens = *r.r32(lists[instr.list as usize]);
            let (x, y, z) = (*r.r64(a), *r.r64(b), *r.r32(c));
            r.set64(d, std::array::from_fn(|i| insert_bits(x[i], y[i], z[i], lens[i], 64)), mask);
        }
        Op::Sel64 => {
            let (x, y, chosen) = (*r.r64(a), *r.r64(b), r.predicate(c));
            r.set64(d, std::array::from_fn(|i| if chosen >> i & 1 == 1 { x[i] } else { y[i] }), mask);
        }
        Op::MulF64 => r64!(|x, y| (f64::from_bits(x) * f64::from_bits(y)).to_bits()),
        Op::CeilF64 => r64!(|x| f64::from_bits(x).ceil().to_bits()),
        Op::CvtU64F64Rz => r64!(|x| f64::from_bits(x) as u64),
        Op::CvtF64U64 => r64!(|x| (x as f64).to_bits()),
        Op::MulWideU32 => widen!(|x, y| u64::from(x) * u64::from(y)),
        Op::MulWideS32 => widen!(|x, y| (i64::from(x as i32) * i64::from(y as i32)) as u64),
        Op::CvtU64U32 => widen!(|x| u64::from(x)),
        Op::CvtS64S32 => widen!(|x| i64::from(x as i32) as u64),
        Op::CvtU64U16 => widen!(|x| u64::from(x & 0xffff)),
        Op::CvtF64F32 => widen!(|x| f64::from(f32::from_bits(x)).to_bits()),
        Op::CvtU64F32Rn => widen!(|x| f32::from_bits(x).round_ties_even() as u64),
        Op::Pack64 => widen!(|x, y| u64::from(x) | u64::from(y) << 32),
        Op::CvtU32U64 => {
            let x = *r.r64(a);
            r.set32(d, std::array::from_fn(|i| x[i] as u32), mask);
        }
        Op::Unpack64 => {
            let x = *r.r64(a);
            let [low, high] = [lists[instr.list as usize], lists[instr.list as usize + 1]];
            r.set32(low, std::array::from_fn(|i| x[i] as u32), mask);
            r.set32(high, std::array::from_fn(|i| (x[i] >> 32) as u32), mask);
        }
        Op::EqU32 => compare!(r32, u32, |x, y| x == y),
        Op::NeU32 => compare!(r32, u32, |x, y| x != y),
        Op::LtU32 => compare!(r32, u32, |x, y| x < y),
        Op::LeU32 => compare!(r32, u32, |x, y| x <= y),
        Op::GtU32 => compare!(r32, u32, |x, y| x > y),
        Op::GeU32 => compare!(r32, u32, |x, y| x >= y),
        Op::LtS32 => compare!(r32, i32, |x, y| x < y),
        Op::LeS32 => compare!(r32, i32, |x, y| x <= y),
        Op::GtS32 => compare!(r32, i32, |x, y| x > y),
        Op::GeS32 => compare!(r32, i32, |x, y| x >= y),
        Op::EqU64 => compare!(r64, u64, |x, y| x == y),
        Op::NeU64 => compare!(r64, u64, |x, y| x != y),
        Op::LtU64 => compare!(r64, u64, |x, y| x < y),
        Op::LeU64 => compare!(r64, u64, |x, y| x <= y),
        Op::GtU64 => compare!(r64, u64, |x, y| x > y),
        Op::GeU64 => compare!(r64, u64, |x, y| x >= y),
        Op::LtS64 => compare!(r64, i64, |x, y| x < y),
        Op::LeS64 => compare!(r64, i64, |x, y| x <= y),
        Op::GtS64 => compare!(r64, i64, |x, y| x > y),
        Op::GeS64 => compare!(r64, i64, |x, y| x >= y),
        Op::EqF32 => compare_floats!(|x, y| x == y),
        Op::NeF32 => compare_floats!(|x, y| !(x == y || x.is_nan() || y.is_nan())),
        Op::LtF32 => compare_floats!(|x, y| x < y),
        Op::LeF32 => compare_floats!(|x, y| x <= y),
        Op::GtF32 => compare_floats!(|x, y| x > y),
        Op::GeF32 => compare_floats!(|x, y| x >= y),
        // These comparisons are also true if a number is NaN.
        Op::EquF32 => compare_floats!(|x, y| x == y || x.is_nan() || y.is_nan()),
        Op::NeuF32 => compare_floats!(|x, y| x != y),
        Op::LtuF32 => compare_floats!(|x, y| x < y || x.is_nan() || y.is_nan()),
        Op::LeuF32 => compare_floats!(|x, y| x <= y || x.is_nan() || y.is_nan()),
        Op::GtuF32 => compare_floats!(|x, y| x > y || x.is_nan() || y.is_nan()),
        Op::GeuF32 => compare_floats!(|x, y| x >= y || x.is_nan() || y.is_nan()),
        Op::AndP => r.set_predicate(d, r.predicate(a) & r.predicate(b), mask),
        Op::OrP => r.set_predicate(d, r.predicate(a) | r.predicate(b), mask),
        Op::XorP => r.set_predicate(d, r.predicate(a) ^ r.predicate(b), mask),
        Op::NotP => r.set_predicate(d, !r.predicate(a), mask),
        Op::MovP => r.set_predicate(d, r.predicate(a), mask),
        _ => return Ok(false),
    }
    Ok(true)
}

/// 2^x, zero below the normal numbers, within 2 units in the last place.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    let clamped = x.clamp(-127.0, 128.0);
    let whole = clamped.round_ties_even();
    let rest = clamped - whole;
    // 2^rest = e^(rest ln 2), |rest| <= 1/2: the Taylor series' first term left out is below 2^-30.
    let t = rest * std::f32::consts::LN_2;
    let tail = t * t * t * (1.0 / 6.0 + t * (1.0 / 24.0 + t * (1.0 / 120.0 + t * (1.0 / 720.0 + t / 5040.0))));
    let fraction = 1.0 + (t + (t * t * 0.5 + tail));
    // This takes two steps, as the largest power alone would not fit.
    let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    let half = whole as i32 / 2;
    let scaled = if whole < -126.0 { 0.0 } else { fraction * power(half) * power(whole as i32 - half) };
    if x.is_nan() { x } else { scaled }
}

/// `prmt` in its plain mode: each nibble of `selector` chooses one of eight bytes, or repeats its sign.
fn permute(x: u32, y: u32, selector: u32) -> u32 {
    let bytes = (u64::from(y) << 32 | u64::from(x)).to_le_bytes();
    u32::from_le_bytes(std::array::from_fn(|i| {
        let nibble = selector >> (4 * i) & 15;
        let byte = bytes[(nibble & 7) as usize];
        if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
    }))
}

/// `bfi`: the low `len` bits of x, into y at `from`.
fn insert_bits(x: u64, y: u64, from: u32, len: u32, bits: u32) -> u64 {
    let (from, len) = (from & 0xff, (len & 0xff).min(bits));
    if from >= bits || len == 0 {
        return y;
    }
    let ones = if len == 64 { u64::MAX } else { (1 << len) - 1 };
    y & !(ones << from) | (x & ones) << from
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_within_two_units() {
        for i in -2000..2000 {
            let x = i as f32 * 0.061;
            let (got, exact) = (f64::from(exp2(x)), f64::from(x).exp2());
            if exact > 1.2e-38 && exact < 3.4e38 {
                assert!((got - exact).abs() <= exact * 2f64.powi(-22), "2^{x}: {got} for {exact}");
            }
        }
        assert_eq!((exp2(f32::NEG_INFINITY), exp2(0.0), exp2(1.0), exp2(200.0)), (0.0, 1.0, 2.0, f32::INFINITY));
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn bytes_and_bits_go_where_they_are_told() {
        assert_eq!(permute(0x1122_3344, 0x5566_7788, 0x5410), 0x7788_3344);
        assert_eq!(permute(0x1122_3344, 0x5566_7788, 0x7632), 0x5566_1122);
        assert_eq!(insert_bits(0xff, 0, 8, 4, 32), 0xf00);
        assert_eq!(insert_bits(5, 0, 32, 32, 64), 5 << 32);
    }
}

//! The test that this processor multiplies bf16 pairs like two fused multiply-adds, and rounds to bf16 like `bf16::round`.
//!
//! Intel documents that `vdpbf16ps` adds the odd product first, then the even one, each rounded to nearest even, with
//! denormals read as zeros (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS). Other
//! vendors may differ, and one bit would break the exactness contract. So each process tests it before use.

use super::{Kernel, LANES, Simd, avx512};
use std::sync::LazyLock;

/// Tests once, which takes microseconds. Also returns `false` if the instruction is missing.
pub(crate) fn bf16_products_are_exact() -> bool {
    static ANSWER: LazyLock<bool> = LazyLock::new(|| {
        let has = avx512::is_available() && is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vnni");
        let chains = chains();
        // SAFETY: everything that the two enable was just detected.
        has && unsafe { avx512::run_pairs(Products(&chains)) == avx512::run(Products(&chains)) }
    });
    *ANSWER
}

/// A sum in every lane, and pairs whose products are added to it.
struct Chain {
    start: [f32; LANES],
    /// Arbitrary bits: numbers of every size, denormals, infinities and NaN.
    any: [f32; LANES],
    links: [Link; LINKS],
}

struct Link {
    a: [u8; 4 * LANES],
    b: u32,
}

const CHAINS: usize = 256;
const LINKS: usize = 4;

/// Numbers of either sign and of sizes that differ by up to 2^15, so that every rounding of a chain decides some bits.
fn chains() -> Vec<Chain> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bits = || {
        // xorshift (Marsaglia, 2003)
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    };
    // Sign, exponent of 2^-8 to 2^7, fraction.
    let sized = |bits: u32| bits & 0x807f_ffff | (119 + (bits >> 23 & 15)) << 23;
    let pair = |bits: u32, more: u32| sized(bits) >> 16 | sized(more) & 0xffff_0000;
    let mut chain = || Chain {
        start: std::array::from_fn(|_| f32::from_bits(sized(bits()))),
        any: std::array::from_fn(|lane| f32::from_bits(if lane % 4 == 0 { bits() & 0x80ff_ffff } else { bits() })),
        links: std::array::from_fn(|_| {
            let mut a = [0; 4 * LANES];
            a.as_chunks_mut().0.iter_mut().for_each(|a| *a = pair(bits(), bits()).to_le_bytes());
            Link { a, b: pair(bits(), bits()) }
        }),
    };
    (0..CHAINS).map(|_| chain()).collect()
}

/// The bits of each chain's sums, and of `any` as bf16.
struct Products<'a>(&'a [Chain]);

impl Kernel for Products<'_> {
    type Output = (Vec<[u32; LANES]>, Vec<[u32; LANES / 2]>);

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let mut results = (Vec::with_capacity(self.0.len()), Vec::with_capacity(self.0.len()));
        for Chain { start, any, links } in self.0 {
            let mut sum = simd.load(start);
            for Link { a, b } in links {
                sum = simd.add_bf16_products(simd.load_bf16_pairs::<0>(a), simd.splat_bf16_pair::<0>(*b), sum);
                if S::BF16_STEPS == 2 {
                    sum = simd.add_bf16_products(simd.load_bf16_pairs::<1>(a), simd.splat_bf16_pair::<1>(*b), sum);
                }
            }
            results.0.push(simd.to_array(sum).map(f32::to_bits));
            results.1.push(simd.to_bf16_pairs(simd.load(any)));
        }
        results
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{bf16, isa::Isa};

    /// The chains' sums, if `add(sum, a, b)` adds a pair of products, given as (even, odd).
    fn with(add: impl Fn(f32, [f32; 2], [f32; 2]) -> f32) -> Vec<[u32; LANES]> {
        let halves = |pair: u32| [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)];
        let lane = |chain: &Chain, lane: usize| {
            let a = |link: &Link| halves(u32::from_le_bytes(link.a.as_chunks().0[lane]));
            chain.links.iter().fold(chain.start[lane], |sum, link| add(sum, a(link), halves(link.b)))
        };
        chains().iter().map(|chain| std::array::from_fn(|i| lane(chain, i).to_bits())).collect()
    }

    #[test]
    fn every_instruction_set_adds_the_odd_product_and_then_the_even_one_and_rounds_alike() {
        let sums = with(|sum, a, b| a[0].mul_add(b[0], a[1].mul_add(b[1], sum)));
        let pairs = |any: &[f32; LANES]| std::array::from_fn(|i| bf16::pair(any[2 * i], any[2 * i + 1]));
        let expected = (sums, chains().iter().map(|chain| pairs(&chain.any)).collect());
        for isa in Isa::testable() {
            assert!(isa.dispatch_pairs(Products(&chains())) == expected, "{isa}");
        }
    }

    #[test]
    fn a_processor_that_computes_otherwise_is_found_out() {
        let (exact, _) = Isa::Portable.dispatch_pairs(Products(&chains()));
        let products = |a: [f32; 2], b: [f32; 2]| [0, 1].map(|i| f64::from(a[i]) * f64::from(b[i]));
        let otherwise: [(&str, Vec<_>); 4] = [
            ("even first", with(|sum, a, b| a[1].mul_add(b[1], a[0].mul_add(b[0], sum)))),
            ("rounded once", with(|sum, a, b| (f64::from(sum) + products(a, b)[1] + products(a, b)[0]) as f32)),
            ("products added to each other first", with(|sum, a, b| sum + a[0].mul_add(b[0], a[1] * b[1]))),
            ("towards zero", with(|sum, a, b| a[0].mul_add(b[0], a[1].mul_add(b[1], sum)) * (1.0 - f32::EPSILON / 2.0))),
        ];
        for (how, results) in otherwise {
            assert!(results != exact, "{how}");
        }
    }

    #[test]
    fn what_was_found_decides_whether_it_is_used() {
        assert_eq!(Isa::Avx512Bf16.is_available(), bf16_products_are_exact());
        assert_eq!(matches!(Isa::best(), Isa::Amx | Isa::Avx512Bf16), bf16_products_are_exact());
    }
}

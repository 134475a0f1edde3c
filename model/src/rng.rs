//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a random number is a pure
//! function of (seed, index), so a preempted or rescued sequence continues with the same draws.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [a, b] = [0, 1].map(|i| u64::from(MULTIPLIERS[i]) * u64::from(counter[2 * i]));
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// Draw number `index` of `seed`, uniform in [0, 1).
pub(crate) fn uniform(seed: u64, index: u64) -> f64 {
    let bits = philox4x32([index as u32, (index >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(bits[0]) << 32 | u64::from(bits[1]);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From `kat_vectors` of the authors' Random123 library.
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let pi = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        assert_eq!(philox4x32(pi, [0xa4093822, 0x299f31d0]), [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
    }

    #[test]
    fn draws_are_spread_evenly_and_differ_by_seed_and_index() {
        let draws: Vec<f64> = (0..10_000).map(|i| uniform(42, i)).collect();
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
        for decile in 0..10 {
            let count = draws.iter().filter(|u| (**u * 10.0) as usize == decile).count();
            assert!((850..1150).contains(&count), "{count} of 10,000 in decile {decile}");
        }
        assert_ne!(uniform(42, 0), uniform(43, 0));
        assert_ne!(uniform(42, 0), uniform(42, 1 << 32));
    }
}

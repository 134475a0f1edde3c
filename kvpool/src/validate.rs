//! The one check that stands between any copied bytes and whoever uses them.

use tidemill_proto::pool::Found;
use twox_hash::XxHash3_64;

/// Why copied bytes must not be used. Either way they are a miss.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Invalid {
    #[error("the slot was reused while it was read")]
    Stale,
    #[error("the bytes differ from what was published")]
    Corrupt,
}

/// Guards copies at memory speed; a block's name, not this, says what its content should be.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// Whether `copy` is the block that was `found`. Every read path calls this after its copy, on the copy, with the slot's
/// generation as read after the copy.
pub fn validate(copy: &[u8], found: &Found, generation_after: u64) -> Result<(), Invalid> {
    if generation_after != found.at.generation {
        return Err(Invalid::Stale);
    }
    if checksum(copy) != found.checksum { Err(Invalid::Corrupt) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::{
        ids::RequestId,
        pool::{SlotRef, Tier},
    };

    #[test]
    fn only_the_published_bytes_of_the_published_generation_pass() {
        let bytes = vec![3u8; 1000];
        let at = SlotRef { slot: 0, generation: 5 };
        let found = Found { index: 0, at, checksum: checksum(&bytes), origin: RequestId(1), tier: Tier::Dram };
        assert_eq!(validate(&bytes, &found, 5), Ok(()));
        assert_eq!(validate(&bytes, &found, 6), Err(Invalid::Stale));
        for at in [0, 500, 999] {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert_eq!(validate(&flipped, &found, 5), Err(Invalid::Corrupt));
        }
        assert_eq!(validate(&bytes[..999], &found, 5), Err(Invalid::Corrupt));
    }
}

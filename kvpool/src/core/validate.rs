//! The one check between copied bytes and their use.

use tidemill_proto::pool::Found;
use twox_hash::XxHash3_64;

/// The reason why copied bytes must not be used. Both are a miss.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Invalid {
    #[error("the slot was reused while it was read")]
    Stale,
    #[error("the bytes differ from what was published")]
    Corrupt,
}

/// The properties of a copy of a slot that [`validate`] checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copied {
    /// The checksum of the copy itself: the source may have changed since.
    pub checksum: u64,
    /// The slot's generation, read after its last byte was copied.
    pub generation_after: u64,
}

/// The checksum of a block, computed at memory speed against accidental corruption. The key, not this, defines the block's content.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// Checks that a copy is of the block that was `found`. Every read path calls this before the copy is used.
pub fn validate(copied: Copied, found: &Found) -> Result<(), Invalid> {
    if copied.generation_after != found.at.generation {
        return Err(Invalid::Stale);
    }
    if copied.checksum != found.checksum { Err(Invalid::Corrupt) } else { Ok(()) }
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
        let validated = |bytes: &[u8], generation_after| validate(Copied { checksum: checksum(bytes), generation_after }, &found);
        assert_eq!(validated(&bytes, 5), Ok(()));
        assert_eq!(validated(&bytes, 6), Err(Invalid::Stale));
        for at in [0, 500, 999] {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert_eq!(validated(&flipped, 5), Err(Invalid::Corrupt));
        }
        assert_eq!(validated(&bytes[..999], 5), Err(Invalid::Corrupt));
    }
}

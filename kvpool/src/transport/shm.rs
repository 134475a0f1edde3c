//! Shared memory: the client copies between its own memory and the node's mapped arena.

use super::{Access, Broken, Filled, Offer, Slots};
use crate::{
    arena::{Arena, ArenaError},
    core::validate::Copied,
};
use std::sync::Arc;
use tidemill_proto::pool::Transport;

/// Maps the arena, which only works on the node's host.
pub(super) fn open(offer: &Offer<'_>) -> Result<Access, ArenaError> {
    Ok(Access::Slots(Arc::new(Arena::open(offer.arena)?)))
}

impl Slots for Arena {
    fn transport(&self) -> Transport {
        Transport::Shm
    }

    fn write(&self, slot: u32, bytes: &[u8]) -> Result<Filled, Broken> {
        Ok(Filled { checksum: self.write_block(slot, bytes), landing: None })
    }

    fn read(&self, slot: u32, to: &mut [u8]) -> Result<Copied, Broken> {
        Ok(self.read_into(slot, to))
    }
}

//! Shared memory: the client copies between its own memory and the node's mapped arena.

use super::{Access, Slots};
use crate::{
    arena::{Arena, ArenaError},
    core::validate::Copied,
};
use std::sync::Arc;
use tidemill_net::link::Connection;
use tidemill_proto::pool::ArenaInfo;

/// Maps the arena, which only works on the node's host.
pub(super) fn open(_: &Connection, info: &ArenaInfo) -> Result<Access, ArenaError> {
    Ok(Access::Slots(Arc::new(Arena::open(info)?)))
}

impl Slots for Arena {
    fn write(&self, slot: u32, bytes: &[u8]) -> u64 {
        self.write_block(slot, bytes)
    }

    fn read(&self, slot: u32, to: &mut [u8]) -> Copied {
        self.read_into(slot, to)
    }
}

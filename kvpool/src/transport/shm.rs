//! Shared memory: the client copies between its own memory and the node's mapped arena. If it brings a device that can, the device copies
//! what is got, and the client only validates.

use super::{Access, Broken, Filled, Offer, Slots};
use crate::{
    arena::{Arena, ArenaError, pin::Pin},
    core::validate::Copied,
};
use std::{sync::Arc, thread, time::Instant};
use tidemill_proto::pool::Transport;

/// Maps the arena, which only works on the node's host.
pub(super) fn open(offer: &Offer<'_>) -> Result<Access, ArenaError> {
    let arena = Arc::new(Arena::open(offer.arena)?);
    if let Some(device) = offer.device {
        pin_aside(Arc::clone(&arena), Arc::clone(device));
    }
    Ok(Access::Slots(arena))
}

/// Pins the slots while the host copies blocks, which it goes on to do if they cannot be pinned. On a thread that nobody waits for: locking
/// takes long where memory is large, and the process may end meanwhile.
fn pin_aside(arena: Arc<Arena>, device: Arc<dyn Pin>) {
    let bytes = arena.layout().file_bytes;
    let pin = move || {
        let started = Instant::now();
        match arena.pin(&*device) {
            Ok(()) => {
                tracing::info!(bytes, took_ms = started.elapsed().as_millis() as u64, "the device copies from the pool node's memory")
            }
            Err(reason) => tracing::warn!(bytes, reason, "the pool node's memory cannot be pinned: the host copies blocks for the device"),
        }
    };
    if let Err(error) = thread::Builder::new().name("pin".into()).spawn(pin) {
        tracing::warn!(%error, "no thread to pin the pool node's memory: the host copies blocks for the device");
    }
}

impl Slots for Arena {
    fn transport(&self) -> Transport {
        Transport::Shm
    }

    fn mapped(&self) -> Option<&Arena> {
        Some(self)
    }

    fn write(&self, slot: u32, bytes: &[u8]) -> Result<Filled, Broken> {
        Ok(Filled { checksum: self.write_block(slot, bytes), landing: None })
    }

    fn read(&self, slot: u32, to: &mut [u8]) -> Result<Copied, Broken> {
        Ok(self.read_into(slot, to))
    }
}

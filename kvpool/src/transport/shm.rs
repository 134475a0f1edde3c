//! Shared memory: the client copies between its own memory and the node's mapped arena. If the client has a suitable device, the device
//! copies the blocks of gets, and the client only validates.

use super::{Access, Broken, Filled, Offer, Slots};
use crate::{
    arena::{Arena, ArenaError, pin::Pin},
    core::validate::Copied,
};
use std::{
    sync::{Arc, Weak},
    thread,
    time::Instant,
};
use tidemill_proto::pool::Transport;

/// Maps the arena, which only works on the node's host.
pub(super) fn open(offer: &Offer<'_>) -> Result<Access, ArenaError> {
    let arena = Arc::new(Arena::open(offer.arena)?);
    if let Some(device) = offer.device {
        pin_aside(&arena, Arc::clone(device));
    }
    Ok(Access::Slots(arena))
}

/// Pins the slots, piece by piece, on a background thread, since locking takes long for large memory. Meanwhile the host copies blocks, and
/// it continues to copy those that cannot be pinned. The thread ends when the arena is no longer used.
fn pin_aside(arena: &Arc<Arena>, device: Arc<dyn Pin>) {
    let arena = Arc::downgrade(arena);
    if let Err(error) = thread::Builder::new().name("pin".into()).spawn(move || pin_all(&arena, &*device)) {
        tracing::warn!(%error, "no thread to pin the pool node's memory: the host copies blocks for the device");
    }
}

fn pin_all(arena: &Weak<Arena>, device: &dyn Pin) {
    let begun = Instant::now();
    for piece in 0.. {
        let Some(arena) = arena.upgrade() else { return };
        let (bytes, pieces) = (arena.layout().file_bytes, arena.pieces());
        if piece == pieces {
            tracing::info!(bytes, pieces, took_ms = begun.elapsed().as_millis() as u64, "the device copies from the pool node's memory");
            return;
        }
        let started = Instant::now();
        if let Err(reason) = arena.pin_piece(piece, device) {
            tracing::warn!(
                bytes,
                piece,
                pieces,
                reason,
                "the pool node's memory cannot be pinned from this piece on: the host copies its blocks for the device"
            );
            return;
        }
        drop(arena);
        // Other callers of the driver wait while it locks memory, so they now get as much time.
        thread::sleep(started.elapsed());
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

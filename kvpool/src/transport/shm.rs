//! Shared memory: the client copies between its own memory and the node's mapped arena.
//!
//! Copies run on async threads, one block at a time with a yield between: 2 MiB take 0.2 ms, which is less than handing them to
//! a thread that may block costs. One core does not use up what memory can do, so a large batch is shared among several.

use super::shares;
use crate::{
    arena::{Arena, ArenaError},
    core::validate::{Invalid, validate},
};
use bytes::Bytes;
use std::{sync::Arc, time::Instant};
use tidemill_proto::pool::{ArenaInfo, Found, SlotRef, Written};
use tokio::task::JoinSet;

/// The arena of a node on this host.
#[derive(Debug)]
pub(crate) struct SharedArena(Arena);

/// Tasks that copy one batch,
const COPIERS_MAX: usize = 4;
/// each at least so much, since waking a thread costs as much as copying some 100 KiB.
const COPIER_BYTES_MIN: usize = 4 << 20;

impl SharedArena {
    pub(crate) fn open(info: &ArenaInfo) -> Result<Self, ArenaError> {
        Arena::open(info).map(Self)
    }

    /// Fills slots until the time is up; what is not in the result was not touched. Whoever still writes holds a clone of
    /// `reserved`.
    pub(crate) async fn write(
        self: &Arc<Self>,
        blocks: Vec<(SlotRef, Bytes)>,
        until: Instant,
        reserved: impl Clone + Send + 'static,
    ) -> Vec<Written> {
        self.copy_shared(blocks, |arena, share| {
            let reserved = reserved.clone();
            async move {
                let _reserved = reserved;
                let mut written = Vec::with_capacity(share.len());
                for (at, bytes) in share {
                    if Instant::now() >= until {
                        break;
                    }
                    written.push(Written { at, checksum: arena.0.write_block(at.slot, &bytes) });
                    tokio::task::yield_now().await;
                }
                written
            }
        })
        .await
        .concat()
    }

    /// Has `copy` called on parts of a batch, by several threads where that pays. Cancelled, it ends when the blocks under way do.
    pub(crate) async fn copy_shared<T, C>(self: &Arc<Self>, batch: Vec<T>, copy: impl Fn(Arc<Self>, Vec<T>) -> C) -> Vec<C::Output>
    where
        C: Future<Output: Send> + Send + 'static,
    {
        let parts = (batch.len() * self.0.block_bytes() / COPIER_BYTES_MIN).clamp(1, COPIERS_MAX);
        let mut shares = shares(batch, parts).into_iter().map(|share| copy(Arc::clone(self), share));
        // The first on this thread, which is awake.
        let Some(first) = shares.next() else { return Vec::new() };
        let mut others: JoinSet<_> = shares.collect();
        let mut outputs = vec![first.await];
        while let Some(output) = others.join_next().await {
            outputs.push(output.expect("copying does not panic and is not aborted"));
        }
        outputs
    }

    /// A private, validated copy of a block.
    pub(crate) fn read(&self, found: &Found) -> Result<Vec<u8>, Invalid> {
        let (bytes, copied) = self.0.read_block(found.at.slot);
        validate(copied, found)?;
        Ok(bytes)
    }
}

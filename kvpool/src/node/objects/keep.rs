//! The keeper of the bucket: the only task of a node that writes, deletes and lists.

use super::{
    ObjectTier, alive,
    bucket::{Failure, Listed, new_name, wall_clock},
};
use crate::{
    core::{
        directory::{Place, ToPack},
        objects::{
            budget::Refused,
            pack::{self, Kind, Packing},
        },
        validate::validate,
    },
    node::store::Store,
};
use futures_util::{StreamExt, stream};
use std::{
    cmp::Reverse,
    collections::HashSet,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use tidemill_proto::block::BlockKey;
use tokio::{task::spawn_blocking, time::sleep};

/// The interval at which the keeper looks for work.
const PAUSE: Duration = Duration::from_millis(500);
/// The number of indexes read at once.
const INDEXES_AT_ONCE: usize = 8;
/// The pause while this second's requests are used up.
const RATE_PAUSE: Duration = Duration::from_millis(100);
/// The longest time for reading indexes of new packs; the rest is read next time.
const REFRESH_MAX: Duration = Duration::from_secs(60);

/// A node's keeper, which does one thing at a time.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    listed: Option<Instant>,
    /// The time since which there have been blocks to write.
    wanted: Option<Instant>,
}

/// Keeps the bucket until the tier or the store is gone.
pub(super) async fn run(tier: Weak<ObjectTier>, store: Weak<Store>) {
    while let Some((tier, store)) = alive(&tier, &store) {
        tier.keeper.lock().await.step(&tier, &store).await;
        drop((tier, store));
        sleep(PAUSE).await;
    }
}

impl Keeper {
    async fn step(&mut self, tier: &ObjectTier, store: &Arc<Store>) {
        if self.listed.is_none_or(|at| at.elapsed() >= tier.settings.refresh) {
            self.look(tier, store).await;
        }
        let (blocks, _) = store.apply(|directory, _| directory.wanted());
        self.wanted = if blocks == 0 { None } else { self.wanted.or_else(|| Some(Instant::now())) };
        let waited = self.wanted.is_some_and(|since| since.elapsed() >= tier.settings.flush);
        if blocks >= blocks_per_pack(tier) || waited {
            self.wanted = None;
            write(tier, store).await;
        }
    }

    /// Lists the bucket, and updates the catalog.
    pub(super) async fn look(&mut self, tier: &ObjectTier, store: &Arc<Store>) {
        self.listed = Some(Instant::now());
        if let Err(failure) = refresh(tier, store).await {
            tracing::warn!(%failure, "object storage cannot be listed: what was known of it stays");
        }
    }

    /// Writes packs until no block is left, or a write fails.
    pub(super) async fn write_all(&mut self, tier: &ObjectTier, store: &Arc<Store>) {
        while store.apply(|directory, _| directory.wanted()).0 > 0 && write(tier, store).await {}
    }
}

fn blocks_per_pack(tier: &ObjectTier) -> usize {
    ((tier.settings.pack_bytes / tier.kind.block_bytes).max(1) as usize).min(pack::BLOCKS_MAX as usize)
}

/// Writes one pack. `false` if it could not be written: its blocks will be wanted again when they are used again.
async fn write(tier: &ObjectTier, store: &Arc<Store>) -> bool {
    let blocks = store.apply(|directory, _| directory.take_wanted(blocks_per_pack(tier)));
    let (kind, secret, name, source) = (tier.kind, tier.secret.clone(), new_name(), Arc::clone(store));
    let packed = spawn_blocking({
        let name = name.clone();
        move || pack(&source, kind, &blocks).map(|packing| packing.finish(&name, &secret))
    });
    // This fails only when the runtime ends, since packing does not panic.
    let Ok(packed) = packed.await else { return false };
    // All blocks have left memory and disk meanwhile.
    let Some((object, records)) = packed else { return true };
    let (bytes, count) = (object.len() as u64, records.len());
    if bytes > tier.settings.capacity_bytes || !make_room(tier, store, bytes).await {
        return false;
    }
    match tier.bucket.write(&name, object).await {
        Ok(()) => {
            tracing::debug!(pack = name, blocks = count, bytes, "written to object storage");
            store.apply(|directory, _| directory.pack_added(name, bytes, wall_clock().as_secs(), records));
            true
        }
        Err(failure) => {
            tracing::debug!(%failure, blocks = count, "not written to object storage");
            false
        }
    }
}

/// Copies blocks into a pack, up to each chain's first block that is gone. `None` if all are gone.
fn pack(store: &Store, kind: Kind, blocks: &[ToPack]) -> Option<Packing> {
    let arena = store.arena();
    let mut packing = Packing::new(kind);
    let mut lost: HashSet<BlockKey> = HashSet::new();
    for ToPack { key, lineage, place } in blocks {
        let copy = match *place {
            _ if lineage.parent.is_some_and(|parent| lost.contains(&parent)) => None,
            Place::Dram(found) => {
                let (bytes, copied) = arena.read_block(found.at.slot);
                validate(copied, &found).ok().map(|()| bytes)
            }
            Place::Disk { slot, checksum } => store.disk().and_then(|disk| disk.copy(slot, arena.block_bytes(), checksum)),
        };
        match copy {
            Some(bytes) => packing.push(*key, *lineage, &bytes),
            None => drop(lost.insert(*key)),
        }
    }
    (packing.blocks() > 0).then_some(packing)
}

/// Deletes the least recently used packs until `bytes` more fit.
async fn make_room(tier: &ObjectTier, store: &Arc<Store>, bytes: u64) -> bool {
    let victims = store.apply(|directory, _| {
        let Some(catalog) = directory.catalog() else { return Vec::new() };
        let ids = catalog.victims(bytes, tier.settings.capacity_bytes);
        ids.into_iter().filter_map(|id| Some((id, catalog.name(id)?.to_owned()))).collect()
    });
    for (id, name) in victims {
        match tier.bucket.delete(&name).await {
            Ok(()) | Err(Failure::Gone) => store.apply(|directory, _| directory.pack_gone(id)),
            Err(failure) => {
                tracing::debug!(%failure, pack = name, "not deleted");
                return false;
            }
        }
    }
    true
}

/// Updates the catalog with packs that were written and deleted by other nodes, or by this one before a restart.
async fn refresh(tier: &ObjectTier, store: &Arc<Store>) -> Result<(), Failure> {
    let started = Instant::now();
    let listed = tier.bucket.list().await?;
    let mut new: Vec<Listed> = store.apply(|directory, _| {
        let names: HashSet<&str> = listed.iter().map(|pack| &*pack.name).collect();
        let missing = directory.catalog().map_or(Vec::new(), |catalog| catalog.missing(|name| names.contains(name)));
        missing.into_iter().for_each(|pack| directory.pack_gone(pack));
        let is_new = |pack: &Listed| directory.catalog().is_some_and(|catalog| !catalog.knows(&pack.name));
        listed.into_iter().filter(is_new).collect()
    });
    // The latest packs are read first, since they are most likely to be wanted.
    new.sort_unstable_by(|a, b| (Reverse(a.written_s), &a.name).cmp(&(Reverse(b.written_s), &b.name)));
    let mut looking = stream::iter(new).map(|pack| look_into(tier, store, pack, started)).buffer_unordered(INDEXES_AT_ONCE);
    let mut outcome = Ok(());
    while let Some(looked) = looking.next().await {
        outcome = outcome.and(looked);
    }
    outcome
}

/// Reads the index of a new pack.
async fn look_into(tier: &ObjectTier, store: &Arc<Store>, pack: Listed, started: Instant) -> Result<(), Failure> {
    let Listed { name, bytes, written_s } = pack;
    let records = match pack::index_range(bytes, tier.kind.block_bytes) {
        Ok(_) if store.apply(|directory, _| directory.catalog().is_none_or(|catalog| catalog.is_full())) => return Ok(()),
        Ok(range) => loop {
            match tier.bucket.read_index(&name, range.clone()).await {
                Ok(index) => break pack::read_index(&name, bytes, &index, tier.kind, &tier.secret),
                Err(Failure::Refused(Refused::Rate)) if started.elapsed() < REFRESH_MAX => sleep(RATE_PAUSE).await,
                Err(Failure::Gone) => return Ok(()),
                Err(failure) => return Err(failure),
            }
        },
        Err(error) => Err(error),
    };
    let records = records.unwrap_or_else(|error| {
        tracing::warn!(pack = name, %error, "a pack in object storage is of no use");
        tier.bucket.found_corrupt(1);
        Vec::new()
    });
    store.apply(|directory, _| directory.pack_added(name, bytes, written_s, records));
    Ok(())
}

//! The vectors by which old messages and facts about users are ranked, and the encoder that makes them.

use super::encoder::{Encoder, EncoderSettings};
use crate::{
    base::shares::{Party, Pool, Refused, Share, Shares},
    metrics,
    vectors::{
        kept::{KeptVectors, Limits, Tenant, TextKey},
        vector::Vector,
    },
};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// The maximum number of texts that are being read ahead, of which a tenant may have a quarter.
const READ_AHEAD_MAX: u64 = 256;
/// The maximum number of texts that one request has read ahead: a tenant's part.
pub const READ_AT_ONCE_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecallSettings {
    pub encoder: EncoderSettings,
    pub limits: Limits,
}

#[derive(Debug)]
pub struct Recall {
    pub encoder: Arc<Encoder>,
    kept: Mutex<KeptVectors>,
    reading: Pool,
    since: Instant,
}

impl Recall {
    pub fn new(RecallSettings { encoder, limits }: RecallSettings) -> Self {
        Self {
            encoder: Arc::new(Encoder::new(encoder, metrics::observe_recall_read)),
            kept: Mutex::new(KeptVectors::new(limits)),
            reading: Pool::new(Shares::quarters(READ_AHEAD_MAX, 0)),
            since: Instant::now(),
        }
    }

    /// Returns a text's vector, if it is kept.
    pub fn vector(&self, tenant: Tenant, text: &str) -> Option<Arc<Vector>> {
        let key = self.key(text);
        self.kept.lock().get(tenant, key, self.since.elapsed())
    }

    /// Whether a text's vector is not kept.
    pub fn lacks(&self, tenant: Tenant, text: &str) -> bool {
        let key = self.key(text);
        !self.kept.lock().has(tenant, key)
    }

    /// Keeps a text's vector.
    pub fn keep(&self, tenant: Tenant, text: &str, vector: Vector) {
        let key = self.key(text);
        let mut kept = self.kept.lock();
        kept.put(tenant, key, Arc::new(vector), self.since.elapsed());
        metrics::show_recall(kept.bytes(), kept.texts());
    }

    /// Takes places for texts that are read ahead.
    pub fn read_ahead(&self, party: Party, texts: usize) -> Result<Share, Refused> {
        self.reading.take(party, texts as u64)
    }

    /// Drops all vectors of a tenant. Returns their number.
    pub fn forget(&self, tenant: Tenant) -> u64 {
        let mut kept = self.kept.lock();
        let forgotten = kept.forget(tenant);
        metrics::show_recall(kept.bytes(), kept.texts());
        forgotten
    }

    /// The number of a tenant's vectors.
    pub fn held(&self, tenant: Tenant) -> u64 {
        self.kept.lock().held(tenant)
    }

    /// Drops vectors that were not used for too long.
    pub fn expire(&self) {
        let mut kept = self.kept.lock();
        kept.expire(self.since.elapsed());
        metrics::show_recall(kept.bytes(), kept.texts());
    }

    fn key(&self, text: &str) -> TextKey {
        TextKey::new(&self.encoder.model, text)
    }

    /// The longest time that reading ahead takes.
    pub const READ_AHEAD_WITHIN: Duration = Duration::from_secs(30);
}

//! Erasure of a tenant's or a user's data at this coordinator.
//!
//! An order is a record of the tenant, which every coordinator finds within a second, or when it comes back. It removes what it keeps
//! itself; what all of them share, the one that was told removes. Requests that ran when the order was given may still write what they were
//! told before: so the removal is repeated until they have all ended, and only then noted as done. A process that dies begins anew.

use super::Gateway;
use crate::{
    base::{
        owner::{Erasing, Whose},
        stamp::unix_seconds,
    },
    cache::response_cache,
    metrics,
    serving::replays::tenant_digest,
};
use serde::Serialize;
use serde_json::{Value, json};
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tidemill_proto::block::{ACCOUNT_SALT_BYTES, TENANT_SALT_BYTES};
use tidemill_tenancy::records::Erasure;

/// The interval at which orders are looked for, and a removal is repeated.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const REPEATED_EVERY: Duration = Duration::from_secs(15);

/// Numbers of things, by their kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Erased {
    pub responses: u64,
    pub conversations: u64,
    pub memories: u64,
    pub files: u64,
    pub batches: u64,
    pub opinions: u64,
    /// Answers that feedback may refer to.
    pub remembered_answers: u64,
    /// Recordings of answers, of the whole tenant.
    pub replays: u64,
    /// Answers in the caches of equal and of similar requests, of the whole tenant.
    pub cached_answers: u64,
    /// Vectors of old messages and facts, of the whole tenant.
    pub vectors: u64,
    /// Events of the usage log with a user, a key, or a time of day.
    pub usage_events: u64,
}

/// The first part of a tenant's salts, which names its blocks: another one after each erasure. Tenants of the tier that is shed first have
/// one account together.
pub(super) fn salt(tenant: &str, erased: u64, is_shed_first: bool) -> [u8; TENANT_SALT_BYTES] {
    let mut salt = match erased {
        0 => blake3::derive_key("tidemill tenant salt v1", tenant.as_bytes()),
        erased => blake3::derive_key("tidemill tenant salt after erasures v1", &[&erased.to_le_bytes(), tenant.as_bytes()].concat()),
    };
    if is_shed_first {
        salt[..ACCOUNT_SALT_BYTES].copy_from_slice(b"unpaid!!");
    }
    salt
}

impl Erased {
    fn each(&self) -> [(&'static str, u64); 11] {
        [
            ("responses", self.responses),
            ("conversations", self.conversations),
            ("memories", self.memories),
            ("files", self.files),
            ("batches", self.batches),
            ("opinions", self.opinions),
            ("remembered_answers", self.remembered_answers),
            ("replays", self.replays),
            ("cached_answers", self.cached_answers),
            ("vectors", self.vectors),
            ("usage_events", self.usage_events),
        ]
    }

    pub fn total(&self) -> u64 {
        self.each().iter().map(|(_, count)| count).sum()
    }
}

impl Gateway {
    /// Removes what this coordinator keeps of these owners, or counts it; with `shared`, also what all coordinators share. The error names
    /// what could not be looked at; the rest was.
    pub async fn erase(&self, whose: &Whose, erasing: Erasing, shared: bool) -> Result<Erased, String> {
        let mut erased = Erased::default();
        let mut problems = Vec::new();
        (erased.cached_answers, erased.replays) = self.erase_caches(&whose.tenant, erasing);
        erased.vectors = self.erase_vectors(&whose.tenant, erasing);
        if shared || !self.shared.settings.store.is_shared() {
            match self.store().erase(whose, erasing).await {
                Ok(held) => {
                    (erased.responses, erased.conversations, erased.memories) = (held.responses, held.conversations, held.memories);
                }
                Err(error) => problems.push(format!("responses, conversations and memories: {error}")),
            }
        }
        if let Some(batches) = &self.shared.settings.batches {
            match batches.erase(whose, erasing).await {
                Ok((files, batches)) => (erased.files, erased.batches) = (files, batches),
                Err(error) => problems.push(format!("files and batches: {error}")),
            }
        }
        let (worker, of) = (self.clone(), whose.clone());
        let blocking = tokio::task::spawn_blocking(move || {
            let opinions = worker.feedback().map_or(Ok((0, 0)), |feedback| feedback.erase(&of, erasing));
            let usage = worker.tenants().erase_usage(&of, erasing);
            (opinions.map_err(|error| error.to_string()), usage.map_err(|error| error.to_string()))
        });
        let (opinions, usage) = blocking.await.unwrap_or_else(|_| (Err("this has panicked".into()), Err("this has panicked".into())));
        match opinions {
            Ok((opinions, answers)) => (erased.opinions, erased.remembered_answers) = (opinions, answers),
            Err(error) => problems.push(format!("feedback: {error}")),
        }
        match usage {
            Ok(events) => erased.usage_events = events,
            Err(error) => problems.push(format!("usage: {error}")),
        }
        if erasing == Erasing::Remove {
            erased.each().iter().for_each(|(kind, count)| metrics::count_erased(kind, *count));
        }
        if problems.is_empty() { Ok(erased) } else { Err(problems.join("; ")) }
    }

    /// Drops the tenant's cached answers of before its last erasure, which no request finds any more, and its recordings.
    fn erase_caches(&self, tenant: &str, erasing: Erasing) -> (u64, u64) {
        let mut cached = 0;
        for salt in self.earlier_salts(tenant) {
            let salt: response_cache::Tenant = salt;
            if let Some(cache) = &self.shared.response_cache {
                let mut cache = cache.cache();
                cached += if erasing == Erasing::Remove { cache.forget(salt) } else { cache.held(salt) };
            }
            if let Some(cache) = &self.shared.similar {
                let mut cache = cache.cache();
                cached += if erasing == Erasing::Remove { cache.forget(salt) } else { cache.held(salt) };
            }
        }
        (cached, self.shared.replays.erase(&tenant_digest(Some(tenant)), erasing))
    }

    /// Drops the vectors of the tenant's texts of before its last erasure, or counts them.
    fn erase_vectors(&self, tenant: &str, erasing: Erasing) -> u64 {
        let Some(recall) = &self.shared.recall else { return 0 };
        let act = |salt| if erasing == Erasing::Remove { recall.forget(salt) } else { recall.held(salt) };
        self.earlier_salts(tenant).map(act).sum()
    }

    /// The salts that a tenant had before its last erasure, in whichever tiers it was.
    fn earlier_salts(&self, tenant: &str) -> impl Iterator<Item = [u8; TENANT_SALT_BYTES]> {
        (0..self.tenants().erased(tenant)).flat_map(move |earlier| [false, true].map(|is_shed_first| salt(tenant, earlier, is_shed_first)))
    }

    /// Waits until no other erasure is at work here.
    pub async fn one_erasure(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.shared.erasing.lock().await
    }

    /// The name under which this coordinator's orders are recorded.
    pub fn coordinator(&self) -> String {
        self.registry().view().coordinator
    }

    /// The time after an order during which its removal is repeated: by then all requests that ran when it was given have ended.
    pub fn erasure_settles(&self) -> Duration {
        self.request_timeout() * 2
    }

    /// Background loop: carries out orders to erase, its own and those that other coordinators were given. Never returns.
    pub async fn tend_erasures(&self) {
        let tenants = Arc::clone(self.tenants());
        let mut done = match tokio::task::spawn_blocking(move || tenants.erasures_done()).await {
            Ok(done) => done,
            Err(_) => return std::future::pending().await,
        };
        let mut interval = tokio::time::interval(LOOK_EVERY);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut repeated = tokio::time::Instant::now();
        let mut begun = BTreeSet::new();
        loop {
            interval.tick().await;
            let orders = self.tenants().erasures();
            let known: BTreeSet<String> = orders.iter().map(|(_, erasure)| erasure.id.clone()).collect();
            let is_time = repeated.elapsed() >= REPEATED_EVERY;
            if is_time {
                repeated = tokio::time::Instant::now();
            }
            for (whose, erasure) in orders.into_iter().filter(|(_, erasure)| !done.has(&erasure.id)).collect::<Vec<_>>() {
                if !begun.insert(erasure.id.clone()) && !is_time {
                    continue;
                }
                if self.carry_out(&whose, &erasure).await {
                    begun.remove(&erasure.id);
                    let (id, known) = (erasure.id.clone(), known.clone());
                    let noted = tokio::task::spawn_blocking(move || {
                        let noted = done.add(id, &known);
                        (done, noted)
                    });
                    let Ok((again, noted)) = noted.await else { return std::future::pending().await };
                    done = again;
                    if let Err(error) = noted {
                        tracing::warn!(%error, "could not note that an erasure was carried out: the next start repeats it");
                    }
                }
            }
        }
    }

    /// Removes what there is. Returns whether that was the last time.
    async fn carry_out(&self, whose: &Whose, erasure: &Erasure) -> bool {
        let _one = self.one_erasure().await;
        let settled = erasure.at.saturating_add(self.erasure_settles().as_secs()) < unix_seconds();
        match self.erase(whose, Erasing::Remove, erasure.by == self.coordinator()).await {
            Ok(erased) => {
                if erased.total() > 0 || settled {
                    tracing::info!(tenant = whose.tenant, erasure = erasure.id, ?erased, settled, "data was erased");
                }
                settled
            }
            Err(problem) => {
                tracing::error!(tenant = whose.tenant, erasure = erasure.id, problem, "could not erase; it is tried again");
                false
            }
        }
    }

    /// Writes an erasure into the audit log, without what was erased.
    pub(crate) async fn note_erasure(&self, whose: &Whose, erasure: &Erasure, erased: Erased) -> Option<Value> {
        let event = json!({
            "kind": "erasure", "id": erasure.id, "tenant": whose.tenant, "user": whose.user, "by": erasure.by, "erased": erased,
        });
        let audit = self.audit()?;
        if let Err(error) = audit.note(event.clone()).await {
            tracing::error!(%error, erasure = erasure.id, "an erasure is not in the audit log");
            return None;
        }
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::block::Tenant;

    #[test]
    fn a_salt_changes_with_each_erasure_and_is_as_before_without_one() {
        assert_eq!(salt("acme", 0, false), blake3::derive_key("tidemill tenant salt v1", b"acme"));
        let salts: BTreeSet<_> =
            ["acme", "acme2", "a"].into_iter().flat_map(|tenant| (0..5).map(move |erased| salt(tenant, erased, false))).collect();
        assert_eq!(salts.len(), 15);
        let account = |tenant, is_shed_first| Tenant::of_salt(&salt(tenant, 0, is_shed_first));
        assert!(account("acme", true) == account("other", true) && salt("acme", 0, true) != salt("other", 0, true));
        assert!(account("acme", false) != account("other", false) && account("acme", false) != account("acme", true));
    }
}

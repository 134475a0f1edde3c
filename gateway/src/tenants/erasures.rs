//! Orders to erase: records of their tenants, which all coordinators know; each notes which of them it has carried out. And what remains of
//! usage: events without user, key, and time of day.

use super::Tenants;
use crate::base::{
    owner::{Erasing, Whose},
    stamp::new_id,
};
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};
use tidemill_tenancy::{
    archive,
    journal::{self, JournalError},
    keeper::KeepError,
    records::{Change, Erasure, Tenant},
    usage::Event,
};

const DAY_MS: u64 = 24 * 3600 * 1000;

/// The reason why an order to erase was not recorded.
#[derive(Debug, thiserror::Error)]
pub enum OrderError {
    #[error("{0}")]
    Full(String),
    #[error(transparent)]
    Keep(#[from] KeepError),
}

impl Tenants {
    /// Records an order to erase, for all coordinators. From then on the tenant has another salt. May block: not for the event loop.
    pub fn order_erasure(&self, whose: &Whose, by: String, at: u64) -> Result<Erasure, OrderError> {
        let erasure = Erasure { id: new_id("erasure_"), user: whose.user.clone(), at, by };
        let unknown = || Tenant {
            id: whose.tenant.clone(),
            // An identity provider's tenant: its tokens name its tier.
            tier: self.tiers.iter().next().map(|tier| tier.name.clone()).unwrap_or_default(),
            limits: Default::default(),
            semantic_cache: false,
            erased: 0,
            erasures: Vec::new(),
            created: at,
        };
        let mut tenant = self.tenant(&whose.tenant).unwrap_or_else(unknown);
        tenant.order_erasure(erasure.clone()).map_err(OrderError::Full)?;
        self.change(Change::Tenant(tenant))?;
        Ok(erasure)
    }

    /// The number of erasures of a tenant so far.
    pub fn erased(&self, tenant: &str) -> u64 {
        self.authentication.directory.read().tenant(tenant).map_or(0, |tenant| tenant.erased)
    }

    /// The orders that all tenants' records have.
    pub fn erasures(&self) -> Vec<(Whose, Erasure)> {
        let directory = self.authentication.directory.read();
        let of = |tenant: &Tenant| {
            let whose = |erasure: &Erasure| Whose { tenant: tenant.id.clone(), user: erasure.user.clone() };
            tenant.erasures.iter().map(|erasure| (whose(erasure), erasure.clone())).collect::<Vec<_>>()
        };
        directory.tenants().flat_map(of).collect()
    }

    /// The orders that an earlier process has carried out, or this one.
    pub(crate) fn erasures_done(&self) -> Done {
        let path = self.meter_dir.as_ref().map(|dir| dir.join(archive::ERASED));
        let read = |path: &PathBuf| serde_json::from_slice(&fs::read(path).ok()?).ok();
        Done { ids: path.as_ref().and_then(read).unwrap_or_default(), path }
    }

    /// Hands over the usage events of a user, or of a tenant, until `each` returns `false`. Blocks.
    pub(crate) fn each_usage(&self, whose: &Whose, each: impl Fn(&Event) -> bool) -> Result<(), JournalError> {
        let Some(dir) = &self.meter_dir else { return Ok(()) };
        journal::read(dir, 0, |_, event: Event| {
            let is_theirs = event.tenant == whose.tenant && (whose.user.is_none() || event.user == whose.user);
            !is_theirs || each(&event)
        })
    }

    /// Takes users, keys, request ids and times of day out of usage events, or counts those that have any. Blocks.
    pub(crate) fn erase_usage(&self, whose: &Whose, erasing: Erasing) -> Result<u64, JournalError> {
        let Some(dir) = &self.meter_dir else { return Ok(0) };
        if erasing == Erasing::Count {
            let mut found = 0;
            journal::read(dir, 0, |_, event: Event| {
                found += u64::from(is_personal(&event, whose));
                true
            })?;
            return Ok(found);
        }
        journal::rewrite(dir, |event: Event| is_personal(&event, whose).then(|| aggregate(event)))
    }
}

fn is_personal(event: &Event, whose: &Whose) -> bool {
    let of_user = match &whose.user {
        Some(user) => event.user.as_ref() == Some(user),
        None => event.user.is_some() || event.key.is_some(),
    };
    event.tenant == whose.tenant && of_user
}

fn aggregate(event: Event) -> Event {
    Event { id: new_id("erased_"), user: None, key: None, at_ms: event.at_ms / DAY_MS * DAY_MS, ..event }
}

/// The ids of the orders that were carried out, in a file if there is a data directory.
#[derive(Debug)]
pub(crate) struct Done {
    path: Option<PathBuf>,
    ids: BTreeSet<String>,
}

impl Done {
    pub(crate) fn has(&self, id: &str) -> bool {
        self.ids.contains(id)
    }

    /// Notes an order, and forgets those that no record has any more. Blocks.
    pub(crate) fn add(&mut self, id: String, known: &BTreeSet<String>) -> io::Result<()> {
        self.ids.insert(id);
        self.ids.retain(|id| known.contains(id));
        match &self.path {
            Some(path) => write(path, &serde_json::to_vec(&self.ids)?),
            None => Ok(()),
        }
    }
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, bytes)?;
    fs::File::open(&part)?.sync_all()?;
    fs::rename(part, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_remains_of_usage_names_nobody() {
        let event = Event {
            id: "req_1".into(),
            at_ms: 3 * DAY_MS + 12_345,
            tenant: "acme".into(),
            user: Some("ann".into()),
            key: Some("tm_1".into()),
            prompt_tokens: 7,
            cost_micros: 9,
            ..Event::default()
        };
        let whose = |tenant: &str, user: Option<&str>| Whose { tenant: tenant.into(), user: user.map(str::to_owned) };
        for (whose, is_theirs) in [
            (whose("acme", Some("ann")), true),
            (whose("acme", None), true),
            (whose("acme", Some("an")), false),
            (whose("acme2", Some("ann")), false),
            (whose("acme2", None), false),
        ] {
            assert_eq!(is_personal(&event, &whose), is_theirs, "{whose:?}");
        }
        let left = aggregate(event.clone());
        assert!(left.id.starts_with("erased_") && left.user.is_none() && left.key.is_none());
        assert_eq!((left.at_ms, left.prompt_tokens, left.cost_micros, &*left.tenant), (3 * DAY_MS, 7, 9, "acme"));
        assert!(!is_personal(&left, &whose("acme", None)), "a second time finds nothing");
    }

    #[test]
    fn orders_that_were_carried_out_are_remembered_by_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(archive::ERASED);
        let mut done = Done { path: Some(path.clone()), ids: BTreeSet::new() };
        let known = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<BTreeSet<_>>();
        done.add("a".into(), &known(&["a", "b"])).unwrap();
        done.add("b".into(), &known(&["b"])).unwrap();
        let ids: BTreeSet<String> = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        assert_eq!(ids, known(&["b"]));
    }
}

//! The state that the coordinators agree on, applied to this process, and changed by operators.
//!
//! | kind of record | key | value | effect |
//! |---|---|---|---|
//! | `alias` | a name | the name of a model | clients may request the model by that name; takes precedence over `--aliases` |
//! | `rollout` | the model that users move from | a [`Rollout`] | users move, step by step: see `tidemill rollout` |
//! | `rollout-seen` | `ID@COORDINATOR` | that coordinator's observations of it | the others include them in their judgement |
//! | `unhealthy` | a worker's epoch, hexadecimal | the name of its model | it computed wrongly: it gets no work, and no earlier block is read |
//! | `cache-reset` | the name of a model | a number that grows | no earlier block of the model is read; without the record, they are again |
//! | `denied` | a certificate's serial, hexadecimal | the reason | the certificate is revoked, at all processes |
//! | `tenant`, `key` | its id | tenancy's record, as JSON | see [`keys`]; shown and changed only by `/admin/` |
//!
//! Records of other kinds are kept, and have no effect yet.

pub mod keys;

use crate::{driver::Driver, revoked::Revoked};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_gateway::{
    base::registry::{CACHE_RESET, ChangeError, Changing, RecordView, RegistryView},
    rollout::{self, record::Rollout, running},
    serving::gateway::Gateway,
};
use tidemill_net::link::Endpoint;
use tidemill_proto::ids::Epoch;
use tidemill_registry::{
    command::{Command, Outcome, Refusal},
    registry::{Failed, Registry, View},
    replica::{CannotRemove, Part},
    state::{Record, State},
};

pub const ALIAS: &str = "alias";
pub const DENIED: &str = "denied";
pub const UNHEALTHY: &str = "unhealthy";
/// Kinds of records that operators may not see: a key's record contains its digest.
const HIDDEN: [&str; 2] = [keys::TENANT, keys::KEY];
/// The time that an operator's change waits for a majority.
const CHANGED_MAX: Duration = Duration::from_secs(5);
/// The time without a link to the registry's leader after which a worker is removed: if it returns, it is a new one.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(120);
const FORGET_EVERY: Duration = Duration::from_secs(5);
/// The delay after which other coordinators are told of a worker that was found here.
const ACCUSE_EVERY: Duration = Duration::from_secs(1);
/// The pause between attempts to add the certificates that an earlier log had revoked.
const REVOKE_EVERY: Duration = Duration::from_secs(1);

/// The registry as operators see it.
#[derive(Debug)]
pub struct Agreed {
    registry: Registry,
    /// The name of this coordinator.
    name: String,
    models: Vec<String>,
}

impl Agreed {
    pub fn new(registry: Registry, name: String, models: Vec<String>) -> Self {
        Self { registry, name, models }
    }

    async fn change(&self, command: Command) -> Result<Outcome, ChangeError> {
        self.registry.change(command, CHANGED_MAX).await.map_err(|error| match error {
            Failed::Refused(refusal @ Refusal::NoRecord) => ChangeError::NotFound(refusal.to_string()),
            Failed::Refused(refusal @ Refusal::Revision { .. }) => ChangeError::Conflict(refusal.to_string()),
            Failed::Refused(refusal) => ChangeError::Invalid(refusal.to_string()),
            error => ChangeError::NotNow(format!("{error}: {}", self.registry.view().why_waiting())),
        })
    }

    fn check(&self, kind: &str, key: &str, value: &Value) -> Result<(), ChangeError> {
        let served = || self.models.iter().map(|model| format!("`{model}`")).collect::<Vec<_>>().join(", ");
        match kind {
            kind if HIDDEN.contains(&kind) => Err(hidden()),
            ALIAS | UNHEALTHY if !value.as_str().is_some_and(|model| self.models.iter().any(|served| served == model)) => {
                Err(ChangeError::Invalid(format!("the value of `{kind}` is the name of a model that is served here: {}", served())))
            }
            UNHEALTHY if epoch(key).is_none() => {
                Err(ChangeError::Invalid("the key is a worker's epoch as `/cluster` has it: 0 to 9 and a to f".into()))
            }
            CACHE_RESET if !self.models.iter().any(|served| served == key) => {
                Err(ChangeError::Invalid(format!("the key of `{kind}` is the name of a model that is served here: {}", served())))
            }
            CACHE_RESET if value.as_u64().is_none_or(|number| number == 0) => {
                Err(ChangeError::Invalid(format!("the value of `{kind}` is a number of at least 1, such as the time in milliseconds")))
            }
            DENIED if !key.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) => {
                Err(ChangeError::Invalid("the key is a certificate's serial as `tidemill certs` prints it: 0 to 9 and a to f".into()))
            }
            rollout::KIND => {
                let wrong = |reason: String| {
                    Err(ChangeError::Invalid(format!("this is no rollout: {reason} (`tidemill rollout start` makes one)")))
                };
                match serde_json::from_value::<Rollout>(value.clone()) {
                    Err(error) => wrong(error.to_string()),
                    Ok(rollout) if rollout.from != key => wrong(format!("its key must be `{}`", rollout.from)),
                    Ok(rollout) => match [&rollout.from, &rollout.to].into_iter().find(|model| !self.models.contains(model)) {
                        Some(model) => Err(ChangeError::Invalid(format!("`{model}` is not served here: {}", served()))),
                        None => rollout.check().or_else(|error| wrong(error.to_string())),
                    },
                }
            }
            _ => Ok(()),
        }
    }
}

impl tidemill_gateway::base::registry::Registry for Agreed {
    fn view(&self) -> RegistryView {
        let View { state, status } = self.registry.view();
        RegistryView {
            coordinator: self.name.clone(),
            part: match status.part {
                Part::Outside => "outside",
                Part::Learner => "learner",
                Part::Follower => "follower",
                Part::Candidate => "candidate",
                Part::Leader => "leader",
                Part::Removed => "removed",
            },
            leader: status.leader,
            term: status.term,
            voters: status.voters,
            learners: status.learners,
            committed: status.committed,
            applied: status.applied,
            lag: status.committed.saturating_sub(status.applied),
            behind: status.behind,
            changes_waiting: status.waiting,
            workers: state.as_ref().map_or(0, |state| state.members().count()),
            records: state.as_ref().map_or(0, |state| state.records().count()),
            stopped: status.halted,
        }
    }

    fn records(&self, kind: Option<&str>, key: Option<&str>) -> Vec<RecordView> {
        let Some(state) = self.registry.view().state else { return Vec::new() };
        let wanted = |of: &str, wanted: Option<&str>| wanted.is_none_or(|wanted| wanted == of);
        let records = state.records().filter(|(of, named, _)| !HIDDEN.contains(of) && wanted(of, kind) && wanted(named, key));
        let view = |(kind, key, record): (&str, &str, &Record)| RecordView {
            kind: kind.to_owned(),
            key: key.to_owned(),
            value: serde_json::from_slice(&record.value).unwrap_or_default(),
            revision: record.revision,
        };
        records.map(view).collect()
    }

    fn put(&self, kind: String, key: String, value: Value, expected: Option<u64>) -> Changing<'_, u64> {
        Box::pin(async move {
            self.check(&kind, &key, &value)?;
            let value = value.to_string().into_bytes();
            match self.change(Command::Put { kind, key, value, expected }).await? {
                Outcome::Put(revision) => Ok(revision),
                other => unreachable!("a record that is put has a revision, and not {other:?}"),
            }
        })
    }

    fn delete(&self, kind: String, key: String, expected: Option<u64>) -> Changing<'_, ()> {
        Box::pin(async move {
            if HIDDEN.contains(&kind.as_str()) {
                return Err(hidden());
            }
            self.change(Command::Delete { kind, key, expected }).await.map(drop)
        })
    }

    fn remove_coordinator(&self, name: String) -> Changing<'_, ()> {
        Box::pin(async move {
            self.registry.remove(name).await.map_err(|error| match error {
                CannotRemove::Unknown => ChangeError::NotFound(error.to_string()),
                CannotRemove::NotLeader(_) | CannotRemove::Leader => ChangeError::Conflict(error.to_string()),
                CannotRemove::Busy => ChangeError::NotNow(error.to_string()),
            })
        })
    }
}

fn hidden() -> ChangeError {
    ChangeError::Invalid("tenants and keys are changed with `tidemill tenants` and `tidemill keys`".into())
}

/// The parts of this process to which the agreed state applies.
#[derive(Debug)]
pub struct Followers {
    pub gateway: Arc<Gateway>,
    pub driver: Arc<Driver>,
    pub endpoint: Endpoint,
    pub revoked: Revoked,
}

/// Applies the agreed state whenever it changes, until the registry ends. `aliases` are the configured ones, which no record changes.
pub async fn follow(registry: Registry, to: Followers, aliases: BTreeMap<String, String>) {
    let Followers { gateway, driver, endpoint, mut revoked } = to;
    let mut changes = registry.watch();
    let mut denied = BTreeSet::new();
    // The log to which the revocations of an earlier one are being added.
    let mut told = None;
    loop {
        let state = changes.borrow_and_update().state.clone();
        if let Some(state) = state {
            let mut all = aliases.clone();
            let named = |value: &[u8]| serde_json::from_slice::<String>(value).ok();
            all.extend(state.records_of(ALIAS).filter_map(|(name, record)| Some((name.to_owned(), named(&record.value)?))));
            gateway.set_aliases(all);
            set_rollouts(&gateway, &state);
            distrust(&driver, &state);
            reset_caches(&driver, &state);
            let log = state.group();
            let known = revoked.all(log, state.records_of(DENIED).map(|(serial, _)| serial.to_owned()).collect());
            if !known.missing.is_empty() && told.replace(log) != Some(log) {
                tokio::spawn(revoke_again(registry.clone(), known.missing));
            }
            if known.serials != denied {
                tracing::info!(certificates = known.serials.len(), "revoked certificates");
                let serials: Vec<_> = known.serials.iter().cloned().collect();
                endpoint.deny(log, state.applied(), serials.clone());
                driver.deny(log, state.applied(), serials);
                denied = known.serials;
            }
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Adds the revocations of an earlier log to a new one.
async fn revoke_again(registry: Registry, serials: BTreeSet<String>) {
    let value = Value::from("revoked before the registry's log was made anew").to_string().into_bytes();
    for serial in serials {
        let put = || Command::Put { kind: DENIED.into(), key: serial.clone(), value: value.clone(), expected: None };
        while let Err(error) = registry.change(put(), CHANGED_MAX).await {
            tracing::warn!(serial, "the other coordinators do not know yet that this certificate is revoked: {error}");
            tokio::time::sleep(REVOKE_EVERY).await;
        }
    }
}

/// Applies rollouts to the gateway. Also called before it accepts requests, so that users who were on a new model when this process ended
/// are still there when it is back.
pub fn set_rollouts(gateway: &Gateway, state: &State) {
    let rollouts = state.records_of(rollout::KIND).map(|(key, record)| (key, &*record.value, record.revision));
    let told = state.records_of(rollout::SEEN_KIND).map(|(key, record)| (key, &*record.value));
    gateway.rollouts().set(running::read(rollouts), &running::read_told(told), &gateway.registry().view().coordinator);
}

/// Applies to the driver the workers that computed wrongly. Also called before the gateway accepts requests: blocks computed before are
/// still void.
pub fn distrust(driver: &Driver, state: &State) {
    let workers = unhealthy(state);
    driver.distrust(workers.iter().map(|(model, worker)| (&**model, *worker)));
}

/// Applies to the driver the resets of models' caches. Also called before the gateway accepts requests, as [`distrust`] is.
pub fn reset_caches(driver: &Driver, state: &State) {
    let reset = |model: &str| state.record(CACHE_RESET, model).and_then(|record| serde_json::from_slice(&record.value).ok()).unwrap_or(0);
    driver.reset_caches(reset);
}

/// The model and epoch of each worker that computed wrongly.
fn unhealthy(state: &State) -> Vec<(String, Epoch)> {
    let worker = |(key, record): (&str, &Record)| Some((serde_json::from_slice(&record.value).ok()?, epoch(key)?));
    state.records_of(UNHEALTHY).filter_map(worker).collect()
}

fn epoch(key: &str) -> Option<Epoch> {
    u64::from_str_radix(key, 16).ok().map(Epoch)
}

/// Reports the workers that were found here to the other coordinators, each once: a record that an operator deletes stays deleted.
pub async fn accuse(registry: Registry, driver: Arc<Driver>) {
    let mut told: BTreeSet<(String, Epoch)> = BTreeSet::new();
    loop {
        tokio::time::sleep(ACCUSE_EVERY).await;
        let Some(state) = registry.view().state else { continue };
        told.extend(unhealthy(&state));
        for (model, worker) in driver.distrusted() {
            if told.contains(&(model.clone(), worker)) {
                continue;
            }
            let value = Value::from(&*model).to_string().into_bytes();
            let command = Command::Put { kind: UNHEALTHY.into(), key: worker.to_string(), value, expected: None };
            match registry.change(command, CHANGED_MAX).await {
                Ok(_) => drop(told.insert((model, worker))),
                Err(error) => {
                    tracing::warn!(model, %worker, "the other coordinators do not know yet that this worker is unhealthy: {error}")
                }
            }
        }
    }
}

/// While this coordinator leads the registry, removes workers that have been away for long.
pub async fn forget(registry: Registry, driver: Arc<Driver>) {
    let mut away: HashMap<Epoch, Instant> = HashMap::new();
    loop {
        tokio::time::sleep(FORGET_EVERY).await;
        let View { state, status } = registry.view();
        let Some(state) = state.filter(|_| status.part == Part::Leader) else {
            away.clear();
            continue;
        };
        let now = Instant::now();
        let absent: Vec<Epoch> = state.members().map(|(_, member)| member.epoch).filter(|epoch| !driver.is_linked(*epoch)).collect();
        away.retain(|epoch, _| absent.contains(epoch));
        for epoch in absent {
            if now - *away.entry(epoch).or_insert(now) >= FORGOTTEN_AFTER {
                // If this fails, the next round tries again.
                let _ = registry.change(Command::Forget { epoch }, CHANGED_MAX).await;
            }
        }
    }
}

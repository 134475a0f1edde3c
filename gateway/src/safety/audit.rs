//! The audit log of this coordinator: blocks, appeals and decisions, without personal data; the review queue built from them; and what else
//! must be known later: operators' changes, erasures, budgets that were crossed.
//!
//! No request waits for a block's record: if the disk fails for long, records are lost, and counted. Appeals and decisions are answered
//! once they are synced.

use super::metrics;
use crate::base::stamp::unix_seconds;
use parking_lot::Mutex;
use serde_json::Value;
use std::{
    collections::HashMap,
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tidemill_safety::{
    appeals::{Block, Case, Cases, Decision, Event, Refused, State},
    category::Finding,
    pii::{find::Finder, redact::masked},
};
use tidemill_tenancy::{
    audit::{Broken, Chain, Line, Record, Verifier},
    journal::{self, Journal, JournalError},
};
use tokio::sync::oneshot;

#[derive(Clone, Debug)]
pub struct AuditSettings {
    pub dir: PathBuf,
    /// The age at which records are deleted.
    pub keep: Duration,
    /// The size above which the oldest records are deleted even earlier.
    pub bytes_max: u64,
    /// The finder of personal data, which is removed from texts.
    pub finder: Arc<Finder>,
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the audit log {dir} cannot be trusted: {source}. Move it away to begin a new one, and find out who did that")]
    Broken { dir: PathBuf, source: Broken },
    #[error(transparent)]
    Journal(#[from] JournalError),
}

#[derive(Debug)]
pub struct Audit {
    state: Mutex<Ledger>,
    journal: Journal<Line>,
    settings: AuditSettings,
}

#[derive(Debug, Default)]
struct Ledger {
    cases: Cases,
    chain: Chain,
    /// The names of events that are recorded once, each with its time.
    once: HashMap<String, u64>,
}

/// The reason why an appeal or a decision is rejected.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("the audit log cannot be written at the moment: the coordinator's log says why")]
    NotWritten,
}

/// The maximum length of a text that is kept.
const TEXT_BYTES_MAX: usize = 4096;
/// The longest time that an appeal waits for the disk.
const SYNCED_MAX: Duration = Duration::from_secs(10);
/// The maximum number of cases in one answer.
const LISTED_MAX: usize = 1000;
/// The interval at which expired records are looked for.
const EXPIRE_EVERY: Duration = Duration::from_secs(3600);
/// The field with the name of an event that is recorded once.
const ONCE: &str = "once";
/// Old records leave the one file that there is.
const JOURNAL: journal::Settings = journal::Settings { sync_every: Duration::ZERO, segment_bytes: u64::MAX };

impl Audit {
    /// Opens the log, and verifies it.
    pub fn open(settings: AuditSettings) -> Result<Self, OpenError> {
        let (mut cases, mut verifier, mut broken, mut once) = (Cases::default(), Verifier::default(), None, HashMap::new());
        let journal = Journal::open(&settings.dir, JOURNAL, UNIX_EPOCH, |line| {
            if broken.is_none() {
                let replay = |record: Record| {
                    cases.replay(record.at, &record.event);
                    once.extend(record.event[ONCE].as_str().map(|name| (name.to_owned(), record.at)));
                };
                broken = verifier.record(&line).map(replay).err();
            }
        })?;
        let verified = broken.map_or_else(|| verifier.finish(), Err);
        let verified = verified.map_err(|source| OpenError::Broken { dir: settings.dir.clone(), source })?;
        Ok(Self { state: Mutex::new(Ledger { cases, chain: verified.end, once }), journal, settings })
    }

    /// Records a block, and returns the id by which it can be appealed against.
    pub fn blocked(&self, side: &str, tenant: Option<&str>, model: &str, finding: Finding, text: &str) -> String {
        let appeal_id = format!("apl_{:032x}", rand::random::<u128>());
        let block = Block {
            side: side.into(),
            tenant: tenant.map(str::to_owned),
            model: model.into(),
            category: finding.category.name().into(),
            stage: finding.stage.name().into(),
            score: finding.score,
            text: self.masked(text),
        };
        // A block that cannot be written is counted; it can still be appealed against, until this process ends.
        let _ = self.record(Event::Block { appeal_id: appeal_id.clone(), block });
        appeal_id
    }

    /// Files a tenant's appeal against a block of its own.
    pub async fn appeal(&self, tenant: Option<&str>, id: &str, reason: &str) -> Result<(), AuditError> {
        if self.state.lock().cases.get(id).is_none_or(|case| case.block.tenant.as_deref() != tenant) {
            return Err(Refused::Unknown.into());
        }
        synced(self.record(Event::Appeal { appeal_id: id.into(), reason: self.masked(reason) })?).await
    }

    /// Decides about an appeal.
    pub async fn decide(&self, id: &str, decision: Decision, note: &str) -> Result<Case, AuditError> {
        synced(self.record(Event::Decision { appeal_id: id.into(), decision, note: self.masked(note) })?).await?;
        Ok(self.state.lock().cases.get(id).cloned().ok_or(Refused::Unknown)?)
    }

    /// Records an operator's act, and waits until it is on disk.
    pub async fn note(&self, event: Value) -> Result<(), AuditError> {
        let written = self.append(&mut self.state.lock(), event)?;
        synced(written).await
    }

    /// Records an event, an object, unless one with this name is in the log, and waits until it is on disk.
    pub async fn note_once(&self, name: &str, mut event: Value) -> Result<(), AuditError> {
        event[ONCE] = name.into();
        let written = {
            let mut ledger = self.state.lock();
            if ledger.once.contains_key(name) {
                return Ok(());
            }
            let written = self.append(&mut ledger, event)?;
            ledger.once.insert(name.to_owned(), unix_seconds());
            written
        };
        synced(written).await
    }

    /// Lists cases, the newest first.
    pub fn list(&self, state: Option<State>) -> Vec<Case> {
        self.state.lock().cases.iter().filter(|case| state.is_none_or(|state| case.state == state)).take(LISTED_MAX).cloned().collect()
    }

    /// The chain's last digest, for an operator who wants to keep it elsewhere.
    pub fn end(&self) -> Chain {
        self.state.lock().chain
    }

    /// Background loop: deletes expired records. Never returns.
    pub async fn expire(&self) {
        loop {
            if let Err(error) = self.retire(SystemTime::now()).await {
                tracing::warn!(%error, dir = %self.settings.dir.display(), "could not delete old records of the audit log");
            }
            tokio::time::sleep(EXPIRE_EVERY).await;
        }
    }

    /// Deletes records that are too old, or too many, once the log has announced it.
    async fn retire(&self, now: SystemTime) -> io::Result<()> {
        let AuditSettings { dir, keep, bytes_max, .. } = self.settings.clone();
        let before = now.checked_sub(keep).unwrap_or(UNIX_EPOCH);
        let since = before.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.state.lock().once.retain(|_, at| *at >= since);
        let work = move || journal::expired::<Line>(&dir, before, bytes_max);
        let expired = tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?.map_err(io::Error::other)?;
        let Some((last, line)) = expired else { return Ok(()) };
        let through = Verifier::default().record(&line).map_err(io::Error::other)?.end;
        let written = self.append(&mut self.state.lock(), through.retirement()).map_err(io::Error::other)?;
        synced(written).await.map_err(io::Error::other)?;
        let dir = self.settings.dir.clone();
        let work = move || journal::remove::<Line>(&dir, last.number);
        let removed = tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?.map_err(io::Error::other)?;
        crate::metrics::note_expired("audit", removed);
        Ok(())
    }

    /// Checks, applies and queues an event in one step, so that no other event comes between.
    fn record(&self, event: Event) -> Result<oneshot::Receiver<()>, AuditError> {
        let mut ledger = self.state.lock();
        ledger.cases.check(&event)?;
        let json = serde_json::to_value(&event).expect("an event is made of texts and numbers");
        let is_block = matches!(event, Event::Block { .. });
        let written = self.append(&mut ledger, json);
        if written.is_ok() || is_block {
            ledger.cases.apply(unix_seconds(), event)?;
        }
        written
    }

    fn append(&self, ledger: &mut Ledger, event: Value) -> Result<oneshot::Receiver<()>, AuditError> {
        let (end, line) = ledger.chain.next(unix_seconds(), &event);
        let written = self.journal.offer(line).map_err(|_| {
            metrics::count_audit_lost();
            AuditError::NotWritten
        })?;
        ledger.chain = end;
        Ok(written)
    }

    /// Replaces what identifies people, and cuts what is too long.
    pub(crate) fn masked(&self, text: &str) -> String {
        // Only the part that is kept is examined.
        let some = &text[..text.floor_char_boundary(2 * TEXT_BYTES_MAX)];
        let mut text = masked(&self.settings.finder, some);
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        text
    }
}

async fn synced(written: oneshot::Receiver<()>) -> Result<(), AuditError> {
    match tokio::time::timeout(SYNCED_MAX, written).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(AuditError::NotWritten),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rusqlite::Connection;
    use std::path::Path;
    use tidemill_safety::{
        category::{Category, Stage},
        pii::Kind,
    };
    use tidemill_tenancy::audit::Verified;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn settings(dir: &Path) -> AuditSettings {
        AuditSettings { dir: dir.join("audit"), keep: 2 * DAY, bytes_max: 1 << 30, finder: Arc::new(Finder::new(&Kind::ALL)) }
    }

    fn finding() -> Finding {
        Finding { category: Category::Hate, stage: Stage::Patterns, score: 1.0 }
    }

    fn verified(dir: &Path) -> Verified {
        let mut verifier = Verifier::default();
        journal::read(dir, 0, |_, line| verifier.record(&line).is_ok()).unwrap();
        verifier.finish().unwrap()
    }

    fn change(dir: &Path, sql: &str) {
        Connection::open(dir.join("000000000001.sqlite")).unwrap().execute(sql, []).unwrap();
    }

    #[tokio::test]
    async fn an_appeal_is_a_tenants_own_and_outlives_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let audit = Audit::open(settings(dir.path())).unwrap();
        let id = audit.blocked("input", Some("acme"), "tiny", finding(), "say it to jane@example.org");
        assert!(matches!(audit.appeal(Some("evil"), &id, "").await, Err(AuditError::Refused(Refused::Unknown))));
        assert!(matches!(audit.appeal(None, &id, "").await, Err(AuditError::Refused(Refused::Unknown))));
        assert!(matches!(audit.decide(&id, Decision::Upheld, "").await, Err(AuditError::Refused(Refused::NotOpen))));
        audit.appeal(Some("acme"), &id, "a quote, call +49 30 901820").await.unwrap();
        drop(audit);

        let audit = Audit::open(settings(dir.path())).unwrap();
        let listed = audit.list(Some(State::Open));
        assert_eq!((listed.len(), listed[0].block.text.as_str()), (1, "say it to [EMAIL]"));
        assert_eq!(listed[0].reason.as_deref(), Some("a quote, call [PHONE]"));
        assert!(matches!(audit.appeal(Some("acme"), &id, "").await, Err(AuditError::Refused(Refused::Appealed))));
        assert_eq!(audit.decide(&id, Decision::Overturned, "it is").await.unwrap().state, State::Overturned);
        let end = audit.end();
        drop(audit);
        let read = verified(&dir.path().join("audit"));
        assert_eq!((read.records, read.end), (3, end));
    }

    #[tokio::test]
    async fn old_records_go_and_the_rest_can_be_verified() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let audit = Audit::open(settings.clone()).unwrap();
        let mut ids = Vec::new();
        for _ in 0..3 {
            let id = audit.blocked("output", None, "tiny", finding(), "…");
            audit.appeal(None, &id, "why?").await.unwrap();
            ids.push(id);
        }
        audit.retire(SystemTime::now()).await.unwrap();
        assert_eq!(verified(&settings.dir).records, 6, "nothing is old");
        change(&settings.dir, "UPDATE entries SET at = at - 3 * 86400 WHERE number <= 2");
        audit.retire(SystemTime::now()).await.unwrap();
        let read = verified(&settings.dir);
        assert_eq!((read.first, read.end.seq), (3, 7));
        // All are deleted, and the record that announces it stays.
        audit.retire(SystemTime::now() + 3 * DAY).await.unwrap();
        let read = verified(&settings.dir);
        assert_eq!((read.records, read.end), (1, audit.end()));
        drop(audit);
        let again = Audit::open(settings.clone()).unwrap();
        assert!(again.list(None).iter().all(|case| case.appeal_id != ids[0]));
        again.blocked("input", None, "tiny", finding(), "…");
        drop(again);
        assert_eq!(verified(&settings.dir).records, 2);
    }

    #[tokio::test]
    async fn what_is_recorded_once_is_not_recorded_again_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let note = async |audit: &Audit, name| audit.note_once(name, serde_json::json!({"kind": "soft-budget"})).await.unwrap();
        let audit = Audit::open(settings.clone()).unwrap();
        note(&audit, "a").await;
        note(&audit, "a").await;
        drop(audit);
        let audit = Audit::open(settings.clone()).unwrap();
        note(&audit, "a").await;
        note(&audit, "b").await;
        assert_eq!(audit.end().seq, 2);
        audit.retire(SystemTime::now() + 3 * DAY).await.unwrap();
        note(&audit, "a").await;
        assert_eq!(audit.end().seq, 4, "a record that is gone is no record");
    }

    #[tokio::test]
    async fn over_its_bytes_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        let settings = AuditSettings { bytes_max: 1000, ..settings(dir.path()) };
        let audit = Audit::open(settings.clone()).unwrap();
        for _ in 0..4 {
            let id = audit.blocked("input", None, "tiny", finding(), &"x".repeat(300));
            audit.appeal(None, &id, "").await.unwrap();
            audit.retire(SystemTime::now()).await.unwrap();
        }
        let read = verified(&settings.dir);
        assert!(read.first > 1 && read.records < 8, "{read:?}");
    }

    #[tokio::test]
    async fn a_changed_log_is_not_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let audit = Audit::open(settings.clone()).unwrap();
        let id = audit.blocked("input", None, "tiny", finding(), "what was said");
        audit.appeal(None, &id, "").await.unwrap();
        drop(audit);
        change(&settings.dir, "UPDATE entries SET content = replace(content, 'what', 'What') WHERE number = 1");
        let error = Audit::open(settings).unwrap_err().to_string();
        assert!(error.contains("record 1 was changed"), "{error}");
    }
}

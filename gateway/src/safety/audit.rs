//! The audit log of this coordinator: blocks, appeals and decisions, without personal data; and the review queue built from them.
//!
//! No request waits for a block's record: if the disk fails for long, records are lost, and counted. Appeals and decisions are answered
//! once they are synced.

use crate::base::stamp::unix_seconds;
use metrics::counter;
use parking_lot::Mutex;
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};
use tidemill_safety::{
    appeals::{Block, Case, Cases, Decision, Event, Refused, State},
    category::Finding,
    pii::{find::Finder, redact::masked},
};
use tidemill_tenancy::{
    audit::{Broken, Chain, Line, Verifier},
    journal::{self, Journal, segments},
    segment,
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
    #[error("the audit log {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("the audit log {dir} cannot be trusted: {source}. Move it away to begin a new one, and find out who did that")]
    Broken { dir: PathBuf, source: Broken },
    #[error(transparent)]
    Journal(#[from] journal::OpenError),
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
const DAY: Duration = Duration::from_secs(24 * 3600);
/// The interval at which expired records are looked for.
const EXPIRE_EVERY: Duration = Duration::from_secs(3600);
const JOURNAL: journal::Settings = journal::Settings { sync_every: Duration::ZERO, segment_bytes: 16 << 20, segment_age: Some(DAY) };

impl Audit {
    /// Opens the log, and verifies it.
    pub fn open(settings: AuditSettings) -> Result<Self, OpenError> {
        let mut cases = Cases::default();
        let mut verifier = Verifier::default();
        if settings.dir.is_dir() {
            let numbers = segments::<Line>(&settings.dir).map_err(|source| OpenError::Io { path: settings.dir.clone(), source })?;
            for number in &numbers {
                let path = settings.dir.join(segment::name::<Line>(*number));
                let bytes = fs::read(&path).map_err(|source| OpenError::Io { path, source })?;
                let read = verifier.segment(&bytes, Some(number) == numbers.last(), |record| cases.replay(record.at, &record.event));
                read.map_err(|source| OpenError::Broken { dir: settings.dir.clone(), source })?;
            }
        }
        let verified = verifier.finish().map_err(|source| OpenError::Broken { dir: settings.dir.clone(), source })?;
        // Everything has been read already.
        let journal = Journal::open(&settings.dir, JOURNAL, SystemTime::now() + DAY, drop)?;
        Ok(Self { state: Mutex::new(Ledger { cases, chain: verified.end }), journal, settings })
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

    /// Deletes segments that are too old, or too many, once the log has announced it.
    async fn retire(&self, now: SystemTime) -> io::Result<()> {
        let settings = self.settings.clone();
        let old = tokio::task::spawn_blocking(move || too_old(&settings, now)).await.map_err(io::Error::other)??;
        let Some((through, numbers)) = old else { return Ok(()) };
        let written = self.append(&mut self.state.lock(), through.retirement()).map_err(io::Error::other)?;
        synced(written).await.map_err(io::Error::other)?;
        let dir = self.settings.dir.clone();
        let work = move || {
            let last = segments::<Line>(&dir)?.last().copied();
            // The oldest first, so that the rest is always a whole log.
            numbers.into_iter().filter(|number| Some(*number) != last).try_for_each(|number| fs::remove_file(path(&dir, number)))
        };
        tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
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

    fn append(&self, ledger: &mut Ledger, event: serde_json::Value) -> Result<oneshot::Receiver<()>, AuditError> {
        let (end, line) = ledger.chain.next(unix_seconds(), &event);
        let written = self.journal.offer(line).map_err(|_| {
            counter!("tidemill_audit_lost_total").increment(1);
            AuditError::NotWritten
        })?;
        ledger.chain = end;
        Ok(written)
    }

    fn masked(&self, text: &str) -> String {
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

fn path(dir: &Path, number: u64) -> PathBuf {
    dir.join(segment::name::<Line>(number))
}

/// Lists the first segments that may be deleted, with the log's end in the last of them.
fn too_old(settings: &AuditSettings, now: SystemTime) -> io::Result<Option<(Chain, Vec<u64>)>> {
    let mut found = Vec::new();
    for number in segments::<Line>(&settings.dir)? {
        let metadata = fs::metadata(path(&settings.dir, number))?;
        found.push((number, metadata.len(), now.duration_since(metadata.modified()?).unwrap_or_default()));
    }
    let mut bytes: u64 = found.iter().map(|(_, length, _)| length).sum();
    let last = found.last().map(|(number, ..)| *number);
    let mut numbers = Vec::new();
    for (number, length, age) in found {
        if age < settings.keep && (bytes <= settings.bytes_max || Some(number) == last) {
            break;
        }
        bytes -= length;
        numbers.push(number);
    }
    let Some(&newest) = numbers.last() else { return Ok(None) };
    let mut end = None;
    let read = Verifier::default().segment(&fs::read(path(&settings.dir, newest))?, true, |record| end = Some(record.end));
    read.map_err(io::Error::other)?;
    Ok(end.map(|end| (end, numbers)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_safety::{
        category::{Category, Stage},
        pii::Kind,
    };
    use tidemill_tenancy::audit::Verified;

    fn settings(dir: &Path) -> AuditSettings {
        AuditSettings { dir: dir.join("audit"), keep: 2 * DAY, bytes_max: 1 << 30, finder: Arc::new(Finder::new(&Kind::ALL)) }
    }

    fn finding() -> Finding {
        Finding { category: Category::Hate, stage: Stage::Patterns, score: 1.0 }
    }

    fn verified(dir: &Path) -> Result<Verified, Broken> {
        let mut verifier = Verifier::default();
        for number in segments::<Line>(dir).unwrap() {
            verifier.segment(&fs::read(path(dir, number)).unwrap(), false, drop)?;
        }
        verifier.finish()
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
        let read = verified(&dir.path().join("audit")).unwrap();
        assert_eq!((read.records, read.end), (3, end));
    }

    #[tokio::test]
    async fn old_segments_go_and_the_rest_can_be_verified() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let mut audit = Audit::open(settings.clone()).unwrap();
        let mut ids = Vec::new();
        for _ in 0..3 {
            let id = audit.blocked("output", None, "tiny", finding(), "…");
            audit.appeal(None, &id, "why?").await.unwrap();
            ids.push(id);
            drop(audit);
            // Each process starts a segment.
            audit = Audit::open(settings.clone()).unwrap();
        }
        audit.retire(SystemTime::now()).await.unwrap();
        assert_eq!(segments::<Line>(&settings.dir).unwrap(), [1, 2, 3], "nothing is old");
        let file = fs::File::options().write(true).open(path(&settings.dir, 1)).unwrap();
        file.set_modified(SystemTime::now() - 3 * DAY).unwrap();
        audit.retire(SystemTime::now()).await.unwrap();
        assert_eq!(segments::<Line>(&settings.dir).unwrap(), [2, 3, 4]);
        let read = verified(&settings.dir).unwrap();
        assert_eq!((read.first, read.end.seq), (3, 7));
        // All are deleted, and the record that announces it stays.
        audit.retire(SystemTime::now() + 3 * DAY).await.unwrap();
        let left = segments::<Line>(&settings.dir).unwrap();
        assert_eq!((left.len(), verified(&settings.dir).unwrap().end), (1, audit.end()), "{left:?}");
        drop(audit);
        let again = Audit::open(settings.clone()).unwrap();
        assert!(again.list(None).iter().all(|case| case.appeal_id != ids[0]));
        again.blocked("input", None, "tiny", finding(), "…");
        drop(again);
        verified(&settings.dir).unwrap();
    }

    #[tokio::test]
    async fn over_its_bytes_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        let settings = AuditSettings { bytes_max: 1000, ..settings(dir.path()) };
        for _ in 0..4 {
            let audit = Audit::open(settings.clone()).unwrap();
            let id = audit.blocked("input", None, "tiny", finding(), &"x".repeat(300));
            audit.appeal(None, &id, "").await.unwrap();
            audit.retire(SystemTime::now()).await.unwrap();
        }
        let left = segments::<Line>(&settings.dir).unwrap();
        assert!(left[0] > 1 && left.len() < 4, "{left:?}");
        verified(&settings.dir).unwrap();
    }

    #[tokio::test]
    async fn a_changed_log_is_not_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let audit = Audit::open(settings.clone()).unwrap();
        let id = audit.blocked("input", None, "tiny", finding(), "what was said");
        audit.appeal(None, &id, "").await.unwrap();
        drop(audit);
        let file = path(&settings.dir, 1);
        let mut bytes = fs::read(&file).unwrap();
        let at = bytes.windows(4).position(|part| part == b"what").unwrap();
        bytes[at] = b'W';
        fs::write(&file, bytes).unwrap();
        let error = Audit::open(settings).unwrap_err().to_string();
        assert!(error.contains("record 1 was changed"), "{error}");
    }
}

//! The ledger of money that was spent, kept in a file beside the usage log.

use crate::{
    journal::{self, JournalError},
    usage::{Event, spend::Spend},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

const FILE: &str = "spend.json";
/// Longer than any month.
const MONTH_MAX: Duration = Duration::from_secs(32 * 24 * 3600);

/// The sums of the usage log in a directory.
#[derive(Debug)]
pub struct Ledger {
    dir: PathBuf,
    spend: Spend,
    /// The number of the last event of the sums in the file.
    written: u64,
}

impl Ledger {
    /// Reads the sums, and the rest of the log. `now` is the time since the Unix epoch. May block for long if there are no sums.
    pub fn open(dir: &Path, now: Duration) -> Result<Self, JournalError> {
        let read = fs::read(dir.join(FILE)).ok().and_then(|bytes| serde_json::from_slice::<Spend>(&bytes).ok());
        let end = journal::end::<Event>(dir)?.number;
        // Sums of more events than there are belong to another log.
        let spend = match read.filter(|spend| spend.number <= end) {
            Some(spend) => spend,
            None => {
                let since = UNIX_EPOCH + now.saturating_sub(MONTH_MAX);
                Spend::after(journal::before::<Event>(dir, since)?)
            }
        };
        let mut ledger = Self { dir: dir.to_owned(), written: spend.number, spend };
        ledger.catch_up()?;
        Ok(ledger)
    }

    /// Adds what the log has gained. Blocks.
    pub fn catch_up(&mut self) -> Result<(), JournalError> {
        journal::read(&self.dir, self.spend.number, |position, event| {
            self.spend.add(position.number, &event);
            true
        })
    }

    /// Writes the sums, if they have changed. Blocks.
    pub fn write(&mut self) -> io::Result<()> {
        if self.written == self.spend.number {
            return Ok(());
        }
        let (path, part) = (self.dir.join(FILE), self.dir.join(format!("{FILE}.part")));
        fs::write(&part, serde_json::to_vec(&self.spend)?)?;
        fs::File::open(&part)?.sync_all()?;
        fs::rename(part, path)?;
        self.written = self.spend.number;
        Ok(())
    }

    pub fn spend(&self) -> &Spend {
        &self.spend
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        journal::{Journal, Settings},
        quota::Scope,
    };

    /// The 31st of January 1970.
    const AT_MS: u64 = 30 * 86_400_000;

    fn event() -> Event {
        Event { at_ms: AT_MS + 5, tenant: "a".into(), model: "m".into(), cost_micros: 3, ..Event::default() }
    }

    /// The money that the tenant has spent in the month.
    fn sum(ledger: &Ledger) -> u64 {
        let scopes = ledger.spend().scopes(Duration::from_millis(AT_MS));
        let found = scopes.into_iter().find(|(scope, _)| *scope == Scope::Tenant("a".into()));
        found.map_or(0, |(_, spent)| spent.month_micros)
    }

    #[tokio::test]
    async fn the_rest_of_the_log_brings_sums_up_to_date_whenever_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings { sync_every: Duration::from_millis(20), segment_bytes: 1000 };
        let log = Journal::<Event>::open(dir.path(), settings, UNIX_EPOCH, drop).unwrap();
        let now = Duration::from_millis(AT_MS);
        for _ in 0..20 {
            log.write(event()).await;
        }
        let mut ledger = Ledger::open(dir.path(), now).unwrap();
        assert_eq!(sum(&ledger), 60, "without sums, the log has all of it");
        ledger.write().unwrap();
        for _ in 0..5 {
            log.write(event()).await;
        }
        assert_eq!(sum(&Ledger::open(dir.path(), now).unwrap()), 75, "a process that dies has not written its last sums");
        ledger.catch_up().unwrap();
        ledger.write().unwrap();
        assert_eq!(sum(&Ledger::open(dir.path(), now).unwrap()), 75);
        // A file that cannot be read, and one of another log, are made anew.
        for wrong in ["{", r#"{"number":99,"day":{"period":30,"tenants":{}},"month":{"period":0,"tenants":{}}}"#] {
            std::fs::write(dir.path().join("spend.json"), wrong).unwrap();
            assert_eq!(sum(&Ledger::open(dir.path(), now).unwrap()), 75);
        }
    }
}

//! Entries that leave a log because of their age or its size, and entries whose contents are replaced.

use super::{BUSY_MAX, CHECKPOINT_EVERY, Entry, JournalError, PAGE, Position, end, entry, files, name, open, unix_seconds};
use rusqlite::{Connection, OpenFlags, OptionalExtension, TransactionBehavior, params};
use std::{
    path::Path,
    time::{Instant, SystemTime},
};

/// Finds the last entry that may go: it and all before it were written before `before`, or exceed the last `bytes_max` bytes. A log of
/// several files is looked at in its first one.
pub fn expired<E: Entry>(dir: &Path, before: SystemTime, bytes_max: u64) -> Result<Option<(Position, E)>, JournalError> {
    let Some(&first) = files::<E>(dir)?.first() else { return Ok(None) };
    let path = dir.join(name(first));
    let Some(database) = open::<E>(&path, OpenFlags::SQLITE_OPEN_READ_ONLY)? else { return Ok(None) };
    let kept_bytes_from = end::<E>(dir)?.bytes.saturating_sub(bytes_max);
    let last = "SELECT number, bytes, content FROM entries WHERE number <
                    ifnull((SELECT min(number) FROM entries WHERE at >= ? AND bytes >= ?), (SELECT max(number) + 1 FROM entries))
                ORDER BY number DESC LIMIT 1";
    let found = database.query_row(last, params![unix_seconds(before), kept_bytes_from], entry).optional();
    Ok(found.map_err(JournalError::database::<E>(&path))?.and_then(|(position, entry)| Some((position, entry?))))
}

/// Deletes a log's entries up to the number `through`, as far as its first file has them, and overwrites what they were. Returns their number.
pub fn remove<E: Entry>(dir: &Path, through: u64) -> Result<u64, JournalError> {
    let Some(&first) = files::<E>(dir)?.first() else { return Ok(0) };
    let path = dir.join(name(first));
    let failed = JournalError::database::<E>(&path);
    let Some(database) = open::<E>(&path, OpenFlags::SQLITE_OPEN_READ_WRITE)? else { return Ok(0) };
    database.pragma_update(None, "secure_delete", "ON").map_err(&failed)?;
    Ok(database.execute("DELETE FROM entries WHERE number <= ?", [through]).map_err(&failed)? as u64)
}

/// Replaces the entries for which `change` has another, and overwrites what they were. Returns their number. A few hundred entries are one
/// transaction: if it is cut off, the rest is as it was.
pub fn rewrite<E: Entry>(dir: &Path, mut change: impl FnMut(E) -> Option<E>) -> Result<u64, JournalError> {
    let mut changed = 0;
    for first in files::<E>(dir)? {
        let path = dir.join(name(first));
        let failed = JournalError::database::<E>(&path);
        let Some(mut database) = open::<E>(&path, OpenFlags::SQLITE_OPEN_READ_WRITE)? else { continue };
        database.pragma_update(None, "secure_delete", "ON").map_err(&failed)?;
        let (mut last, before) = (0, changed);
        loop {
            let page = page::<E>(&database, last).map_err(&failed)?;
            let Some((end, _)) = page.last() else { break };
            last = end.number;
            let others = page.into_iter().filter_map(|(position, entry)| Some((position.number, change(entry?)?.encode())));
            changed += replace(&mut database, others.collect()).map_err(&failed)?;
        }
        if changed > before {
            // Pages may have copies of entries in their free room, from when these were moved.
            database.execute_batch("VACUUM").map_err(&failed)?;
        }
        // The entries' former contents are in the file until a checkpoint, and in the write-ahead log until that is begun anew.
        let give_up = Instant::now() + BUSY_MAX;
        while database.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| Ok(row.get::<_, i64>(0)? != 0)).map_err(&failed)? {
            if Instant::now() > give_up {
                return Err(JournalError::file::<E, _>(&path)("it is read or synced all the time, and what was replaced is still in it"));
            }
            std::thread::sleep(CHECKPOINT_EVERY);
        }
    }
    Ok(changed)
}

fn page<E: Entry>(database: &Connection, after: u64) -> rusqlite::Result<Vec<(Position, Option<E>)>> {
    let mut select = database.prepare_cached("SELECT number, bytes, content FROM entries WHERE number > ? ORDER BY number LIMIT ?")?;
    select.query_map(params![after, PAGE], entry)?.collect()
}

fn replace(database: &mut Connection, contents: Vec<(u64, String)>) -> rusqlite::Result<u64> {
    if contents.is_empty() {
        return Ok(0);
    }
    let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for (number, content) in &contents {
        transaction.prepare_cached("UPDATE entries SET content = ?2 WHERE number = ?1")?.execute(params![number, content])?;
    }
    transaction.commit()?;
    Ok(contents.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Settings, read,
            tests::{SETTINGS, event, ids, open_at, read_after},
        },
        *,
    };
    use crate::usage::Event;
    use std::{
        collections::BTreeMap,
        time::{Duration, UNIX_EPOCH},
    };

    #[tokio::test]
    async fn expired_entries_are_removed_and_the_rest_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (meter, _) = open_at(dir.path(), Settings { segment_bytes: u64::MAX, ..SETTINGS });
        for id in 0..4 {
            meter.write(event(id)).await;
        }
        let each = event(0).encode().len() as u64;
        let found = |before, bytes_max| expired::<Event>(dir.path(), before, bytes_max).unwrap().map(|(position, _)| position.number);
        let later = SystemTime::now() + Duration::from_secs(60);
        assert_eq!([found(UNIX_EPOCH, 4 * each), found(UNIX_EPOCH, 2 * each), found(later, 4 * each)], [None, Some(1), Some(4)]);
        assert_eq!(found(UNIX_EPOCH, 0), Some(3), "the last one goes by its age alone");
        remove::<Event>(dir.path(), 2).unwrap();
        meter.write(event(4)).await;
        assert_eq!(read_after(dir.path(), 0), ids(2..5));
        drop(meter);
        assert_eq!(open_at(dir.path(), SETTINGS).1, ids(2..5));
    }

    #[tokio::test]
    async fn entries_are_rewritten_beside_their_writer_and_leave_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let (meter, _) = open_at(dir.path(), Settings { segment_bytes: 100_000, ..SETTINGS });
        let of = |id: usize, user: &str| Event { user: Some(user.into()), ..event(id) };
        for id in 0..1200 {
            meter.write(of(id, if id % 2 == 0 { "ann-of-the-secret" } else { "bob" })).await;
        }
        let strip = |event: Event| (event.user.as_deref() == Some("ann-of-the-secret")).then_some(Event { user: None, ..event });
        assert_eq!([rewrite(dir.path(), strip).unwrap(), rewrite(dir.path(), strip).unwrap()], [600, 0]);
        meter.write(of(1200, "bob")).await;
        let mut users = BTreeMap::new();
        read(dir.path(), 0, |_, event: Event| {
            *users.entry(event.user).or_insert(0) += 1;
            true
        })
        .unwrap();
        assert_eq!(users, [(None, 600), (Some("bob".into()), 601)].into());
        for file in std::fs::read_dir(dir.path()).unwrap() {
            let path = file.unwrap().path();
            let found = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).contains("ann-of-the-secret");
            assert!(!found, "{}", path.display());
        }
    }
}

//! A batch's answers so far, in the two files that its client will get: the good ones and the others. They alone record which requests were
//! answered, so they cannot be contradicted; a line torn by a crash was never written.

use super::disk::{Disk, PRIVATE, blocking};
use crate::batch::record;
use std::{
    collections::HashSet,
    fs,
    io::{self, BufRead, BufReader},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};
use tokio::io::AsyncWriteExt;

#[derive(Debug)]
pub(super) struct Journal {
    good: Side,
    others: Side,
    answered: HashSet<String>,
}

#[derive(Debug)]
struct Side {
    file: tokio::fs::File,
    lines: u64,
    bytes: u64,
}

impl Journal {
    pub(super) async fn open(disk: &Disk, id: &str) -> io::Result<Self> {
        let paths = [disk.journal(id, true), disk.journal(id, false)];
        let (good, others, answered) = blocking(move || {
            let mut answered = HashSet::new();
            let [good, others] = paths.map(|path| recover(path, &mut answered));
            Ok((good?, others?, answered))
        })
        .await?;
        let side = |(file, lines, bytes)| Side { file: tokio::fs::File::from_std(file), lines, bytes };
        Ok(Self { good: side(good), others: side(others), answered })
    }

    pub(super) fn has(&self, custom_id: &str) -> bool {
        self.answered.contains(custom_id)
    }

    /// The numbers of good and of other answers.
    pub(super) fn lines(&self) -> (u64, u64) {
        (self.good.lines, self.others.lines)
    }

    /// The size of all answers.
    pub(super) fn bytes(&self) -> u64 {
        self.good.bytes + self.others.bytes
    }

    /// Appends an answer. After an error, it is unknown how much was written: only a journal that is opened again may be appended to.
    pub(super) async fn append(&mut self, good: bool, custom_id: &str, record: &str) -> io::Result<()> {
        if !self.answered.insert(custom_id.to_owned()) {
            return Ok(());
        }
        let side = if good { &mut self.good } else { &mut self.others };
        side.file.write_all(record.as_bytes()).await?;
        side.file.flush().await?;
        side.lines += 1;
        side.bytes += record.len() as u64;
        Ok(())
    }
}

/// Cuts the file off after its last whole line. Returns the numbers of its lines and bytes, too.
fn recover(path: PathBuf, answered: &mut HashSet<String>) -> io::Result<(fs::File, u64, u64)> {
    let file = fs::File::options().read(true).append(true).create(true).mode(PRIVATE).open(path)?;
    let (mut reader, mut line) = (BufReader::new(&file), Vec::new());
    let (mut whole, mut lines) = (0, 0);
    loop {
        line.clear();
        let bytes = reader.read_until(b'\n', &mut line)?;
        match record::custom_id(&line) {
            Some(custom_id) => answered.insert(custom_id),
            None => break,
        };
        whole += bytes as u64;
        lines += 1;
    }
    file.set_len(whole)?;
    Ok((file, lines, whole))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn a_journal_goes_on_after_its_last_whole_line() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(dir.path().to_owned()).unwrap();
        let answer = |custom_id: &str| record::answer("batch_req_1", custom_id, 200, "req_1", &json!({}));
        let mut journal = Journal::open(&disk, "batch_1").await.unwrap();
        for (good, custom_id) in [(true, "a"), (false, "b"), (true, "c"), (true, "c")] {
            journal.append(good, custom_id, &answer(custom_id)).await.unwrap();
        }
        assert_eq!(journal.lines(), (2, 1));
        let path = disk.journal("batch_1", true);
        let whole = fs::read_to_string(&path).unwrap();
        assert_eq!(whole, answer("a") + &answer("c"), "each is written once");
        for cut in 0..answer("c").len() {
            fs::write(&path, &whole[..whole.len() - 1 - cut]).unwrap();
            let mut journal = Journal::open(&disk, "batch_1").await.unwrap();
            assert_eq!((journal.has("a"), journal.has("b"), journal.has("c")), (true, true, false), "{cut}");
            journal.append(true, "c", &answer("c")).await.unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), whole, "{cut}");
            assert_eq!(journal.bytes(), whole.len() as u64 + fs::metadata(disk.journal("batch_1", false)).unwrap().len());
        }
    }
}

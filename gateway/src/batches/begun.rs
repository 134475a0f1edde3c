//! The running requests of a batch, written to disk before they start, so that one that crashes its process is found: a line that ran when
//! a process died has one more death, and after the second it does not run again.
//!
//! ```text
//! process 7f3a…     this process has taken the batch
//! died 12 1         a line that ran when a process died, and the number of its deaths
//! began 3           it runs from here on;  `ended 3`: it was postponed
//! stopped           the process ended in an orderly way, and its running requests with it
//! ```
//!
//! A line that was answered needs no entry: its answer shows it. Nothing is synced, since a process's death loses no written data; a
//! machine's may lose a death.

use super::disk::{Disk, blocking};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    io::{self, Write as _},
    path::Path,
};
use tokio::{io::AsyncWriteExt, sync::Mutex};

/// The number of deaths after which a line does not run again. The first may have a different cause; at the second, the line ran without
/// the others that were running at the first.
pub(super) const DEATHS_MAX: u32 = 2;

#[derive(Debug)]
pub(super) struct Begun {
    file: Mutex<tokio::fs::File>,
    /// The number of process deaths while each line ran.
    deaths: BTreeMap<u64, u32>,
}

impl Begun {
    /// Counts the deaths of the last process that had taken the batch, unless that is this one. `process` is its unique name.
    pub(super) async fn open(disk: &Disk, id: &str, process: &str) -> io::Result<Self> {
        let (path, process) = (disk.begun(id), process.to_owned());
        let (file, deaths) = blocking(move || {
            let text = match fs::read_to_string(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
                read => read?,
            };
            let deaths = deaths(&text, &process);
            let mut text = format!("process {process}\n");
            deaths.iter().for_each(|(line, deaths)| {
                let _ = writeln!(text, "died {line} {deaths}");
            });
            let beside = path.with_extension("begun-tmp");
            fs::write(&beside, text)?;
            fs::rename(&beside, &path)?;
            Ok((fs::File::options().append(true).open(&path)?, deaths))
        })
        .await?;
        Ok(Self { file: Mutex::new(tokio::fs::File::from_std(file)), deaths })
    }

    /// Returns the number of processes that died while this line ran.
    pub(super) fn deaths(&self, line: u64) -> u32 {
        self.deaths.get(&line).copied().unwrap_or(0)
    }

    /// Notes that a line is about to run.
    pub(super) async fn began(&self, line: u64) -> io::Result<()> {
        self.write(&format!("began {line}\n")).await
    }

    /// Notes that a line no longer runs, and has no answer.
    pub(super) async fn ended(&self, line: u64) -> io::Result<()> {
        self.write(&format!("ended {line}\n")).await
    }

    async fn write(&self, line: &str) -> io::Result<()> {
        let mut file = self.file.lock().await;
        file.write_all(line.as_bytes()).await?;
        file.flush().await
    }
}

/// Notes that running requests were stopped in an orderly way, and did not cause the process's end.
pub(super) fn stop(path: &Path) -> io::Result<()> {
    match fs::File::options().append(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        file => file?.write_all(b"stopped\n"),
    }
}

fn deaths(text: &str, process: &str) -> BTreeMap<u64, u32> {
    let (mut deaths, mut running, mut last) = (BTreeMap::new(), BTreeSet::new(), "");
    // A line torn by a crash was never written.
    for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        let mut words = line.split(' ');
        let word = words.next().unwrap_or_default();
        if word == "process" {
            last = words.next().unwrap_or_default();
            continue;
        }
        let mut number = || words.next().and_then(|number| number.parse::<u64>().ok());
        match (word, number(), number()) {
            ("began", Some(line), _) => drop(running.insert(line)),
            ("ended", Some(line), _) => drop(running.remove(&line)),
            ("died", Some(line), Some(count)) => drop(deaths.insert(line, count as u32)),
            ("stopped", ..) => running.clear(),
            _ => {}
        }
    }
    if last != process {
        running.into_iter().for_each(|line| *deaths.entry(line).or_default() += 1);
    }
    deaths
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn open(disk: &Disk, process: &str) -> Begun {
        Begun::open(disk, "batch_1", process).await.unwrap()
    }

    #[tokio::test]
    async fn a_line_that_ran_when_a_process_died_has_one_death_more() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(dir.path().to_owned()).unwrap();
        for (process, expected) in [("a", 0), ("b", 1), ("c", 2)] {
            let begun = open(&disk, process).await;
            assert_eq!([begun.deaths(7), begun.deaths(8), begun.deaths(9)], [expected, 0, 0], "{process}");
            begun.began(7).await.unwrap();
            begun.began(8).await.unwrap();
            begun.ended(8).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_process_that_ends_in_good_order_or_opens_it_again_kills_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(dir.path().to_owned()).unwrap();
        for process in ["a", "b", "b", "c"] {
            let begun = open(&disk, process).await;
            assert_eq!(begun.deaths(7), 0, "{process}");
            begun.began(7).await.unwrap();
            if process != "b" {
                stop(&disk.begun("batch_1")).unwrap();
            } else {
                begun.began(8).await.unwrap();
                stop(&disk.begun("batch_1")).unwrap();
                begun.began(8).await.unwrap();
            }
        }
        assert_eq!(open(&disk, "d").await.deaths(8), 1, "it began again after the stop that was none");
        stop(&disk.begun("batch_2")).unwrap();
    }

    #[test]
    fn what_a_death_has_torn_counts_for_nothing() {
        let text = "process a\ndied 3 1\nbegan 4\nbegan 12\n";
        for cut in 0..text.len() {
            let found = deaths(&text[..cut], "b");
            assert!(found.iter().all(|(&line, &deaths)| [3, 4].contains(&line) && deaths == 1), "{cut}: {found:?}");
        }
        assert_eq!(deaths(text, "b"), [(3, 1), (4, 1), (12, 1)].into());
        assert_eq!(deaths("\u{0}\nbegan x\ndied 1\n", "b"), BTreeMap::new());
    }
}

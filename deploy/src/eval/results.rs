//! The results of evaluations, in one SQLite file: runs, with a score per case and per check; comparisons of two models.

use anyhow::Context;
use rusqlite::{Connection, OptionalExtension, Row, params};
use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tidemill_eval::gate::Scores;

const SCHEMA: &str = "
    PRAGMA journal_mode = WAL;
    CREATE TABLE IF NOT EXISTS runs (
        id INTEGER PRIMARY KEY, at INTEGER NOT NULL, model TEXT NOT NULL, judge TEXT, \"commit\" TEXT NOT NULL, cases INTEGER NOT NULL,
        failed INTEGER, score REAL, passed INTEGER);
    CREATE TABLE IF NOT EXISTS results (
        run INTEGER NOT NULL REFERENCES runs, id TEXT NOT NULL, score REAL NOT NULL, answer TEXT NOT NULL, error TEXT,
        PRIMARY KEY (run, id));
    CREATE TABLE IF NOT EXISTS checks (
        run INTEGER NOT NULL REFERENCES runs, id TEXT NOT NULL, number INTEGER NOT NULL, kind TEXT NOT NULL, score REAL NOT NULL,
        passed INTEGER NOT NULL, PRIMARY KEY (run, id, number));
    CREATE TABLE IF NOT EXISTS comparisons (
        id INTEGER PRIMARY KEY, at INTEGER NOT NULL, first TEXT NOT NULL, second TEXT NOT NULL, judge TEXT NOT NULL, wins INTEGER NOT NULL,
        losses INTEGER NOT NULL, ties INTEGER NOT NULL, agreement REAL, bias REAL);";

#[derive(Debug)]
pub(super) struct Results(Connection);

/// A run, as it is listed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Run {
    pub(super) id: i64,
    pub(super) at: u64,
    pub(super) model: String,
    pub(super) judge: Option<String>,
    pub(super) commit: String,
    pub(super) cases: u64,
    /// Cases without an answer.
    pub(super) failed: Option<u64>,
    /// The mean score; `None` if the run did not finish.
    pub(super) score: Option<f64>,
    pub(super) passed: Option<bool>,
}

/// The outcome of one case.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    pub(super) id: String,
    pub(super) tags: Vec<String>,
    pub(super) answer: String,
    /// The reason that there is no answer.
    pub(super) error: Option<String>,
    pub(super) checks: Vec<Checked>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Checked {
    pub(super) kind: &'static str,
    /// The score, from 0 to 1.
    pub(super) score: f64,
    pub(super) passed: bool,
}

/// A comparison of two models by one judge.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Comparison {
    pub(super) first: String,
    pub(super) second: String,
    pub(super) wins: u64,
    pub(super) losses: u64,
    pub(super) ties: u64,
    /// The share of pairs for which the judge said the same in both orders.
    pub(super) agreement: Option<f64>,
    /// The judge's mean bias in favour of the answer shown first.
    pub(super) bias: Option<f64>,
}

impl Outcome {
    /// The mean score of the case's checks.
    pub(super) fn score(&self) -> f64 {
        tidemill_eval::gate::mean(self.checks.iter().map(|check| check.score)).unwrap_or(0.0)
    }
}

impl Results {
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let open = || -> rusqlite::Result<Connection> {
            let file = Connection::open(path)?;
            file.busy_timeout(Duration::from_secs(10))?;
            file.execute_batch(SCHEMA)?;
            Ok(file)
        };
        Ok(Self(open().with_context(|| format!("cannot keep results in {}", path.display()))?))
    }

    /// Starts a run and returns its number.
    pub(super) fn begin(&self, model: &str, judge: Option<&str>, commit: &str, cases: usize) -> anyhow::Result<i64> {
        let insert = "INSERT INTO runs (at, model, judge, \"commit\", cases) VALUES (?1, ?2, ?3, ?4, ?5)";
        self.0.execute(insert, params![unix_seconds(), model, judge, commit, cases as u64])?;
        Ok(self.0.last_insert_rowid())
    }

    pub(super) fn add(&mut self, run: i64, outcome: &Outcome) -> anyhow::Result<()> {
        let Outcome { id, answer, error, checks, .. } = outcome;
        let work = self.0.transaction()?;
        let result = "INSERT INTO results (run, id, score, answer, error) VALUES (?1, ?2, ?3, ?4, ?5)";
        work.execute(result, params![run, id, outcome.score(), answer, error])?;
        for (number, check) in (0_u32..).zip(checks) {
            let check_row = "INSERT INTO checks (run, id, number, kind, score, passed) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
            work.execute(check_row, params![run, id, number, check.kind, check.score, check.passed])?;
        }
        Ok(work.commit()?)
    }

    pub(super) fn end(&self, run: i64, score: f64, failed: usize, passed: bool) -> anyhow::Result<()> {
        let update = "UPDATE runs SET score = ?2, failed = ?3, passed = ?4 WHERE id = ?1";
        self.0.execute(update, params![run, score, failed as u64, passed])?;
        Ok(())
    }

    /// The latest runs, newest first.
    pub(super) fn list(&self, model: Option<&str>, limit: usize) -> anyhow::Result<Vec<Run>> {
        let mut select = self.0.prepare(
            "SELECT id, at, model, judge, \"commit\", cases, failed, score, passed FROM runs WHERE ?1 IS NULL OR model = ?1
             ORDER BY id DESC LIMIT ?2",
        )?;
        Ok(select.query_map(params![model, limit as i64], run)?.collect::<Result<_, _>>()?)
    }

    /// The run to compare another run with: the requested one, or else the model's last one, or else another model's.
    pub(super) fn baseline(&self, wanted: Option<&str>, model: &str, before: i64) -> anyhow::Result<Option<Run>> {
        let columns = "SELECT id, at, model, judge, \"commit\", cases, failed, score, passed FROM runs WHERE score IS NOT NULL AND id < ?1";
        let find = |rest: &str, by: &dyn rusqlite::ToSql| {
            let sql = format!("{columns} {rest} LIMIT 1");
            self.0.query_row(&sql, params![before, by], run).optional()
        };
        match wanted {
            Some("none") => Ok(None),
            Some(wanted) => {
                let found = match wanted.parse::<i64>() {
                    Ok(number) => find("AND id = ?2", &number)?,
                    Err(_) => find("AND model = ?2 ORDER BY id DESC", &wanted)?,
                };
                Ok(Some(
                    found
                        .with_context(|| format!("there is no finished run `{wanted}`: `tidemill eval list` shows those that there are"))?,
                ))
            }
            None => Ok(find("ORDER BY model = ?2 DESC, id DESC", &model)?),
        }
    }

    pub(super) fn scores(&self, run: i64) -> anyhow::Result<Scores> {
        let mut select = self.0.prepare("SELECT id, score FROM results WHERE run = ?1")?;
        Ok(select.query_map([run], |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<Result<_, _>>()?)
    }

    pub(super) fn compared(&self, judge: &str, comparison: &Comparison) -> anyhow::Result<()> {
        let Comparison { first, second, wins, losses, ties, agreement, bias } = comparison;
        self.0.execute(
            "INSERT INTO comparisons (at, first, second, judge, wins, losses, ties, agreement, bias) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            params![unix_seconds(), first, second, judge, wins, losses, ties, agreement, bias],
        )?;
        Ok(())
    }
}

fn run(row: &Row<'_>) -> rusqlite::Result<Run> {
    Ok(Run {
        id: row.get(0)?,
        at: row.get(1)?,
        model: row.get(2)?,
        judge: row.get(3)?,
        commit: row.get(4)?,
        cases: row.get(5)?,
        failed: row.get(6)?,
        score: row.get(7)?,
        passed: row.get(8)?,
    })
}

/// The runs as a table of text.
pub(super) fn table(runs: &[Run]) -> String {
    let mut out =
        format!("{:>5}  {:20}  {:24}  {:>6}  {:>6}  {:>6}  {:6}  {}\n", "run", "at", "model", "cases", "failed", "score", "gate", "commit");
    for run in runs {
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".into());
        let at = tidemill_tenancy::usage::report::day(run.at * 1000);
        let (failed, score) = (or_dash(run.failed.map(|failed| failed.to_string())), or_dash(run.score.map(|score| format!("{score:.3}"))));
        let gate = or_dash(run.passed.map(|passed| if passed { "passed" } else { "failed" }.into()));
        out += &format!("{:>5}  {at:20}  {:24}  {:>6}  {failed:>6}  {score:>6}  {gate:6}  {}\n", run.id, run.model, run.cases, run.commit);
    }
    out
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(results: &mut Results, model: &str, score: f64) -> i64 {
        let run = results.begin(model, None, "abc", 1).unwrap();
        let checks = vec![Checked { kind: "contains", score, passed: score > 0.5 }];
        results.add(run, &Outcome { id: "a".into(), checks, ..Outcome::default() }).unwrap();
        results.end(run, score, 0, true).unwrap();
        run
    }

    #[test]
    fn a_run_is_compared_with_its_models_last_one_or_with_what_is_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("eval.sqlite");
        let mut results = Results::open(&path).unwrap();
        let (first, second) = (finished(&mut results, "small", 0.5), finished(&mut results, "large", 0.75));
        let broken = results.begin("small", None, "", 1).unwrap();
        let now = results.begin("small", None, "", 1).unwrap();
        drop(results);
        let results = Results::open(&path).unwrap();
        let baseline = |wanted, model| results.baseline(wanted, model, now).map(|run| run.map(|run| run.id));
        assert_eq!(baseline(None, "small").unwrap(), Some(first));
        assert_eq!(baseline(None, "new").unwrap(), Some(second));
        assert_eq!(baseline(Some("large"), "small").unwrap(), Some(second));
        assert_eq!(baseline(Some("1"), "large").unwrap(), Some(first));
        assert_eq!(baseline(Some("none"), "small").unwrap(), None);
        assert!(baseline(Some(&broken.to_string()), "small").is_err());
        assert_eq!(results.scores(second).unwrap()["a"], 0.75);
        assert_eq!(results.list(Some("small"), 9).unwrap().len(), 3);
        assert!(table(&results.list(None, 9).unwrap()).contains("0.750"));
    }
}

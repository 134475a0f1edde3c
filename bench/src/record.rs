//! The format of every subcommand's `--json`: one envelope with the measured object, the place, the time and the command. The subcommand's
//! own figures are its `result`.

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// The version of the format, raised when a reader of the old form would misread the new one.
pub const SCHEMA: &str = "tidemill-bench/1";

/// The largest file that is read.
const BYTES_MAX: u64 = 256 << 20;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record<T = Value> {
    pub schema: String,
    pub subcommand: String,
    pub machine: Machine,
    /// The commit of the sources that this program was built from, as they are now; `-dirty` if they differ from it, `null` if they are
    /// gone.
    pub commit: Option<String>,
    /// The command line as typed, without the program's path.
    pub command: Vec<String>,
    /// The time at the end: RFC 3339, UTC.
    pub time: String,
    pub result: T,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_gib: f64,
    pub gpus: Vec<String>,
    pub os: String,
}

impl<T> Record<T> {
    pub fn new(subcommand: &str, result: T) -> Self {
        let time = OffsetDateTime::now_utc().replace_nanosecond(0).expect("0 is a nanosecond");
        Self {
            schema: SCHEMA.into(),
            subcommand: subcommand.into(),
            machine: Machine::here(),
            commit: commit(),
            command: std::env::args().skip(1).collect(),
            time: time.format(&Rfc3339).expect("years have four digits"),
            result,
        }
    }
}

impl Record {
    /// Reads a record. An error describes the file otherwise.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot read {}", path.display());
        ensure!(fs::metadata(path).with_context(cannot)?.len() <= BYTES_MAX, "{} is larger than {BYTES_MAX} bytes", path.display());
        let text = fs::read_to_string(path).with_context(cannot)?;
        let record: Self = serde_json::from_str(&text).with_context(|| format!("{} is not what `--json` writes", path.display()))?;
        ensure!(record.schema == SCHEMA, "{} has the schema {:?}, this program reads {SCHEMA:?}", path.display(), record.schema);
        Ok(record)
    }
}

/// Writes `result` in its envelope, if there is a path to write to.
pub fn write(path: Option<&PathBuf>, subcommand: &str, result: &impl Serialize) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_string_pretty(&Record::new(subcommand, result))?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

impl Machine {
    fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let field =
            |text: &str, name: &str| text.lines().find_map(|line| Some(line.strip_prefix(name)?.split_once(':')?.1.trim().to_owned()));
        let memory_kib = field(&read("/proc/meminfo"), "MemTotal");
        let memory_kib: f64 = memory_kib.and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0.0);
        let gpus = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
        Self {
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory_gib: (memory_kib / f64::from(1 << 20) * 10.0).round() / 10.0,
            gpus: gpus.filter_map(|gpu| field(&read(gpu.path().join("information").to_str()?), "Model")).collect(),
            os: format!("{} {}", std::env::consts::OS, read("/proc/sys/kernel/osrelease").trim()),
        }
    }
}

fn commit() -> Option<String> {
    let mut git = Command::new("git");
    git.args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]);
    let output = git.stderr(Stdio::null()).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_says_where_it_comes_from_and_is_read_back() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path().to_path_buf();
        write(Some(&path), "load", &serde_json::json!({"requests": 3})).unwrap();
        let record = Record::read(&path).unwrap();
        assert_eq!((record.subcommand.as_str(), &record.result["requests"]), ("load", &3.into()));
        assert!(record.machine.cores >= 1 && !record.machine.cpu.is_empty() && record.time.ends_with('Z'), "{record:?}");
        for (text, complaint) in [("[]", "--json"), (r#"{"schema": "x"}"#, "--json")] {
            fs::write(&path, text).unwrap();
            assert!(format!("{:#}", Record::read(&path).unwrap_err()).contains(complaint));
        }
        fs::write(&path, serde_json::to_string(&Record { schema: "tidemill-bench/9".into(), ..record }).unwrap()).unwrap();
        assert!(format!("{:#}", Record::read(&path).unwrap_err()).contains("tidemill-bench/9"));
    }
}

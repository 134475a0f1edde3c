//! `tidemill audit`: verifies and prints the audit log of blocks, from its files.

use anyhow::Context;
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
};
use tidemill_tenancy::{
    audit::{Line, Record, Verified, Verifier},
    segment,
};

#[derive(Debug, clap::Subcommand)]
pub enum AuditCommand {
    /// Check that no record was changed, removed or moved; ends with status 1 if one was, and says which
    Verify {
        /// Directory `audit` in a coordinator's --data
        dir: PathBuf,
        /// Head that was noted elsewhere: if it is not there, the log's end is missing, or all of it was written anew
        #[arg(long, value_name = "DIGEST")]
        head: Option<String>,
    },
    /// Print the records, a JSON object a line
    Show {
        /// Directory `audit` in a coordinator's --data
        dir: PathBuf,
    },
}

pub fn audit(command: AuditCommand) -> anyhow::Result<()> {
    match command {
        AuditCommand::Verify { dir, head } => {
            let Verified { records, first, end } = read(&dir, head.map(|head| head.to_lowercase()), drop)?;
            println!("{records} records, {first} to {}, each chained to the one before\nhead {}", end.seq, end.head.to_hex());
        }
        AuditCommand::Show { dir } => {
            read(&dir, None, |Record { seq, at, event, .. }| println!("{}", json!({"seq": seq, "at": at, "event": event})))?;
        }
    }
    Ok(())
}

fn read(dir: &Path, head: Option<String>, mut each: impl FnMut(Record)) -> anyhow::Result<Verified> {
    let unreadable = || format!("cannot read {}", dir.display());
    let listed = fs::read_dir(dir).with_context(unreadable)?.collect::<Result<Vec<_>, _>>().with_context(unreadable)?;
    let mut numbers: Vec<u64> = listed.iter().filter_map(|entry| segment::number::<Line>(entry.file_name().to_str()?)).collect();
    numbers.sort_unstable();
    anyhow::ensure!(!numbers.is_empty(), "{} has no audit log: a coordinator with --audit and --data writes one", dir.display());
    let mut verifier = Verifier::looking_for(head);
    for number in &numbers {
        let path = dir.join(segment::name::<Line>(*number));
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        verifier.segment(&bytes, Some(number) == numbers.last(), &mut each).with_context(|| path.display().to_string())?;
    }
    verifier.finish().with_context(|| dir.display().to_string())
}

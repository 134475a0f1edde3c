//! `tidemill audit`: verifies and prints the audit log of blocks, from its file.

use anyhow::Context;
use serde_json::json;
use std::path::{Path, PathBuf};
use tidemill_tenancy::{
    audit::{Line, Record, Verified, Verifier},
    journal,
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
    let files = journal::files::<Line>(dir)?;
    anyhow::ensure!(!files.is_empty(), "{} has no audit log: a coordinator with --audit and --data writes one", dir.display());
    let (mut verifier, mut broken) = (Verifier::looking_for(head), None);
    journal::read(dir, 0, |_, line| {
        broken = verifier.record(&line).map(&mut each).err();
        broken.is_none()
    })?;
    broken.map_or_else(|| verifier.finish(), Err).with_context(|| dir.display().to_string())
}

//! `tidemill appeals`: the queue of appeals against blocks, at a coordinator's operators' port.

use crate::{
    golden,
    keys::{At, table, text},
};
use anyhow::bail;
use serde_json::{Value, json};
use std::path::PathBuf;
use tidemill_eval::{
    case::Case,
    check::{Check, Side},
};

#[derive(Debug, clap::Subcommand)]
pub enum AppealsCommand {
    /// Show blocks that were appealed against
    List {
        /// State: blocked (without an appeal), open, upheld, overturned, or all
        #[arg(long, default_value = "open", value_parser = ["blocked", "open", "upheld", "overturned", "all"])]
        state: String,
        #[command(flatten)]
        at: At,
    },
    /// Uphold a block: it was right
    Uphold {
        id: String,
        /// Reason, for the audit log
        #[arg(long, default_value = "")]
        note: String,
        #[command(flatten)]
        at: At,
    },
    /// Overturn a block: it was wrong, and its text becomes a golden case, which the safety checks must let pass
    Overturn {
        id: String,
        /// Reason, for the audit log
        #[arg(long, default_value = "")]
        note: String,
        /// The golden set; all overturned cases that it lacks are added
        #[arg(long, value_name = "FILE", default_value = "golden.jsonl")]
        cases: PathBuf,
        #[command(flatten)]
        at: At,
    },
}

pub async fn appeals(command: AppealsCommand) -> anyhow::Result<()> {
    match command {
        AppealsCommand::List { state, at } => {
            let listed = list(&at, &state).await?;
            at.print(&listed, |listed| {
                let columns = ["appeal_id", "state", "side", "category", "stage", "score", "tenant", "model", "reason", "text", "note"];
                table(&columns, &listed["appeals"]);
            });
        }
        AppealsCommand::Uphold { id, note, at } => decide(&id, "upheld", &note, &at).await?,
        AppealsCommand::Overturn { id, note, cases, at } => {
            decide(&id, "overturned", &note, &at).await?;
            let listed = list(&at, "overturned").await?;
            let overturned: Vec<Case> = listed["appeals"].as_array().into_iter().flatten().map(case).collect();
            let added = golden::add(&cases, &overturned)?;
            eprintln!("{added} added to {}", cases.display());
        }
    }
    Ok(())
}

async fn list(at: &At, state: &str) -> anyhow::Result<Value> {
    let query = if state == "all" { String::new() } else { format!("?state={state}") };
    at.call(reqwest::Method::GET, &format!("/admin/appeals{query}"), None).await
}

async fn decide(id: &str, decision: &str, note: &str, at: &At) -> anyhow::Result<()> {
    if !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        bail!("an appeal is named by its id, such as apl_0123…: `tidemill appeals list` shows the ids");
    }
    let body = json!({"decision": decision, "note": note});
    let decided = at.call(reqwest::Method::POST, &format!("/admin/appeals/{id}"), Some(body)).await?;
    at.print(&decided, |decided| println!("{} is {}", text(decided, "appeal_id"), text(decided, "state")));
    Ok(())
}

/// A golden case that requires the blocked text to pass from now on.
fn case(appeal: &Value) -> Case {
    let side = if appeal["side"] == "output" { Side::Output } else { Side::Input };
    let note = format!("blocked as {}, appeal overturned: {}", text(appeal, "category"), text(appeal, "note"));
    Case {
        id: text(appeal, "appeal_id").to_owned(),
        tags: vec!["overturned".into()],
        prompt: Some(text(appeal, "text").to_owned()),
        checks: vec![Check::Allowed(side)],
        note: Some(note),
        ..Case::default()
    }
}

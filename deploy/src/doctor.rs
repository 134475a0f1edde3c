//! `tidemill doctor`: checks whether a machine, and with a URL a cluster, is fit to serve, and says what to do if it is not.
//!
//! - [`facts`]: facts read from the system and from role programs' config files, without judgement
//! - [`checks`]: pure functions from facts to findings
//! - [`remote`]: findings about a cluster, from what a coordinator shows

pub mod checks;
pub mod facts;
pub mod remote;

use crate::operators::TokenArgs;
use checks::{Finding, Verdict};
use facts::Facts;
use serde::Serialize;
use std::{path::PathBuf, process::ExitCode};

/// Check a machine, and with a URL a cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct DoctorArgs {
    /// Config file of a role program that shall run here; several times for several. Its certificates, ports, memory and disk are checked
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    /// URL of a coordinator's operators' port, or of its front door if it has none: checks the cluster, too
    #[arg(long)]
    pub url: Option<String>,
    #[command(flatten)]
    token: TokenArgs,
    /// Print JSON: `failed`, and `findings` with `check`, `verdict` (good, warning or failure), `says` and `todo`
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct Outcome {
    failed: bool,
    findings: Vec<Finding>,
}

/// Prints the findings. The status is 1 if a check failed, and 0 if there are at most warnings.
pub async fn doctor(args: DoctorArgs) -> anyhow::Result<ExitCode> {
    let facts = Facts::gather(&args.config)?;
    let mut findings = checks::all(&facts);
    if let Some(url) = &args.url {
        findings.extend(remote::check(url, &args.token).await?);
    }
    let failed = findings.iter().any(|finding| finding.verdict == Verdict::Failure);
    let outcome = Outcome { failed, findings };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&outcome)?);
    } else {
        for finding in &outcome.findings {
            println!("{finding}");
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

//! `tidemill-coordinator`: see [`tidemill_coordinator`].

use clap::Parser;
use std::{future::pending, path::PathBuf};
use tidemill_coordinator::{run, settings::Flags};
use tidemill_proto::{config, process};

#[derive(Parser)]
#[command(name = "tidemill-coordinator", version, about)]
struct Cli {
    /// TOML file with the same keys as the flags, which win
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let settings = config::resolve(&cli.flags, cli.config.as_deref())?.check()?;
    process::init_logging(&settings.log);
    let exit_with_parent = settings.exit_with_parent;
    let orphaned = async move { if exit_with_parent { process::orphaned().await } else { pending().await } };
    let shutdown = async {
        tokio::select! {
            () = process::terminated() => {}
            () = orphaned => {}
        }
    };
    Ok(run::run(settings, shutdown).await?)
}

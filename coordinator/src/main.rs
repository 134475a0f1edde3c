//! `tidemill-coordinator`: the coordinator as a process.

use std::env;
use tidemill_coordinator::{run, settings::Flags};
use tidemill_gateway::features::grammars::helper;
use tidemill_net::{
    config::Cli,
    process::{self, Logging},
};

/// Requests are made of small pieces that one thread makes and another frees.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<(), process::Failed> {
    process::keep_files_private();
    // A coordinator starts its own program for this, which must have no threads yet.
    if env::args_os().nth(1).is_some_and(|argument| argument == helper::ARGUMENT) {
        return Ok(helper::run()?);
    }
    coordinate()
}

#[tokio::main]
async fn coordinate() -> Result<(), process::Failed> {
    let cli = Cli::<Flags>::of_process("tidemill-coordinator", "The cluster's front door and scheduler");
    let settings = cli.resolve()?.check()?;
    // The client of MCP servers tells at length, sessions and all, what the gateway tells in a line. `--log` may still ask for it.
    Logging { filter: format!("rmcp=off,{}", settings.log.filter), ..settings.log }.start();
    let shutdown = process::shutdown(settings.exit_with_parent);
    Ok(run::run(settings, shutdown).await?)
}

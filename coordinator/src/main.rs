//! `tidemill-coordinator`: the coordinator as a process.

use std::env;
use tidemill_coordinator::{run, settings::Flags};
use tidemill_gateway::features::{grammars::helper, templates};
use tidemill_net::{
    config::Cli,
    process::{self, Logging},
};

/// Requests consist of small allocations that one thread makes and a different one frees.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<(), process::Failed> {
    process::keep_files_private();
    // A coordinator starts its own program as its helpers, which must have no threads yet.
    match env::args_os().nth(1) {
        Some(argument) if argument == helper::ARGUMENT => Ok(helper::run()?),
        Some(argument) if argument == templates::ARGUMENT => Ok(templates::run()?),
        _ => coordinate(),
    }
}

#[tokio::main]
async fn coordinate() -> Result<(), process::Failed> {
    let cli = Cli::<Flags>::of_process("tidemill-coordinator", "The cluster's front door and scheduler");
    let settings = cli.resolve()?.check()?;
    // The client of MCP servers logs at length, sessions included, what the gateway logs in a line. `--log` can still enable it.
    Logging { filter: format!("rmcp=off,{}", settings.log.filter), ..settings.log }.start();
    let shutdown = process::shutdown(settings.exit_with_parent);
    Ok(run::run(settings, shutdown).await?)
}

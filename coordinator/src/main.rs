//! `tidemill-coordinator`: the coordinator as a process.

use tidemill_coordinator::{run, settings::Flags};
use tidemill_net::{config::Cli, process};

/// Requests are made of small pieces that one thread makes and another frees.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> Result<(), process::Failed> {
    process::keep_files_private();
    let cli = Cli::<Flags>::of_process("tidemill-coordinator", "The cluster's front door and scheduler");
    let settings = cli.resolve()?.check()?;
    // The client of MCP servers tells at length, sessions and all, what the gateway tells in a line. `--log` may still ask for it.
    process::init_logging(&format!("rmcp=off,{}", settings.log));
    let shutdown = process::shutdown(settings.exit_with_parent);
    Ok(run::run(settings, shutdown).await?)
}

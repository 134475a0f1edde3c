//! `tidemill-kvpool`: the pool node as a process.

use tidemill_kvpool::{node, settings::Flags};
use tidemill_net::{config::Cli, process};

#[tokio::main]
async fn main() -> Result<(), process::Failed> {
    process::keep_files_private();
    let cli = Cli::<Flags>::of_process("tidemill-kvpool", "Keeps KV blocks for the workers of a cluster: one node per host");
    let settings = cli.resolve()?.check()?;
    settings.worker.log.start();
    process::keep_freed_memory();
    let shutdown = settings.worker.shutdown();
    Ok(node::run(settings, shutdown).await?)
}

//! `tidemill-kvpool`: the pool node as a process.

use clap::Parser;
use tidemill_kvpool::{node, settings::Cli};
use tidemill_proto::process;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let settings = Cli::parse().resolve()?;
    process::init_logging(&settings.worker.log);
    let shutdown = settings.worker.shutdown();
    Ok(node::run(settings, shutdown).await?)
}

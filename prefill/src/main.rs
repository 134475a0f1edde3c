//! `tidemill-prefill`: the prefill role as a process.

use clap::Parser;
use tidemill_prefill::{settings::Cli, worker};

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    worker::run(Cli::parse().resolve()?).await
}

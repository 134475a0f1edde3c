//! `tidemill-decode`: the decode role as a process.

use clap::Parser;
use tidemill_decode::{settings::Cli, worker};

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    worker::run(Cli::parse().resolve()?).await
}

//! `tidemill-decode`: the decode role as a process.

use tidemill_decode::{settings::Flags, worker};
use tidemill_proto::config::Cli;

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let cli = Cli::<Flags>::of_process(
        "tidemill-decode",
        "Generates tokens: continuous batching over KV blocks that it fetches, computes and publishes",
    );
    worker::run(cli.resolve()?.check()?).await
}

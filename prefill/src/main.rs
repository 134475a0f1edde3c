//! `tidemill-prefill`: the prefill role as a process.

use tidemill_prefill::{settings::Flags, worker};
use tidemill_proto::config::Cli;

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let cli = Cli::<Flags>::of_process("tidemill-prefill", "Computes prompts in chunks and puts their KV blocks into the pool");
    worker::run(cli.resolve()?.check()?).await
}

//! `tidemill-prefill`: the prefill role as a process.

use tidemill_net::{config::Cli, process};
use tidemill_prefill::{settings::Flags, worker};

fn main() -> anyhow::Result<()> {
    let cli = Cli::<Flags>::of_process("tidemill-prefill", "Computes prompts in chunks and puts their KV blocks into the pool");
    let settings = cli.resolve()?.check()?;
    let cores = settings.engine.cores.clone();
    process::run(cores.as_ref(), worker::run(settings))
}

//! `tidemill-decode`: the decode role as a process.

use tidemill_decode::{settings::Flags, worker};
use tidemill_net::{config::Cli, process};

fn main() -> anyhow::Result<()> {
    let cli = Cli::<Flags>::of_process(
        "tidemill-decode",
        "Generates tokens: continuous batching over KV blocks that it fetches, computes and publishes",
    );
    let settings = cli.resolve()?.check()?;
    let cores = settings.engine.cores.clone();
    process::run(cores.as_ref(), worker::run(settings))
}

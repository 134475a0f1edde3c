//! `tidemill-decode`: the decode role as a process.

use tidemill_decode::settings::Flags;
use tidemill_engine::worker;
use tidemill_net::{config::Cli, process};

fn main() -> Result<(), process::Failed> {
    process::keep_files_private();
    let cli = Cli::<Flags>::of_process(
        "tidemill-decode",
        "Generates tokens: continuous batching over KV blocks that it fetches, computes and publishes",
    );
    Ok(worker::run(cli.resolve()?.check()?)?)
}

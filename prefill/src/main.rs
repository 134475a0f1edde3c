//! `tidemill-prefill`: the prefill role as a process.

use tidemill_engine::worker;
use tidemill_net::{config::Cli, process};
use tidemill_prefill::settings::Flags;

fn main() -> Result<(), process::Failed> {
    process::keep_files_private();
    let cli = Cli::<Flags>::of_process("tidemill-prefill", "Computes prompts in chunks and puts their KV blocks into the pool");
    Ok(worker::run(cli.resolve()?.check()?)?)
}

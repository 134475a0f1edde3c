//! `tidemill-bench`: one subcommand per kind of measurement.

use clap::Parser;
use tidemill_bench::{
    chaos::{self, ChaosArgs},
    grammar::{self, GrammarArgs},
    kernels::{self, KernelsArgs},
    kv::{self, KvArgs},
    load::{self, LoadArgs},
    model::{self, ModelArgs},
    perplexity::{self, PerplexityArgs},
    replay::{self, ReplayArgs},
    sim::{self, SimArgs},
};
use tidemill_net::process::Failed;

/// Measure a Tidemill cluster, or any server that speaks OpenAI's API.
#[derive(Parser)]
#[command(version)]
enum Command {
    Chaos(ChaosArgs),
    Grammar(GrammarArgs),
    Kernels(KernelsArgs),
    Kv(KvArgs),
    Load(LoadArgs),
    Model(ModelArgs),
    Perplexity(PerplexityArgs),
    Replay(ReplayArgs),
    Sim(SimArgs),
}

fn main() -> Result<(), Failed> {
    let outcome = match Command::parse() {
        Command::Chaos(args) => tokio::runtime::Runtime::new()?.block_on(chaos::run(args)),
        Command::Grammar(args) => grammar::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Kv(args) => tokio::runtime::Runtime::new()?.block_on(kv::run(args)),
        Command::Load(args) => tokio::runtime::Runtime::new()?.block_on(load::run(args)),
        Command::Model(args) => model::make(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Sim(args) => sim::run(&args),
    };
    Ok(outcome?)
}

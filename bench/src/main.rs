//! `tidemill-bench`: one subcommand per kind of measurement.

use clap::Parser;
use tidemill_bench::{
    abuse::{self, AbuseArgs},
    chaos::{self, ChaosArgs},
    contamination::{self, ContaminationArgs},
    goodput::{self, GoodputArgs},
    grammar::{self, GrammarArgs},
    kernels::{self, KernelsArgs},
    kv::{self, KvArgs},
    load::{self, LoadArgs},
    model::{self, ModelArgs},
    perplexity::{self, PerplexityArgs},
    plan::{self, PlanArgs},
    replay::{self, ReplayArgs},
    report::{self, ReportArgs},
    sim::{self, SimArgs},
    stub::{self, StubArgs},
};
use tidemill_net::process::Failed;

/// Measure a Tidemill cluster, or any server that speaks OpenAI's API.
#[derive(Parser)]
#[command(version)]
enum Command {
    Abuse(AbuseArgs),
    Chaos(ChaosArgs),
    Contamination(ContaminationArgs),
    Goodput(GoodputArgs),
    Grammar(GrammarArgs),
    Kernels(KernelsArgs),
    Kv(KvArgs),
    Load(LoadArgs),
    Model(ModelArgs),
    Perplexity(PerplexityArgs),
    Plan(PlanArgs),
    Replay(ReplayArgs),
    Report(ReportArgs),
    Sim(SimArgs),
    Stub(StubArgs),
}

fn main() -> Result<(), Failed> {
    let outcome = match Command::parse() {
        Command::Abuse(args) => tokio::runtime::Runtime::new()?.block_on(abuse::run(args)),
        Command::Chaos(args) => tokio::runtime::Runtime::new()?.block_on(chaos::run(args)),
        Command::Contamination(args) => tokio::runtime::Runtime::new()?.block_on(contamination::run(args)),
        Command::Goodput(args) => load::runtime(args.settings.threads).and_then(|runtime| runtime.block_on(goodput::run(args))),
        Command::Grammar(args) => grammar::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Kv(args) => tokio::runtime::Runtime::new()?.block_on(kv::run(args)),
        Command::Load(args) => load::runtime(args.threads).and_then(|runtime| runtime.block_on(load::run(args))),
        Command::Model(args) => model::make(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Stub(args) => tokio::runtime::Runtime::new()?.block_on(stub::run(args)),
    };
    Ok(outcome?)
}

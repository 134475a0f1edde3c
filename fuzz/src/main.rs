//! Fuzzing of all external input: messages of peers and clients, and files.
//!
//! - [`target`]: a target, and the limits of one case; [`targets`]: all of them
//! - [`dice`]: one case's choices, all from one seed
//! - [`mutate`]: valid inputs made odd: as bytes, as text, as trees of JSON
//! - [`child`]: the process that runs cases; [`meter`]: the memory that a case takes
//! - [`run`]: all targets in turn, in processes that may die
//!
//! A case is a function of its target and its seed, so `--target X --seed N` replays it and prints its inputs. The processes behind the
//! endpoints keep state from earlier cases, so there a replay may differ if that state mattered.
//!
//! The promises of every case: no panic on any thread, an end within its CPU time, no more memory than its target may take, and the
//! promises of the target itself: an endpoint never answers with a status of 500 and above, a grammar is compiled or refused within its
//! limits, decoded input encodes to the same bytes again, and a loaded model runs.

mod child;
mod dice;
mod meter;
mod mutate;
mod run;
mod target;
mod targets;

use clap::Parser;
use std::{env, path::PathBuf, process::ExitCode};
use tidemill_gateway::features::templates;

#[global_allocator]
static METER: meter::Meter = meter::Meter;

/// Fuzzes everything that comes from outside.
#[derive(Debug, Parser)]
struct Flags {
    /// Only these targets [default: all]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    target: Vec<String>,
    /// Replay this case of the one target, and print its inputs
    #[arg(long, value_name = "N", requires = "target")]
    seed: Option<u64>,
    /// Minutes of all targets together
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    minutes: f64,
    /// A few fixed cases of each target instead
    #[arg(long)]
    short: bool,
    /// Processes at a time [default: one for each core that this one may use]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// The first seed [default: another one each second]
    #[arg(long, value_name = "N")]
    from: Option<u64>,
    /// List the targets
    #[arg(long)]
    list: bool,
    /// Used between these processes
    #[arg(long, hide = true, num_args = 4, value_names = ["FILE", "FIRST", "STEP", "CASES"])]
    child: Option<Vec<String>>,
}

fn main() -> anyhow::Result<ExitCode> {
    // This program is its own helpers, as a coordinator is. They must have no threads yet.
    match env::args_os().nth(1) {
        Some(argument) if argument == tidemill_grammar::helper::ARGUMENT => {
            tidemill_grammar::helper::run()?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(argument) if argument == templates::ARGUMENT => {
            templates::run()?;
            return Ok(ExitCode::SUCCESS);
        }
        _ => {}
    }
    let flags = Flags::parse();
    if flags.list {
        targets::ALL.iter().for_each(|target| println!("{:12} {}", target.name, target.about));
        return Ok(ExitCode::SUCCESS);
    }
    let mut chosen: Vec<&target::Target> = Vec::new();
    for &target in targets::ALL {
        if flags.target.is_empty() || flags.target.iter().any(|name| name == target.name) {
            chosen.push(target);
        }
    }
    if let Some(name) = flags.target.iter().find(|name| chosen.iter().all(|target| target.name != **name)) {
        anyhow::bail!("there is no target `{name}`: --list shows them");
    }
    if let Some(arguments) = &flags.child {
        let [file, first, step, cases] = &arguments[..] else { anyhow::bail!("--child has four values") };
        return child::run(chosen[0], &PathBuf::from(file), first.parse()?, step.parse()?, cases.parse()?);
    }
    if let Some(seed) = flags.seed {
        return child::replay(chosen[0], seed);
    }
    run::all(&chosen, &run::Plan { minutes: flags.minutes, short: flags.short, jobs: flags.jobs, from: flags.from })
}

//! Runs the fault simulation over many seeds, or one seed with a trace of what happened.
//!
//! `cargo run --release -p tidemill-sim --example faults -- --seeds 10000 [--from 0] [--plant NAME]`, `-- --seed 42 [--plant NAME]`, or
//! `-- --mutations [--seeds 1000]`

use std::{
    env,
    process::ExitCode,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    thread,
};
use tidemill_sim::faults::{self, Report, mutation::Mutation};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let value = |name: &str| arguments.iter().position(|argument| argument == name).and_then(|at| arguments.get(at + 1));
    let number = |name: &str| value(name).and_then(|value| value.parse::<u64>().ok());
    let planted = match value("--plant").map(|name| name.parse::<Mutation>()) {
        Some(Err(error)) => {
            let names: Vec<_> = Mutation::ALL.iter().map(|mutation| mutation.name()).collect();
            eprintln!("{error}; there are: {}", names.join(", "));
            return ExitCode::FAILURE;
        }
        Some(Ok(mutation)) => Some(mutation),
        None => None,
    };
    match number("--seed") {
        None if arguments.iter().any(|argument| argument == "--mutations") => mutations(number("--seeds").unwrap_or(1000)),
        Some(seed) => replay(seed, planted),
        None => search(number("--from").unwrap_or(0), number("--seeds").unwrap_or(1000), planted),
    }
}

fn replay(seed: u64, planted: Option<Mutation>) -> ExitCode {
    let report = faults::run(seed, planted, true);
    report.trace.iter().for_each(|line| println!("{line}"));
    println!("{} events, {} of {} requests complete", report.events, report.complete, report.requests);
    match report.violation {
        Some(violation) => {
            println!("seed {seed}: {violation}");
            ExitCode::FAILURE
        }
        None => ExitCode::SUCCESS,
    }
}

/// Searches for every planted bug, and prints the first seed that finds it: what its row in `faults/mutation.rs` should say.
fn mutations(seeds: u64) -> ExitCode {
    let next = AtomicUsize::new(0);
    let missed = AtomicUsize::new(0);
    let worker = || {
        while let Some(&mutation) = Mutation::ALL.get(next.fetch_add(1, Relaxed)) {
            match faults::find(mutation, 0..seeds) {
                Some(report) => {
                    let violation = report.violation.unwrap_or_default();
                    let (seed, rule) = mutation.found_by();
                    let stored = if seed == report.seed && violation.contains(rule) { "as stored" } else { "NOT AS STORED" };
                    println!("{mutation}: seed {}: {violation} ({stored})", report.seed);
                }
                None => {
                    println!("{mutation}: not found within {seeds} seeds");
                    missed.fetch_add(1, Relaxed);
                }
            }
        }
    };
    thread::scope(|scope| (0..threads()).for_each(|_| drop(scope.spawn(worker))));
    if missed.into_inner() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn threads() -> usize {
    thread::available_parallelism().map_or(1, |threads| threads.get())
}

fn search(from: u64, seeds: u64, planted: Option<Mutation>) -> ExitCode {
    let next = AtomicU64::new(from);
    let worker = || {
        let mut reports = Vec::new();
        loop {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= from + seeds {
                return reports;
            }
            let report = faults::run(seed, planted, false);
            if let Some(violation) = &report.violation {
                println!("seed {seed}: {violation}\n    again: {}", faults::replay_command(seed, planted));
            }
            reports.push(report);
        }
    };
    let reports: Vec<Report> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads()).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("findings are caught")).collect()
    });
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    let broken = reports.iter().filter(|report| report.violation.is_some()).count();
    println!(
        "{seeds} seeds, {broken} of them broke a rule; {} requests, {} complete, {} rescues; {} faults and repairs; {} events",
        sum(|report| report.requests),
        sum(|report| report.complete),
        sum(|report| report.rescues),
        sum(|report| report.troubles),
        sum(|report| report.events)
    );
    if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

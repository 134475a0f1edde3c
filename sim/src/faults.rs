//! A cluster under faults, in virtual time: processes crash, pause and come back, links break, clocks drift, disks fail, clients leave. One
//! seed determines everything, and replays it.
//!
//! - [`plan`]: the scenario of a seed: a small cluster, its clients, and the faults with their times
//! - [`mutation`]: bugs that can be planted where the simulated shells join the cores, to check that they are found
//! - [`run`]: one seed, with its rules checked throughout
//!
//! ```text
//!   0 s ──► all register ──► 2 s requests, and faults ──► [`QUIET`] all is repaired ──► [`RECOVERED`] full service: probes ──► [`END`]
//! ```
//!
//! **The rules.** Each core's state is consistent (`check_integrity`). Every request ends within its deadline, by its coordinator's clock,
//! and fails only for a valid reason. No token is lost, duplicated or wrong, and no reader accepts a block with wrong bytes.
//! Acknowledged blocks are published. No process sends to an epoch that is gone, and no epoch is assigned twice; a link on which a message
//! of an earlier epoch arrives is closed. Nothing is held for a client that is gone, and no worker computes for a request that is gone.
//! A block is put whole, with the parts of all stages of its worker, and a stage computes for one head at a time.
//! [`RECOVERED`]: all earlier requests have ended, and every process is a member everywhere. Probes are answered in full. [`END`]: every
//! process is idle and holds nothing, and becomes so in a finite number of events.

pub mod mutation;
pub mod plan;
#[cfg(test)]
mod tests;

use crate::{
    outcome::End,
    random::Random,
    world::{Extras, Unwatched, World, io::Faulty},
};
use mutation::Mutation;
use plan::Plan;
use std::{
    any::Any,
    cell::RefCell,
    collections::{HashMap, HashSet},
    panic::{self, AssertUnwindSafe},
    sync::Once,
    time::Duration,
};

/// The time at which all faults are repaired.
pub const QUIET: Duration = Duration::from_secs(24);
/// The time at which everything must work again: twice the longest deadline of production's shells, and more.
pub const RECOVERED: Duration = Duration::from_secs(40);
/// The time at which everything must be over.
pub const END: Duration = Duration::from_secs(50);
/// Events between two checks of all invariants.
const LOOK_EVERY: u64 = 128;
/// The most events of a seed, ten times as many as busy ones take.
const EVENTS_MAX: u64 = 500_000;

/// The result of a seed.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub seed: u64,
    /// The rule that was broken first.
    pub violation: Option<String>,
    /// The events of the run, if requested.
    pub trace: Vec<String>,
    pub events: u64,
    pub digest: u64,
    pub requests: u64,
    pub complete: u64,
    pub rescues: u64,
    pub troubles: u64,
}

/// Runs one seed until a rule is broken or everything is over.
pub fn run(seed: u64, planted: Option<Mutation>, traced: bool) -> Report {
    let plan = Plan::draw(seed);
    let mut report = Report { seed, troubles: plan.troubles.len() as u64, requests: plan.asks.len() as u64, ..Report::default() };
    let faulty = Faulty {
        random: Random::new(seed ^ 0x5eed),
        truth: Default::default(),
        planted,
        violations: Vec::new(),
        published: HashSet::new(),
        epochs: HashSet::new(),
        granted: HashMap::new(),
        trace: traced.then(|| vec![plan.describe()]),
    };
    let extras = Extras {
        coordinators: plan.coordinators,
        disk_slots: plan.disk_slots,
        neighbour: plan.neighbour,
        manners: plan.manners.clone(),
        faulty: Some(faulty),
        limits: plan.limits,
        stages: plan.stages.clone(),
        waiting_max: plan.waiting_max,
    };
    let mut world = World::with(&plan.settings, plan.asks.clone(), seed, extras).expect("plans are valid");
    world.set_plan(plan.troubles.clone(), &plan.clocks);
    silence_panics();
    let caught = panic::catch_unwind(AssertUnwindSafe(|| watch(&mut world, &plan)));
    QUIETLY.set(false);
    report.violation = match caught {
        Ok(violation) => violation,
        Err(panic) => Some(format!("panic: {}", message(panic.as_ref()))),
    };
    let faulty = world.io.faulty.take();
    report.trace = faulty.and_then(|faulty| faulty.trace).unwrap_or_default();
    report.complete = world.answers.iter().filter(|answer| answer.end == End::Complete).count() as u64;
    report.rescues = world.answers.iter().map(|answer| u64::from(answer.rescues)).sum();
    report.events = world.events;
    report.digest = world.digest();
    report
}

/// The first of these seeds that breaks a rule.
pub fn find(planted: Mutation, seeds: std::ops::Range<u64>) -> Option<Report> {
    seeds.map(|seed| run(seed, Some(planted), false)).find(|report| report.violation.is_some())
}

/// The command that shows the events of a seed.
pub fn replay_command(seed: u64, planted: Option<Mutation>) -> String {
    let planted = planted.map_or_else(String::new, |mutation| format!(" --plant {mutation}"));
    format!("cargo run --release -p tidemill-sim --example faults -- --seed {seed}{planted}")
}

fn watch(world: &mut World, plan: &Plan) -> Option<String> {
    let mut recovered = false;
    while world.io.queue.next_at().is_some_and(|at| at <= END) {
        if !recovered && world.io.queue.next_at().is_some_and(|at| at >= RECOVERED) {
            recovered = true;
            check_recovered(world, plan);
        }
        world.step(&mut Unwatched);
        if world.events.is_multiple_of(LOOK_EVERY) {
            world.check_integrity();
        }
        if world.events == EVENTS_MAX {
            world.io.violated(|| format!("{EVENTS_MAX} events: the cluster does not come to rest"));
        }
        if let Some(violation) = first_violation(world) {
            return Some(violation);
        }
    }
    world.check_integrity();
    check_over(world, plan);
    first_violation(world)
}

fn first_violation(world: &World) -> Option<String> {
    world.io.faulty.as_ref().and_then(|faulty| faulty.violations.first().cloned())
}

/// Checks that all earlier requests have ended, and that every process is a member everywhere.
fn check_recovered(world: &mut World, plan: &Plan) {
    for number in 0..plan.asks.len() {
        if !plan.probes.contains(&number) && world.answers[number].end == End::Open {
            let since = world.io.now - QUIET;
            world.io.violated(|| format!("request {number} has not ended {since:?} after all was repaired"));
        }
    }
    let everybody = world.workers.len() + world.pools.len();
    for number in 0..world.coordinators.len() {
        let members = world.coordinators[number].members();
        if members != everybody {
            world.io.violated(|| format!("coordinator-{number} has {members} members of {everybody} after all was repaired"));
        }
    }
}

/// Checks that probes were answered, and that every process is idle and holds nothing.
fn check_over(world: &mut World, plan: &Plan) {
    for &number in &plan.probes {
        let end = world.answers[number].end.clone();
        if end != End::Complete && plan.manners[number].leaves.is_none() {
            world.io.violated(|| format!("after all was repaired, request {number} ends so: {end:?}"));
        }
    }
    for busy in world.busy() {
        world.io.violated(|| format!("something is left: {busy}"));
    }
}

thread_local! {
    /// The last panic of this thread, with its place.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
    static QUIETLY: RefCell<bool> = const { RefCell::new(false) };
}

/// Silences the usual message of a panic: a core's failed assertion is a finding with its own trace, and the messages would be thousands.
fn silence_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            PANIC.set(Some(info.to_string()));
            if !QUIETLY.with_borrow(|quietly| *quietly) {
                usual(info);
            }
        }));
    });
    QUIETLY.set(true);
}

fn message(panic: &(dyn Any + Send)) -> String {
    PANIC.take().unwrap_or_else(|| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        text.unwrap_or("without a message").to_owned()
    })
}

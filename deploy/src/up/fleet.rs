//! The processes of a running cluster: started, watched, started again, scaled, restarted in turn, and ended.

use super::{
    UpArgs, free_addresses,
    rolling::{self, Rolling},
    scaling::{self, Fleet},
};
use crate::{
    operators,
    processes::{Process, Tended, say},
    wanted::{self, Wanted},
};
use anyhow::bail;
use futures_util::future::join_all;
use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};
use tidemill_net::{identity::issue, process};

/// The interval between looks at the number of workers that is wanted.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The interval between checks of all processes.
const TEND_EVERY: Duration = Duration::from_millis(100);
/// A coordinator gives running requests 30 s to finish and then needs a moment to end.
const COORDINATOR_END: Duration = Duration::from_secs(40);
/// Workers have nothing left to finish once the coordinators have ended.
const WORKER_END: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Cluster {
    pub(super) coordinators: Vec<Process>,
    pub(super) workers: Vec<Process>,
    /// The processes with the later stages of workers, which no coordinator knows.
    stages: Vec<Process>,
    /// The number of models that share each pool node.
    pub(super) models_per_node: usize,
    /// The addresses of each coordinator.
    pub(super) doors: Vec<Door>,
    /// Engines, by model and role.
    fleets: Vec<Fleet>,
    /// Names of workers that were told to end for good.
    leaving: BTreeSet<String>,
    /// The secret by which the coordinators are looked at, where operators sign in.
    look_token: Option<String>,
}

/// The addresses of a coordinator's HTTP ports.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) http: String,
    /// The operators' port, which shows the cluster; without one, `http` does.
    pub(super) admin: Option<String>,
}

impl Cluster {
    /// A cluster without processes. `look_token` is the secret by which its coordinators are looked at, where operators sign in.
    pub(super) fn new(look_token: Option<String>) -> Self {
        Self { look_token, ..Self::default() }
    }

    /// The number of members that the coordinators should know: a pool node is one for each of its models.
    fn members(&self) -> usize {
        let of = |worker: &Process| if worker.name.starts_with("kvpool-") { self.models_per_node } else { 1 };
        self.workers.iter().map(of).sum()
    }

    /// Starts the first workers of a role and model.
    pub(super) fn start_fleet(&mut self, fleet: Fleet, workers: usize, args: &UpArgs, data: &Path) -> anyhow::Result<()> {
        for number in fleet.numbers().take(workers) {
            self.start_engine(&fleet, number, args, data)?;
        }
        self.fleets.push(fleet);
        Ok(())
    }

    fn start_engine(&mut self, fleet: &Fleet, number: usize, args: &UpArgs, data: &Path) -> anyhow::Result<()> {
        let own = certified(data, &format!("{}/{}", fleet.role, fleet.name(number)))?;
        let stages = self.start_stages(fleet, number, args, data)?;
        self.start_worker(fleet.role, number, args, &[&fleet.flags[..], fleet.share(number, 0), &own, &stages].concat())
    }

    /// Starts the later stages of a worker, and returns the flags that tell it their addresses.
    fn start_stages(&mut self, fleet: &Fleet, number: usize, args: &UpArgs, data: &Path) -> anyhow::Result<Vec<String>> {
        if fleet.stages == 1 {
            return Ok(Vec::new());
        }
        let addrs = free_addresses(fleet.stages - 1)?;
        for (addr, stage) in addrs.iter().zip(1..) {
            let name = fleet.stage_name(number, stage);
            let own = certified(data, &format!("{}/{name}", fleet.role))?;
            let place = ["--bind".to_owned(), addr.to_string(), "--stage".to_owned(), format!("{}/{}", stage + 1, fleet.stages)];
            let flags = [&unregistered(&fleet.flags)[..], fleet.share(number, stage), &own, &place].concat();
            self.stages.push(Process::start(&format!("tidemill-{}", fleet.role), &name, &flags)?.restarted(args.restarts));
        }
        let addrs = addrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        Ok(vec!["--stages".to_owned(), addrs])
    }

    /// Starts the `n`th worker of a role. Workers are assigned to the hosts in turn.
    pub(super) fn start_worker(&mut self, role: &str, n: usize, args: &UpArgs, flags: &[String]) -> anyhow::Result<()> {
        let host = if args.hosts > 1 { vec!["--host".to_owned(), format!("host-{}", n % args.hosts)] } else { Vec::new() };
        let (program, name) = (format!("tidemill-{role}"), format!("{role}-{n}"));
        self.workers.push(Process::start(&program, &name, &[flags, &host].concat())?.restarted(args.restarts));
        Ok(())
    }

    /// A client for the coordinators.
    fn client(&self) -> anyhow::Result<reqwest::Client> {
        Ok(operators::client(self.look_token.as_deref())?.timeout(Duration::from_secs(5)).build()?)
    }

    /// Waits until the coordinator behind `door` knows every worker.
    pub(super) async fn wait_ready(&mut self, door: &Door, within: Duration) -> anyhow::Result<()> {
        let client = self.client()?;
        let deadline = Instant::now() + within;
        loop {
            if let Some(reason) = self.ended_process() {
                bail!(reason);
            }
            if known(&client, door).await.is_some_and(|known| known.is_all(self.members())) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("not every process was ready within {within:?} (see the log above; --ready-s waits longer)");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Restarts crashed processes, and after each SIGHUP all processes in turn; with `--autoscale`, starts and ends workers. Resolves with
    /// the reason when the cluster can no longer serve. The loss of one worker is only reported.
    pub(super) async fn supervise(&mut self, args: &UpArgs, data: &Path) -> String {
        let restart = Duration::from_secs(args.ready_s);
        let mut hangups = process::hangups();
        let mut rolling = Rolling::default();
        let wanted = match (args.autoscale.is_some(), self.client()) {
            (false, _) => None,
            (true, Ok(client)) => Some(wanted::watch(client, self.doors.iter().map(Door::cluster_url).collect(), LOOK_EVERY, say)),
            (true, Err(error)) => return format!("the coordinators cannot be asked how many workers they want: {error}"),
        };
        loop {
            tokio::select! {
                () = tokio::time::sleep(TEND_EVERY) => {}
                Some(()) = hangups.recv() => {
                    say("restarting every process, one after the other");
                    // Pool nodes go first: once they are back, so are their blocks on disk.
                    let workers = self.workers.iter().chain(&self.coordinators);
                    rolling.begin(workers.map(|process| process.name.clone()));
                }
            }
            let now = Instant::now();
            for coordinator in &mut self.coordinators {
                if let Tended::Ended(how) = coordinator.tend(now) {
                    return how;
                }
            }
            self.tend_workers(now);
            if self.workers.is_empty() && wanted.is_none() {
                return "no worker is left".into();
            }
            self.roll(&mut rolling, now, restart).await;
            // No scaling during a rolling restart: a worker that restarts would count as missing.
            if let Some(wanted) = wanted.as_ref().filter(|_| rolling.turn().is_none()) {
                let wanted = wanted.borrow().clone();
                self.scale(now, &wanted, args, data);
            }
        }
    }

    fn tend_workers(&mut self, now: Instant) {
        let Self { workers, stages, leaving, fleets, .. } = self;
        // A worker that has ended for good leaves no use for its other stages.
        let dismiss = |stages: &mut [Process], worker: &str| {
            stages.iter_mut().filter(|stage| scaling::is_stage_of(&stage.name, worker)).for_each(|stage| stage.dismiss(now));
        };
        workers.retain_mut(|worker| match worker.tend(now) {
            Tended::Alive => true,
            Tended::Ended(_) if leaving.remove(&worker.name) => {
                say(&format!("{} was not needed any more and has ended", worker.name));
                dismiss(stages, &worker.name);
                false
            }
            Tended::Ended(how) => {
                say(&format!("{how}; the cluster goes on without it"));
                dismiss(stages, &worker.name);
                let of_it = fleets.iter_mut().find(|fleet| fleet.numbers().any(|number| fleet.name(number) == worker.name));
                of_it.into_iter().for_each(|fleet| fleet.rests_until = Some(now + scaling::REST));
                false
            }
        });
        stages.retain_mut(|stage| match stage.tend(now) {
            Tended::Alive => true,
            Tended::Ended(how) => {
                say(&how);
                false
            }
        });
    }

    /// Starts workers that are wanted but missing, and drains and ends those that are not wanted.
    fn scale(&mut self, now: Instant, wanted: &Wanted, args: &UpArgs, data: &Path) {
        let mut fleets = std::mem::take(&mut self.fleets);
        for fleet in &mut fleets {
            let Some(count) = wanted.of(&fleet.model, fleet.role) else { continue };
            let there = fleet.numbers().filter(|&number| self.workers.iter().any(|worker| worker.name == fleet.name(number)));
            let (leaving, running): (Vec<usize>, Vec<usize>) = there.partition(|&number| self.leaving.contains(&fleet.name(number)));
            let scaling::Change { start, dismiss } = fleet.change(now, count, &running, &leaving);
            for number in dismiss {
                let name = fleet.name(number);
                say(&format!("{count} {} workers are enough: {name} drains and ends", fleet.role));
                self.workers.iter_mut().filter(|worker| worker.name == name).for_each(|worker| worker.dismiss(now));
                self.leaving.insert(name);
            }
            for number in start {
                say(&format!("{count} {} workers are needed: {} starts", fleet.role, fleet.name(number)));
                if let Err(error) = self.start_engine(fleet, number, args, data) {
                    say(&format!("{} cannot start: {error:#}", fleet.name(number)));
                    fleet.rests_until = Some(now + scaling::REST);
                    break;
                }
            }
        }
        self.fleets = fleets;
    }

    /// Advances a rolling restart: checks whether the process being restarted is back, and restarts the next one.
    async fn roll(&mut self, rolling: &mut Rolling, now: Instant, within: Duration) {
        if let Some(turn) = rolling.turn().cloned()
            && self.is_back(&turn).await
            && rolling.done()
        {
            say("every process was restarted");
        }
        if let Some(name) = rolling.overdue(now, within) {
            say(&format!("{name} did not come back within {within:?}: the others are not restarted"));
        }
        if let Some(name) = rolling.next() {
            let process = self.workers.iter_mut().chain(&mut self.coordinators).find(|process| process.name == name);
            // A process that has ended in the meantime needs no restart.
            if let Some(pid) = process.and_then(Process::recall) {
                // A worker and its other stages are started again together.
                for stage in self.stages.iter_mut().filter(|stage| scaling::is_stage_of(&stage.name, &name)) {
                    stage.recall();
                }
                rolling.started(name, pid, now);
            }
        }
    }

    /// A worker is back when every coordinator has registered its new process; a coordinator, when it knows every worker.
    async fn is_back(&self, turn: &rolling::Turn) -> bool {
        let Ok(client) = self.client() else { return false };
        let running = |process: &Process| process.name == turn.name && process.id().is_some_and(|pid| pid != turn.old_pid);
        let of_worker = self.workers.iter().find(|process| running(process)).and_then(Process::id);
        if of_worker.is_none() && !self.coordinators.iter().any(running) {
            return false;
        }
        for door in &self.doors {
            let known = known(&client, door).await;
            let knows = known.is_some_and(|known| match of_worker {
                Some(pid) => known.has(pid),
                None => known.is_all(self.members()),
            });
            if !knows {
                return false;
            }
        }
        true
    }

    fn ended_process(&mut self) -> Option<String> {
        [&mut self.coordinators, &mut self.workers, &mut self.stages].into_iter().find_map(|processes| first_ended(processes))
    }

    /// Coordinators drain first, while their workers can still finish running requests. Returns whether every process ended well.
    pub(super) async fn stop(self) -> bool {
        let mut clean = true;
        let workers = self.workers.into_iter().chain(self.stages).collect();
        for (processes, within) in [(self.coordinators, COORDINATOR_END), (workers, WORKER_END)] {
            processes.iter().for_each(Process::terminate);
            let ends = join_all(processes.into_iter().map(|process| process.wait(within))).await;
            clean &= ends.into_iter().all(|well| well);
        }
        clean
    }
}

impl Door {
    fn cluster_url(&self) -> String {
        format!("http://{}/cluster", self.admin.as_ref().unwrap_or(&self.http))
    }
}

/// The flags without the coordinators' addresses.
fn unregistered(flags: &[String]) -> Vec<String> {
    let place = flags.iter().position(|flag| flag == "--coordinators").unwrap_or(flags.len());
    flags[..place].iter().chain(flags.iter().skip(place + 2)).cloned().collect()
}

/// Each process gets a certificate of its own, a new one with each start.
pub(super) fn certified(data: &Path, role_and_name: &str) -> anyhow::Result<[String; 2]> {
    let (dir, _) = issue::issue(&data.join("pki"), role_and_name, issue::DAYS)?;
    Ok(["--pki".to_owned(), dir.display().to_string()])
}

/// The workers that a coordinator knows.
enum Known {
    /// The workers' process ids.
    Members(Vec<u32>),
    /// The coordinator is ready but does not show the cluster: its front door is closed, and it has no operators' port.
    Hidden,
}

impl Known {
    fn is_all(&self, workers: usize) -> bool {
        match self {
            Self::Members(pids) => pids.len() >= workers,
            Self::Hidden => true,
        }
    }

    fn has(&self, pid: u32) -> bool {
        match self {
            Self::Members(pids) => pids.contains(&pid),
            Self::Hidden => true,
        }
    }
}

/// The workers that a coordinator reports, if it answers.
async fn known(client: &reqwest::Client, door: &Door) -> Option<Known> {
    #[derive(serde::Deserialize)]
    struct Answer {
        members: Vec<Member>,
    }
    #[derive(serde::Deserialize)]
    struct Member {
        pid: u32,
    }
    let at = door.admin.as_ref().unwrap_or(&door.http);
    let answer = client.get(door.cluster_url()).send().await.ok()?;
    if answer.status() == reqwest::StatusCode::NOT_FOUND && door.admin.is_none() {
        let ready = client.get(format!("http://{at}/ready")).send().await.ok()?;
        return ready.status().is_success().then_some(Known::Hidden);
    }
    let answer: Answer = answer.json().await.ok()?;
    Some(Known::Members(answer.members.into_iter().map(|member| member.pid).collect()))
}

fn first_ended(processes: &mut [Process]) -> Option<String> {
    processes.iter_mut().find_map(|p| p.ended().map(|status| format!("{} ended: {status}", p.name)))
}

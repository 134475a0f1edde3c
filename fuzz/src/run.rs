//! All targets in turn, each in some processes. The file of a process that dies gives the case, and another process continues after it.

use crate::{
    child::{FOUND, Progress},
    target::Target,
};
use anyhow::Context;
use std::{
    env,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

pub(crate) struct Plan {
    pub(crate) minutes: f64,
    pub(crate) short: bool,
    pub(crate) jobs: Option<usize>,
    pub(crate) from: Option<u64>,
}

/// The number of findings of one target after which the next one's turn comes.
const FINDINGS_MAX: usize = 20;
const POLLED_EVERY: Duration = Duration::from_millis(20);
/// The distance of the seeds of runs that are started a second apart.
const SEEDS_A_SECOND: u64 = 1_000_000;
/// The duration of a round of all targets, so that a long run reaches all targets early.
const ROUND: Duration = Duration::from_secs(20 * 60);

/// Runs the plan. The exit status tells whether there were findings.
pub(crate) fn all(targets: &[&Target], plan: &Plan) -> anyhow::Result<ExitCode> {
    let jobs = plan.jobs.unwrap_or_else(|| if plan.short { 1 } else { thread::available_parallelism().map_or(1, usize::from) }).max(1);
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut from = plan.from.unwrap_or(if plan.short { 0 } else { started.as_secs() * SEEDS_A_SECOND });
    let dir = tempfile::tempdir().context("a directory for what the processes tell")?;
    println!("seeds from {from}, {jobs} process{}", if jobs == 1 { "" } else { "es" });
    let mut totals: Vec<Total> = targets.iter().map(|_| Total::default()).collect();
    let whole = Duration::try_from_secs_f64(plan.minutes * 60.0).context("--minutes")?;
    let began = Instant::now();
    loop {
        let left = whole.saturating_sub(began.elapsed());
        if !plan.short && left.is_zero() {
            break;
        }
        let turn = left.min(ROUND) / targets.len().max(1) as u32;
        for (target, total) in targets.iter().zip(&mut totals) {
            let turn = if plan.short { Turn::Cases(target.short) } else { Turn::Until(Instant::now() + turn) };
            Round { target, dir: dir.path(), jobs, turn }.run(from, total)?;
            println!("{}", total.line(target));
        }
        if plan.short {
            break;
        }
        from += SEEDS_A_SECOND / 2;
    }
    let found: usize = totals.iter().map(|total| total.findings).sum();
    println!(
        "{} cases in {:.1} minutes, {found} findings",
        totals.iter().map(|total| total.cases).sum::<u64>(),
        began.elapsed().as_secs_f64() / 60.0
    );
    Ok(if found == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

enum Turn {
    /// The number of cases of each process.
    Cases(u64),
    Until(Instant),
}

struct Round<'a> {
    target: &'a Target,
    dir: &'a Path,
    jobs: usize,
    turn: Turn,
}

#[derive(Default)]
struct Total {
    cases: u64,
    time: Duration,
    findings: usize,
    most: Progress,
}

impl Total {
    fn add(&mut self, progress: Progress) {
        self.cases += progress.cases;
        if progress.most_bytes > self.most.most_bytes {
            (self.most.most_bytes, self.most.most_bytes_seed) = (progress.most_bytes, progress.most_bytes_seed);
        }
        if progress.slowest_us > self.most.slowest_us {
            (self.most.slowest_us, self.most.slowest_seed) = (progress.slowest_us, progress.slowest_seed);
        }
    }

    fn line(&self, target: &Target) -> String {
        let Progress { most_bytes, most_bytes_seed, slowest_us, slowest_seed, .. } = self.most;
        format!(
            "{:12} {:>9} cases {:>7.1} s {:>3} findings, at most {:.1} MiB (seed {most_bytes_seed}) and {:.1} ms of CPU (seed {slowest_seed})",
            target.name,
            self.cases,
            self.time.as_secs_f64(),
            self.findings,
            most_bytes as f64 / f64::from(1 << 20),
            slowest_us as f64 / 1e3,
        )
    }
}

struct Job {
    number: usize,
    child: Child,
    file: PathBuf,
    first: u64,
    /// The number of cases; 0 for an endless run.
    cases: u64,
}

impl Round<'_> {
    fn run(&self, from: u64, total: &mut Total) -> anyhow::Result<()> {
        let began = Instant::now();
        let findings = total.findings;
        let mut jobs = Vec::new();
        for number in 0..self.jobs {
            let cases = if let Turn::Cases(cases) = self.turn { cases } else { 0 };
            jobs.push(self.start(number, from + number as u64, cases)?);
        }
        while !jobs.is_empty() {
            thread::sleep(POLLED_EVERY);
            let over = matches!(self.turn, Turn::Until(end) if Instant::now() >= end) || total.findings - findings >= FINDINGS_MAX;
            let mut going_on = Vec::new();
            for mut job in jobs {
                if over {
                    // The process has no state to save.
                    let _ = job.child.kill();
                }
                let Some(status) = (if over { Some(job.child.wait()?) } else { job.child.try_wait()? }) else {
                    going_on.push(job);
                    continue;
                };
                let progress = Progress::read(&job.file);
                total.add(progress.unwrap_or_default());
                if !over && !status.success() {
                    total.findings += 1;
                    self.tell(status, progress);
                    if let Some(next) = self.after(&job, progress)? {
                        going_on.push(next);
                    }
                }
            }
            jobs = going_on;
        }
        total.time += began.elapsed();
        Ok(())
    }

    fn start(&self, number: usize, first: u64, cases: u64) -> anyhow::Result<Job> {
        let file = self.dir.join(format!("{}-{number}", self.target.name));
        let _ = std::fs::remove_file(&file);
        let mut command = Command::new(env::current_exe()?);
        command.args(["--target", self.target.name, "--child"]).arg(&file);
        command.args([first.to_string(), self.jobs.to_string(), cases.to_string()]).stdin(Stdio::null());
        Ok(Job { number, child: command.spawn().context("a process that runs cases")?, file, first, cases })
    }

    /// Reports the end of a process that died without reporting a finding.
    fn tell(&self, status: ExitStatus, progress: Option<Progress>) {
        if status.code() == Some(FOUND.into()) {
            return;
        }
        let how = status.signal().map_or_else(|| status.to_string(), |signal| format!("signal {signal}"));
        match progress {
            Some(progress) => eprintln!("finding: --target {} --seed {}: the process ended by {how}", self.target.name, progress.seed),
            None => eprintln!("finding: --target {}: the process ended by {how} before its first case", self.target.name),
        }
    }

    /// Starts another process for the cases left after one that ended a process.
    fn after(&self, job: &Job, progress: Option<Progress>) -> anyhow::Result<Option<Job>> {
        let Some(progress) = progress else { return Ok(None) };
        let step = self.jobs as u64;
        let next = progress.seed.wrapping_add(step);
        let done = next.wrapping_sub(job.first) / step;
        match job.cases {
            0 => self.start(job.number, next, 0).map(Some),
            cases if cases > done => self.start(job.number, next, cases - done).map(Some),
            _ => Ok(None),
        }
    }
}

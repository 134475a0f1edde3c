//! Wall time, and CPU time of the processes that share the work.

use anyhow::Context;
use nix::{
    time::{ClockId, clock_getcpuclockid, clock_gettime},
    unistd::Pid,
};
use std::{
    ops::{AddAssign, Sub},
    time::{Duration, Instant},
};

#[derive(Clone, Debug)]
pub struct Clocks {
    epoch: Instant,
    processes: Vec<ClockId>,
}

/// Elapsed time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    wall: Duration,
    /// User and system time of all threads.
    cpu: Duration,
}

impl Clocks {
    /// Creates clocks of this process and of `others`.
    pub fn new(others: &[u32]) -> anyhow::Result<Self> {
        let mut processes = vec![ClockId::CLOCK_PROCESS_CPUTIME_ID];
        for &pid in others {
            processes.push(clock_getcpuclockid(Pid::from_raw(pid as i32)).with_context(|| format!("process {pid} has no CPU clock"))?);
        }
        Ok(Self { epoch: Instant::now(), processes })
    }

    /// The current readings, of which only differences are meaningful. Fails once a process has ended.
    pub fn now(&self) -> anyhow::Result<Spent> {
        let mut cpu = Duration::ZERO;
        for &process in &self.processes {
            cpu += Duration::from(clock_gettime(process).context("a measured process has ended")?);
        }
        Ok(Spent { wall: self.epoch.elapsed(), cpu })
    }
}

impl Spent {
    pub fn gb_per_s(self, bytes: usize) -> f64 {
        bytes as f64 / 1e9 / self.wall.as_secs_f64()
    }

    pub fn cpu_s_per_gb(self, bytes: usize) -> f64 {
        self.cpu.as_secs_f64() / (bytes as f64 / 1e9)
    }
}

impl Sub for Spent {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self { wall: self.wall - earlier.wall, cpu: self.cpu - earlier.cpu }
    }
}

impl AddAssign for Spent {
    fn add_assign(&mut self, more: Self) {
        self.wall += more.wall;
        self.cpu += more.cpu;
    }
}

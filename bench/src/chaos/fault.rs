//! The faults and their victims.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, fmt, fs, time::Duration};
use tokio::time::{Instant, sleep};

/// The time within which a crashed process is up again: it is started, loads its model, and registers.
pub const BACK: Duration = Duration::from_secs(15);
/// The longest time for which a fault is watched for the end of its victim's membership.
const GONE_MAX: Duration = Duration::from_secs(10);

/// The members in the response of `/cluster`.
#[derive(Debug, Deserialize)]
pub struct View {
    pub members: Vec<Member>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Member {
    pub pid: u32,
    pub role: String,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Kill,
    /// A pause shorter than the time after which a silent worker is taken for dead.
    Hiccup,
    /// A pause longer than that.
    Pause,
    /// A rolling restart of everything.
    Restart,
}

#[derive(Clone, Debug)]
pub struct Fault {
    pub kind: Kind,
    pub role: String,
    pub pid: u32,
    lasts: Duration,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Kill => write!(f, "kill {} {}", self.role, self.pid),
            Kind::Restart => write!(f, "restart {}", self.role),
            Kind::Hiccup | Kind::Pause => write!(f, "pause {} {} for {:.1} s", self.role, self.pid, self.lasts.as_secs_f64()),
        }
    }
}

impl Fault {
    /// Inflicts the fault. Returns the time for which its victim was still taken for a member, if it ceased to be one.
    pub async fn inflict<F: Future<Output = bool>>(&self, is_member: impl Fn(u32) -> F) -> Option<Duration> {
        let began = Instant::now();
        if self.kind == Kind::Restart {
            signal(self.pid, Signal::SIGHUP);
            return None;
        }
        if self.kind == Kind::Kill {
            signal(self.pid, Signal::SIGKILL);
        } else {
            signal(self.pid, Signal::SIGSTOP);
            let pid = self.pid;
            let lasts = self.lasts;
            tokio::spawn(async move {
                sleep(lasts).await;
                signal(pid, Signal::SIGCONT);
            });
        }
        let watched = if self.kind == Kind::Kill { GONE_MAX } else { self.lasts };
        if self.role == "coordinator" || self.kind == Kind::Hiccup {
            return None;
        }
        while began.elapsed() < watched {
            if !is_member(self.pid).await {
                return Some(began.elapsed());
            }
            sleep(Duration::from_millis(5)).await;
        }
        None
    }
}

/// Chooses faults, by a seed: one at a time per role, so that each role always has a working process.
#[derive(Debug)]
pub struct Faults {
    random: StdRng,
    up: u32,
    paused: BTreeSet<u32>,
    /// The time at which each role's last victim is back.
    back: Vec<(String, Instant)>,
}

impl Faults {
    pub fn new(seed: u64, up: u32) -> Self {
        Self { random: StdRng::seed_from_u64(seed), up, paused: BTreeSet::new(), back: Vec::new() }
    }

    /// The fault that restarts everything, process by process, while other faults continue.
    pub fn restart(&self) -> Fault {
        Fault { kind: Kind::Restart, role: "everything".into(), pid: self.up, lasts: Duration::ZERO }
    }

    /// Chooses the next fault; `None` if no process may fail now.
    pub fn next(&mut self, members: &[Member]) -> Option<Fault> {
        let now = Instant::now();
        self.back.retain(|(_, back)| *back > now);
        let coordinators = children(self.up).into_iter().filter(|(_, program)| program == "tidemill-coordinator");
        let coordinators: Vec<Member> = coordinators.map(|(pid, _)| Member { pid, role: "coordinator".into() }).collect();
        let all: Vec<&Member> = members.iter().chain(&coordinators).collect();
        let many = |role: &str| all.iter().filter(|member| member.role == role).count() > 1;
        let may = |member: &&&Member| many(&member.role) && self.back.iter().all(|(role, _)| *role != member.role);
        let victims: Vec<&&Member> = all.iter().filter(may).collect();
        let victim = victims.get(self.random.random_range(0..victims.len().max(1)))?;
        let (pid, role) = (victim.pid, victim.role.clone());
        let kind = match self.random.random_range(0..10) {
            0..6 => Kind::Kill,
            6..8 => Kind::Hiccup,
            _ => Kind::Pause,
        };
        let lasts = match kind {
            Kind::Kill | Kind::Restart => Duration::ZERO,
            Kind::Hiccup => Duration::from_secs_f64(self.random.random_range(0.1..2.0)),
            Kind::Pause => Duration::from_secs_f64(self.random.random_range(6.0..9.0)),
        };
        self.back.push((role.clone(), now + lasts + BACK));
        if kind != Kind::Kill {
            self.paused.insert(pid);
        }
        Some(Fault { kind, role, pid, lasts })
    }

    /// Processes that were paused at some time.
    pub fn paused(&self) -> impl Iterator<Item = u32> {
        self.paused.iter().copied()
    }
}

/// A process's children, each with its program's name.
pub fn children(parent: u32) -> Vec<(u32, String)> {
    let child = |pid: u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let theirs: u32 = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        let program = command.split('\0').next()?.rsplit('/').next()?.to_owned();
        (theirs == parent).then_some((pid, program))
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter_map(child).collect()
}

/// Whether a process lives; a zombie does not.
pub fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z')))
}

/// Sends a signal, only to processes that this bench has started.
pub fn signal(pid: u32, signal: Signal) {
    let _ = kill(Pid::from_raw(pid as i32), signal);
}

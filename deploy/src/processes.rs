//! Child processes of `tidemill up`: started from this binary's directory, restarted when they crash, ended by pid, never left behind.

mod pulse;
mod restarts;

use anyhow::{Context, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use pulse::{Pulse, SILENCE_MAX};
use restarts::{Restarts, WINDOW};
use std::{
    io::{Write, stderr},
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tidemill_net::supervised::BEAT;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStdout, Command},
    sync::mpsc,
    time::timeout,
};

/// Writes a line to standard error in one piece: the children also write there, and `eprintln!` would let their lines into the middle of
/// ours.
pub(crate) fn say(line: &str) {
    // There is nowhere left to report an error.
    let _ = stderr().write_all(format!("tidemill: {line}\n").as_bytes());
}

/// One running role process.
#[derive(Debug)]
pub struct Process {
    pub name: String,
    program: String,
    /// The arguments with which the process is started and restarted.
    pub args: Vec<String>,
    child: Child,
    said: Said,
    pulse: Pulse,
    restarts: Restarts,
    /// The time at which the process, which has crashed, is restarted.
    due: Option<Instant>,
    /// Whether the process was asked to end in order to be restarted.
    recalled: bool,
    /// The time at which the process was told to end for good.
    dismissed: Option<Instant>,
}

/// A result of [`Process::tend`].
#[derive(Debug, PartialEq, Eq)]
pub enum Tended {
    /// The process is running, or will be restarted.
    Alive,
    /// The process has ended for good, with a description of how.
    Ended(String),
}

impl Process {
    /// Starts `program` from this binary's directory. Its own process group keeps Ctrl-C away from it, so that this process
    /// decides the order of draining. Its stdin is a pipe that closes when this process ends, however that happens.
    pub fn start(program: &str, name: &str, args: &[String]) -> anyhow::Result<Self> {
        let (child, said) = spawn(program, name, args)?;
        let (program, name, args) = (program.to_owned(), name.to_owned(), args.to_vec());
        Ok(Self {
            name,
            program,
            args,
            child,
            said,
            pulse: Pulse::default(),
            restarts: Restarts::new(0),
            due: None,
            recalled: false,
            dismissed: None,
        })
    }

    /// The process, with automatic restarts after up to `max` recent crashes.
    pub fn restarted(self, max: u32) -> Self {
        Self { restarts: Restarts::new(max), ..self }
    }

    /// Restarts the process if it has crashed, after a wait that grows with each crash. A process that exits with success is not restarted.
    /// One whose event loop hangs is killed, which counts as a crash.
    pub fn tend(&mut self, now: Instant) -> Tended {
        if let Some(due) = self.due {
            if now >= due {
                match spawn(&self.program, &self.name, &self.args) {
                    Ok((child, said)) => (self.child, self.said, self.pulse, self.due) = (child, said, Pulse::default(), None),
                    Err(error) => return self.crashed(now, &format!("{error:#}")),
                }
            }
            return Tended::Alive;
        }
        match self.status() {
            None => {
                if self.dismissed.take_if(|since| now.duration_since(*since) > DISMISSAL_MAX).is_some() {
                    say(&format!("{} has not ended {DISMISSAL_MAX:?} after it was told to: it is killed", self.name));
                    let _ = self.child.start_kill();
                }
                if self.pulse.is_lost(now, self.said.beats.load(Ordering::Relaxed)) {
                    say(&format!("the event loop of {} has stood still for {SILENCE_MAX:?}: it is killed", self.name));
                    let _ = self.child.start_kill();
                    self.pulse = Pulse::default();
                }
                Tended::Alive
            }
            Some(_) if std::mem::take(&mut self.recalled) => {
                self.due = Some(now);
                Tended::Alive
            }
            Some(status) if status.success() => Tended::Ended(format!("{} ended: {status}", self.name)),
            Some(status) => self.crashed(now, &status.to_string()),
        }
    }

    fn crashed(&mut self, now: Instant, how: &str) -> Tended {
        let Self { name, restarts, .. } = self;
        match restarts.crashed(now) {
            Some(wait) => {
                let (count, max) = (restarts.count(), restarts.max());
                say(&format!("{name} ended: {how}; starting it again in {wait:?} ({count} of {max} within {WINDOW:?})"));
                self.due = Some(now + wait);
                Tended::Alive
            }
            None if restarts.max() == 0 => Tended::Ended(format!("{name} ended: {how}")),
            None => Tended::Ended(format!("{name} ended: {how}; it keeps failing and is not started again")),
        }
    }

    fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// The next line that the process prints on stdout.
    pub async fn line(&mut self, within: Duration) -> anyhow::Result<String> {
        let line = timeout(within, self.said.lines.recv()).await;
        match line.with_context(|| format!("{} printed nothing within {within:?}", self.name))? {
            Some(line) => Ok(line),
            None => bail!("{} ended before it was ready", self.name),
        }
    }

    /// `None` once the process has ended and was reaped.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// The exit status of the process, if it has ended.
    pub fn ended(&mut self) -> Option<String> {
        self.status().map(|status| status.to_string())
    }

    /// Asks the process to drain and end; [`tend`](Self::tend) then restarts it. Returns its process id, if it is running.
    pub fn recall(&mut self) -> Option<u32> {
        let pid = self.child.id()?;
        self.recalled = true;
        self.terminate();
        Some(pid)
    }

    /// Asks the process to drain and end for good. [`tend`](Self::tend) says when it has.
    pub fn dismiss(&mut self, now: Instant) {
        self.restarts = Restarts::new(0);
        (self.due, self.dismissed) = (None, Some(now));
        self.terminate();
    }

    /// Asks the process to drain and end.
    pub fn terminate(&self) {
        if let Some(pid) = self.child.id() {
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGTERM);
        }
    }

    /// Waits for the process to end, and kills it after `within`. Returns whether it ended well.
    pub async fn wait(mut self, within: Duration) -> bool {
        if self.due.is_some() {
            // It crashed, which has been reported, and is not running.
            return true;
        }
        match timeout(within, self.child.wait()).await {
            // SIGTERM may arrive before the process handles it. It then ends at once, which is fine.
            Ok(status) => status.is_ok_and(|s| s.success() || s.signal() == Some(Signal::SIGTERM as i32)),
            Err(_) => {
                say(&format!("{} did not end within {within:?}: killed", self.name));
                let _ = self.child.kill().await;
                false
            }
        }
    }
}

/// The lines that a process prints. They are read as they arrive, so that no process blocks on a full pipe.
#[derive(Debug)]
struct Said {
    lines: mpsc::Receiver<String>,
    /// The number of heartbeats printed by the process's event loop.
    beats: Arc<AtomicU64>,
}

impl Said {
    fn by(stdout: ChildStdout) -> Self {
        let (heard, lines) = mpsc::channel(LINES_MAX);
        let beats = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&beats);
        tokio::spawn(async move {
            let mut stdout = BufReader::new(stdout).lines();
            while let Ok(Some(line)) = stdout.next_line().await {
                if line == BEAT {
                    counted.fetch_add(1, Ordering::Relaxed);
                } else {
                    // Only the first lines are of interest.
                    let _ = heard.try_send(line);
                }
            }
        });
        Self { lines, beats }
    }
}

/// The time that a dismissed worker has to hand its work back and to end, so that it does not hold its place indefinitely.
const DISMISSAL_MAX: Duration = Duration::from_secs(30);
/// The most unread lines of a process that are kept.
const LINES_MAX: usize = 64;

fn spawn(program: &str, name: &str, args: &[String]) -> anyhow::Result<(Child, Said)> {
    let path = beside_this_binary(program)?;
    let mut command = Command::new(&path);
    command.args(args).args(["--name", name, "--exit-with-parent", "true"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", path.display()))?;
    let stdout = child.stdout.take().expect("stdout is piped");
    Ok((child, Said::by(stdout)))
}

fn beside_this_binary(program: &str) -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe().context("cannot tell where this binary is")?;
    let path = me.with_file_name(program);
    if !path.is_file() {
        bail!("{} is missing: build the whole workspace (`cargo build --release`)", path.display());
    }
    Ok(path)
}

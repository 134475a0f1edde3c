//! Common parts of every process: logging to stderr, the end on Ctrl-C, SIGTERM or a closed pipe from the parent, plain error output, and
//! an allocator setting for processes that move blocks.

use crate::{config::ConfigError, cores::Cores, supervised::orphaned};
use serde::{Deserialize, Serialize};
use std::{
    error::Error,
    fmt,
    io::{self, IsTerminal},
    str::FromStr,
};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// The error that ends a `main`. Prints the error and its causes, never a backtrace: RUST_BACKTRACE is often set for other programs, and an
/// operator's mistake needs one sentence.
pub struct Failed(Box<dyn Error + Send + Sync>);

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failed {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

/// Rust prints an error that `main` returns with `Debug`.
impl fmt::Debug for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let text = error.to_string();
            // Many errors already quote their cause.
            if !said.contains(&text) {
                write!(f, ": {text}")?;
                said.push_str(&text);
            }
            cause = error.source();
        }
        Ok(())
    }
}

/// The filter and the format of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logging {
    /// A tracing filter such as `info`.
    pub filter: String,
    pub format: LogFormat,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people: time, level, origin, text, fields.
    #[default]
    Text,
    /// For programs: one object per line, with the same parts.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("`{text}` is not a format: there are `text` and `json`")),
        }
    }
}

impl Logging {
    pub fn new(filter: Option<String>, format: Option<LogFormat>) -> Self {
        Self { filter: filter.unwrap_or_else(|| "info".into()), format: format.unwrap_or_default() }
    }

    /// Starts logging to stderr; stdout is left for other programs to read.
    ///
    /// Lines that stderr refuses are lost. If it is a file on a full disk, reporting that there would panic.
    pub fn start(&self) {
        let filter = EnvFilter::try_new(&self.filter).unwrap_or_else(|_| EnvFilter::new("info"));
        let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false);
        match self.format {
            LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).init(),
            LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).with_span_list(false).init(),
        }
    }
}

/// Makes all files and directories that this process creates from now on private to its user, regardless of the code that creates them.
/// Many contain prompts and answers.
pub fn keep_files_private() {
    // SAFETY: umask takes a number and returns one, and may be called at any time from any thread.
    unsafe { libc::umask(0o077) };
}

/// Lets this process end without a message when the reader of its output has gone, as in `tidemill usage | head`. Only for a program that
/// prints and ends: one with children would end when a child's pipe closes. Sockets never raise this signal.
pub fn end_with_the_reader() {
    // SAFETY: the default action is no handler, so no code runs in a signal's context.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Gives the calling thread a low priority: a tenth of a core beside a thread of normal priority.
pub fn give_way() {
    // SAFETY: the call reads its arguments, which are numbers, and changes nothing but this thread's priority. 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) };
}

/// Makes the allocator keep up to a GiB of freed memory for the next blocks. Every transfer allocates blocks of some MiB; by default each
/// is mapped anew and costs a page fault every 4 KiB. With this setting, 2 MiB blocks arrive a third faster over QUIC on loopback. Only
/// glibc's allocator has it.
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    for (parameter, bytes) in [(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN), (libc::M_TRIM_THRESHOLD, KEPT_BYTES)] {
        // SAFETY: mallopt takes two numbers and may be called at any time from any thread.
        if unsafe { libc::mallopt(parameter, bytes) } == 0 {
            tracing::debug!(parameter, bytes, "the allocator does not take this setting");
        }
    }
}

#[cfg(target_env = "gnu")]
const KEPT_BYTES: libc::c_int = 1 << 30;
/// The size from which allocations are mapped from the system and returned to it. The largest threshold that glibc allows.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: libc::c_int = 32 << 20;

/// Runs `role` to its end with two runtime threads, pinned to `cores` if given. Model computation has its own threads.
pub fn run<R: Future<Output = Result<(), E>>, E: From<ConfigError> + From<io::Error>>(cores: Option<&Cores>, role: R) -> Result<(), E> {
    // Threads inherit the pinning of the thread that starts them.
    cores.map_or(Ok(()), Cores::stay)?;
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(role)
}

/// Logs each tenth of a long task. Tasks of under 64 MiB log nothing.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    tenths: u64,
}

impl Progress {
    pub fn new(what: &'static str) -> Self {
        Self { what, tenths: 0 }
    }

    pub fn update(&mut self, done: u64, total: u64) {
        let tenths = done * 10 / total.max(1);
        if tenths > self.tenths && total >= WORTH_A_LINE_BYTES {
            self.tenths = tenths;
            tracing::info!("{} {} % of {} MiB", self.what, tenths * 10, total >> 20);
        }
    }
}

const WORTH_A_LINE_BYTES: u64 = 64 << 20;

/// Resolves at Ctrl-C or SIGTERM.
pub async fn terminated() {
    let mut interrupt = signal(SignalKind::interrupt()).expect("SIGINT can be handled");
    let mut terminate = signal(SignalKind::terminate()).expect("SIGTERM can be handled");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

/// A stream of the SIGHUPs that this process receives.
pub fn hangups() -> Signal {
    signal(SignalKind::hangup()).expect("SIGHUP can be handled")
}

/// Resolves when the process should end: on Ctrl-C, on SIGTERM or, with `exit_with_parent`, when its supervisor has ended.
pub async fn shutdown(exit_with_parent: bool) {
    tokio::select! {
        () = terminated() => {}
        () = orphaned(), if exit_with_parent => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot start: {source}")]
    struct Quotes {
        source: Hides,
    }

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read the file")]
    struct Hides {
        source: io::Error,
    }

    #[test]
    fn a_failure_prints_each_cause_once() {
        let source = Hides { source: io::Error::other("disk on fire") };
        assert_eq!(format!("{:?}", Failed::from(Quotes { source })), "cannot start: cannot read the file: disk on fire");
    }
}

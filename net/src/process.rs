//! What every role process does alike: logs to stderr, ends on Ctrl-C or SIGTERM, and ends with its parent's pipe. Those that
//! move blocks keep memory that they freed.

use crate::{config::ConfigError, cores::Cores};
use std::io::{self, IsTerminal, Read};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};
use tracing_subscriber::EnvFilter;

/// Logs to stderr; stdout is for what a program says to programs. `level` is a tracing filter such as `info`.
///
/// What stderr does not take is lost: where it is a file on a disk that is full, complaining there about that would be a panic.
pub fn init_logging(level: &str) {
    let filter = EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new("info"));
    let ansi = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi).log_internal_errors(false).init();
}

/// Has the allocator keep freed memory for the next block, at most a GiB. Blocks of some MiB come and go with every
/// transfer; by default each is mapped anew, and costs a page fault every 4 KiB. (Two MiB blocks over QUIC on loopback were received
/// a third faster for it.) A setting of glibc's allocator; others are left as they are.
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    for (parameter, bytes) in [(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN), (libc::M_TRIM_THRESHOLD, KEPT_BYTES)] {
        // SAFETY: takes two numbers, and may be called at any time from any thread.
        if unsafe { libc::mallopt(parameter, bytes) } == 0 {
            tracing::debug!(parameter, bytes, "the allocator does not take this setting");
        }
    }
}

#[cfg(target_env = "gnu")]
const KEPT_BYTES: libc::c_int = 1 << 30;
/// Larger pieces come from the system and go back to it. The most that glibc allows.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: libc::c_int = 32 << 20;

/// Runs `role` to its end, with two threads for all that is not computed, on the given cores alone if there are some.
pub fn run<R: Future<Output = Result<(), E>>, E: From<ConfigError> + From<io::Error>>(cores: Option<&Cores>, role: R) -> Result<(), E> {
    // Threads stay where the one that starts them is.
    cores.map_or(Ok(()), Cores::stay)?;
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(role)
}

/// Logs the progress of something long, each time another tenth is done. What is done in a blink is not worth a line.
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

/// Resolves when the process should end: at Ctrl-C, SIGTERM, or, if it is to end with its parent, the end of stdin.
pub async fn shutdown(exit_with_parent: bool) {
    tokio::select! {
        () = terminated() => {}
        () = orphaned(), if exit_with_parent => {}
    }
}

/// Resolves when stdin is at its end. `tidemill up` keeps a pipe to each child's stdin open, so that a child
/// notices even a parent that was killed, and no process is left behind.
pub async fn orphaned() {
    let (ended, end) = oneshot::channel();
    // A thread of its own, not the runtime's: the runtime would wait for this read when the process ends for another reason.
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while std::io::stdin().read(&mut buffer).is_ok_and(|n| n > 0) {}
        let _ = ended.send(());
    });
    let _ = end.await;
}

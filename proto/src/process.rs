//! What every role process does alike: logs to stderr, ends on Ctrl-C or SIGTERM, and ends with its parent's pipe.

use std::io::IsTerminal;
use tokio::{
    io::AsyncReadExt,
    signal::unix::{SignalKind, signal},
};
use tracing_subscriber::EnvFilter;

/// Logs to stderr; stdout is for what a program says to programs. `level` is a tracing filter such as `info`.
pub fn init_logging(level: &str) {
    let filter = EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
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

/// Resolves when stdin is at its end. `tidemill up` keeps a pipe to each child's stdin open, so that a child
/// notices even a parent that was killed, and no process is left behind.
pub async fn orphaned() {
    let mut stdin = tokio::io::stdin();
    let mut buffer = [0; 64];
    while stdin.read(&mut buffer).await.is_ok_and(|n| n > 0) {}
}

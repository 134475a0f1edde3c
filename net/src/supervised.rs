//! A supervised process (`--exit-with-parent`), as under `tidemill up`: once a second it reports on stdout that its event loop is running,
//! and it ends with its supervisor, even if its loop has stalled.
//!
//! All of this has a thread of its own: a task that waits in a stalled loop waits forever.

use std::{
    io::{self, Read, Write},
    process, ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use tokio::{sync::oneshot, time};

/// The line on stdout that reports a running event loop.
pub const BEAT: &str = "beat";
/// The time between two such lines.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);
/// The number of missed beats after which a loop counts as stalled; the watching thread then ends an orphaned process.
const STILL_MAX: u32 = 10;

/// Starts the reports, and resolves when the supervisor has ended.
pub async fn orphaned() {
    end_with_parent();
    let turns = Arc::new(AtomicU64::new(0));
    let gone = Arc::new(AtomicBool::new(false));
    let (ended, end) = oneshot::channel();
    thread::spawn({
        let gone = Arc::clone(&gone);
        move || {
            // `tidemill up` holds a pipe to each child's stdin, which closes when `tidemill up` ends, in whatever way.
            let mut buffer = [0; 64];
            while io::stdin().read(&mut buffer).is_ok_and(|n| n > 0) {}
            gone.store(true, Ordering::Relaxed);
            let _ = ended.send(());
        }
    });
    thread::spawn({
        let turns = Arc::clone(&turns);
        move || watch(&turns, &gone)
    });
    // A task, since it is the progress of tasks that counts.
    let turning = tokio::spawn(async move {
        loop {
            turns.fetch_add(1, Ordering::Relaxed);
            time::sleep(BEAT_EVERY).await;
        }
    });
    let _ = end.await;
    drop(turning);
}

/// Reports each beat to the supervisor; never returns. Once the supervisor has ended, ends the process if the loop has stalled.
fn watch(turns: &AtomicU64, gone: &AtomicBool) {
    let (mut seen, mut still) = (0, 0);
    loop {
        thread::sleep(BEAT_EVERY);
        let now = turns.load(Ordering::Relaxed);
        still = if now == seen { still + 1 } else { 0 };
        if still == 0 {
            seen = now;
            // The line need not be read.
            let _ = writeln!(io::stdout(), "{BEAT}");
        }
        if still >= STILL_MAX && gone.load(Ordering::Relaxed) {
            let _ = writeln!(io::stderr(), "the supervisor of this process has ended, and its event loop does not turn: it ends at once");
            // There is no point in waiting for a stalled loop.
            process::abort();
        }
    }
}

/// Makes the kernel end this process with its parent, in case some other process holds the pipe open.
fn end_with_parent() {
    #[cfg(target_os = "linux")]
    // SAFETY: this option takes a signal's number, and touches no memory.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM, ptr::null::<()>(), ptr::null::<()>(), ptr::null::<()>()) } != 0 {
        tracing::debug!(error = %io::Error::last_os_error(), "the kernel will not say when the supervisor ends");
    }
}

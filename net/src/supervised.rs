//! A process that another one supervises (`--exit-with-parent`), as `tidemill up` does: it says once a second on stdout that its event loop
//! turns, and it ends with its supervisor, even if its loop does not turn any more.
//!
//! All of this has a thread of its own: what waits in the loop waits for ever when the loop stands still.

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

/// The line on stdout that says that the event loop turns.
pub const BEAT: &str = "beat";
/// The time between two such lines.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);
/// A loop that has stood still for this many beats will not end an orphaned process: the watching thread does.
const STILL_MAX: u32 = 10;

/// Says that the loop turns, and resolves when the supervisor has ended.
pub async fn orphaned() {
    end_with_parent();
    let turns = Arc::new(AtomicU64::new(0));
    let gone = Arc::new(AtomicBool::new(false));
    let (ended, end) = oneshot::channel();
    thread::spawn({
        let gone = Arc::clone(&gone);
        move || {
            // `tidemill up` holds a pipe to each child's stdin, which closes when it ends, however that happens.
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
    // A task, since it is tasks that are to run.
    let turning = tokio::spawn(async move {
        loop {
            turns.fetch_add(1, Ordering::Relaxed);
            time::sleep(BEAT_EVERY).await;
        }
    });
    let _ = end.await;
    drop(turning);
}

/// Tells the supervisor of each turn, for ever. Once the supervisor has ended, ends the process if the loop stands still.
fn watch(turns: &AtomicU64, gone: &AtomicBool) {
    let (mut seen, mut still) = (0, 0);
    loop {
        thread::sleep(BEAT_EVERY);
        let now = turns.load(Ordering::Relaxed);
        still = if now == seen { still + 1 } else { 0 };
        if still == 0 {
            seen = now;
            // Nobody need read it.
            let _ = writeln!(io::stdout(), "{BEAT}");
        }
        if still >= STILL_MAX && gone.load(Ordering::Relaxed) {
            let _ = writeln!(io::stderr(), "the supervisor of this process has ended, and its event loop does not turn: it ends at once");
            // Nothing is waited for: what would be does not move.
            process::abort();
        }
    }
}

/// Makes the kernel end this process with its parent, in case another process holds the pipe open.
fn end_with_parent() {
    #[cfg(target_os = "linux")]
    // SAFETY: this option takes a signal's number, and touches no memory.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM, ptr::null::<()>(), ptr::null::<()>(), ptr::null::<()>()) } != 0 {
        tracing::debug!(error = %io::Error::last_os_error(), "the kernel will not say when the supervisor ends");
    }
}

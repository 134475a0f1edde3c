//! The thread that waits for a device, and the waiters for its work.
//!
//! While work is in progress the thread polls, as long as another completion is likely to come soon; after that, and when idle, it sleeps
//! until the device wakes it.

use super::{rail::Rail, staging::Place, verbs::CompletionQueue};
use crate::transport::Broken;
use nix::libc;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    hint,
    io::{self, PipeReader, PipeWriter},
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::SyncSender,
    },
    thread,
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

pub(super) type Outcome = Result<(), Broken>;

/// The work in progress on one device.
#[derive(Debug, Default)]
pub(super) struct Pending {
    entries: Mutex<HashMap<u64, Entry>>,
    last: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    rail: Arc<Rail>,
    done: Done,
}

/// The waiters for the end of some work.
#[derive(Debug)]
pub(super) enum Done {
    /// A blocked thread.
    Thread(SyncSender<Outcome>),
    /// Tasks, each with the buffer that the device reads until then.
    Tasks(Vec<(oneshot::Sender<Outcome>, Arc<Place>)>),
}

impl Done {
    pub(super) fn resolve(self, outcome: Outcome) {
        match self {
            // Both fail only if the waiter is gone.
            Done::Thread(thread) => _ = thread.try_send(outcome),
            Done::Tasks(tasks) => tasks.into_iter().for_each(|(task, _)| _ = task.send(outcome)),
        }
    }
}

impl Pending {
    /// Adds work that is about to be posted, and returns its number.
    pub(super) fn add(&self, rail: &Arc<Rail>, done: Done) -> u64 {
        let id = self.last.fetch_add(1, Relaxed) + 1;
        self.entries.lock().insert(id, Entry { rail: Arc::clone(rail), done });
        id
    }

    /// Ends all work of a rail, whose queue pair must be gone.
    pub(super) fn fail(&self, rail: &Rail) {
        let of_rail = |_: &u64, entry: &mut Entry| std::ptr::eq(&*entry.rail, rail);
        let failed: Vec<Entry> = self.entries.lock().extract_if(of_rail).map(|(_, entry)| entry).collect();
        failed.into_iter().for_each(|entry| entry.done.resolve(Err(Broken)));
    }

    fn take(&self, id: u64) -> Option<Entry> {
        self.entries.lock().remove(&id)
    }

    fn is_empty(&self) -> bool {
        self.entries.lock().is_empty()
    }
}

/// The thread's handle. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Poller {
    _stop: PipeWriter,
}

/// The time for which the thread polls in vain, while work is in progress, before it sleeps: waking it costs some 10 µs.
const SPIN: Duration = Duration::from_micros(50);

impl Poller {
    pub(super) fn start(device: &str, queue: Arc<CompletionQueue>, pending: Arc<Pending>) -> io::Result<Self> {
        let (stop, _stop) = io::pipe()?;
        // The kernel keeps 15 bytes of a name.
        thread::Builder::new().name(format!("rdma-{device}")).spawn(move || run(&queue, &pending, &stop))?;
        Ok(Self { _stop })
    }
}

fn run(queue: &CompletionQueue, pending: &Pending, stop: &PipeReader) {
    let mut last = Instant::now();
    loop {
        if take_all(queue, pending) {
            last = Instant::now();
        } else if !pending.is_empty() && last.elapsed() < SPIN {
            hint::spin_loop();
        } else {
            let armed = queue.arm();
            // A completion may have arrived just before the queue was armed.
            if armed.is_ok() && take_all(queue, pending) {
                last = Instant::now();
                continue;
            }
            let woken = armed.and_then(|()| match wait(queue, stop) {
                Woken::Event => queue.take_event().map(|()| true),
                Woken::Stopped => Ok(false),
            });
            match woken {
                Ok(true) => last = Instant::now(),
                Ok(false) => return,
                // Work in progress ends by its waiters' own deadlines.
                Err(error) => return tracing::error!(%error, "the device's completions are not waited for any more"),
            }
        }
    }
}

/// Takes all completions. Returns whether there were any.
fn take_all(queue: &CompletionQueue, pending: &Pending) -> bool {
    let completions = queue.poll();
    let any = !completions.is_empty();
    for completion in completions {
        // Work that was flushed after the first error has no waiters any more.
        let Some(Entry { rail, done }) = pending.take(completion.id) else { continue };
        match completion.result {
            Ok(()) => done.resolve(Ok(())),
            Err(status) => {
                rail.close(&status);
                done.resolve(Err(Broken));
            }
        }
    }
    any
}

enum Woken {
    Event,
    Stopped,
}

fn wait(queue: &CompletionQueue, stop: &PipeReader) -> Woken {
    let file = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    loop {
        let mut files = [file(queue.fd()), file(stop.as_raw_fd())];
        // SAFETY: both are open as long as they are borrowed, and the array has two entries.
        let ready = unsafe { libc::poll(files.as_mut_ptr(), 2, -1) };
        if files[1].revents != 0 {
            return Woken::Stopped;
        }
        if ready > 0 && files[0].revents != 0 {
            return Woken::Event;
        }
    }
}

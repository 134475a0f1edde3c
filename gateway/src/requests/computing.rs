//! Threads for work on clients' data: parsing, rendering, tokenizing, serializing. The event loop only moves bytes, and hands over
//! everything else, however short it is: the size of a body does not tell its cost.
//!
//! A piece keeps its thread until it ends, even if its client has left: so there is never more work than threads. A piece whose client
//! leaves before it starts is dropped, and a running one ends at its next [`checkpoint`].

use crate::{
    base::{
        line::{Begun, Line, Stage},
        shares::{Party, Refused},
    },
    metrics,
    requests::error::ApiError,
};
use parking_lot::{Condvar, Mutex};
use std::{
    cell::RefCell,
    fmt,
    num::NonZero,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use tokio::{runtime::Handle, sync::oneshot};

/// The maximum number of waiting pieces of all parties.
const WAITING_MAX: u64 = 4096;

type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    /// The mark of the piece that this thread works on, set when its client leaves.
    static ABANDONED: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Fails when the client of the current piece of work has left. Long work calls this between its parts.
pub fn checkpoint() -> Result<(), ApiError> {
    let abandoned = ABANDONED.with_borrow(|abandoned| abandoned.as_ref().is_some_and(|abandoned| abandoned.load(Ordering::Relaxed)));
    if abandoned { Err(ApiError::internal("the client has left: the rest of its request was not worked on")) } else { Ok(()) }
}

/// The compute threads of one gateway. They end when this is dropped.
#[derive(Debug)]
pub struct Computing(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    more: Condvar,
}

struct State {
    line: Line<Job>,
    idle: usize,
    over: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}

impl Shared {
    fn work(&self) {
        let mut ended: Option<Begun> = None;
        loop {
            let (begun, job) = {
                let mut state = self.state.lock();
                if let Some(ended) = ended.take() {
                    state.line.done(ended);
                    // This piece may have held back several others.
                    if state.idle > 0 && state.line.has_waiting() {
                        self.more.notify_one();
                    }
                }
                loop {
                    if state.over {
                        return;
                    }
                    if let Some(next) = state.line.next() {
                        break next;
                    }
                    state.idle += 1;
                    self.more.wait(&mut state);
                    state.idle -= 1;
                }
            };
            job();
            ended = Some(begun);
        }
    }
}

impl Computing {
    /// Starts one thread per core and one more, since no party may occupy every thread. The threads enter the runtime in which this is
    /// called, if any.
    pub fn start() -> Self {
        let threads = thread::available_parallelism().map_or(1, NonZero::get) + 1;
        let state = State { line: Line::new(threads, WAITING_MAX), idle: 0, over: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), more: Condvar::new() });
        for n in 0..threads {
            let (shared, runtime) = (Arc::clone(&shared), Handle::try_current().ok());
            let started = thread::Builder::new().name(format!("compute-{n}")).spawn(move || {
                let _entered = runtime.as_ref().map(Handle::enter);
                shared.work();
            });
            started.expect("a process can start its threads");
        }
        Self(shared)
    }

    /// Runs `work` on one of the threads, at a stage of its request. `bytes` is the size of its input, as far as known. Dropping the future
    /// abandons the work.
    pub async fn run<T: Send + 'static>(
        &self,
        party: Party,
        stage: Stage,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (told, answer) = oneshot::channel();
        let abandoned = Arc::new(AtomicBool::new(false));
        let mark = Arc::clone(&abandoned);
        let job = move || {
            if mark.load(Ordering::Relaxed) {
                return;
            }
            ABANDONED.set(Some(mark));
            let done = panic::catch_unwind(AssertUnwindSafe(work));
            ABANDONED.set(None);
            let _ = told.send(done.unwrap_or_else(|_| Err(unreadable())));
        };
        let id = {
            let mut state = self.0.state.lock();
            let entered = state.line.enter(&party, stage, bytes, Box::new(job));
            if state.idle > 0 {
                self.0.more.notify_one();
            }
            entered
        };
        let id = id.map_err(|refused| refusal("compute", refused))?;
        let mut waiting = Waiting { shared: &self.0, party, id, abandoned, over: false };
        let answer = answer.await;
        waiting.over = true;
        answer.unwrap_or_else(|_| Err(unreadable()))
    }
}

impl Drop for Computing {
    fn drop(&mut self) {
        self.0.state.lock().over = true;
        self.0.more.notify_all();
    }
}

/// The client of a piece of work. Dropping it early abandons the piece.
struct Waiting<'a> {
    shared: &'a Shared,
    party: Party,
    id: u64,
    abandoned: Arc<AtomicBool>,
    over: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.abandoned.store(true, Ordering::Relaxed);
            // The job is dropped after the lock is released.
            let withdrawn = self.shared.state.lock().line.withdraw(&self.party, self.id);
            drop(withdrawn);
        }
    }
}

/// Counts a refused share and turns it into an error response.
pub fn refusal(resource: &'static str, refused: Refused) -> ApiError {
    metrics::count_share_refusal(resource, refused);
    ApiError::over_share(resource, refused)
}

fn unreadable() -> ApiError {
    ApiError::internal("the request could not be read: please report this as a bug")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{Barrier, mpsc},
        time::Duration,
    };

    fn party(name: &str) -> Party {
        Party::Tenant { name: name.into(), shed: 0 }
    }

    #[tokio::test]
    async fn work_whose_client_has_left_keeps_its_thread_until_it_ends() {
        let computing = Arc::new(Computing::start());
        let threads = computing.0.state.lock().line.threads();
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let gate = Arc::new(Barrier::new(threads));
        let mut clients = Vec::new();
        for _ in 0..threads - 1 {
            let (computing, begun, gate) = (Arc::clone(&computing), begun.clone(), Arc::clone(&gate));
            clients.push(tokio::spawn(async move {
                let work = move || {
                    begun.send(()).unwrap();
                    gate.wait();
                    Ok(())
                };
                computing.run(party("flood"), Stage::First, 0, work).await
            }));
        }
        for _ in 0..threads - 1 {
            begins.recv().await.unwrap();
        }
        for client in clients {
            client.abort();
            assert!(client.await.unwrap_err().is_cancelled());
        }
        let (ran, runs) = mpsc::channel();
        let late = tokio::spawn({
            let computing = Arc::clone(&computing);
            async move { computing.run(party("flood"), Stage::First, 0, move || ran.send(()).map_err(|_| unreadable())).await }
        });
        let other = computing.run(party("quiet"), Stage::First, 0, || Ok(7)).await;
        assert_eq!(other, Ok(7), "a thread is left to others");
        assert!(runs.try_recv().is_err(), "none is left to those who left");
        gate.wait();
        assert_eq!(late.await.unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn abandoned_work_ends_at_its_checkpoint_and_is_not_begun_if_it_waits() {
        let computing = Arc::new(Computing::start());
        let (begun, begins) = tokio::sync::oneshot::channel();
        let (ended, ends) = tokio::sync::oneshot::channel();
        let client = tokio::spawn({
            let computing = Arc::clone(&computing);
            async move {
                let work = move || -> Result<(), ApiError> {
                    begun.send(()).unwrap();
                    let error = loop {
                        if let Err(error) = checkpoint() {
                            break error;
                        }
                        thread::sleep(Duration::from_millis(1));
                    };
                    ended.send(()).unwrap();
                    Err(error)
                };
                computing.run(party("a"), Stage::First, 0, work).await
            }
        });
        begins.await.unwrap();
        client.abort();
        ends.await.unwrap();
        assert!(computing.run(party("a"), Stage::First, 0, checkpoint).await.is_ok(), "the mark is the piece's own");
    }

    #[tokio::test]
    async fn a_panic_is_an_error_and_the_thread_goes_on() {
        let computing = Computing::start();
        for _ in 0..8 {
            let done: Result<(), _> = computing.run(party("a"), Stage::First, 0, || panic!("as a test")).await;
            assert_eq!(done.unwrap_err().status(), 500);
        }
        assert_eq!(computing.run(party("a"), Stage::First, 0, || Ok(1)).await, Ok(1));
    }
}

//! A thread pool whose workers wait for the next loop without a system call, as long as it comes soon.
//!
//! A step of a model is hundreds of short parallel loops. Between them workers spin, then spin and yield, and park only after a longer
//! pause: so a step makes no system call, an idle process costs nothing, and two processes that share cores hand them to each other.
//!
//! One word, the *gate*, holds everything that workers and caller must agree on: the number of the loop, whether it is open, and how many
//! workers are inside. Tasks are distributed beforehand: each thread has a range of neighbours and walks through it, so that a task can
//! prefetch for the next one. A thread that is done steals from the ends of other ranges. The caller also works; when no tasks are left, it
//! closes the gate and waits for the workers inside. A worker that slept through a whole loop is not waited for: others have done its
//! tasks.

pub(crate) mod affinity;
pub(crate) mod disjoint;

use std::{
    any::Any,
    cell::UnsafeCell,
    hint::spin_loop,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Worker threads, besides the caller's.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Set while a loop runs. A second loop, from within a task or from another thread, runs on its caller alone.
    busy: AtomicBool,
}

struct Shared {
    gate: Gate,
    /// The caller writes it while the gate is closed with no worker inside; workers inside read it.
    job: UnsafeCell<Job>,
    /// The tasks of each thread that are still to be taken, the caller's first.
    left: Vec<Tasks>,
    stop: AtomicBool,
    /// Workers that sleep or are about to.
    parked: Vec<AtomicBool>,
    /// The payload of the first task that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is the only part that is not `Sync` by itself. The caller writes it before it opens the gate and after
// the last worker of the previous loop has left; workers read it only inside. The gate's release and acquire order the
// two.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` leads to a `Sync` closure, and is followed only while the caller keeps that alive.
unsafe impl Send for Shared {}

/// A closure without its type.
#[derive(Clone, Copy)]
struct Job {
    /// # Safety
    /// The pointer must be the job's own `task`, still alive.
    call: unsafe fn(*const (), usize),
    task: *const (),
}

/// The time for which a worker looks for work before it yields, and before it parks. The first is longer than a step's serial parts, the
/// second longer than the usual pause between two steps.
const SPIN: Duration = Duration::from_micros(50);
const SPIN_AND_YIELD: Duration = Duration::from_millis(1);

impl ThreadPool {
    /// Starts `workers` threads besides the callers of [`for_each`](Self::for_each). Each first calls `start` with its number.
    pub(crate) fn new(workers: usize, start: impl Fn(usize) + Clone + Send + 'static) -> std::io::Result<ThreadPool> {
        let shared = Arc::new(Shared {
            gate: Gate::default(),
            job: UnsafeCell::new(Job { call: |_, _| (), task: std::ptr::null() }),
            left: (0..=workers).map(|_| Tasks::default()).collect(),
            stop: AtomicBool::new(false),
            parked: (0..workers).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
        });
        let mut pool = ThreadPool { shared, workers: Vec::with_capacity(workers), busy: AtomicBool::new(false) };
        for index in 0..workers {
            let (shared, start) = (pool.shared.clone(), start.clone());
            let body = move || {
                start(index);
                shared.work(index);
            };
            pool.workers.push(thread::Builder::new().name(format!("compute-{}", index + 1)).spawn(body)?);
        }
        Ok(pool)
    }

    pub(crate) fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Runs `task(0..tasks)` on all threads and returns when all are done. The order is arbitrary, but a thread's next task is usually the
    /// following one. A panic in a task resumes in the caller, once no thread is inside any more.
    pub(crate) fn for_each<F: Fn(usize) + Sync>(&self, tasks: usize, task: &F) {
        if self.busy.swap(true, Ordering::Acquire) {
            return (0..tasks).for_each(task);
        }
        let call = |task: *const (), index: usize| {
            // SAFETY: `task` is the pointer below, to a closure that outlives the loop: see `finish`.
            unsafe { (*task.cast::<F>())(index) }
        };
        // SAFETY: the gate is closed with no worker inside, so no other thread accesses the job.
        unsafe { *self.shared.job.get() = Job { call, task: std::ptr::from_ref(task).cast() } };
        let threads = self.shared.left.len();
        for (thread, left) in self.shared.left.iter().enumerate() {
            left.deal(first_of(thread, threads, tasks)..first_of(thread + 1, threads, tasks));
        }
        self.shared.gate.open();
        for (parked, worker) in self.shared.parked.iter().zip(&self.workers) {
            if parked.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        self.shared.run_tasks(0);
        let panic = self.finish();
        self.busy.store(false, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Whether task `index` out of `tasks` is the first of some thread's range.
    pub(crate) fn begins(&self, index: usize, tasks: usize) -> bool {
        let threads = self.shared.left.len();
        (0..threads).any(|thread| first_of(thread, threads, tasks) == index)
    }

    /// Closes the gate and waits for the workers inside; afterwards no thread refers to the job any more.
    fn finish(&self) -> Option<Box<dyn Any + Send>> {
        self.shared.gate.close();
        let mut backoff = Backoff::default();
        while self.shared.gate.inside() > 0 {
            backoff.wait();
        }
        self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker's tasks do not unwind through it, so the result has no information.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// The main loop of a worker.
    fn work(&self, index: usize) {
        let mut seen = 0;
        while let Some(entered) = self.wait(index, seen) {
            seen = entered;
            self.run_tasks(index + 1);
            self.gate.leave();
        }
    }

    /// Waits for a loop after number `seen`, and enters it. Returns `None` when the pool ends.
    fn wait(&self, index: usize, seen: u32) -> Option<u32> {
        let mut backoff = Backoff::default();
        loop {
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
            if let Some(number) = self.gate.enter(seen) {
                return Some(number);
            }
            if backoff.wait() {
                continue;
            }
            // A caller that opens the gate from here on sees the flag and unparks us; one that opened it before, we see
            // below.
            self.parked[index].store(true, Ordering::SeqCst);
            if !self.gate.is_open_after(seen) && !self.stop.load(Ordering::SeqCst) {
                thread::park();
            }
            self.parked[index].store(false, Ordering::SeqCst);
            backoff = Backoff::default();
        }
    }

    /// Runs tasks until none are left: those of thread `own`, then those of other threads. Only for workers inside, and the caller of the
    /// loop.
    fn run_tasks(&self, own: usize) {
        // SAFETY: the job does not change while any worker is inside.
        let job = unsafe { *self.job.get() };
        let work = || {
            while let Some(index) = self.left[own].take_first().or_else(|| self.take_from_others()) {
                // SAFETY: the caller of `for_each` keeps the closure alive until no worker is inside.
                unsafe { (job.call)(job.task, index) };
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
            self.left.iter().for_each(|left| left.deal(0..0));
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }

    /// Takes the last task of the thread with the most tasks left.
    fn take_from_others(&self) -> Option<usize> {
        loop {
            let most = self.left.iter().max_by_key(|left| left.len()).filter(|left| left.len() > 0)?;
            if let Some(index) = most.take_last() {
                return Some(index);
            }
        }
    }
}

/// The first task assigned to thread `thread`.
fn first_of(thread: usize, threads: usize, tasks: usize) -> usize {
    tasks * thread / threads
}

/// A range of tasks: start (32 bits) and end. It has cache lines of its own, as usually only one thread writes it.
#[derive(Default)]
#[repr(align(128))]
struct Tasks(AtomicU64);

impl Tasks {
    fn deal(&self, tasks: Range<usize>) {
        let [start, end] = [tasks.start, tasks.end].map(|task| u32::try_from(task).expect("fewer than 2^32 tasks"));
        self.0.store(u64::from(start) << 32 | u64::from(end), Ordering::Relaxed);
    }

    fn range(tasks: u64) -> Range<usize> {
        (tasks >> 32) as usize..tasks as u32 as usize
    }

    fn len(&self) -> usize {
        Self::range(self.0.load(Ordering::Relaxed)).len()
    }

    /// Takes the first task, only for the thread that owns the range. The start advances at each call, even past the end.
    fn take_first(&self) -> Option<usize> {
        Self::range(self.0.fetch_add(1 << 32, Ordering::Relaxed)).next()
    }

    fn take_last(&self) -> Option<usize> {
        let take = |tasks| (!Self::range(tasks).is_empty()).then(|| tasks - 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok().and_then(|tasks| Self::range(tasks).next_back())
    }
}

/// The number of the loop (32 bits), whether it is open (1 bit), and the number of workers inside (31 bits).
#[derive(Default)]
struct Gate(AtomicU64);

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

fn number(gate: u64) -> u32 {
    (gate >> 32) as u32
}

impl Gate {
    /// Opens the gate, which must be closed with no worker inside.
    fn open(&self) {
        let next = number(self.0.load(Ordering::Relaxed)).wrapping_add(1);
        self.0.store(u64::from(next) << 32 | OPEN, Ordering::SeqCst);
    }

    fn close(&self) {
        self.0.fetch_and(!OPEN, Ordering::AcqRel);
    }

    fn is_open_after(&self, seen: u32) -> bool {
        let gate = self.0.load(Ordering::SeqCst);
        gate & OPEN != 0 && number(gate) != seen
    }

    /// Enters if the gate is open for a loop other than number `seen`; returns the number of that loop.
    fn enter(&self, seen: u32) -> Option<u32> {
        let gate = self.0.load(Ordering::Relaxed);
        if gate & OPEN == 0 || number(gate) == seen {
            return None;
        }
        self.0.compare_exchange(gate, gate + 1, Ordering::AcqRel, Ordering::Relaxed).ok().map(number)
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    fn inside(&self) -> u64 {
        self.0.load(Ordering::Acquire) & INSIDE
    }
}

/// Spins, then spins and yields, then tells the worker to park.
#[derive(Default)]
pub(crate) struct Backoff {
    rounds: u32,
    since: Option<Instant>,
}

impl Backoff {
    /// Waits a little. Returns `false` when the wait has been long enough.
    pub(crate) fn wait(&mut self) -> bool {
        spin_loop();
        self.rounds += 1;
        if !self.rounds.is_multiple_of(ROUNDS_PER_LOOK) {
            return true;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited > SPIN {
            thread::yield_now();
        }
        waited < SPIN_AND_YIELD
    }
}

/// Rounds between two looks at the clock; reading it costs more than a round.
const ROUNDS_PER_LOOK: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    fn pool(workers: usize) -> ThreadPool {
        ThreadPool::new(workers, |_| ()).unwrap()
    }

    #[test]
    fn every_task_of_many_loops_runs_once() {
        for workers in [0, 1, 3] {
            let pool = pool(workers);
            for round in 0..2000 {
                let tasks = round % 13;
                let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(tasks, &|i| _ = runs[i].fetch_add(1, Ordering::Relaxed));
                assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1));
                if round % 500 == 0 {
                    // Long enough for the workers to park.
                    thread::sleep(3 * SPIN_AND_YIELD);
                }
            }
        }
    }

    #[test]
    fn each_thread_is_dealt_neighbouring_tasks() {
        let pool = pool(2);
        assert_eq!((0..7).filter(|task| pool.begins(*task, 7)).collect::<Vec<_>>(), [0, 2, 4]);
        assert_eq!((0..2).filter(|task| pool.begins(*task, 2)).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn workers_take_part() {
        let pool = pool(2);
        let threads = Mutex::new(std::collections::HashSet::new());
        let arrived = AtomicUsize::new(0);
        pool.for_each(3, &|_| {
            threads.lock().unwrap().insert(thread::current().id());
            arrived.fetch_add(1, Ordering::SeqCst);
            // No thread takes two tasks, so this ends only if three threads take one each.
            while arrived.load(Ordering::SeqCst) < 3 {
                thread::yield_now();
            }
        });
        assert_eq!(threads.lock().unwrap().len(), 3);
    }

    #[test]
    fn others_do_the_tasks_of_a_thread_that_is_held_up() {
        let (pool, done) = (pool(2), AtomicUsize::new(0));
        for round in 1..20 {
            pool.for_each(100, &|i| {
                // The caller's first task ends only when all others are done.
                while i == 0 && done.load(Ordering::SeqCst) < 100 * round - 1 {
                    thread::yield_now();
                }
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        assert_eq!(done.into_inner(), 1900);
    }

    #[test]
    fn a_panic_goes_on_in_the_caller_and_the_pool_lives() {
        let pool = pool(2);
        for _ in 0..50 {
            let result = catch_unwind(AssertUnwindSafe(|| pool.for_each(100, &|i| assert_ne!(i, 37, "the task that fails"))));
            let message = *result.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains("the task that fails"));
            let sum = AtomicUsize::new(0);
            pool.for_each(100, &|i| _ = sum.fetch_add(i, Ordering::Relaxed));
            assert_eq!(sum.into_inner(), 4950);
        }
    }

    #[test]
    fn loops_within_loops_and_from_other_threads_do_not_block() {
        let pool = pool(2);
        let runs = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| pool.for_each(20, &|_| pool.for_each(5, &|_| _ = runs.fetch_add(1, Ordering::Relaxed))));
            }
        });
        assert_eq!(runs.into_inner(), 300);
    }
}

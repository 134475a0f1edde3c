//! A mask in progress, and the time for which a step waits for it.

use parking_lot::{Condvar, Mutex};
use std::{
    fmt,
    sync::OnceLock,
    time::{Duration, Instant},
};
use tidemill_proto::step::{Mask, Withheld};

/// A mask in progress.
#[derive(Default)]
pub(super) struct Cell {
    mask: OnceLock<Result<Mask, String>>,
    waiting: Mutex<Waiting>,
    known: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// Whether the engine is to be told of the mask.
    is_awaited: bool,
    /// Whether a sampler has gone on without the mask, so that all others of its step must as well.
    is_late: bool,
}

impl Cell {
    /// Returns whether the engine is to be told.
    #[must_use]
    pub(super) fn set(&self, mask: Result<Mask, String>) -> bool {
        let waiting = self.waiting.lock();
        let _ = self.mask.set(mask);
        self.known.notify_all();
        waiting.is_awaited
    }

    #[cfg(test)]
    pub(super) fn is_known(&self) -> bool {
        self.mask.get().is_some()
    }

    /// Waits as long as the step has patience.
    pub(super) fn wait(&self, patience: &Patience) -> Result<&Mask, Withheld<'_>> {
        let mut waiting = self.waiting.lock();
        if self.mask.get().is_none() && !waiting.is_late {
            let (started, left) = (Instant::now(), patience.left());
            let is_missing = |_: &mut Waiting| self.mask.get().is_none();
            self.known.wait_while_until(&mut waiting, is_missing, started + left);
            patience.spend(started.elapsed());
            waiting.is_late = self.mask.get().is_none();
        }
        match self.mask.get() {
            Some(mask) if !waiting.is_late => mask.as_ref().map_err(|reason| Withheld::Failed(reason)),
            _ => Err(Withheld::Late),
        }
    }

    /// Whether a new step may have the row: the mask is known, or it is `expected` and has not been late. Otherwise the engine is told when
    /// it is known.
    pub(super) fn is_due(&self, expected: bool) -> bool {
        let mut waiting = self.waiting.lock();
        waiting.is_late &= self.mask.get().is_none();
        waiting.is_awaited = self.mask.get().is_none() && (waiting.is_late || !expected);
        !waiting.is_awaited
    }
}

impl fmt::Debug for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cell").field("known", &self.mask.get().is_some()).finish()
    }
}

/// The time for which masks may still delay steps: a share of all time, of which little is saved.
#[derive(Debug)]
pub(super) struct Patience {
    most: Duration,
    /// The rest, and the time up to which it has grown.
    left: Mutex<(Duration, Instant)>,
}

/// The share of the time for which masks may delay steps.
const SHARE: u32 = 10;

impl Patience {
    /// Creates patience for at most `most` in one step.
    pub(super) fn new(most: Duration) -> Self {
        Self { most, left: Mutex::new((most, Instant::now())) }
    }

    /// Begins a step.
    pub(super) fn renew(&self) {
        let (left, at) = &mut *self.left.lock();
        *left = self.most.min(*left + at.elapsed() / SHARE);
        *at = Instant::now();
    }

    fn left(&self) -> Duration {
        self.left.lock().0
    }

    fn spend(&self, time: Duration) {
        let left = &mut self.left.lock().0;
        *left = left.saturating_sub(time);
    }
}

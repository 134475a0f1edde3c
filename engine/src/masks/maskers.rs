//! The threads that compute masks, by the token before each. Groups of requests take turns, and slow sequences have threads of their own,
//! which give way to all others: however long their masks take, the next one of any other sequence finds a thread.

use super::{Inbox, cell::Cell, unwinding};
use crate::{engine::Event, turns::Turns};
use parking_lot::Mutex;
use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use tidemill_grammar::Matcher;
use tidemill_net::process;
use tidemill_proto::{block::Token, step::Mask};

/// The most threads that compute masks. More would not find enough sequences to share.
const MASKERS_MAX: usize = 4;
/// The most threads for slow sequences, beside those.
const SLOW_MASKERS_MAX: usize = 2;
/// The average CPU time of a mask from which a sequence is slow. The forward pass hides less, and the masks of complex schemas take about
/// one millisecond on average, with the largest vocabularies.
const SLOW: Duration = Duration::from_millis(2);
/// The inverse of the newest mask's share in the average: the first masks in a part of a grammar take ten times as long as later ones.
const MASKS: u32 = 16;

/// The queues of the maskers.
pub(super) struct Maskers {
    fast: Turns<Advance>,
    slow: Turns<Advance>,
}

/// A sequence's matcher.
pub(super) struct Follower {
    group: u64,
    state: Mutex<(Matcher, Pace)>,
    is_slow: AtomicBool,
}

/// A token to apply, and the place for the mask that follows it.
struct Advance {
    follower: Arc<Follower>,
    token: Token,
    next: Arc<Cell>,
}

impl Maskers {
    /// Starts the threads, up to `threads` of each kind.
    pub(super) fn start(threads: usize, inbox: &Inbox) -> io::Result<Arc<Self>> {
        let maskers = Arc::new(Self { fast: Turns::new(), slow: Turns::new() });
        for i in 0..threads.clamp(1, MASKERS_MAX) {
            let (maskers, inbox) = (Arc::clone(&maskers), inbox.clone());
            thread::Builder::new().name(format!("masks-{i}")).spawn(move || advance(&maskers.fast, &inbox))?;
        }
        for i in 0..threads.clamp(1, SLOW_MASKERS_MAX) {
            let (maskers, inbox) = (Arc::clone(&maskers), inbox.clone());
            thread::Builder::new().name(format!("slow-masks-{i}")).spawn(move || {
                process::give_way();
                advance(&maskers.slow, &inbox);
            })?;
        }
        Ok(maskers)
    }

    /// Begins the mask that follows a token.
    pub(super) fn begin(&self, follower: &Arc<Follower>, token: Token) -> Arc<Cell> {
        let next = Arc::<Cell>::default();
        let queue = if follower.is_slow() { &self.slow } else { &self.fast };
        queue.put(follower.group, Advance { follower: Arc::clone(follower), token, next: Arc::clone(&next) });
        next
    }

    /// Ends the threads when their queues are empty.
    pub(super) fn close(&self) {
        self.fast.close();
        self.slow.close();
    }
}

impl Follower {
    pub(super) fn new(group: u64, matcher: Matcher) -> Self {
        Self { group, state: Mutex::new((matcher, Pace::default())), is_slow: AtomicBool::new(false) }
    }

    /// Whether the next masks may take long, by the last ones.
    pub(super) fn is_slow(&self) -> bool {
        self.is_slow.load(Ordering::Relaxed)
    }

    /// Applies a token, if there is one, and computes the mask that follows.
    pub(super) fn mask(&self, token: Option<Token>) -> Result<Mask, String> {
        let (matcher, pace) = &mut *self.state.lock();
        let before = matcher.cpu();
        let mask = token.map_or(Ok(()), |token| matcher.advance(token)).and_then(|()| matcher.mask());
        pace.note(matcher.cpu() - before);
        self.is_slow.store(pace.is_slow(), Ordering::Relaxed);
        mask.map_err(|error| error.to_string())
    }
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower").field("group", &self.group).field("is_slow", &self.is_slow()).finish_non_exhaustive()
    }
}

/// The loop of a masker's thread.
fn advance(queue: &Turns<Advance>, inbox: &Inbox) {
    while let Some(Advance { follower, token, next }) = queue.take() {
        if next.set(unwinding(|| follower.mask(Some(token)))) {
            // A closed inbox means that the engine has ended.
            let _ = inbox.blocking_send(Event::Masked);
        }
    }
}

/// The average CPU time of a sequence's last masks.
#[derive(Default)]
struct Pace(Duration);

impl Pace {
    fn note(&mut self, took: Duration) {
        self.0 = self.0 - self.0 / MASKS + took / MASKS;
    }

    fn is_slow(&self) -> bool {
        self.0 > SLOW
    }
}

#[cfg(test)]
impl Follower {
    /// Delays the sequence's masks until the returned value is dropped.
    pub(super) fn delay(&self) -> impl Drop + '_ {
        self.state.lock()
    }

    /// Notes a mask that took this long.
    pub(super) fn note(&self, took: Duration) {
        let pace = &mut self.state.lock().1;
        pace.note(took);
        self.is_slow.store(pace.is_slow(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_is_as_slow_as_its_last_masks() {
        let mut pace = Pace::default();
        pace.note(Duration::from_millis(15));
        assert!(!pace.is_slow(), "the first mask of a part");
        for _ in 0..3 {
            pace.note(Duration::from_millis(15));
        }
        assert!(pace.is_slow());
        for _ in 0..100 {
            pace.note(Duration::from_millis(1));
        }
        assert!(!pace.is_slow());
        pace.note(Duration::from_millis(300));
        assert!(pace.is_slow());
    }
}

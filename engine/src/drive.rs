//! The loop that drives an engine on its own thread, and the task that feeds its inbox.

use crate::engine::Event;
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};
use tidemill_net::uplink::LinkEvent;
use tidemill_proto::ids::LinkId;
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinHandle},
};

/// The engine ended without being told to.
#[derive(Debug, thiserror::Error)]
#[error("the engine ended by itself: {0}")]
pub struct EngineEnded(String);

/// An engine, as seen by its thread.
pub(crate) trait Driven {
    type Event;
    /// After this error, nothing computed since the last step may be used, and the engine cannot continue.
    type Error: std::error::Error;

    /// Applies an event. `Break` ends the engine.
    fn apply(&mut self, event: Self::Event) -> Result<ControlFlow<()>, Self::Error>;

    /// Plans and computes one step; `false` if there was nothing to compute.
    fn step(&mut self) -> Result<bool, Self::Error>;

    /// Called after an error: hands all jobs back, so that they continue elsewhere.
    fn give_up(&mut self, error: &Self::Error);
}

/// Drives an engine until it ends or fails, or its inbox is closed.
pub(crate) fn drive<E: Driven>(mut engine: E, inbox: mpsc::Receiver<E::Event>) -> Result<(), EngineEnded> {
    drive_until_end(&mut engine, inbox).map_err(|error| {
        engine.give_up(&error);
        EngineEnded(error.to_string())
    })
}

fn drive_until_end<E: Driven>(engine: &mut E, mut inbox: mpsc::Receiver<E::Event>) -> Result<(), E::Error> {
    let mut last_step = Duration::ZERO;
    loop {
        // The bounds keep a flood of events from delaying the next step.
        let (started, time) = (Instant::now(), EVENTS_MIN.max(last_step / EVENTS_SHARE));
        for _ in 0..EVENTS_PER_STEP {
            let Ok(event) = inbox.try_recv() else { break };
            if engine.apply(event)?.is_break() {
                return Ok(());
            }
            if started.elapsed() >= time {
                break;
            }
        }
        let started = Instant::now();
        let computed = engine.step()?;
        last_step = started.elapsed();
        if !computed {
            let Some(event) = inbox.blocking_recv() else { return Ok(()) };
            if engine.apply(event)?.is_break() {
                return Ok(());
            }
        }
    }
}

/// The most events applied between two steps.
const EVENTS_PER_STEP: usize = 256;
/// The share of the last step's time that events may take: when many blocks come at once, some of which the engine's thread copies, a token
/// is delayed by no more than this.
const EVENTS_SHARE: u32 = 4;
/// The time that events may take in any case, for short steps.
const EVENTS_MIN: Duration = Duration::from_millis(2);

/// Forwards link events to an engine's inbox until `shutdown`. An engine that ends before that is broken, and the process must not pretend
/// to work. The caller keeps `links` until they are closed: a link whose messages are not received ends at once, and loses everything it
/// still had to send.
pub(crate) async fn pump(
    links: &mut mpsc::Receiver<(LinkId, LinkEvent)>,
    inbox: &mpsc::Sender<Event>,
    engine: &mut JoinHandle<Result<(), EngineEnded>>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), EngineEnded> {
    tokio::pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => return Ok(()),
            ended = &mut *engine => {
                joined(ended)?;
                return Err(EngineEnded("no shutdown was requested".into()));
            }
            Some((link, event)) = links.recv() => {
                // A closed inbox means that the engine has ended, which the next turn sees.
                let _ = inbox.send(Event::Link(link, event)).await;
            }
        }
    }
}

/// The outcome of an engine's thread.
pub(crate) fn joined(ended: Result<Result<(), EngineEnded>, JoinError>) -> Result<(), EngineEnded> {
    ended.unwrap_or_else(|panic| Err(EngineEnded(panic.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// An engine that fails in its third step.
    struct Failing {
        steps: usize,
        given_up: std::sync::mpsc::Sender<String>,
    }

    impl Driven for Failing {
        type Event = ();
        type Error = io::Error;

        fn apply(&mut self, (): ()) -> io::Result<ControlFlow<()>> {
            Ok(ControlFlow::Continue(()))
        }

        fn step(&mut self) -> io::Result<bool> {
            self.steps += 1;
            if self.steps < 3 { Ok(true) } else { Err(io::Error::other("the device failed")) }
        }

        fn give_up(&mut self, error: &io::Error) {
            let _ = self.given_up.send(error.to_string());
        }
    }

    /// An engine that takes a millisecond for each event, and counts those before its first step.
    struct Slow {
        applied: usize,
        before_first_step: Option<usize>,
    }

    impl Driven for &mut Slow {
        type Event = ();
        type Error = io::Error;

        fn apply(&mut self, (): ()) -> io::Result<ControlFlow<()>> {
            std::thread::sleep(Duration::from_millis(1));
            self.applied += 1;
            Ok(ControlFlow::Continue(()))
        }

        fn step(&mut self) -> io::Result<bool> {
            self.before_first_step.get_or_insert(self.applied);
            Ok(false)
        }

        fn give_up(&mut self, _error: &io::Error) {}
    }

    #[test]
    fn a_step_waits_for_some_slow_events_and_not_for_all() {
        let mut engine = Slow { applied: 0, before_first_step: None };
        let (inbox, events) = mpsc::channel(EVENTS_PER_STEP);
        for _ in 0..EVENTS_PER_STEP {
            inbox.try_send(()).unwrap();
        }
        drop(inbox);
        drive(&mut engine, events).unwrap();
        assert_eq!(engine.applied, EVENTS_PER_STEP, "none is lost");
        assert!((1..=10).contains(&engine.before_first_step.unwrap()), "{:?}", engine.before_first_step);
    }

    #[test]
    fn an_engine_that_fails_gives_its_work_up_and_says_why() {
        let (given_up, reasons) = std::sync::mpsc::channel();
        let (_inbox, events) = mpsc::channel(1);
        let ended = drive(Failing { steps: 0, given_up }, events);
        assert!(ended.unwrap_err().to_string().contains("the device failed"));
        assert_eq!(reasons.into_iter().collect::<Vec<_>>(), ["the device failed"]);
    }
}

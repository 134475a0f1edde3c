//! Sends sessions, in an open loop or a closed one.
//!
//! - **Open**: each session begins at its time, regardless of the server. Latencies count from the time at which a request was *due*.
//! - **Closed**: a number of users, each of whom begins the next session when the last one has ended. A slow server is asked less, so a
//!   stall affects as many requests as there are users, and no more: a closed loop cannot show how a server performs at a given load.

use super::{
    progress::Progress,
    summary::{Failure, Slo},
    target::{History, Target},
    timeline::Answer,
    workload::Session,
};
use anyhow::Context;
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep_until},
};

/// One request and its outcome.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The index of the session, in the given order.
    pub session: usize,
    /// The time at which it was due, since the start.
    pub due: Duration,
    /// The time from due to sent, without waiting for a slot.
    pub lag: Duration,
    /// The index of the turn, from 0.
    pub turn: u32,
    pub outcome: Result<Answer, Failure>,
}

/// The state that all sessions share.
#[derive(Clone)]
pub struct Driver {
    pub target: Target,
    pub start: Instant,
    /// The permits for concurrent requests.
    pub slots: Arc<Semaphore>,
    pub slo: Slo,
    pub progress: Arc<Progress>,
}

impl Driver {
    /// Runs a session at each of `arrivals`. Samples come in no particular order.
    pub async fn open(&self, sessions: Vec<Session>, arrivals: Vec<Duration>) -> anyhow::Result<Vec<Sample>> {
        let mut tasks = JoinSet::new();
        let mut samples = Vec::with_capacity(sessions.len());
        for (session, at) in sessions.into_iter().enumerate().zip(arrivals) {
            let due = self.start.checked_add(at).context("the rate is so low that the last request is due in ages: fewer --requests?")?;
            sleep_until(due).await;
            let driver = self.clone();
            tasks.spawn(async move { driver.session(session.0, &session.1, due).await });
            while let Some(joined) = tasks.try_join_next() {
                samples.extend(joined.context("a session's task broke")?);
            }
        }
        while let Some(joined) = tasks.join_next().await {
            samples.extend(joined.context("a session's task broke")?);
        }
        Ok(samples)
    }

    /// Runs the sessions with `users` concurrent users.
    pub async fn closed(&self, sessions: Vec<Session>, users: u32) -> anyhow::Result<Vec<Sample>> {
        let queue = Arc::new(Mutex::new(sessions.into_iter().enumerate().collect::<VecDeque<_>>()));
        let mut tasks = JoinSet::new();
        for _ in 0..users {
            let (driver, queue) = (self.clone(), queue.clone());
            tasks.spawn(async move {
                let mut samples = Vec::new();
                let mut begun = driver.start;
                let next = || queue.lock().expect("nobody panics with the lock").pop_front();
                while let Some((number, session)) = next() {
                    // A user also thinks between sessions.
                    let think = session.turns.first().map_or(Duration::ZERO, |turn| turn.think);
                    samples.extend(driver.session(number, &session, begun + think).await);
                    begun = Instant::now();
                }
                samples
            });
        }
        let mut samples = Vec::new();
        while let Some(joined) = tasks.join_next().await {
            samples.extend(joined.context("a user's task broke")?);
        }
        Ok(samples)
    }

    /// Runs a session. The first turn is due at `due`, each later one when the user has thought about the previous answer. A failure ends
    /// it.
    async fn session(&self, number: usize, session: &Session, mut due: Instant) -> Vec<Sample> {
        let mut samples = Vec::with_capacity(session.turns.len());
        let mut history = History::new();
        for (turn, place) in session.turns.iter().zip(0..) {
            if place > 0 {
                due = Instant::now() + turn.think;
            }
            sleep_until(due).await;
            let lag = due.elapsed();
            let slot = self.slots.acquire().await;
            self.progress.sent();
            let outcome = self.target.ask(&turn.ask, &mut history, due).await;
            drop(slot);
            self.progress.done(&outcome, self.slo);
            let failed = outcome.is_err();
            let due = due.saturating_duration_since(self.start);
            samples.push(Sample { session: number, due, lag, turn: place, outcome });
            if failed {
                break;
            }
        }
        samples
    }
}

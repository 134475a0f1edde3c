//! The loop that drives an engine on its own thread, and the task that feeds its inbox.

use std::ops::ControlFlow;
use tidemill_net::uplink::LinkEvent;
use tidemill_proto::ids::LinkId;
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinHandle},
};

/// The engine ended before anybody told it to.
#[derive(Debug, thiserror::Error)]
#[error("the engine ended by itself: {0}")]
pub struct EngineEnded(String);

/// What computes: it owns a model and its device memory, and is driven by one thread.
pub trait Engine {
    type Input;
    /// What computes failed: nothing that it computed since its last step may be used, and it cannot go on.
    type Error: std::error::Error;

    /// Takes in something that arrived. `Break` ends the engine.
    fn apply(&mut self, input: Self::Input) -> Result<ControlFlow<()>, Self::Error>;

    /// Plans and computes one step; `false` if there was nothing to compute.
    fn step(&mut self) -> Result<bool, Self::Error>;

    /// After an error: hands all work back, so that it goes on elsewhere.
    fn give_up(&mut self, error: &Self::Error);
}

/// Drives an engine until it ends, fails or its inbox is closed: between steps, everything that has arrived is applied.
pub fn drive<E: Engine>(mut engine: E, inbox: mpsc::Receiver<E::Input>) -> Result<(), EngineEnded> {
    drive_until_end(&mut engine, inbox).map_err(|error| {
        engine.give_up(&error);
        EngineEnded(error.to_string())
    })
}

fn drive_until_end<E: Engine>(engine: &mut E, mut inbox: mpsc::Receiver<E::Input>) -> Result<(), E::Error> {
    loop {
        // The bound keeps a flood from delaying the next step.
        for _ in 0..INPUTS_PER_STEP {
            let Ok(input) = inbox.try_recv() else { break };
            if engine.apply(input)?.is_break() {
                return Ok(());
            }
        }
        if !engine.step()? {
            let Some(input) = inbox.blocking_recv() else { return Ok(()) };
            if engine.apply(input)?.is_break() {
                return Ok(());
            }
        }
    }
}

/// Inputs applied between two steps.
const INPUTS_PER_STEP: usize = 256;

/// Forwards what happens on the links to an engine's inbox, until `shutdown`. The caller keeps `links` until they are closed: a link
/// whose messages nobody takes ends at once, with what it still had to send. An engine that ends before that is broken:
/// the process must not pretend to work.
pub async fn pump<I>(
    links: &mut mpsc::Receiver<(LinkId, LinkEvent)>,
    inbox: &mpsc::Sender<I>,
    wrap: fn(LinkId, LinkEvent) -> I,
    engine: &mut JoinHandle<Result<(), EngineEnded>>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), EngineEnded> {
    tokio::pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => return Ok(()),
            ended = &mut *engine => {
                joined(ended)?;
                return Err(EngineEnded("nobody told it to".into()));
            }
            Some((link, event)) = links.recv() => {
                // A closed inbox is the engine's end, which the next turn sees.
                let _ = inbox.send(wrap(link, event)).await;
            }
        }
    }
}

/// How an engine's thread ended.
pub fn joined(ended: Result<Result<(), EngineEnded>, JoinError>) -> Result<(), EngineEnded> {
    ended.unwrap_or_else(|panic| Err(EngineEnded(panic.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// Fails in its third step.
    struct Failing {
        steps: usize,
        given_up: std::sync::mpsc::Sender<String>,
    }

    impl Engine for Failing {
        type Input = ();
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

    #[test]
    fn an_engine_that_fails_gives_its_work_up_and_says_why() {
        let (given_up, reasons) = std::sync::mpsc::channel();
        let (_inbox, inputs) = mpsc::channel(1);
        let ended = drive(Failing { steps: 0, given_up }, inputs);
        assert!(ended.unwrap_err().to_string().contains("the device failed"));
        assert_eq!(reasons.into_iter().collect::<Vec<_>>(), ["the device failed"]);
    }
}

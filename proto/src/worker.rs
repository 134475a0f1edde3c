//! What every worker process has alike: its name, coordinators and identity, and the loop that drives an engine.

use crate::{
    config::{ConfigError, invalid, required},
    identity::{Identity, IdentityError},
    ids::LinkId,
    message::{Host, Register, RoleInfo},
    uplink::LinkEvent,
};
use serde::{Deserialize, Serialize};
use std::{fs, net::SocketAddr, ops::ControlFlow, path::PathBuf};
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinHandle},
};

/// Section `[worker]` of a worker's config file, and its flags.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[command(next_help_heading = "[worker]")]
pub struct WorkerFlags {
    /// Name shown to people
    #[arg(long)]
    pub name: Option<String>,
    /// Which machine this is: KV blocks go through shared memory between processes that say the same, and over QUIC between
    /// others. Different names let one machine play several (default: this boot of this machine)
    #[arg(long)]
    pub host: Option<String>,
    /// QUIC addresses of the coordinators, separated by commas
    #[arg(long, value_delimiter = ',')]
    pub coordinators: Option<Vec<SocketAddr>>,
    /// Directory with ca.pem, node.pem and node.key
    #[arg(long)]
    pub pki: Option<PathBuf>,
    /// Address that the worker's QUIC sockets bind to
    #[arg(long)]
    pub bind: Option<SocketAddr>,
    /// Log filter: error, warn, info, debug, or tracing directives
    #[arg(long)]
    pub log: Option<String>,
    /// End when standard input ends
    #[arg(long)]
    pub exit_with_parent: Option<bool>,
}

/// The same, checked.
#[derive(Debug)]
pub struct WorkerSettings {
    pub name: String,
    pub host: Host,
    pub coordinators: Vec<SocketAddr>,
    pub identity: Identity,
    pub bind: SocketAddr,
    pub log: String,
    pub exit_with_parent: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("the engine ended by itself: {0}")]
    EngineEnded(String),
}

impl WorkerFlags {
    /// `role` names the worker where the operator does not.
    pub fn check(self, role: &str) -> Result<WorkerSettings, WorkerError> {
        let coordinators = required(Some("worker"), "coordinators", self.coordinators)?;
        if coordinators.is_empty() {
            return Err(invalid("coordinators", "[]", "a worker needs at least one").into());
        }
        let name = self.name.unwrap_or_else(|| format!("{role}-{}", std::process::id()));
        if let Some(host) = self.host.as_ref().filter(|host| !(1..=HOST_BYTES_MAX).contains(&host.len())) {
            return Err(invalid("host", host, format!("must have 1 to {HOST_BYTES_MAX} bytes")).into());
        }
        Ok(WorkerSettings {
            host: self.host.map_or_else(|| this_host(&name), Host),
            name,
            coordinators,
            identity: Identity::load(&required(Some("worker"), "pki", self.pki)?)?,
            bind: self.bind.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0))),
            log: self.log.unwrap_or_else(|| "info".into()),
            exit_with_parent: self.exit_with_parent.unwrap_or(false),
        })
    }
}

/// Longest name of a host.
pub const HOST_BYTES_MAX: usize = 128;

/// What all processes on this machine, and no others, find here. Where there is no such thing, a process shares memory with
/// nobody.
fn this_host(name: &str) -> Host {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned());
    Host(boot.filter(|id| (1..=HOST_BYTES_MAX).contains(&id.len())).unwrap_or_else(|| format!("{name}-{}", std::process::id())))
}

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
pub fn drive<E: Engine>(mut engine: E, inbox: mpsc::Receiver<E::Input>) -> Result<(), WorkerError> {
    drive_until_end(&mut engine, inbox).map_err(|error| {
        engine.give_up(&error);
        WorkerError::EngineEnded(error.to_string())
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
    engine: &mut JoinHandle<Result<(), WorkerError>>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), WorkerError> {
    tokio::pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => return Ok(()),
            ended = &mut *engine => {
                joined(ended)?;
                return Err(WorkerError::EngineEnded("nobody told it to".into()));
            }
            Some((link, event)) = links.recv() => {
                // A closed inbox is the engine's end, which the next turn sees.
                let _ = inbox.send(wrap(link, event)).await;
            }
        }
    }
}

/// How an engine's thread ended.
pub fn joined(ended: Result<Result<(), WorkerError>, JoinError>) -> Result<(), WorkerError> {
    ended.unwrap_or_else(|panic| Err(WorkerError::EngineEnded(panic.to_string())))
}

impl WorkerSettings {
    /// This process, as it introduces itself to coordinators.
    pub fn register(&self, role: RoleInfo) -> Register {
        Register { name: self.name.clone(), host: self.host.clone(), pid: std::process::id(), role }
    }

    /// Resolves when the process should end.
    pub fn shutdown(&self) -> impl Future<Output = ()> + Send + 'static {
        crate::process::shutdown(self.exit_with_parent)
    }
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

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
use tokio::{sync::mpsc, task::JoinHandle};

/// Section `[worker]` of a worker's config file, and its flags.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
        let coordinators = required("coordinators", self.coordinators)?;
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
            identity: Identity::load(&required("pki", self.pki)?)?,
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

    /// Takes in something that arrived. `Break` ends the engine.
    fn apply(&mut self, input: Self::Input) -> ControlFlow<()>;

    /// Plans and computes one step; `false` if there was nothing to compute.
    fn step(&mut self) -> bool;
}

/// Drives an engine until it ends or its inbox is closed: between steps, everything that has arrived is applied.
pub fn drive<E: Engine>(mut engine: E, mut inbox: mpsc::Receiver<E::Input>) {
    loop {
        // The bound keeps a flood from delaying the next step.
        for _ in 0..INPUTS_PER_STEP {
            let Ok(input) = inbox.try_recv() else { break };
            if engine.apply(input).is_break() {
                return;
            }
        }
        if !engine.step() && inbox.blocking_recv().is_none_or(|input| engine.apply(input).is_break()) {
            return;
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
    engine: &mut JoinHandle<()>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), WorkerError> {
    tokio::pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => return Ok(()),
            ended = &mut *engine => return Err(WorkerError::EngineEnded(ended.err().map(|e| e.to_string()).unwrap_or_default())),
            Some((link, event)) = links.recv() => {
                // A closed inbox is the engine's end, which the next turn sees.
                let _ = inbox.send(wrap(link, event)).await;
            }
        }
    }
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

//! Settings that all worker processes have: name, host, coordinators, identity.

use crate::{
    config::{ConfigError, invalid, required},
    identity::{Identity, IdentityError, PeerRole},
    process::{LogFormat, Logging},
    uplink::{HEARTBEAT, HEARTBEAT_DEAD},
};
use serde::{Deserialize, Serialize};
use std::{fs, net::SocketAddr, ops::RangeInclusive, path::PathBuf, time::Duration};
use tidemill_proto::message::{Host, Register, RoleInfo};

/// Section `[worker]` of a worker's config file, and its flags.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[command(next_help_heading = "[worker]")]
pub struct WorkerFlags {
    /// Name in logs, `/cluster` and metrics [default: its certificate's]
    #[arg(long)]
    pub name: Option<String>,
    /// Name of this machine. KV blocks go through shared memory between processes with the same name, and over the network between others;
    /// with different names one machine can play several [default: this boot of this machine]
    #[arg(long)]
    pub host: Option<String>,
    /// Name of the model that this worker serves, or keeps blocks of, as the coordinator lists it; a pool node has to say it where several
    /// models are served [default: the only one that it can be]
    #[arg(long)]
    pub model_name: Option<String>,
    /// Addresses (UDP) of the coordinators, separated by commas; in the file a list [default: none, required]
    #[arg(long, value_delimiter = ',')]
    pub coordinators: Option<Vec<SocketAddr>>,
    /// Directory with ca.pem, node.pem and node.key [default: none, required]
    #[arg(long)]
    pub pki: Option<PathBuf>,
    /// Address (UDP) to bind; fix it for pool nodes, which are reached there [default: any port, on every address, or for a pool node on
    /// loopback]
    #[arg(long)]
    pub bind: Option<SocketAddr>,
    /// Milliseconds between two reports to each coordinator, from 50 to 2000: one without news of a worker for five seconds gives it up
    /// [default: 1000]
    #[arg(long)]
    pub heartbeat_ms: Option<u64>,
    /// Log filter: error, warn, info, debug, or directives such as info,tidemill_net=debug [default: info]
    #[arg(long)]
    pub log: Option<String>,
    /// Format of log lines: text, or json with an object a line [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Ends the process when its standard input ends; and `beat` appears on standard output each second while the event loop turns
    /// [default: false]
    #[arg(long)]
    pub exit_with_parent: Option<bool>,
}

/// [`WorkerFlags`], checked and with defaults filled in.
#[derive(Debug)]
pub struct WorkerSettings {
    pub name: String,
    pub role: PeerRole,
    pub host: Host,
    pub model_name: Option<String>,
    pub coordinators: Vec<SocketAddr>,
    pub identity: Identity,
    pub bind: SocketAddr,
    /// The interval of reports.
    pub heartbeat: Duration,
    pub log: Logging,
    pub exit_with_parent: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

impl WorkerFlags {
    /// `role` is part of the default name.
    pub fn check(self, role: &str) -> Result<WorkerSettings, WorkerError> {
        if required(Some("worker"), "coordinators", self.coordinators.as_ref())?.is_empty() {
            return Err(invalid("coordinators", "[]", "a worker needs at least one").into());
        }
        self.check_rest(role)
    }

    /// Checks the settings of a process that another worker reaches at its address, and that no coordinator knows.
    pub fn check_unregistered(self, role: &str) -> Result<WorkerSettings, WorkerError> {
        if let Some(first) = self.coordinators.iter().flatten().next() {
            return Err(invalid("coordinators", first, "is for a process that registers: leave it out for a stage").into());
        }
        required(Some("worker"), "bind", self.bind)?;
        self.check_rest(role)
    }

    fn check_rest(self, role: &str) -> Result<WorkerSettings, WorkerError> {
        let pki = required(Some("worker"), "pki", self.pki)?;
        let identity = Identity::load(&pki)?;
        let of_certificate = identity.name();
        let name = self.name.unwrap_or_else(|| match of_certificate.role {
            PeerRole::Any => format!("{role}-{}", std::process::id()),
            _ => of_certificate.name.clone(),
        });
        let role = match role.parse::<PeerRole>() {
            Ok(role) if of_certificate.is(role, Some(&name)) => role,
            _ => {
                let reason = format!("has a certificate for {of_certificate}, and this is {role}/{name}");
                return Err(invalid("pki", pki.display(), reason).into());
            }
        };
        if let Some(host) = self.host.as_ref().filter(|host| !(1..=HOST_BYTES_MAX).contains(&host.len())) {
            return Err(invalid("host", host, format!("must have 1 to {HOST_BYTES_MAX} bytes")).into());
        }
        let heartbeat = match self.heartbeat_ms.map(Duration::from_millis) {
            None => HEARTBEAT,
            Some(every) if HEARTBEATS.contains(&every) => every,
            Some(every) => {
                let (least, most) = (HEARTBEATS.start().as_millis(), HEARTBEATS.end().as_millis());
                return Err(invalid("heartbeat_ms", every.as_millis(), format!("must be from {least} to {most}")).into());
            }
        };
        Ok(WorkerSettings {
            host: self.host.map_or_else(|| this_host(&name), Host),
            name,
            role,
            model_name: self.model_name,
            coordinators: self.coordinators.unwrap_or_default(),
            identity,
            bind: self.bind.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0))),
            heartbeat,
            log: Logging::new(self.log, self.log_format),
            exit_with_parent: self.exit_with_parent.unwrap_or(false),
        })
    }
}

/// The intervals of reports that a worker may have. One that is late must not look like a dead worker.
const HEARTBEATS: RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_millis(2000);
const _: () = assert!(HEARTBEATS.end().as_millis() * 2 < HEARTBEAT_DEAD.as_millis());

/// The maximum length of a host name.
pub const HOST_BYTES_MAX: usize = 128;

/// The id of this boot, which is common to all processes on this machine and unknown to others. Without it, a process shares memory with no
/// other process.
fn this_host(name: &str) -> Host {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned());
    Host(boot.filter(|id| (1..=HOST_BYTES_MAX).contains(&id.len())).unwrap_or_else(|| format!("{name}-{}", std::process::id())))
}

impl WorkerSettings {
    /// The message with which this process registers.
    pub fn register(&self, role: RoleInfo) -> Register {
        let Self { name, host, model_name, .. } = self;
        Register { name: name.clone(), host: host.clone(), pid: std::process::id(), model: model_name.clone(), role }
    }

    /// Resolves when the process should end.
    pub fn shutdown(&self) -> impl Future<Output = ()> + Send + 'static {
        crate::process::shutdown(self.exit_with_parent)
    }
}

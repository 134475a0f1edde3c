//! Flags and config file of `tidemill-kvpool`.

use crate::{
    directory::Limits,
    eviction::{Policy, UnknownPolicy},
};
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};
use tidemill_proto::{
    config::{ConfigError, invalid, parse_bytes},
    worker::{WorkerError, WorkerFlags, WorkerSettings},
};

/// Sections `[worker]` and `[kvpool]` of the config file.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Flags {
    #[command(flatten)]
    pub worker: WorkerFlags,
    #[command(flatten)]
    pub kvpool: PoolFlags,
}

#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolFlags {
    /// Address that workers reach this node at (default: the one it binds to)
    #[arg(long)]
    pub advertise: Option<SocketAddr>,
    /// Memory for blocks, such as 4GiB; taken from the system as blocks arrive
    #[arg(long)]
    pub dram: Option<String>,
    /// Which blocks make room for new ones: lru, lfu, s3fifo or hit-density (the default)
    #[arg(long)]
    pub policy: Option<String>,
    /// Time from reserving slots to publishing them, in milliseconds
    #[arg(long)]
    pub put_deadline_ms: Option<u64>,
    /// Time for which a reader may claim the blocks it was handed, in milliseconds
    #[arg(long)]
    pub lease_ms: Option<u64>,
    /// When told to end, the node takes at most so many seconds to hand over what it holds to other nodes
    #[arg(long)]
    pub drain_s: Option<u64>,
}

#[derive(Debug)]
pub struct Settings {
    pub worker: WorkerSettings,
    /// `None`: the bound address.
    pub advertise: Option<SocketAddr>,
    pub dram_bytes: u64,
    pub policy: Policy,
    pub limits: Limits,
    pub drain: Duration,
}

/// Shorter than this, deadlines would pass while a batch is copied; longer, a dead peer would hold too much for too long.
const DEADLINE_MS: std::ops::RangeInclusive<u64> = 100..=600_000;

/// More than any node needs.
const DRAIN_S_MAX: u64 = 24 * 3600;

impl Flags {
    pub fn check(self) -> Result<Settings, WorkerError> {
        let Flags { mut worker, kvpool } = self;
        let bind = *worker.bind.get_or_insert(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        if kvpool.advertise.is_none() && is_wildcard(bind.ip()) {
            return Err(invalid("bind", bind, "listens on every address: say with `advertise` which one workers should use").into());
        }
        let dram = kvpool.dram.unwrap_or_else(|| "1GiB".into());
        let dram_bytes = parse_bytes(&dram).map_err(|reason| invalid("dram", &dram, reason))?;
        let policy = match kvpool.policy {
            Some(name) => name.parse().map_err(|unknown: UnknownPolicy| invalid("policy", &name, unknown.to_string()))?,
            None => Policy::default(),
        };
        let limits = Limits {
            put_deadline: deadline("put_deadline_ms", kvpool.put_deadline_ms.unwrap_or(10_000))?,
            lease: deadline("lease_ms", kvpool.lease_ms.unwrap_or(10_000))?,
        };
        let drain = Duration::from_secs(kvpool.drain_s.unwrap_or(20).min(DRAIN_S_MAX));
        Ok(Settings { worker: worker.check("kvpool")?, advertise: kvpool.advertise, dram_bytes, policy, limits, drain })
    }
}

fn is_wildcard(ip: IpAddr) -> bool {
    ip.is_unspecified()
}

fn deadline(key: &'static str, ms: u64) -> Result<Duration, ConfigError> {
    if DEADLINE_MS.contains(&ms) {
        Ok(Duration::from_millis(ms))
    } else {
        Err(invalid(key, ms, format!("must be from {} to {}", DEADLINE_MS.start(), DEADLINE_MS.end())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use tidemill_proto::config::Cli;

    fn resolve(pki: &std::path::Path, flags: &[&str]) -> Result<Settings, String> {
        let fixed = ["tidemill-kvpool", "--coordinators", "127.0.0.1:1", "--pki", pki.to_str().unwrap()];
        let cli = Cli::<Flags>::try_parse_from(fixed.iter().chain(flags)).map_err(|e| e.to_string())?;
        cli.resolve().map_err(|e| e.to_string())?.check().map_err(|e| e.to_string())
    }

    #[test]
    fn flags_become_settings_and_errors_name_the_key() {
        let pki = tempfile::tempdir().unwrap();
        tidemill_proto::identity::create(pki.path()).unwrap();
        let settings = resolve(pki.path(), &["--dram", "2GiB", "--lease-ms", "500", "--policy", "s3fifo"]).unwrap();
        assert_eq!(settings.policy, Policy::S3Fifo);
        assert_eq!((settings.dram_bytes, settings.limits.lease), (2 << 30, Duration::from_millis(500)));
        assert!(settings.worker.bind.ip().is_loopback());
        for (flags, key) in [
            (["--dram", "2GB"], "dram"),
            (["--policy", "fifo"], "policy"),
            (["--lease-ms", "1"], "lease_ms"),
            (["--put-deadline-ms", "99999999"], "put_deadline_ms"),
            (["--bind", "0.0.0.0:0"], "advertise"),
        ] {
            let error = resolve(pki.path(), &flags).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}

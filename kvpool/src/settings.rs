//! Flags and config file of `tidemill-kvpool`.

use crate::{
    core::{
        directory::Limits,
        eviction::{Policy, UnknownPolicy},
    },
    transport::rdma::DeviceNames,
};
use serde::{Deserialize, Serialize};
use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};
use tidemill_net::{
    config::{ConfigError, invalid, parse_bytes, required, within_memory},
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
#[command(next_help_heading = "[kvpool]")]
pub struct PoolFlags {
    /// Address that workers reach this node at; required if `bind` is a wildcard [default: the one that it binds]
    #[arg(long)]
    pub advertise: Option<SocketAddr>,
    /// Memory for blocks, such as 4GiB, taken from the system as blocks arrive [default: 1GiB]
    #[arg(long)]
    pub dram: Option<String>,
    /// Takes all of that memory in the background when the first client comes, not as blocks arrive [default: false]
    #[arg(long)]
    pub prefault: Option<bool>,
    /// Disk for blocks that leave memory, such as 64GiB, in `data` [default: none]
    #[arg(long)]
    pub nvme_capacity: Option<String>,
    /// Directory of the disk's blocks; what an earlier run left there is found again [default: none]
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// Rule by which blocks make room for new ones: lru, lfu, s3fifo or hit-density [default: hit-density]
    #[arg(long)]
    pub policy: Option<String>,
    /// Slots of memory, and of disk, that one tenant (requests with one salt) may fill, in percent [default: 100]
    #[arg(long)]
    pub tenant_share: Option<u8>,
    /// RDMA devices through which workers may reach its memory: all, none, or names such as mlx5_0,mlx5_1 [default: all]
    #[arg(long)]
    pub rdma_devices: Option<String>,
    /// Milliseconds from reserving slots to publishing them. The longer one of this and `lease_ms`, and half a second, bounds how long a
    /// dead peer holds memory (`reclaim_ms` in the log) [default: 10000]
    #[arg(long)]
    pub put_deadline_ms: Option<u64>,
    /// Milliseconds in which a reader may claim the blocks that it was handed [default: 10000]
    #[arg(long)]
    pub lease_ms: Option<u64>,
    /// Most seconds at the end to hand blocks over to other nodes [default: 20]
    #[arg(long)]
    pub drain_s: Option<u64>,
}

#[derive(Debug)]
pub struct Settings {
    pub worker: WorkerSettings,
    /// `None`: the bound address.
    pub advertise: Option<SocketAddr>,
    pub dram_bytes: u64,
    pub prefault: bool,
    /// `None`: blocks that leave memory are lost.
    pub nvme: Option<Nvme>,
    pub policy: Policy,
    /// Percent.
    pub tenant_share: u8,
    pub rdma: DeviceNames,
    pub limits: Limits,
    pub drain: Duration,
}

/// The tier behind DRAM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Nvme {
    pub dir: PathBuf,
    /// For blocks. Their index takes about 100 more bytes per block.
    pub capacity_bytes: u64,
}

/// Shorter deadlines would pass while a batch is copied; with longer ones, a dead peer would hold too much for too long.
const DEADLINE_MS: std::ops::RangeInclusive<u64> = 100..=600_000;

/// More than any node needs.
const DRAIN_S_MAX: u64 = 24 * 3600;

impl Flags {
    pub fn check(self) -> Result<Settings, WorkerError> {
        let Flags { mut worker, kvpool } = self;
        let bind = *worker.bind.get_or_insert(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        if kvpool.advertise.is_none() && bind.ip().is_unspecified() {
            return Err(invalid("bind", bind, "listens on every address: say with `advertise` which one workers should use").into());
        }
        let dram = kvpool.dram.unwrap_or_else(|| "1GiB".into());
        let dram_bytes = within_memory("dram", parse_bytes(&dram).map_err(|reason| invalid("dram", &dram, reason))?)?;
        if dram_bytes == 0 {
            return Err(invalid("dram", dram, "all blocks go through memory, also those on disk").into());
        }
        let capacity = kvpool.nvme_capacity.unwrap_or_else(|| "0".into());
        let nvme = match parse_bytes(&capacity).map_err(|reason| invalid("nvme_capacity", &capacity, reason))? {
            0 => None,
            capacity_bytes => Some(Nvme { dir: required(Some("kvpool"), "data", kvpool.data)?, capacity_bytes }),
        };
        let prefault = kvpool.prefault.unwrap_or(false);
        let policy = match kvpool.policy {
            Some(name) => name.parse().map_err(|unknown: UnknownPolicy| invalid("policy", &name, unknown.to_string()))?,
            None => Policy::default(),
        };
        let tenant_share = kvpool.tenant_share.unwrap_or(100);
        if !(1..=100).contains(&tenant_share) {
            return Err(invalid("tenant_share", tenant_share, "must be from 1 to 100 percent").into());
        }
        let rdma = match &kvpool.rdma_devices {
            Some(names) => names.parse().map_err(|reason: &str| invalid("rdma_devices", names, reason))?,
            None => DeviceNames::All,
        };
        let limits = Limits {
            put_deadline: deadline("put_deadline_ms", kvpool.put_deadline_ms.unwrap_or(10_000))?,
            lease: deadline("lease_ms", kvpool.lease_ms.unwrap_or(10_000))?,
        };
        let drain = Duration::from_secs(kvpool.drain_s.unwrap_or(20).min(DRAIN_S_MAX));
        Ok(Settings {
            worker: worker.check("kvpool")?,
            advertise: kvpool.advertise,
            dram_bytes,
            prefault,
            nvme,
            policy,
            tenant_share,
            rdma,
            limits,
            drain,
        })
    }
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
    use tidemill_net::config::Cli;

    fn resolve(pki: &std::path::Path, flags: &[&str]) -> Result<Settings, String> {
        let fixed = ["tidemill-kvpool", "--coordinators", "127.0.0.1:1", "--pki", pki.to_str().unwrap()];
        let cli = Cli::<Flags>::try_parse_from(fixed.iter().chain(flags)).map_err(|e| e.to_string())?;
        cli.resolve().map_err(|e| e.to_string())?.check().map_err(|e| e.to_string())
    }

    #[test]
    fn flags_become_settings_and_errors_name_the_key() {
        let pki = tempfile::tempdir().unwrap();
        tidemill_net::identity::create(pki.path()).unwrap();
        let settings = resolve(pki.path(), &["--dram", "2GiB", "--lease-ms", "500", "--policy", "s3fifo"]).unwrap();
        assert_eq!(settings.policy, Policy::S3Fifo);
        assert_eq!((settings.dram_bytes, settings.limits.lease), (2 << 30, Duration::from_millis(500)));
        assert!(settings.worker.bind.ip().is_loopback());
        assert_eq!(settings.nvme, None);
        let flags = ["--nvme-capacity", "3GiB", "--data", "/tmp/pool"];
        let nvme = Nvme { dir: "/tmp/pool".into(), capacity_bytes: 3 << 30 };
        assert_eq!(resolve(pki.path(), &flags).unwrap().nvme, Some(nvme));
        for (flags, key) in [
            (["--dram", "2GB"], "dram"),
            (["--dram", "0"], "dram"),
            (["--dram", "100000GiB"], "memory"),
            (["--policy", "fifo"], "policy"),
            (["--lease-ms", "1"], "lease_ms"),
            (["--put-deadline-ms", "99999999"], "put_deadline_ms"),
            (["--bind", "0.0.0.0:0"], "advertise"),
            (["--tenant-share", "0"], "tenant_share"),
            (["--rdma-devices", "mlx5_0,,"], "rdma_devices"),
            (["--nvme-capacity", "1TB"], "nvme_capacity"),
            (["--nvme-capacity", "1GiB"], "data"),
        ] {
            let error = resolve(pki.path(), &flags).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}

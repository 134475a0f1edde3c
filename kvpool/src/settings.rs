//! Flags and config file of `tidemill-kvpool`.

use crate::{
    core::{
        directory::Limits,
        division::Share,
        eviction::{Policy, UnknownPolicy},
        objects::budget,
        validate::checksum,
    },
    node::nvme::slab::RecordStore,
    transport::rdma::DeviceNames,
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
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
    /// Models that share this node's memory, with their weights where it is short, such as `small,large` or `small=1,large=3`; blocks of
    /// others are refused. The disk is divided among them by weight, and requests to object storage evenly [default: that of `model_name`,
    /// or the only one]
    #[arg(long)]
    pub models: Option<String>,
    /// Percent of the memory that each model keeps whatever the others need, such as `small=10,large=30` [default: a quarter of its share]
    #[arg(long)]
    pub floors: Option<String>,
    /// Disk for blocks that leave memory, such as 64GiB, in `data` [default: none]
    #[arg(long)]
    pub nvme_capacity: Option<String>,
    /// Directory of the disk's blocks; what an earlier run left there is found again [default: none]
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// Store of the records that say what the disk's slots hold: file, or rocksdb where the program was built with it, as in the packages.
    /// After a change the disk's blocks are forgotten [default: file]
    #[arg(long)]
    pub nvme_records: Option<String>,
    /// Rule by which blocks make room for new ones: lru, lfu, s3fifo or hit-density [default: hit-density]
    #[arg(long)]
    pub policy: Option<String>,
    /// Slots of memory, and of disk, that one tenant may fill while there are others, in percent; all of the tier that is shed first
    /// are one [default: 50]
    #[arg(long)]
    pub tenant_share: Option<u8>,
    /// Object storage or a shared directory for blocks that are used again, common to all nodes: s3://BUCKET/PREFIX or file:///DIRECTORY.
    /// S3's credentials and region come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and so on) [default:
    /// none]
    #[arg(long)]
    pub object_store: Option<String>,
    /// URL of an S3 server that is not AWS's, such as http://10.0.0.5:9000 [default: AWS's of the region]
    #[arg(long)]
    pub object_endpoint: Option<String>,
    /// Bytes of one model's blocks there, over all nodes; packs that were used longest ago are deleted [default: 1024GiB]
    #[arg(long)]
    pub object_capacity: Option<String>,
    /// Bytes of blocks that are written as one object [default: 32MiB]
    #[arg(long)]
    pub object_pack: Option<String>,
    /// Uses from which on a block is written; to be computed is the first [default: 2]
    #[arg(long)]
    pub object_uses: Option<u32>,
    /// Seconds after which blocks are written although they fill no pack [default: 30]
    #[arg(long)]
    pub object_flush_s: Option<u64>,
    /// Seconds between two looks at what other nodes have written [default: 60]
    #[arg(long)]
    pub object_refresh_s: Option<u64>,
    /// Most milliseconds that a reader waits for blocks from there [default: 1000]
    #[arg(long)]
    pub object_deadline_ms: Option<u64>,
    /// Most requests of this node per second; half of them are kept for readers [default: 100]
    #[arg(long)]
    pub object_requests_per_s: Option<u32>,
    /// Most dollars for requests of this node per day (UTC) [default: no limit]
    #[arg(long)]
    pub object_usd_per_day: Option<f64>,
    /// Dollars for 1000 requests that write or list [default: 0.005]
    #[arg(long)]
    pub object_usd_per_1000_writes: Option<f64>,
    /// Dollars for 1000 requests that read [default: 0.0004]
    #[arg(long)]
    pub object_usd_per_1000_reads: Option<f64>,
    /// File with a secret of 16 bytes or more, the same at all nodes: what was not written with it is not used [default: none]
    #[arg(long)]
    pub object_secret: Option<PathBuf>,
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
    /// The models whose blocks the node keeps: at least one.
    pub models: Vec<ModelShare>,
    /// The address for clients; `None` for the bound address.
    pub advertise: Option<SocketAddr>,
    pub dram_bytes: u64,
    pub prefault: bool,
    /// The disk; `None` if blocks that leave memory are lost.
    pub nvme: Option<Nvme>,
    /// The object storage; `None` if blocks that leave all memory and disks of this cluster are lost.
    pub objects: Option<Objects>,
    pub policy: Policy,
    /// The most slots of a tier that one tenant may fill, in percent.
    pub tenant_share: u8,
    pub rdma: DeviceNames,
    pub limits: Limits,
    pub drain: Duration,
}

/// A model that a node keeps blocks of, and its claim to the memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelShare {
    /// The name; `None` if the node serves the only model of its coordinators.
    pub name: Option<String>,
    pub share: Share,
}

/// The tier behind DRAM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Nvme {
    pub dir: PathBuf,
    /// Capacity for blocks. Their index takes about 100 more bytes per block.
    pub capacity_bytes: u64,
    pub records: RecordStore,
}

/// The tier behind disks, which nodes share.
#[derive(Clone, PartialEq, Debug)]
pub struct Objects {
    pub place: ObjectPlace,
    pub capacity_bytes: u64,
    pub pack_bytes: u64,
    pub uses_min: u32,
    pub flush: Duration,
    pub refresh: Duration,
    pub deadline: Duration,
    pub limits: budget::Limits,
    /// The key of the packs' digests, never shown.
    pub secret: Option<HiddenBytes>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ObjectPlace {
    Directory(PathBuf),
    /// A bucket on an S3 server; `endpoint` if the server is not AWS's.
    S3 {
        bucket: String,
        prefix: String,
        endpoint: Option<String>,
    },
}

/// Bytes that no log shows.
#[derive(Clone, PartialEq, Eq)]
pub struct HiddenBytes(Vec<u8>);

impl HiddenBytes {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl std::ops::Deref for HiddenBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for HiddenBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(hidden)")
    }
}

/// Bytes of a pack: with less, requests would cost more than blocks; with more, a node would hold too much while it writes.
const PACK_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=512 << 20;
/// Milliseconds that a reader waits for a block from object storage: if it waited longer than for a load from disk, it had better compute.
const OBJECT_DEADLINE_MS: std::ops::RangeInclusive<u64> = 50..=Limits::LOAD.as_millis() as u64;
/// Bytes of a secret.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=4096;
/// The longest configurable pause: with longer ones the tier would be as good as absent.
const PAUSE_S_MAX: u64 = 24 * 3600;

/// Milliseconds of a deadline: shorter ones would pass while a batch is copied; with longer ones, a dead peer would hold too much for too
/// long.
const DEADLINE_MS: std::ops::RangeInclusive<u64> = 100..=600_000;

/// The default share of one tenant, in percent: enough for several others, each with what it uses again.
const TENANT_SHARE: u8 = 50;
/// The longest configurable drain, more than any node needs.
const DRAIN_S_MAX: u64 = 24 * 3600;

impl Flags {
    pub fn check(self) -> Result<Settings, WorkerError> {
        let Flags { mut worker, kvpool } = self;
        let objects = kvpool.objects()?;
        let bind = *worker.bind.get_or_insert(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        if kvpool.advertise.is_none() && bind.ip().is_unspecified() {
            return Err(invalid("bind", bind, "listens on every address: say with `advertise` which one workers should use").into());
        }
        let dram = kvpool.dram.unwrap_or_else(|| "1GiB".into());
        let dram_bytes = within_memory("dram", parse_bytes(&dram).map_err(|reason| invalid("dram", &dram, reason))?)?;
        if dram_bytes == 0 {
            return Err(invalid("dram", dram, "all blocks go through memory, also those on disk").into());
        }
        let records = match kvpool.nvme_records {
            Some(name) => name.parse().map_err(|reason: &str| invalid("nvme_records", &name, reason))?,
            None => RecordStore::default(),
        };
        let capacity = kvpool.nvme_capacity.unwrap_or_else(|| "0".into());
        let nvme = match parse_bytes(&capacity).map_err(|reason| invalid("nvme_capacity", &capacity, reason))? {
            0 => None,
            capacity_bytes => Some(Nvme { dir: required(Some("kvpool"), "data", kvpool.data)?, capacity_bytes, records }),
        };
        let prefault = kvpool.prefault.unwrap_or(false);
        let policy = match kvpool.policy {
            Some(name) => name.parse().map_err(|unknown: UnknownPolicy| invalid("policy", &name, unknown.to_string()))?,
            None => Policy::default(),
        };
        let tenant_share = kvpool.tenant_share.unwrap_or(TENANT_SHARE);
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
        let models = models(kvpool.models.as_deref(), kvpool.floors.as_deref(), worker.model_name.as_deref())?;
        Ok(Settings {
            worker: worker.check("kvpool")?,
            models,
            advertise: kvpool.advertise,
            dram_bytes,
            prefault,
            nvme,
            objects,
            policy,
            tenant_share,
            rdma,
            limits,
            drain,
        })
    }
}

impl PoolFlags {
    fn objects(&self) -> Result<Option<Objects>, ConfigError> {
        let Some(url) = &self.object_store else { return Ok(None) };
        let place = ObjectPlace::parse(url, self.object_endpoint.as_deref())?;
        let bytes = |key: &'static str, given: &Option<String>, default: &str| {
            let text = given.as_deref().unwrap_or(default);
            parse_bytes(text).map_err(|reason| invalid(key, text, reason))
        };
        let pack_bytes = bytes("object_pack", &self.object_pack, "32MiB")?;
        if !PACK_BYTES.contains(&pack_bytes) {
            return Err(invalid("object_pack", pack_bytes, "must be from 64KiB to 512MiB"));
        }
        let pause = |key, given: Option<u64>, default| match given.unwrap_or(default) {
            s if (1..=PAUSE_S_MAX).contains(&s) => Ok(Duration::from_secs(s)),
            s => Err(invalid(key, s, format!("must be from 1 to {PAUSE_S_MAX}"))),
        };
        let at_least_1 = |key, given: Option<u32>, default| match given.unwrap_or(default) {
            0 => Err(invalid(key, 0, "must be at least 1")),
            n => Ok(n),
        };
        let deadline_ms = self.object_deadline_ms.unwrap_or(1000);
        if !OBJECT_DEADLINE_MS.contains(&deadline_ms) {
            let range = format!("must be from {} to {}", OBJECT_DEADLINE_MS.start(), OBJECT_DEADLINE_MS.end());
            return Err(invalid("object_deadline_ms", deadline_ms, range));
        }
        Ok(Some(Objects {
            place,
            capacity_bytes: bytes("object_capacity", &self.object_capacity, "1024GiB")?,
            pack_bytes,
            uses_min: at_least_1("object_uses", self.object_uses, 2)?,
            flush: pause("object_flush_s", self.object_flush_s, 30)?,
            refresh: pause("object_refresh_s", self.object_refresh_s, 60)?,
            deadline: Duration::from_millis(deadline_ms),
            limits: budget::Limits {
                requests_per_s: at_least_1("object_requests_per_s", self.object_requests_per_s, 100)?,
                usd_per_1000_writes: usd("object_usd_per_1000_writes", self.object_usd_per_1000_writes.unwrap_or(0.005))?,
                usd_per_1000_reads: usd("object_usd_per_1000_reads", self.object_usd_per_1000_reads.unwrap_or(0.0004))?,
                usd_per_day: self.object_usd_per_day.map(|most| usd("object_usd_per_day", most)).transpose()?,
            },
            secret: self.object_secret.as_deref().map(secret).transpose()?,
        }))
    }
}

impl ObjectPlace {
    fn parse(url: &str, endpoint: Option<&str>) -> Result<Self, ConfigError> {
        let wrong = |reason: &str| invalid("object_store", url, reason);
        if let Some(dir) = url.strip_prefix("file://") {
            let absolute = dir.starts_with('/') && dir.len() > 1;
            return if absolute { Ok(Self::Directory(dir.into())) } else { Err(wrong("give the whole path, as in file:///srv/kv")) };
        }
        let Some(place) = url.strip_prefix("s3://") else { return Err(wrong("must begin with s3:// or file:///")) };
        let (bucket, prefix) = place.trim_end_matches('/').split_once('/').unwrap_or((place.trim_end_matches('/'), ""));
        if bucket.is_empty() {
            return Err(wrong("names no bucket: write s3://BUCKET/PREFIX"));
        }
        let is_url = |endpoint: &&str| endpoint.starts_with("http://") || endpoint.starts_with("https://");
        if let Some(other) = endpoint.filter(|endpoint| !is_url(endpoint)) {
            return Err(invalid("object_endpoint", other, "must begin with http:// or https://"));
        }
        Ok(Self::S3 { bucket: bucket.into(), prefix: prefix.into(), endpoint: endpoint.map(str::to_owned) })
    }
}

impl Nvme {
    /// The part of one of several models, in a directory of its own; all of it if there is only one, which needs no name.
    pub fn part_of(&self, model: Option<&str>, weight: u32, weights: u32) -> Self {
        let Some(name) = model else { return self.clone() };
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
        // Two names may look alike then.
        let dir = format!("model-{}-{:08x}", name.chars().map(plain).collect::<String>(), checksum(name.as_bytes()) as u32);
        let capacity_bytes = u128::from(self.capacity_bytes) * u128::from(weight) / u128::from(weights);
        Self { dir: self.dir.join(dir), capacity_bytes: capacity_bytes as u64, ..self.clone() }
    }
}

impl Objects {
    /// The part of one of this many models: each has its own capacity, and its part of the requests and dollars.
    pub fn part(&self, models: u32) -> Self {
        let budget::Limits { requests_per_s, usd_per_day, .. } = self.limits;
        let usd_per_day = usd_per_day.map(|usd| usd / f64::from(models));
        Self { limits: budget::Limits { requests_per_s: (requests_per_s / models).max(1), usd_per_day, ..self.limits }, ..self.clone() }
    }
}

/// The most models of a node: more would have too little of it.
const MODELS_MAX: usize = 16;
/// The largest weight, so that shares are exact enough.
const WEIGHT_MAX: u32 = 1000;

/// Parses `models` and `floors`.
fn models(models: Option<&str>, floors: Option<&str>, model_name: Option<&str>) -> Result<Vec<ModelShare>, ConfigError> {
    let Some(text) = models else {
        if let Some(floors) = floors {
            return Err(invalid("floors", floors, "is about the models that `models` names, and it names none"));
        }
        return Ok(vec![ModelShare { name: model_name.map(str::to_owned), share: Share::default() }]);
    };
    let wrong = |reason: String| invalid("models", text, reason);
    if let Some(name) = model_name {
        return Err(wrong(format!("and `model_name` ({name}) both say whose blocks this node keeps: leave one out")));
    }
    let mut found: Vec<(&str, u32)> = Vec::new();
    for entry in text.split(',') {
        let (name, weight) = entry.rsplit_once('=').unwrap_or((entry, "1"));
        let weight = weight.trim().parse().ok().filter(|weight| (1..=WEIGHT_MAX).contains(weight));
        let weight = weight.ok_or_else(|| wrong(format!("`{entry}`: a weight is a number from 1 to {WEIGHT_MAX}")))?;
        if name.trim().is_empty() || found.iter().any(|(other, _)| *other == name.trim()) {
            return Err(wrong(format!("`{entry}` names no model, or one that is named already")));
        }
        found.push((name.trim(), weight));
    }
    if found.len() > MODELS_MAX {
        return Err(wrong(format!("are more than {MODELS_MAX}: start more pool nodes")));
    }
    let weights: u32 = found.iter().map(|(_, weight)| weight).sum();
    let quarter = |weight: u32| (100 * weight / weights / 4) as u8;
    let mut shares: Vec<_> = found.iter().map(|&(name, weight)| (name, Share { weight, floor_percent: quarter(weight) })).collect();
    for entry in floors.into_iter().flat_map(|floors| floors.split(',')) {
        let wrong = |reason: &str| invalid("floors", entry, reason);
        let (name, percent) = entry.rsplit_once('=').ok_or_else(|| wrong("is not of the form NAME=PERCENT"))?;
        let percent = percent.trim().parse().ok().filter(|percent| *percent <= 100);
        let share = shares.iter_mut().find(|(other, _)| *other == name.trim()).ok_or_else(|| wrong("is none of `models`"))?;
        share.1.floor_percent = percent.ok_or_else(|| wrong("must be from 0 to 100 percent"))?;
    }
    if shares.iter().map(|(_, share)| u32::from(share.floor_percent)).sum::<u32>() > 100 {
        return Err(invalid("floors", floors.unwrap_or_default(), "are more than all of the memory together"));
    }
    Ok(shares.into_iter().map(|(name, share)| ModelShare { name: Some(name.to_owned()), share }).collect())
}

fn usd(key: &'static str, usd: f64) -> Result<f64, ConfigError> {
    if usd.is_finite() && usd >= 0.0 { Ok(usd) } else { Err(invalid(key, usd, "must be an amount of dollars")) }
}

fn secret(path: &Path) -> Result<HiddenBytes, ConfigError> {
    let wrong = |reason: String| invalid("object_secret", path.display(), reason);
    let bytes = fs::read(path).map_err(|error| wrong(error.to_string()))?;
    if SECRET_BYTES.contains(&bytes.len()) {
        Ok(HiddenBytes::new(bytes))
    } else {
        Err(wrong(format!("has {} bytes, and must have from {} to {}", bytes.len(), SECRET_BYTES.start(), SECRET_BYTES.end())))
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
        let nvme = Nvme { dir: "/tmp/pool".into(), capacity_bytes: 3 << 30, records: RecordStore::File };
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
            (["--models", "a,a"], "models"),
            (["--models", "a=0"], "models"),
            (["--models", "a,,b"], "models"),
            (["--floors", "a=10"], "floors"),
            (["--nvme-capacity", "1TB"], "nvme_capacity"),
            (["--nvme-capacity", "1GiB"], "data"),
            (["--object-store", "file://kv"], "object_store"),
            (["--object-store", "s3:///kv"], "object_store"),
            (["--object-store", "gs://kv"], "object_store"),
        ] {
            let error = resolve(pki.path(), &flags).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn models_have_weights_and_floors() {
        let share = |name: &str, weight, floor_percent| ModelShare { name: Some(name.into()), share: Share { weight, floor_percent } };
        assert_eq!(models(Some("a, org/b=3"), None, None).unwrap(), [share("a", 1, 6), share("org/b", 3, 18)]);
        assert_eq!(models(Some("a,b"), Some("b=40"), None).unwrap(), [share("a", 1, 12), share("b", 1, 40)]);
        assert_eq!(models(None, None, Some("a")).unwrap(), [ModelShare { name: Some("a".into()), share: Share::default() }]);
        for (given, floors, name, word) in [
            ("a,b", Some("a=60,b=60"), None, "together"),
            ("a,b", Some("c=6"), None, "models"),
            ("a,b", Some("a=101"), None, "percent"),
            ("a,b", None, Some("a"), "model_name"),
        ] {
            let error = models(Some(given), floors, name).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn each_model_has_its_part_of_the_disk() {
        let nvme = Nvme { dir: "/kv".into(), capacity_bytes: 4000, records: RecordStore::File };
        assert_eq!(nvme.part_of(None, 1, 4), nvme);
        let [slash, line] = ["a/b", "a_b"].map(|name| nvme.part_of(Some(name), 3, 4));
        assert_eq!(slash.capacity_bytes, 3000);
        assert!(slash.dir != line.dir && slash.dir.starts_with("/kv"), "{slash:?} {line:?}");
    }

    #[test]
    fn object_storage_has_a_place_and_bounds() {
        let pki = tempfile::tempdir().unwrap();
        tidemill_net::identity::create(pki.path()).unwrap();
        let with =
            |flags: &[&str]| resolve(pki.path(), &[&["--object-store", "s3://kv/a/b/"], flags].concat()).map(|all| all.objects.unwrap());
        let objects = with(&["--object-endpoint", "http://127.0.0.1:9000", "--object-usd-per-day", "1.5"]).unwrap();
        let place = ObjectPlace::S3 { bucket: "kv".into(), prefix: "a/b".into(), endpoint: Some("http://127.0.0.1:9000".into()) };
        assert_eq!((objects.place, objects.limits.usd_per_day, objects.uses_min), (place, Some(1.5), 2));
        let secret = pki.path().join("secret");
        fs::write(&secret, [7; 16]).unwrap();
        let secret = secret.to_str().unwrap();
        let objects = with(&["--object-secret", secret]).unwrap();
        assert_eq!(objects.secret.as_deref(), Some(&[7; 16][..]));
        assert!(format!("{objects:?}").contains("hidden"));
        for (flags, key) in [
            (["--object-endpoint", "127.0.0.1:9000"], "object_endpoint"),
            (["--object-pack", "1KiB"], "object_pack"),
            (["--object-capacity", "1TB"], "object_capacity"),
            (["--object-uses", "0"], "object_uses"),
            (["--object-deadline-ms", "49"], "object_deadline_ms"),
            (["--object-deadline-ms", "5001"], "object_deadline_ms"),
            (["--object-requests-per-s", "0"], "object_requests_per_s"),
            (["--object-refresh-s", "0"], "object_refresh_s"),
            (["--object-usd-per-day", "NaN"], "object_usd_per_day"),
            (["--object-secret", "/nowhere"], "object_secret"),
        ] {
            let error = with(&flags).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}

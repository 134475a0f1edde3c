//! Properties of a machine, and the demands that config files make on it.

use anyhow::{Context, bail};
use nix::{libc, sys::statvfs::statvfs};
use std::{
    env, fs, io,
    net::{SocketAddr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};
use tidemill_net::{config::parse_bytes, identity};

/// A limit of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Unlimited,
    At(u64),
    Unknown,
}

#[derive(Clone, Debug)]
pub struct Certificate {
    pub path: PathBuf,
    /// Whole days until the certificate expires, or the reason that it cannot be read.
    pub days_left: Result<i64, String>,
}

#[derive(Clone, Debug)]
pub struct Port {
    pub key: &'static str,
    pub protocol: &'static str,
    pub address: SocketAddr,
    /// The error that binding the port gives, if it fails.
    pub taken: Option<String>,
}

/// The memory that a config file's key asks for.
#[derive(Clone, Debug)]
pub struct Need {
    pub key: &'static str,
    pub bytes: u64,
}

#[derive(Clone, Debug)]
pub struct Disk {
    pub path: PathBuf,
    pub free: u64,
    pub wanted: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gpu {
    None,
    NoDriver,
    /// A GPU whose driver has this version.
    Driver(String),
}

#[derive(Clone, Debug)]
pub struct Facts {
    pub rmem_max: Option<u64>,
    pub wmem_max: Option<u64>,
    pub open_files: Bound,
    pub locked_memory: Bound,
    pub clock_synchronized: Option<bool>,
    pub certificates: Vec<Certificate>,
    pub ports: Vec<Port>,
    /// The mode of transparent huge pages: always, madvise or never.
    pub transparent_huge_pages: Option<String>,
    pub numa_nodes: usize,
    /// The number of prefill and decode workers among the config files.
    pub engines: usize,
    /// Whether all of these workers have their own cores.
    pub engines_keep_cores: bool,
    pub memory_total: u64,
    pub memory_available: u64,
    pub memory_wanted: Vec<Need>,
    pub disks: Vec<Disk>,
    /// The version of this program.
    pub version: String,
    /// The names and versions of the role programs beside this one.
    pub programs: Vec<(String, String)>,
    pub gpu: Gpu,
    pub wants_gpu: bool,
}

/// The names of the role programs, without their prefix.
const ROLES: [&str; 4] = ["coordinator", "prefill", "decode", "kvpool"];

impl Facts {
    /// Reads the system and the config files. An error names the file, and the line if it is not valid TOML.
    pub fn gather(configs: &[PathBuf]) -> anyhow::Result<Self> {
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let mut facts = Self {
            rmem_max: number("/proc/sys/net/core/rmem_max"),
            wmem_max: number("/proc/sys/net/core/wmem_max"),
            open_files: bound(&limits, "Max open files"),
            locked_memory: bound(&limits, "Max locked memory"),
            clock_synchronized: clock_synchronized(),
            certificates: vec![],
            ports: vec![],
            transparent_huge_pages: chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
            numa_nodes: numa_nodes(),
            engines: 0,
            engines_keep_cores: true,
            memory_total: kibibytes(&meminfo, "MemTotal:"),
            memory_available: kibibytes(&meminfo, "MemAvailable:"),
            memory_wanted: vec![],
            disks: vec![],
            version: env!("CARGO_PKG_VERSION").into(),
            programs: programs(),
            gpu: gpu(),
            wants_gpu: false,
        };
        for path in configs {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read config file {}", path.display()))?;
            let table = text.parse().map_err(|error| anyhow::anyhow!("config file {}: {error}", path.display()))?;
            facts.add(&table).with_context(|| format!("config file {}", path.display()))?;
        }
        Ok(facts)
    }

    /// Adds the demands of a role's config file. Other keys are left for the role program to check.
    fn add(&mut self, config: &toml::Table) -> anyhow::Result<()> {
        let text = |section: &str, key: &str| -> anyhow::Result<Option<String>> {
            let table = if section.is_empty() { Some(config) } else { config.get(section).and_then(toml::Value::as_table) };
            match table.and_then(|table| table.get(key)) {
                None => Ok(None),
                Some(toml::Value::String(text)) => Ok(Some(text.clone())),
                Some(toml::Value::Integer(number)) => Ok(Some(number.to_string())),
                Some(other) => bail!("`{key}` = {other}: a text or a number is expected"),
            }
        };
        let bytes = |section, key| -> anyhow::Result<Option<u64>> {
            let given = text(section, key)?;
            given.map(|size| parse_bytes(&size).map_err(|reason| anyhow::anyhow!("`{key}`: {reason}"))).transpose()
        };
        for (section, key, protocols) in
            [("", "http", &["TCP"][..]), ("", "admin", &["TCP"]), ("", "listen", &["UDP", "TCP"]), ("worker", "bind", &["UDP", "TCP"])]
        {
            if let Some(address) = text(section, key)? {
                let address = address.parse().with_context(|| format!("`{key}` = {address} is no address with a port"))?;
                self.ports.extend(protocols.iter().map(|protocol| Port { key, protocol, address, taken: taken(protocol, address) }));
            }
        }
        for section in ["", "worker"] {
            if let Some(dir) = text(section, "pki")? {
                self.certificates.extend(["ca.pem", "node.pem"].map(|name| certificate(Path::new(&dir).join(name))));
            }
        }
        if let Some(chain) = text("", "tls_cert")? {
            self.certificates.push(certificate(chain.into()));
        }
        for (section, key) in [("kvpool", "dram"), ("engine", "kv_memory")] {
            self.memory_wanted.extend(bytes(section, key)?.map(|bytes| Need { key, bytes }));
        }
        if let Some(engine) = config.get("engine").and_then(toml::Value::as_table) {
            self.engines += 1;
            self.engines_keep_cores &= engine.contains_key("cores");
            self.wants_gpu |= text("engine", "device")?.is_some_and(|device| device == "cuda");
            if let Some(model) = text("engine", "model")? {
                self.memory_wanted.push(Need { key: "model", bytes: files_bytes(Path::new(&model)) });
            }
        }
        for (section, wanted) in [("", None), ("kvpool", bytes("kvpool", "nvme_capacity")?)] {
            if let Some(dir) = text(section, "data")? {
                let path = PathBuf::from(dir);
                let free = free(&path).with_context(|| format!("cannot look at the disk of {}", path.display()))?;
                self.disks.push(Disk { path, free, wanted: wanted.unwrap_or(0) });
            }
        }
        Ok(())
    }
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The soft limit in `/proc/self/limits`.
pub fn bound(limits: &str, name: &str) -> Bound {
    let row = limits.lines().find_map(|line| line.strip_prefix(name));
    match row.and_then(|row| row.split_whitespace().next()) {
        Some("unlimited") => Bound::Unlimited,
        Some(number) => number.parse().map_or(Bound::Unknown, Bound::At),
        None => Bound::Unknown,
    }
}

/// The selected option, which such files show in brackets.
fn chosen(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

fn kibibytes(meminfo: &str, name: &str) -> u64 {
    let row = meminfo.lines().find_map(|line| line.strip_prefix(name));
    row.and_then(|row| row.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn numa_nodes() -> usize {
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|rest| rest.parse::<u32>().is_ok());
    let entries = fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count()
}

/// Whether the kernel considers the clock synchronized, as set by a time daemon; `None` if unknown.
fn clock_synchronized() -> Option<bool> {
    // SAFETY: a `timex` holds only numbers, for which all zeros is a valid value.
    let mut asked: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to one `timex`; with `modes` 0 the call only writes to it.
    match unsafe { libc::adjtimex(&raw mut asked) } {
        -1 => None,
        state => Some(state != libc::TIME_ERROR),
    }
}

fn certificate(path: PathBuf) -> Certificate {
    let days_left = days_left(&path);
    Certificate { path, days_left }
}

fn days_left(path: &Path) -> Result<i64, String> {
    let end = identity::end(path).map_err(|error| error.to_string())?.as_secs().cast_signed();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|_| "the clock is before 1970")?;
    Ok((end - now.as_secs().cast_signed()).div_euclid(24 * 60 * 60))
}

/// Binds an address for a moment, and returns the error if that fails.
fn taken(protocol: &str, address: SocketAddr) -> Option<String> {
    let bound = if protocol == "TCP" { TcpListener::bind(address).map(drop) } else { UdpSocket::bind(address).map(drop) };
    bound.err().map(|error| error.to_string())
}

/// Free bytes on the disk where a directory is or will be.
fn free(path: &Path) -> io::Result<u64> {
    let there = path.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    let disk = statvfs(there)?;
    Ok(disk.blocks_available() * disk.fragment_size())
}

/// The size of a directory's files, such as a model's.
fn files_bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| fs::metadata(entry.path()).ok()).filter(fs::Metadata::is_file).map(|file| file.len()).sum()
}

/// Role programs beside this one, and their versions.
fn programs() -> Vec<(String, String)> {
    let here = env::current_exe().ok();
    let beside = |role| Some((format!("tidemill-{role}"), here.as_deref()?.with_file_name(format!("tidemill-{role}"))));
    let programs = ROLES.into_iter().filter_map(beside).filter(|(_, path)| path.exists());
    programs.map(|(name, path)| (name, version(&path).unwrap_or_else(|error| format!("not to be run: {error}")))).collect()
}

fn version(program: &Path) -> io::Result<String> {
    let output = Command::new(program).arg("--version").output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    Ok(said.split_whitespace().last().unwrap_or("without a version").to_owned())
}

fn gpu() -> Gpu {
    if let Ok(text) = fs::read_to_string("/proc/driver/nvidia/version") {
        return Gpu::Driver(driver(&text).unwrap_or_else(|| "unknown".into()));
    }
    let reads = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    // The vendor is NVIDIA, and the class is a display or 3D controller.
    let is_gpu = |dir: PathBuf| reads(dir.join("vendor")).trim() == "0x10de" && reads(dir.join("class")).starts_with("0x03");
    let devices = fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    if devices.map(|entry| entry.path()).any(is_gpu) { Gpu::NoDriver } else { Gpu::None }
}

/// The version in the driver's description: the first word that consists of digits and dots.
pub fn driver(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

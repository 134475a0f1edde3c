//! One function per check: facts in, findings out.

use super::facts::{Bound, Certificate, Facts, Gpu, Need, Port};
use serde::Serialize;
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Good,
    Warning,
    Failure,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub check: &'static str,
    pub verdict: Verdict,
    pub says: String,
    /// The remedy; empty if there is nothing to do.
    pub todo: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Good => "ok  ",
            Verdict::Warning => "warn",
            Verdict::Failure => "FAIL",
        };
        write!(f, "{verdict}  {}: {}", self.check, self.says)?;
        if self.todo.is_empty() { Ok(()) } else { write!(f, "\n      → {}", self.todo) }
    }
}

pub(super) fn good(check: &'static str, says: impl Into<String>) -> Finding {
    Finding { check, verdict: Verdict::Good, says: says.into(), todo: String::new() }
}

pub(super) fn warning(check: &'static str, says: impl Into<String>, todo: impl Into<String>) -> Finding {
    Finding { check, verdict: Verdict::Warning, says: says.into(), todo: todo.into() }
}

pub(super) fn failure(check: &'static str, says: impl Into<String>, todo: impl Into<String>) -> Finding {
    Finding { check, verdict: Verdict::Failure, says: says.into(), todo: todo.into() }
}

/// Every check of a machine, in the order in which they are shown.
pub fn all(facts: &Facts) -> Vec<Finding> {
    let checks: [fn(&Facts) -> Vec<Finding>; 12] =
        [socket_buffers, open_files, locked_memory, clock, certificates, ports, huge_pages, numa, memory, disk, versions, gpu];
    checks.iter().flat_map(|check| check(facts)).collect()
}

/// The buffer size that a QUIC socket asks for.
const BUFFER_BYTES: u64 = 4 << 20;

pub fn socket_buffers(facts: &Facts) -> Vec<Finding> {
    let sysctls = [("net.core.rmem_max", facts.rmem_max), ("net.core.wmem_max", facts.wmem_max)];
    let judge = |(name, value): (&str, Option<u64>)| match value {
        Some(bytes) if bytes >= BUFFER_BYTES => good("socket buffers", format!("{name} = {bytes}")),
        Some(bytes) => warning(
            "socket buffers",
            format!("{name} = {bytes}: below 4 MiB, a fast sender loses datagrams"),
            format!("sysctl -w {name}={BUFFER_BYTES}, and the same in /etc/sysctl.d/tidemill.conf"),
        ),
        None => warning("socket buffers", format!("{name} cannot be read"), "look at it on the host: a container may not see it"),
    };
    sysctls.map(judge).into()
}

/// Files that a coordinator may have open: the connections that it accepts by default, and some of its own.
const FILES: u64 = 4096 + 1024;

pub fn open_files(facts: &Facts) -> Vec<Finding> {
    let finding = match facts.open_files {
        Bound::Unlimited => good("open files", "no limit"),
        Bound::At(files) if files >= FILES => good("open files", format!("up to {files}")),
        Bound::At(files) => warning(
            "open files",
            format!("up to {files} here; a coordinator's `connections_max` is 4096 by default"),
            format!("ulimit -n {FILES}, or LimitNOFILE in the unit (deploy/systemd has it)"),
        ),
        Bound::Unknown => warning("open files", "the limit cannot be read", "ulimit -n shows it"),
    };
    vec![finding]
}

/// Checks the limit on locked memory. Only workers with a GPU lock much memory.
pub fn locked_memory(facts: &Facts) -> Vec<Finding> {
    let finding = match (facts.locked_memory, &facts.gpu) {
        (Bound::Unlimited, _) => good("locked memory", "no limit"),
        (_, Gpu::None) => good("locked memory", "limited; nothing here needs it: no GPU"),
        (Bound::At(bytes), _) => warning(
            "locked memory",
            format!("up to {bytes} bytes: a GPU cannot pin the pool's memory"),
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit; in a container, --cap-add IPC_LOCK --ulimit memlock=-1",
        ),
        (Bound::Unknown, _) => warning("locked memory", "the limit cannot be read", "ulimit -l shows it"),
    };
    vec![finding]
}

pub fn clock(facts: &Facts) -> Vec<Finding> {
    let finding = match facts.clock_synchronized {
        Some(true) => good("clock", "synchronized"),
        Some(false) => warning(
            "clock",
            "not synchronized: certificates are judged by it, and logs of several machines are compared",
            "start chrony or systemd-timesyncd",
        ),
        None => warning("clock", "the kernel does not say whether it is synchronized", "timedatectl shows it on the host"),
    };
    vec![finding]
}

/// The number of days before its expiry at which a certificate should be renewed.
const RENEW_DAYS: i64 = 30;

pub fn certificates(facts: &Facts) -> Vec<Finding> {
    let todo = "run the same `tidemill certs` command again and copy its files: running processes take them up";
    let judge = |certificate: &Certificate| {
        let path = certificate.path.display();
        match certificate.days_left {
            Err(ref reason) => failure("certificates", reason, "`tidemill certs` makes them; they must be readable by this user"),
            Ok(days) if days < 0 => failure("certificates", format!("{path} ended {} days ago", -days), todo),
            Ok(days) if days < RENEW_DAYS => warning("certificates", format!("{path} ends in {days} days"), todo),
            Ok(days) => good("certificates", format!("{path} is good for {days} days")),
        }
    };
    facts.certificates.iter().map(judge).collect()
}

pub fn ports(facts: &Facts) -> Vec<Finding> {
    let judge = |port: &Port| match &port.taken {
        None => good("ports", format!("{} {} is free (`{}`)", port.protocol, port.address, port.key)),
        Some(reason) => warning(
            "ports",
            format!("{} {} cannot be had: {reason} (`{}`)", port.protocol, port.address, port.key),
            "if the process runs already, this is its own; otherwise `ss -tulpn` says whose it is, or the address is not this machine's",
        ),
    };
    facts.ports.iter().map(judge).collect()
}

pub fn huge_pages(facts: &Facts) -> Vec<Finding> {
    let finding = match facts.transparent_huge_pages.as_deref() {
        Some(mode @ ("always" | "madvise")) => good("huge pages", format!("transparent ones: {mode}")),
        Some(mode) => warning(
            "huge pages",
            format!("transparent ones: {mode}; weights are read faster from huge pages"),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        None => {
            warning("huge pages", "this kernel has no transparent ones", "a kernel with CONFIG_TRANSPARENT_HUGEPAGE reads weights faster")
        }
    };
    vec![finding]
}

pub fn numa(facts: &Facts) -> Vec<Finding> {
    let finding = match facts.numa_nodes {
        0 | 1 => good("NUMA", "one node"),
        nodes if facts.engines > 0 && !facts.engines_keep_cores => warning(
            "NUMA",
            format!("{nodes} nodes, and an engine that may use all cores: it reads other nodes' memory"),
            "run one engine per node, each with `cores` of one node (`lscpu` lists them)",
        ),
        nodes => good("NUMA", format!("{nodes} nodes")),
    };
    vec![finding]
}

pub fn memory(facts: &Facts) -> Vec<Finding> {
    let wanted: u64 = facts.memory_wanted.iter().map(|need| need.bytes).sum();
    let says = format!("{} available, {} wanted ({})", size(facts.memory_available), size(wanted), list(&facts.memory_wanted));
    let finding = match wanted {
        0 => good("memory", format!("{} available", size(facts.memory_available))),
        wanted if wanted > facts.memory_total => failure("memory", says, "set `dram` or `kv_memory` lower, or take a smaller model"),
        wanted if wanted > facts.memory_available => {
            warning("memory", says, "if the processes run already, they have it; otherwise something else does")
        }
        _ => good("memory", says),
    };
    vec![finding]
}

/// The least free space of a disk that logs are written to.
const SPARE_BYTES: u64 = 1 << 30;

pub fn disk(facts: &Facts) -> Vec<Finding> {
    let judge = |disk: &super::facts::Disk| {
        let says = format!("{}: {} free, {} wanted", disk.path.display(), size(disk.free), size(disk.wanted));
        match disk.wanted {
            wanted if disk.free < wanted => {
                warning("disk", says, "if the process ran before, its file is there already; otherwise make room")
            }
            _ if disk.free < SPARE_BYTES => failure("disk", says, "make room: the usage log and the registry stop on a full disk"),
            _ => good("disk", says),
        }
    };
    facts.disks.iter().map(judge).collect()
}

pub fn versions(facts: &Facts) -> Vec<Finding> {
    let judge = |(program, version): &(String, String)| {
        if *version == facts.version {
            good("versions", format!("{program} {version}"))
        } else {
            failure(
                "versions",
                format!("{program} is {version}, and this is {}", facts.version),
                "install programs of one version everywhere",
            )
        }
    };
    facts.programs.iter().map(judge).collect()
}

/// The oldest driver that supports CUDA 13, whose NVRTC compiles the kernels.
const DRIVER: u32 = 580;

pub fn gpu(facts: &Facts) -> Vec<Finding> {
    let finding = match &facts.gpu {
        Gpu::None if facts.wants_gpu => {
            failure("GPU", "`device` is cuda, and there is no NVIDIA GPU", "pass it into the container or machine, or set `device` to cpu")
        }
        Gpu::None => good("GPU", "none"),
        Gpu::NoDriver => {
            warning("GPU", "an NVIDIA GPU without its driver", "install NVIDIA's driver, 580 or later; without it workers use the CPU")
        }
        Gpu::Driver(version) => match version.split('.').next().and_then(|major| major.parse::<u32>().ok()) {
            Some(major) if major >= DRIVER => good("GPU", format!("driver {version}")),
            _ => warning("GPU", format!("driver {version} is older than CUDA 13"), "install NVIDIA's driver, 580 or later"),
        },
    };
    vec![finding]
}

fn list(needs: &[Need]) -> String {
    needs.iter().map(|need| format!("{} {}", need.key, size(need.bytes))).collect::<Vec<_>>().join(", ")
}

/// A size in a unit that is easy to read.
fn size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, bits)| bytes >> bits > 0) {
        Some((unit, bits)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << bits) as f64),
        None => format!("{bytes} B"),
    }
}

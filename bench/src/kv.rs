//! `tidemill-bench kv`: the speed at which a pool node takes and gives blocks, and its cost.
//!
//! A real `tidemill-kvpool` runs beside this process; the CPU time of both counts. Everything is measured several times and the best is
//! kept, as other load can only slow it down. References (copying memory, TCP over loopback) are measured in the same run, as a rate says
//! little without the machine's own.

pub mod clocks;
pub mod node;
pub mod nvme;
pub mod reference;
pub mod report;
pub mod transfer;

use crate::record;
use anyhow::{Context, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use node::PoolNode;
use report::Row;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use tidemill_kvpool::client::{DeviceNames, Nics, Transport, TransportChoice, Ways};
use tidemill_net::process;
use transfer::Plan;

/// Measure put and get of blocks at a pool node on this machine: bytes and CPU time, per transport.
#[derive(Clone, Debug, clap::Args)]
pub struct KvArgs {
    /// Write the rows to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Measure this tier only: dram or nvme
    #[arg(long, value_parser = ["dram", "nvme"])]
    pub tier: Option<String>,
    /// Measure blocks of this many bytes only
    #[arg(long)]
    pub block_bytes: Option<usize>,
    /// Measure this transport only (DRAM tier): shm, quic or rdma. RDMA is measured only if asked for, with perftest (`ib_write_bw`,
    /// `ib_read_bw`) as its reference
    #[arg(long, value_parser = ["shm", "quic", "rdma"])]
    pub transport: Option<String>,
    /// RDMA device of this process
    #[arg(long, default_value = "all")]
    pub rdma_device: DeviceNames,
    /// RDMA device of the node
    #[arg(long, default_value = "all")]
    pub node_rdma_device: DeviceNames,
    /// perftest's index of the devices' addresses (`show_gids`)
    #[arg(long, default_value_t = 1)]
    pub gid_index: u32,
    /// Directory on the disk to be measured (default: that of temporary files)
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// Make nodes allocate their memory before blocks come
    #[arg(long)]
    pub prefault: bool,
    /// Fewer bytes and repetitions: to check that it works, not how fast it is.
    #[arg(long)]
    pub quick: bool,
}

impl KvArgs {
    fn wants(&self, block_bytes: usize) -> bool {
        self.block_bytes.is_none_or(|only| only == block_bytes)
    }

    fn wants_way(&self, way: Way) -> bool {
        let name = if way.choice == TransportChoice::Auto { "shm" } else { way.choice.name() };
        self.transport.as_ref().map_or(name != "rdma", |only| only == name)
    }
}

/// The path of blocks. Datagrams are limited by the client, which tells its node in the handshake.
#[derive(Clone, Copy, Debug)]
struct Way {
    choice: TransportChoice,
    datagram_bytes_max: u16,
}

/// The discovered path MTU, and the datagrams of an Ethernet with and without jumbo frames.
const WAYS: [Way; 5] = [
    Way { choice: TransportChoice::Auto, datagram_bytes_max: u16::MAX },
    Way { choice: TransportChoice::Quic, datagram_bytes_max: u16::MAX },
    Way { choice: TransportChoice::Quic, datagram_bytes_max: 8_952 },
    Way { choice: TransportChoice::Quic, datagram_bytes_max: 1_452 },
    Way { choice: TransportChoice::Rdma, datagram_bytes_max: u16::MAX },
];

/// Block size, blocks per call, bytes per repetition.
const LOADS: [(usize, usize, usize); 4] =
    [(2 << 20, 32, 512 << 20), (2 << 20, 1, 128 << 20), (4 << 10, 128, 32 << 20), (4 << 10, 1, 4 << 20)];

/// Block size, blocks per call, bytes of DRAM, bytes of disk.
const NVME_LOADS: [(usize, usize, usize, usize); 2] = [(2 << 20, 32, 512 << 20, 4 << 30), (4 << 10, 512, 32 << 20, 512 << 20)];

/// Runs the measurement. A multi-threaded runtime, like the workers', must be running.
pub async fn run(args: KvArgs) -> anyhow::Result<()> {
    // The workers do the same.
    process::keep_freed_memory();
    let sizes = NVME_LOADS.map(|load| load.0);
    ensure!(sizes.into_iter().any(|bytes| args.wants(bytes)), "--block-bytes: blocks of {sizes:?} bytes are measured");
    let (repetitions, shrink) = if args.quick { (2, 8) } else { (5, 1) };
    let progress = ProgressBar::new((WAYS.len() * LOADS.len() + NVME_LOADS.len() + 2) as u64);
    progress.set_style(ProgressStyle::with_template("{elapsed} [{wide_bar}] {msg}")?);
    let pki = tempfile::tempdir().context("cannot make a directory for certificates")?;
    tidemill_net::identity::create(pki.path())?;
    let wanted = |tier: &str| args.tier.as_ref().is_none_or(|only| only == tier);
    let mut rows = Vec::new();
    if wanted("dram") {
        rows.extend(dram(pki.path(), &args, repetitions, shrink, &progress).await?);
    }
    if wanted("nvme") {
        rows.extend(nvme(pki.path(), &args, repetitions, shrink, &progress).await?);
    }
    progress.finish_and_clear();
    report::compare(&mut rows);
    print!("{}", report::table(&rows));
    record::write(args.json.as_ref(), "kv", &rows)?;
    Ok(())
}

async fn dram(pki: &Path, args: &KvArgs, repetitions: u32, shrink: usize, progress: &ProgressBar) -> anyhow::Result<Vec<Row>> {
    let rdma = args.transport.as_deref() == Some("rdma");
    let mut rows = Vec::new();
    if !rdma {
        progress.set_message("memcpy");
        rows = tokio::task::spawn_blocking(move || reference::memcpy(repetitions, shrink)).await??;
        progress.inc(1);
        progress.set_message("TCP");
        rows.push(tokio::task::spawn_blocking(move || reference::tcp(repetitions, shrink)).await??);
        progress.inc(1);
    }
    let nics = rdma.then(|| Nics::open(&args.rdma_device));
    for (block_bytes, batch, bytes) in LOADS.into_iter().filter(|load| args.wants(load.0)) {
        for way in WAYS.into_iter().filter(|way| args.wants_way(*way)) {
            let blocks = (bytes / shrink / block_bytes).max(batch);
            let plan = Plan { block_bytes, batch, blocks, repetitions };
            progress.set_message(format!("{block_bytes} B × {batch}, {:?}, datagrams up to {}", way.choice, way.datagram_bytes_max));
            // Each time, a fresh node has memory for one repetition, so the first one touches all of it.
            let node = PoolNode::start(pki, blocks * block_bytes, args.prefault, None, &args.node_rdma_device).await?;
            let ways = Ways { choice: way.choice, nics: nics.clone(), device: None };
            let client = node.client(block_bytes, ways, way.datagram_bytes_max).await?;
            if rdma {
                ensure!(client.transport() == Transport::Rdma, "the node cannot be reached by RDMA from {}", args.rdma_device);
                // This alternates with the measurement that it is compared with.
                let (client, node, gid_index) = (args.rdma_device.to_string(), args.node_rdma_device.to_string(), args.gid_index);
                let measured = move || reference::perftest(&client, &node, gid_index, block_bytes, blocks);
                rows.extend(tokio::task::spawn_blocking(measured).await??);
            }
            // It runs on a worker thread, like all of a worker's work.
            rows.extend(tokio::spawn(transfer::measure(client, nics.clone(), node.clocks()?, plan)).await??);
            progress.inc(1);
        }
    }
    Ok(rows)
}

async fn nvme(pki: &Path, args: &KvArgs, repetitions: u32, shrink: usize, progress: &ProgressBar) -> anyhow::Result<Vec<Row>> {
    let data = args.data.clone().unwrap_or_else(std::env::temp_dir);
    let mut rows = Vec::new();
    for (block_bytes, batch, dram_bytes, disk_bytes) in NVME_LOADS.into_iter().filter(|load| args.wants(load.0)) {
        progress.set_message(format!("{block_bytes} B × {batch}, disk"));
        let putting = Duration::from_secs(4);
        let (dram_bytes, disk_bytes, rounds) = (dram_bytes / shrink, disk_bytes / shrink, repetitions.min(3));
        let plan = nvme::Plan { block_bytes, batch, dram_bytes, disk_bytes, putting, rounds };
        let dir = tempfile::tempdir_in(&data).with_context(|| format!("cannot make a directory in {}", data.display()))?;
        let node_dir = dir.path().join("node");
        let none = DeviceNames::Only(vec![]);
        let node = PoolNode::start(pki, plan.dram_bytes, true, Some((&node_dir, plan.disk_bytes)), &none).await?;
        let mut clients = Vec::new();
        for way in WAYS.into_iter().take(2) {
            clients.push(node.client(block_bytes, way.choice.into(), way.datagram_bytes_max).await?);
        }
        // It runs on a worker thread, like all of a worker's work.
        rows.extend(tokio::spawn(async move { nvme::measure(&node, &clients, &node_dir, plan).await }).await??);
        progress.inc(1);
    }
    Ok(rows)
}

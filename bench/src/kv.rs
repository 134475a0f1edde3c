//! `tidemill-bench kv`: how fast a pool node takes and gives blocks, and what that costs.
//!
//! A real `tidemill-kvpool` runs beside this process; both are on the bill. Everything is measured several times and the
//! best is kept: what else the machine does can only make it slower. References (copying memory, TCP over loopback) are
//! measured in the same run, since a rate says little without the machine's own.

pub mod clocks;
pub mod node;
pub mod reference;
pub mod report;
pub mod transfer;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use node::PoolNode;
use std::{fs, path::PathBuf};
use tidemill_kvpool::client::TransportChoice;
use tidemill_proto::process;
use transfer::Plan;

/// Measure put and get of blocks at a pool node on this machine: bytes and CPU time, per transport.
#[derive(Clone, Debug, clap::Args)]
pub struct KvArgs {
    /// Write the rows here too.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Fewer bytes and repetitions: to see that it works, not how fast it is.
    #[arg(long)]
    pub quick: bool,
}

/// The way that blocks take. Datagrams are bounded by the client: its node learns that in the handshake.
#[derive(Clone, Copy, Debug)]
struct Path {
    choice: TransportChoice,
    datagram_bytes_max: u16,
}

/// Discovered path MTU, then what an Ethernet with jumbo frames and one without would carry.
const PATHS: [Path; 4] = [
    Path { choice: TransportChoice::Auto, datagram_bytes_max: u16::MAX },
    Path { choice: TransportChoice::Quic, datagram_bytes_max: u16::MAX },
    Path { choice: TransportChoice::Quic, datagram_bytes_max: 8_952 },
    Path { choice: TransportChoice::Quic, datagram_bytes_max: 1_452 },
];

/// Block size, blocks per call, bytes per repetition.
const LOADS: [(usize, usize, usize); 4] =
    [(2 << 20, 32, 512 << 20), (2 << 20, 1, 128 << 20), (4 << 10, 128, 32 << 20), (4 << 10, 1, 4 << 20)];

/// A multi-threaded runtime, as the workers have, must be running.
pub async fn run(args: KvArgs) -> anyhow::Result<()> {
    // As the workers do.
    process::keep_freed_memory();
    let (repetitions, shrink) = if args.quick { (2, 8) } else { (5, 1) };
    let progress = ProgressBar::new((PATHS.len() * LOADS.len() + 2) as u64);
    progress.set_style(ProgressStyle::with_template("{elapsed} [{wide_bar}] {msg}")?);

    progress.set_message("memcpy");
    let mut rows = tokio::task::spawn_blocking(move || reference::memcpy(repetitions, shrink)).await??;
    progress.inc(1);
    progress.set_message("TCP");
    rows.push(tokio::task::spawn_blocking(move || reference::tcp(repetitions, shrink)).await??);
    progress.inc(1);
    let pki = tempfile::tempdir().context("cannot make a directory for certificates")?;
    tidemill_proto::identity::create(pki.path())?;
    for (block_bytes, batch, bytes) in LOADS {
        for path in PATHS {
            let blocks = (bytes / shrink / block_bytes).max(batch);
            let plan = Plan { block_bytes, batch, blocks, repetitions };
            progress.set_message(format!("{block_bytes} B × {batch}, {:?}, datagrams up to {}", path.choice, path.datagram_bytes_max));
            // A fresh node each time, with memory for one repetition: the first one touches all of it.
            let node = PoolNode::start(pki.path(), blocks * block_bytes).await?;
            let client = node.client(block_bytes, path.choice, path.datagram_bytes_max).await?;
            // On a worker thread, as everything is that a worker does.
            rows.extend(tokio::spawn(transfer::measure(client, node.clocks()?, plan)).await??);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    report::compare(&mut rows);
    print!("{}", report::table(&rows));
    if let Some(path) = args.json {
        let text = serde_json::to_string_pretty(&rows)?;
        fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

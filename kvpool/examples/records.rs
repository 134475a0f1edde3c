//! Measures a store of the disk's records: how long many of them take to write and, in a process of its own, to read at a restart, and the
//! memory and disk that it takes. No block's bytes are written.
//!
//!   cargo run --release -p tidemill-kvpool --features rocksdb --example records -- fill STORE DIR COUNT
//!   cargo run --release -p tidemill-kvpool --features rocksdb --example records -- restart STORE DIR
//!
//! `fill` writes COUNT records once, in chains of 64 blocks, and then a quarter of them anew at random places, as blocks that come and go.

use std::{
    env,
    error::Error,
    fs,
    path::Path,
    time::{Duration, Instant},
};
use tidemill_kvpool::{
    core::directory::DiskBlock,
    node::nvme::slab::{RecordStore, Slab},
};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    ids::RequestId,
    pool::Lineage,
};

/// Blocks of a chain, and of a batch that a thread of the disk records at once.
const CHAIN: u32 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["fill", store, dir, count] => fill(Path::new(dir), store.parse()?, count.parse()?),
        ["restart", store, dir] => restart(Path::new(dir), store.parse()?),
        _ => Err("usage: records fill STORE DIR COUNT | records restart STORE DIR".into()),
    }
}

fn fill(dir: &Path, store: RecordStore, count: u32) -> Result<(), Box<dyn Error>> {
    let disk = Slab::open(dir, store)?;
    let chains = count / CHAIN;
    let mut slowest = Duration::ZERO;
    let mut write = |chain: u32, version: u32| -> Result<(), Box<dyn Error>> {
        let started = Instant::now();
        disk.record((0..CHAIN).map(|n| (chain * CHAIN + n, block(chain, n, version))))?;
        slowest = slowest.max(started.elapsed());
        Ok(())
    };
    let started = Instant::now();
    (0..chains).try_for_each(|chain| write(chain, 0))?;
    let new = started.elapsed();
    let started = Instant::now();
    (0..chains / 4).try_for_each(|n| write((u64::from(n) * 2_654_435_761 % u64::from(chains)) as u32, 1))?;
    let per_s = |records: u32, took: Duration| f64::from(records) / took.as_secs_f64();
    println!(
        "{} records: {:.0}/s; anew, at random places: {:.0}/s; slowest batch of {CHAIN}: {:.1} ms; {}",
        chains * CHAIN,
        per_s(chains * CHAIN, new),
        per_s(chains / 4 * CHAIN, started.elapsed()),
        slowest.as_secs_f64() * 1e3,
        memory(),
    );
    drop(disk);
    println!("on disk: {} MB", bytes(dir)? / 1_000_000);
    Ok(())
}

fn restart(dir: &Path, store: RecordStore) -> Result<(), Box<dyn Error>> {
    let started = Instant::now();
    let disk = Slab::open(dir, store)?;
    let opened = started.elapsed();
    let (records, sum) = disk.records().fold((0_u64, 0_u64), |(records, sum), (_, block)| (records + 1, sum.wrapping_add(block.checksum)));
    println!(
        "{records} records (sum {sum:x}): open after {:.2} s, read after {:.2} s; {}",
        opened.as_secs_f64(),
        started.elapsed().as_secs_f64(),
        memory()
    );
    Ok(())
}

/// A block whose key is as good as random, after the one before it in its chain.
fn block(chain: u32, n: u32, version: u32) -> DiskBlock {
    let key = |n: u32| {
        let mixed = |seed: u64| {
            (u64::from(chain) << 32 | u64::from(n) << 8 | u64::from(version)).wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        };
        let scrambled = |x: u64| (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mut key = [0; 16];
        key[..8].copy_from_slice(&scrambled(mixed(1)).to_le_bytes());
        key[8..].copy_from_slice(&scrambled(mixed(2)).to_le_bytes());
        BlockKey(key)
    };
    let lineage = Lineage {
        origin: RequestId(u64::from(chain) << 8 | u64::from(version)),
        tenant: Tenant(u64::from(chain % 100).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        parent: n.checked_sub(1).map(key),
        position: n,
    };
    let BlockKey(bytes) = key(n);
    let checksum = u64::from_le_bytes(*bytes.first_chunk().expect("a key is longer")).wrapping_mul(0x94d0_49bb_1331_11eb);
    DiskBlock { key: key(n), checksum, lineage }
}

/// The memory of this process: now, and at most.
fn memory() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mb = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|kb| kb.trim().trim_end_matches(" kB").parse::<u64>().ok()).map_or(0, |kb| kb / 1000)
    };
    format!("{} MB of memory, at most {} MB", mb("VmRSS:"), mb("VmHWM:"))
}

/// Bytes of the files in a directory and those below it, as they are on disk.
fn bytes(dir: &Path) -> Result<u64, Box<dyn Error>> {
    use std::os::unix::fs::MetadataExt;
    fs::read_dir(dir)?.try_fold(0, |sum, entry| {
        let entry = entry?;
        let metadata = entry.metadata()?;
        Ok(sum + if metadata.is_dir() { bytes(&entry.path())? } else { metadata.blocks() * 512 })
    })
}

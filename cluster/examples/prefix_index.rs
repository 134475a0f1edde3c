//! The cost of the prefix index: memory per block, and the time to look a long prompt up, at millions of blocks.
//!
//! `cargo run --release -p tidemill-cluster --example prefix_index [BLOCKS]`

use std::{fs, hint::black_box, time::Instant};
use tidemill_cluster::index::PrefixIndex;
use tidemill_proto::{
    block::BlockKey,
    ids::Epoch,
    message::{CacheEvent, PoolEvent},
    pool::Tier,
};

/// A prompt of 128k tokens.
const PROMPT: usize = 8192;
const POOLS: u64 = 8;
const ENGINES: u64 = 1000;
const LOOKUPS: usize = 200;

fn main() {
    let blocks: usize = std::env::args().nth(1).map_or(10_000_000, |n| n.parse().expect("a number of blocks"));
    let chains = blocks / PROMPT;
    println!("{} blocks in chains of {PROMPT}", chains * PROMPT);

    let index = measure("each block at one pool node", chains, |index, chain, keys, next| {
        let node = chain as u64 % POOLS;
        tell(index, node, keys, next);
    });
    time_lookups(&index, chains, "told in order");
    drop(index);

    let index = measure("and on two engines' devices", chains, |index, chain, keys, next| {
        tell(index, chain as u64 % POOLS, keys, next);
        for engine in [chain as u64 % ENGINES, (chain as u64 * 7 + 1) % ENGINES] {
            tell_cached(index, POOLS + engine, keys, next);
        }
    });
    time_lookups(&index, chains, "told in order");
    drop(index);

    // Blocks of all chains arrive mixed, so that no chain lies in order.
    let mut shuffled = PrefixIndex::default();
    (0..POOLS).for_each(|node| shuffled.add_node(Epoch(node)));
    let mut next = vec![0; POOLS as usize];
    for number in 0..PROMPT {
        for chain in 0..chains {
            tell(&mut shuffled, chain as u64 % POOLS, &[key(chain, number)], &mut next);
        }
    }
    time_lookups(&shuffled, chains, "told in the worst order");
    drop(shuffled);

    // One prompt that every engine has.
    let mut hot = PrefixIndex::default();
    (0..POOLS + ENGINES).for_each(|node| hot.add_node(Epoch(node)));
    let mut next = vec![0; (POOLS + ENGINES) as usize];
    let keys: Vec<BlockKey> = (0..128).map(|number| key(0, number)).collect();
    tell(&mut hot, 0, &keys, &mut next);
    (0..ENGINES).for_each(|engine| tell_cached(&mut hot, POOLS + engine, &keys, &mut next));
    let started = Instant::now();
    for _ in 0..LOOKUPS {
        black_box(hot.leading(black_box(&keys)));
    }
    println!("a prompt of 2k tokens that {ENGINES} engines have: {:.1} µs", started.elapsed().as_secs_f64() * 1e6 / LOOKUPS as f64);
}

fn measure(what: &str, chains: usize, fill: impl Fn(&mut PrefixIndex, usize, &[BlockKey], &mut [u64])) -> PrefixIndex {
    let before = resident_bytes();
    let mut index = PrefixIndex::default();
    (0..POOLS + ENGINES).for_each(|node| index.add_node(Epoch(node)));
    let mut next = vec![0; (POOLS + ENGINES) as usize];
    let started = Instant::now();
    for chain in 0..chains {
        let keys: Vec<BlockKey> = (0..PROMPT).map(|number| key(chain, number)).collect();
        fill(&mut index, chain, &keys, &mut next);
    }
    let (took, blocks) = (started.elapsed(), index.blocks() as f64);
    println!(
        "{what}: {:.1} bytes per block resident, {:.1} counted; {:.2} s to fill",
        resident_bytes().saturating_sub(before) as f64 / blocks,
        index.bytes() as f64 / blocks,
        took.as_secs_f64()
    );
    index
}

fn time_lookups(index: &PrefixIndex, chains: usize, how: &str) {
    let mut times: Vec<f64> = (0..LOOKUPS)
        .map(|lookup| {
            // A different prompt each time, so that no cache has it.
            let chain = lookup * 7919 % chains;
            let keys: Vec<BlockKey> = (0..PROMPT).map(|number| key(chain, number)).collect();
            let started = Instant::now();
            let leading = black_box(index.leading(black_box(&keys)));
            let took = started.elapsed().as_secs_f64() * 1e6;
            assert_eq!(leading.blocks() as usize, PROMPT);
            took
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("  {PROMPT} keys, {how}: p50 {:.0} µs, p90 {:.0} µs", times[LOOKUPS / 2], times[LOOKUPS * 9 / 10]);
}

fn tell(index: &mut PrefixIndex, node: u64, keys: &[BlockKey], next: &mut [u64]) {
    let events: Vec<PoolEvent> = keys.iter().map(|key| PoolEvent::Stored { key: *key, tier: Tier::Dram }).collect();
    index.apply(Epoch(node), next[node as usize], &events).expect("no gap");
    next[node as usize] += events.len() as u64;
}

fn tell_cached(index: &mut PrefixIndex, engine: u64, keys: &[BlockKey], next: &mut [u64]) {
    let events: Vec<CacheEvent> = keys.iter().map(|key| CacheEvent::Stored(*key)).collect();
    index.apply_cache(Epoch(engine), next[engine as usize], &events).expect("no gap");
    next[engine as usize] += events.len() as u64;
}

/// A key as random as a real hash (splitmix64).
fn key(chain: usize, number: usize) -> BlockKey {
    let mix = |seed: u64| {
        let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let seed = (chain * PROMPT + number) as u64;
    let mut key = [0; 16];
    key[..8].copy_from_slice(&mix(2 * seed + 1).to_le_bytes());
    key[8..].copy_from_slice(&mix(2 * seed + 2).to_le_bytes());
    BlockKey(key)
}

fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = status.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.unwrap_or(0) * 4096
}

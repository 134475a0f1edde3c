//! `tidemill-bench replay`: recorded traffic to a live server, or through the KV pool's directory alone, one run per eviction policy, or per
//! rule of where a recurrent model's states are kept.

pub mod bound;
pub mod chains;
pub mod live;
pub mod optimum;
pub mod pool;
pub mod shared;
pub mod states;
pub mod trace;

use crate::{load, record};
use anyhow::{Context, bail, ensure};
use bound::Bound;
use chains::Chains;
use live::LiveArgs;
use pool::ReplayedPool;
use serde::{Serialize, Serializer};
use serde_json::json;
use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Instant,
};
use tidemill_kvpool::core::eviction::Policy;
use tidemill_proto::block::BLOCK_TOKENS;
use trace::{Request, TRACE_BLOCK_TOKENS};

/// Replay a request trace: to a live server, or (--cache-only) to measure how much of its prompts a KV pool remembers.
///
/// A live server gets prompts that are made up so that equal ids give equal prefixes, at the trace's times. With --cache-only, requests
/// come in file order, and the blocks of each are available to the next one at once.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct ReplayArgs {
    /// Use only the pool's directory and eviction code, without a cluster.
    #[arg(long, requires = "capacity")]
    pub cache_only: bool,
    #[command(flatten)]
    #[serde(skip)]
    pub live: LiveArgs,
    /// Mooncake's format: one JSON object per line with `input_length` and `hash_ids`, one id per 512-token block.
    #[arg(long)]
    pub trace: PathBuf,
    /// Blocks of 512 tokens that the pool holds, or `unlimited`.
    #[arg(long)]
    pub capacity: Option<Capacity>,
    /// lru, lfu, s3fifo, hit-density, `optimum` (knows the future), or `all`.
    #[arg(long, default_value = Policy::default().name())]
    pub policy: Choice,
    /// States beside K and V, of this shape with recurrent layers: lfm2-1.2b or qwen3-next-80b-a3b. Compares the rules of which block ends
    /// have one.
    #[arg(long, requires = "cache_only", conflicts_with = "bounds")]
    pub states: Option<String>,
    /// Blocks of 16 tokens between states, as workers' flag of this name has them. [default: the workers' own]
    #[arg(long, requires = "states", value_parser = clap::value_parser!(u32).range(1..))]
    pub state_every: Option<u32>,
    /// The trace of a second model, with blocks half as large again, in the same node; beside two nodes of half the memory, which is
    /// --capacity blocks of the first model.
    #[arg(long, requires = "cache_only", conflicts_with_all = ["states", "bounds"])]
    pub beside: Option<PathBuf>,
    /// Also print upper bounds for policies that know only what a pool can see of a block.
    #[arg(long)]
    pub bounds: bool,
    /// Write settings and results here too; results of `all` as a list, `runs`.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Capacity {
    Blocks(u32),
    Unlimited,
}

/// The rule that decides which blocks stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decider {
    Policy(Policy),
    Optimum,
}

/// The rules to compare.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Choice {
    One(Decider),
    All,
}

/// Hits over all prompts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Hits {
    pub blocks: u64,
    /// Blocks found together with all blocks before them.
    pub prefix_blocks: u64,
    pub tokens: u64,
    /// Tokens in `prefix_blocks`.
    pub prefix_tokens: u64,
}

#[derive(Debug, Serialize)]
struct Row {
    policy: &'static str,
    block_hit_rate: f64,
    prefix_token_hit_rate: f64,
    seconds: f64,
}

impl Hits {
    /// Counts one prompt and its number of leading blocks found.
    pub fn add(&mut self, request: &Request, leading_blocks: usize) {
        self.blocks += request.blocks.len() as u64;
        self.prefix_blocks += leading_blocks as u64;
        self.tokens += request.input_tokens;
        // The last block of a prompt is usually not full.
        self.prefix_tokens += request.input_tokens.min(TRACE_BLOCK_TOKENS * leading_blocks as u64);
    }

    pub fn block_hit_rate(&self) -> f64 {
        self.prefix_blocks as f64 / self.blocks as f64
    }

    pub fn prefix_token_hit_rate(&self) -> f64 {
        self.prefix_tokens as f64 / self.tokens as f64
    }
}

/// Hits of a pool of `capacity` blocks over the requests' prompts.
pub fn replay(requests: &[Request], capacity: Capacity, decider: Decider) -> Hits {
    // More slots than blocks change nothing.
    let unique = trace::unique_blocks(requests) as u32;
    let slots = match capacity {
        Capacity::Blocks(blocks) => blocks.min(unique),
        Capacity::Unlimited => unique,
    };
    match decider {
        Decider::Optimum => optimum::hits(requests, slots as usize),
        Decider::Policy(policy) => {
            let mut pool = ReplayedPool::new(slots, policy);
            let mut hits = Hits::default();
            requests.iter().for_each(|request| hits.add(request, pool.serve(request)));
            hits
        }
    }
}

pub fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let Some(capacity) = args.capacity.filter(|_| args.cache_only) else {
        return load::runtime(args.live.threads)?.block_on(live::run(args));
    };
    let requests = trace::read(&args.trace)?;
    let unique_blocks = trace::unique_blocks(&requests);
    println!("{}: {} requests, {unique_blocks} different blocks, capacity {}", args.trace.display(), requests.len(), capacity);
    if let Some(name) = &args.states {
        return replay_states(args, &requests, capacity, name);
    }
    if let Some(beside) = &args.beside {
        return replay_shared(args, &requests, beside, capacity);
    }
    println!("{:<12} {:>15} {:>22} {:>8}", "policy", "block hit rate", "prefix token hit rate", "seconds");
    let mut rows = Vec::new();
    for decider in args.policy.deciders() {
        let start = Instant::now();
        let hits = replay(&requests, capacity, decider);
        let (block_hit_rate, prefix_token_hit_rate) = (hits.block_hit_rate(), hits.prefix_token_hit_rate());
        let seconds = start.elapsed().as_secs_f64();
        let policy = decider.name();
        println!("{policy:<12} {block_hit_rate:>15.4} {prefix_token_hit_rate:>22.4} {seconds:>8.2}");
        rows.push(Row { policy, block_hit_rate, prefix_token_hit_rate, seconds });
    }
    let bounds = if args.bounds { bounds(&requests, capacity, unique_blocks) } else { Vec::new() };
    let mut report = json!({
        "settings": args,
        "requests": requests.len(),
        "unique_blocks": unique_blocks,
        "block_tokens": TRACE_BLOCK_TOKENS,
    });
    match (&args.policy, rows.as_slice()) {
        (Choice::One(_), [row]) => {
            report["block_hit_rate"] = row.block_hit_rate.into();
            report["prefix_token_hit_rate"] = row.prefix_token_hit_rate.into();
            report["seconds"] = row.seconds.into();
        }
        _ => report["runs"] = json!(rows),
    }
    if args.bounds {
        report["bounds"] = json!(bounds);
    }
    record::write(args.json.as_ref(), "replay", &report)
}

fn replay_states(args: &ReplayArgs, requests: &[Request], capacity: Capacity, name: &str) -> anyhow::Result<()> {
    let shape = states::recurrent(name)?;
    let Choice::One(Decider::Policy(policy)) = args.policy else { bail!("--states: choose one --policy, of those that a pool has") };
    let mut chains = Chains::default();
    let next_turns = requests.iter().filter(|request| chains.next(request).is_next_turn).count();
    let (block, state) = (shape.block_bytes() >> 10, shape.state_bytes() >> 10);
    println!("{next_turns} prompts are next turns; {name}: {block} KiB a block of 16 tokens, {state} KiB a state");
    println!("{}", states::header());
    let mut runs = Vec::new();
    for ends in states::rules(&shape, args.state_every.map(|every| every as usize)) {
        let outcome = states::replay(requests, capacity, policy, &shape, ends)?;
        println!("{}", outcome.line());
        runs.push(outcome);
    }
    let report =
        json!({ "settings": args, "requests": requests.len(), "next_turns": next_turns, "block_tokens": BLOCK_TOKENS, "runs": runs });
    record::write(args.json.as_ref(), "replay", &report)
}

fn replay_shared(args: &ReplayArgs, requests: &[Request], beside: &Path, capacity: Capacity) -> anyhow::Result<()> {
    let (Choice::One(Decider::Policy(policy)), Capacity::Blocks(blocks)) = (&args.policy, capacity) else {
        bail!("--beside: choose one --policy, of those that a pool has, and a --capacity in blocks")
    };
    let others = trace::read(beside)?;
    println!("{}: {} requests of the second model", beside.display(), others.len());
    println!("{:<8} {:>12} {:>16} {:>14} {:>18}", "model", "block size", "hits, shared", "hits, halves", "memory at the end");
    let rows = shared::compare([requests, &others], blocks, *policy);
    for shared::Row { model, block_units, shared, halves, memory_percent } in &rows {
        println!("{model:<8} {block_units:>12} {shared:>16.4} {halves:>14.4} {memory_percent:>16.0} %");
    }
    let report = json!({ "settings": args, "requests": requests.len(), "requests_beside": others.len(), "runs": rows });
    record::write(args.json.as_ref(), "replay", &report)
}

fn bounds(requests: &[Request], capacity: Capacity, unique_blocks: usize) -> Vec<Bound> {
    let blocks = match capacity {
        Capacity::Blocks(blocks) => blocks.into(),
        Capacity::Unlimited => unique_blocks as u64,
    };
    let bounds = bound::bounds(requests, blocks);
    println!("{:<52} {:>8} {:>22}", "no policy beats, with classes by", "classes", "prefix token hit rate");
    for Bound { classes_by, classes, prefix_token_hit_rate } in &bounds {
        println!("{classes_by:<52} {classes:>8} {prefix_token_hit_rate:>22.4}");
    }
    bounds
}

impl Decider {
    pub const ALL: [Decider; Policy::ALL.len() + 1] = {
        let mut all = [Decider::Optimum; Policy::ALL.len() + 1];
        let mut n = 0;
        while n < Policy::ALL.len() {
            all[n] = Decider::Policy(Policy::ALL[n]);
            n += 1;
        }
        all
    };

    pub fn name(self) -> &'static str {
        match self {
            Decider::Policy(policy) => policy.name(),
            Decider::Optimum => "optimum",
        }
    }
}

impl Choice {
    fn deciders(&self) -> Vec<Decider> {
        match self {
            Choice::One(decider) => vec![*decider],
            Choice::All => Decider::ALL.to_vec(),
        }
    }
}

impl FromStr for Choice {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        match (name, Decider::ALL.into_iter().find(|decider| decider.name() == name)) {
            ("all", _) => Ok(Choice::All),
            (_, Some(decider)) => Ok(Choice::One(decider)),
            _ => bail!("choose one of {}, or all", Decider::ALL.map(Decider::name).join(", ")),
        }
    }
}

impl Serialize for Choice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            Choice::One(decider) => decider.name(),
            Choice::All => "all",
        })
    }
}

impl FromStr for Capacity {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        if text == "unlimited" {
            return Ok(Capacity::Unlimited);
        }
        let blocks = text.parse().context("not a number of blocks up to 4294967295, nor `unlimited`")?;
        ensure!(blocks > 0, "must be at least one block");
        Ok(Capacity::Blocks(blocks))
    }
}

impl std::fmt::Display for Capacity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Capacity::Blocks(blocks) => write!(f, "{blocks} blocks"),
            Capacity::Unlimited => f.write_str("unlimited"),
        }
    }
}

impl Serialize for Capacity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Capacity::Blocks(blocks) => serializer.serialize_u32(*blocks),
            Capacity::Unlimited => serializer.serialize_str("unlimited"),
        }
    }
}

#[cfg(test)]
mod tests;

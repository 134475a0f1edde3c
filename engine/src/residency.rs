//! Admission: which blocks of which job are on the device. *Match what the device has, fetch what the pool has, compute the rest.*
//!
//! ```text
//!             admit                  all that comes is here
//!   (no blocks) ───► fetching ──────────────────────────────► ready ──advance──► ready …
//!      ▲  └────────────────(nothing to fetch)───────────────────▲ │
//!      └────────────────────────── release ───────────────────────┘
//! ```
//!
//! A job holds device blocks for all its tokens, or none. Each job owns its [`JobKv`]; [`Residency`] owns what they share: the device,
//! the fetches under way, and the queue of actions.

use crate::{
    announcing::Changes,
    device::DeviceBlocks,
    fetching::Fetching,
    job::{Action, Delivery, JobId, ScheduledChunk},
};
use std::{collections::HashMap, ops::Range, time::Duration};
use tidemill_kvpool::client::{Arrival, FetchId, request::parts};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint, Tenant, Token},
    ids::RequestId,
    message::{Blocks, CacheEvent, PoolNode},
    pool::Lineage,
};

/// The KV of one job: the chain of its full blocks, and the device blocks that hold it.
#[derive(Debug)]
pub struct JobKv {
    job: JobId,
    request: RequestId,
    tenant: Tenant,
    chain: Chain,
    /// Device blocks; empty until admitted.
    table: Vec<u32>,
    computed: usize,
    fetching: Option<Fetching>,
}

impl JobKv {
    pub fn new(job: JobId, request: RequestId, layout: &LayoutFingerprint, salt: &[u8], tokens: &[Token]) -> Self {
        Self {
            job,
            request,
            tenant: Tenant::of_salt(salt),
            chain: Chain::new(layout, salt, tokens),
            table: Vec::new(),
            computed: 0,
            fetching: None,
        }
    }

    /// Hashes the blocks that became full. `tokens` are all tokens of the job.
    pub fn extend_to(&mut self, tokens: &[Token]) {
        self.chain.extend_to(tokens);
    }

    /// Keys of the full blocks, in order.
    pub fn keys(&self) -> &[BlockKey] {
        self.chain.keys()
    }

    /// The block table.
    pub fn table(&self) -> &[u32] {
        &self.table
    }

    /// Leading tokens whose KV is on the device.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Leading blocks that are on the device and full.
    pub fn computed_blocks(&self) -> usize {
        self.computed / BLOCK_TOKENS
    }

    pub fn is_admitted(&self) -> bool {
        !self.table.is_empty()
    }

    /// Whether the next tokens can be computed: all that comes from elsewhere is here.
    pub fn is_ready(&self) -> bool {
        self.is_admitted() && self.fetching.is_none()
    }

    /// The device block for the key `index` of the job's fetch, if it is still wanted.
    pub(crate) fn destination(&self, index: usize) -> Option<u32> {
        Some(self.table[self.fetching.as_ref()?.wanted(index)?])
    }

    /// Lineage of block `number`.
    pub fn lineage(&self, number: usize) -> Lineage {
        Lineage {
            origin: self.request,
            tenant: self.tenant,
            parent: number.checked_sub(1).map(|before| self.keys()[before]),
            position: number as u32,
        }
    }

    /// Full blocks by number, as a put takes them.
    pub fn blocks(&self, numbers: Range<usize>) -> Vec<(BlockKey, u32)> {
        numbers.map(|number| (self.keys()[number], self.table[number])).collect()
    }
}

/// One answer of a fetch.
#[derive(Debug)]
pub struct Fetched {
    /// The device block that the bytes belong into, if anybody wants them.
    pub block: Option<u32>,
    /// Since the fetch began.
    pub waited: Duration,
    /// Set by the answer that ends the fetch.
    pub finished: Option<FetchedBlocks>,
}

/// Consecutive blocks of one job that came from the pool.
#[derive(Debug)]
pub struct FetchedBlocks {
    /// Number of the first one in the chain.
    pub first: usize,
    pub arrivals: Vec<Arrival>,
}

/// What all jobs of a worker share.
#[derive(Debug)]
pub struct Residency {
    device: DeviceBlocks,
    /// Fetches under way, and for which job.
    fetches: HashMap<FetchId, JobId>,
    fetches_begun: u64,
    actions: Vec<Action>,
}

impl Residency {
    pub fn new(device_blocks: u32) -> Self {
        Self { device: DeviceBlocks::new(device_blocks), fetches: HashMap::new(), fetches_begun: 0, actions: Vec::new() }
    }

    /// Queues an action.
    pub fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    /// The actions since the last call.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// All blocks of the device.
    pub fn device_blocks(&self) -> usize {
        self.device.total()
    }

    /// Those that a job could have.
    pub fn free_blocks(&self) -> usize {
        self.device.free_blocks()
    }

    /// Device blocks by state.
    pub fn blocks(&self, bytes_per_block: u64) -> Blocks {
        self.device.report(bytes_per_block)
    }

    /// What changed in the device's prefix cache since the last call.
    pub(crate) fn take_changes(&mut self) -> Changes {
        self.device.take_changes()
    }

    /// All that the device's prefix cache has, as events from empty.
    pub(crate) fn cached(&self) -> Vec<CacheEvent> {
        self.device.findable().map(CacheEvent::Stored).collect()
    }

    /// Gives a job a table of `blocks` device blocks: of its first `reusable` full blocks those that the device has, and private ones. All
    /// or nothing: `false`, without a change, if that would leave fewer than `spare` blocks.
    pub fn admit(&mut self, kv: &mut JobKv, reusable: usize, blocks: usize, spare: usize) -> bool {
        let mut table = self.device.match_prefix(&kv.keys()[..reusable]);
        let (held, missing) = (table.len(), blocks - table.len());
        let fits = self.device.free_blocks() >= missing + spare;
        let Some(private) = fits.then(|| self.device.allocate(missing)).flatten() else {
            self.device.release(&table);
            return false;
        };
        table.extend(private);
        kv.table = table;
        kv.computed = held * BLOCK_TOKENS;
        true
    }

    /// Asks the pool for those of an admitted job's leading blocks that the device lacks: block `n` at `nodes[n]`. Waits for blocks only
    /// at `home`. `false`: there is nothing to fetch.
    pub fn fetch(&mut self, kv: &mut JobKv, nodes: &[PoolNode], home: Option<PoolNode>, wait: Duration, now: Duration) -> bool {
        let first = kv.computed_blocks();
        if nodes.len() <= first {
            return false;
        }
        let fetch = self.begin_fetch(kv.job);
        kv.fetching = Some(Fetching::new(fetch, first, nodes.len() - first, now));
        let blocks = nodes.iter().copied().zip(kv.keys().iter().copied()).skip(first);
        self.actions.push(Action::Fetch { fetch, parts: parts(blocks, home, wait) });
        true
    }

    /// Waits no longer for a job's fetch: asks once more for what is missing, and takes what is there now.
    pub fn fetch_without_waiting(&mut self, kv: &mut JobKv, nodes: &[PoolNode]) {
        let Some(mut fetching) = self.end_fetch(kv) else { return };
        let fetch = self.begin_fetch(kv.job);
        let missing = fetching.restart(fetch).map(|number| (nodes[number], kv.keys()[number]));
        self.actions.push(Action::Fetch { fetch, parts: parts(missing, None, Duration::ZERO) });
        kv.fetching = Some(fetching);
    }

    /// Whose fetch this is. `None`: it has ended.
    pub fn fetching_job(&self, fetch: FetchId) -> Option<JobId> {
        self.fetches.get(&fetch).copied()
    }

    /// One answer of a job's fetch: an arrival, or a miss. `None`: a duplicate, or of no use any more. With the last answer that matters
    /// the fetched blocks become findable on the device.
    pub fn fetched(&mut self, kv: &mut JobKv, index: usize, arrival: Option<Arrival>, now: Duration) -> Option<Fetched> {
        let fetching = kv.fetching.as_mut()?;
        let number = match arrival {
            Some(arrival) => Some(fetching.arrive(index, arrival)?),
            None => {
                fetching.miss(index);
                None
            }
        };
        let (block, waited) = (number.map(|number| kv.table[number]), now - fetching.started);
        let finished = fetching.is_done().then(|| self.finish_fetch(kv)).flatten();
        Some(Fetched { block, waited, finished })
    }

    /// One more block for an admitted job. `false`: the device is full.
    pub fn grow(&mut self, kv: &mut JobKv) -> bool {
        let block = self.device.allocate(1);
        let grown = block.is_some();
        kv.table.extend(block.into_iter().flatten());
        grown
    }

    /// A chunk is computed. Returns the numbers of the blocks that became full; the device finds them from now on.
    pub fn advance(&mut self, kv: &mut JobKv, chunk: &ScheduledChunk) -> Range<usize> {
        assert_eq!(kv.computed, chunk.start, "a job's chunks are computed in order");
        let first = kv.computed_blocks();
        kv.computed += chunk.len;
        let full = first..kv.computed_blocks();
        self.publish_on_device(kv, full.clone());
        full
    }

    /// Sends full blocks of a job on their way into the pool.
    pub fn put(&mut self, kv: &JobKv, numbers: Range<usize>, node: PoolNode, delivery: Delivery) {
        let (lineage, blocks) = (kv.lineage(numbers.start), kv.blocks(numbers));
        self.actions.push(Action::Put { node, lineage, blocks, delivery });
    }

    /// Gives up a job's fetch and its device blocks.
    pub fn release(&mut self, kv: &mut JobKv) {
        self.end_fetch(kv);
        self.device.release(&std::mem::take(&mut kv.table));
        kv.computed = 0;
    }

    /// Checks everything that is believed between calls, of all jobs there are. For tests.
    pub fn check_integrity<'a>(&self, jobs: impl IntoIterator<Item = &'a JobKv>) {
        self.device.check_integrity();
        let mut references = vec![0; self.device.total()];
        let mut fetches = 0;
        for kv in jobs {
            assert!(kv.computed <= kv.table.len() * BLOCK_TOKENS, "computed tokens have a block");
            kv.table.iter().for_each(|&block| references[block as usize] += 1);
            if let Some(fetching) = &kv.fetching {
                assert_eq!(self.fetches.get(&fetching.id), Some(&kv.job));
                assert!(kv.is_admitted(), "a job that fetches has the blocks to fetch into");
                assert!(!fetching.is_done(), "a finished fetch ends at once");
                fetches += 1;
            }
        }
        assert_eq!(fetches, self.fetches.len(), "each fetch is some job's");
        for (block, held) in (0..).zip(references) {
            assert_eq!(self.device.references(block), held, "block {block}: one reference for each job that holds it");
        }
    }

    fn begin_fetch(&mut self, job: JobId) -> FetchId {
        let fetch = FetchId(self.fetches_begun);
        self.fetches_begun += 1;
        self.fetches.insert(fetch, job);
        fetch
    }

    fn end_fetch(&mut self, kv: &mut JobKv) -> Option<Fetching> {
        let fetching = kv.fetching.take()?;
        self.fetches.remove(&fetching.id);
        self.actions.push(Action::CancelFetch { fetch: fetching.id });
        Some(fetching)
    }

    fn finish_fetch(&mut self, kv: &mut JobKv) -> Option<FetchedBlocks> {
        let fetching = kv.fetching.take()?;
        self.fetches.remove(&fetching.id);
        if fetching.is_cut() {
            self.actions.push(Action::CancelFetch { fetch: fetching.id });
        }
        let (first, arrivals) = (fetching.first, fetching.arrivals());
        let ready = first + arrivals.len();
        kv.computed = ready * BLOCK_TOKENS;
        self.publish_on_device(kv, first..ready);
        Some(FetchedBlocks { first, arrivals })
    }

    /// Makes full blocks findable, as far as they have keys.
    fn publish_on_device(&mut self, kv: &JobKv, numbers: Range<usize>) {
        let numbers = numbers.start..numbers.end.min(kv.keys().len());
        for (key, block) in kv.blocks(numbers) {
            self.device.publish(block, key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_kvpool::client::Source;

    const LAYOUT: LayoutFingerprint = LayoutFingerprint([1; 16]);

    fn node() -> PoolNode {
        PoolNode { addr: ([127, 0, 0, 1], 1).into(), near: true }
    }

    /// A job whose first `shared` blocks are those of every other job.
    fn job(id: u64, shared: usize, blocks: usize) -> JobKv {
        let token = |i: usize| if i < shared * BLOCK_TOKENS { 0 } else { 1 + id as Token };
        let tokens: Vec<Token> = (0..blocks * BLOCK_TOKENS).map(token).collect();
        JobKv::new(JobId(id), RequestId(id), &LAYOUT, b"", &tokens)
    }

    /// On a device of five blocks that has computed and released two.
    fn residency() -> Residency {
        let (mut residency, mut first) = (Residency::new(5), job(1, 2, 2));
        assert!(residency.admit(&mut first, 2, 2, 0));
        let full = residency.advance(&mut first, &ScheduledChunk { job: JobId(1), start: 0, len: 2 * BLOCK_TOKENS });
        assert_eq!(full, 0..2);
        residency.release(&mut first);
        residency.check_integrity([&first]);
        residency
    }

    #[test]
    fn a_job_takes_what_the_device_has_and_fetches_what_the_pool_has() {
        let (mut residency, mut kv) = (residency(), job(2, 2, 5));
        assert!(residency.admit(&mut kv, 4, 5, 0));
        assert_eq!(kv.computed_blocks(), 2, "the device has these");
        assert!(!residency.fetch(&mut kv, &[node(); 2], None, Duration::ZERO, Duration::ZERO) && kv.is_ready());

        assert!(residency.fetch(&mut kv, &[node(); 4], None, Duration::ZERO, Duration::ZERO) && !kv.is_ready());
        let Some(Action::Fetch { fetch, parts }) = residency.take_actions().pop() else { panic!("it fetches") };
        assert_eq!(parts[0].keys, kv.keys()[2..4]);
        assert_eq!(residency.fetching_job(fetch), Some(JobId(2)));

        let arrival = Some(Arrival { origin: RequestId(1), source: Source::Dram });
        let fetched = residency.fetched(&mut kv, 0, arrival, Duration::ZERO).unwrap();
        assert_eq!((fetched.block, fetched.finished.is_some()), (Some(kv.table()[2]), false));
        residency.check_integrity([&kv]);
        let fetched = residency.fetched(&mut kv, 1, None, Duration::ZERO).unwrap();
        assert_eq!((fetched.block, fetched.finished.unwrap().arrivals.len()), (None, 1), "the rest is computed");
        assert!(kv.is_ready() && kv.computed_blocks() == 3);
        assert_eq!(residency.take_actions(), [Action::CancelFetch { fetch }]);
        residency.check_integrity([&kv]);
    }

    #[test]
    fn admission_is_all_or_nothing() {
        let (mut residency, mut kv) = (residency(), job(2, 2, 4));
        assert!(!residency.admit(&mut kv, 4, 4, 2), "two blocks must be left, and one would be");
        assert!(!kv.is_admitted());
        residency.check_integrity([&kv]);
        assert!(residency.admit(&mut kv, 4, 4, 1) && residency.grow(&mut kv) && !residency.grow(&mut kv));
        residency.check_integrity([&kv]);
    }

    #[test]
    fn late_answers_of_a_released_job_are_nobodys() {
        let (mut residency, mut kv) = (residency(), job(2, 0, 3));
        assert!(residency.admit(&mut kv, 3, 3, 0));
        assert!(residency.fetch(&mut kv, &[node(); 3], None, Duration::ZERO, Duration::ZERO));
        let Some(Action::Fetch { fetch, .. }) = residency.take_actions().pop() else { panic!("it fetches") };
        residency.release(&mut kv);
        assert_eq!(residency.take_actions(), [Action::CancelFetch { fetch }]);
        assert_eq!(residency.fetching_job(fetch), None);
        residency.check_integrity([&kv]);
    }
}

//! Admission: the blocks of each job on the device. *Match what the device has, fetch what the pool has, compute the rest.*
//!
//! ```text
//!             admit                  all that comes is here
//!   (no blocks) ───► fetching ──────────────────────────────► ready ──advance──► ready …
//!      ▲  └────────────────(nothing to fetch)───────────────────▲ │
//!      └────────────────────────── release ───────────────────────┘
//! ```
//!
//! A job holds device blocks for all its tokens, or none. Each job owns its [`JobKv`]; [`Residency`] owns the parts that jobs share: the
//! device, the fetches in progress, and the queue of actions.

use crate::{
    announcing::Changes,
    device::DeviceBlocks,
    fetching::Fetching,
    job::{Action, Delivery, JobId, ScheduledChunk},
    states::{JobState, StateRule},
};
use std::{collections::HashMap, ops::Range, time::Duration};
use tidemill_kvpool::client::{Arrival, FetchId, request::parts as pool_parts};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint, Tenant, Token},
    ids::RequestId,
    message::{Blocks, CacheEvent, PoolNode},
    pool::Lineage,
    step::StateBlocks,
};

/// The KV of one job: the chain of its full blocks, and the device blocks that hold it.
#[derive(Debug)]
pub struct JobKv {
    job: JobId,
    request: RequestId,
    tenant: Tenant,
    chain: Chain,
    /// The job's device blocks; empty until admitted.
    table: Vec<u32>,
    /// The job's state; empty if the model keeps none.
    state: JobState,
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
            state: JobState::default(),
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

    /// The state's blocks for a chunk up to position `end`.
    pub fn state(&self, end: usize) -> StateBlocks<'_> {
        self.state.of_chunk(end)
    }

    /// The number of blocks after which a state was last kept by this job, or came from the pool.
    pub fn kept_at(&self) -> usize {
        self.state.kept_at()
    }

    /// The number of device blocks that the job holds.
    pub fn blocks_held(&self) -> usize {
        self.table.len() + self.state.blocks().count()
    }

    /// The number of leading tokens whose KV is on the device.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// The number of leading blocks that are on the device and full.
    pub fn computed_blocks(&self) -> usize {
        self.computed / BLOCK_TOKENS
    }

    pub fn is_admitted(&self) -> bool {
        !self.table.is_empty()
    }

    /// Whether the next tokens can be computed, as all fetched blocks have arrived.
    pub fn is_ready(&self) -> bool {
        self.is_admitted() && self.fetching.is_none()
    }

    /// The device block for the key `index` of the job's fetch, if it is still wanted.
    pub(crate) fn destination(&self, index: usize) -> Option<u32> {
        let fetching = self.fetching.as_ref()?;
        Some(self.place(fetching.wanted(index)?, fetching.end()))
    }

    /// The device block of number `number`: of the chain, or from `end` on of the state there.
    fn place(&self, number: usize, end: usize) -> u32 {
        if number < end { self.table[number] } else { self.state.fetched_to()[number - end] }
    }

    /// The key of number `number`, likewise.
    fn key(&self, number: usize, end: usize) -> BlockKey {
        if number < end { self.keys()[number] } else { self.keys()[end - 1].state_part((number - end) as u32) }
    }

    /// The lineage of block `number`.
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

/// The result of one answer of a fetch.
#[derive(Debug)]
pub struct Fetched {
    /// The device block that the bytes belong into, if they are still wanted.
    pub block: Option<u32>,
    /// The time since the fetch began.
    pub waited: Duration,
    /// Set by the answer that ends the fetch.
    pub finished: Option<FetchedBlocks>,
}

/// Consecutive blocks of one job that came from the pool.
#[derive(Debug)]
pub struct FetchedBlocks {
    /// The number of the first one in the chain.
    pub first: usize,
    pub arrivals: Vec<Arrival>,
}

/// The data that all jobs of a worker share.
#[derive(Debug)]
pub struct Residency {
    device: DeviceBlocks,
    states: StateRule,
    /// The fetches in progress, and their jobs.
    fetches: HashMap<FetchId, JobId>,
    fetches_begun: u64,
    actions: Vec<Action>,
}

impl Residency {
    pub fn new(device_blocks: u32) -> Self {
        Self {
            device: DeviceBlocks::new(device_blocks),
            states: StateRule::default(),
            fetches: HashMap::new(),
            fetches_begun: 0,
            actions: Vec::new(),
        }
    }

    /// Keeps the states of a model's layers by this rule.
    pub fn keep_states(&mut self, states: StateRule) {
        self.states = states;
    }

    /// The rule by which states are kept.
    pub fn states(&self) -> StateRule {
        self.states
    }

    /// Queues an action.
    pub fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    /// The actions since the last call.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// The number of blocks that one job's tokens could have.
    pub fn device_blocks(&self) -> usize {
        self.device.total().saturating_sub(self.states.of_job())
    }

    /// The number of free blocks that a job could get.
    pub fn free_blocks(&self) -> usize {
        self.device.free_blocks()
    }

    /// Device blocks by state.
    pub fn blocks(&self, bytes_per_block: u64) -> Blocks {
        self.device.report(bytes_per_block)
    }

    /// The changes of the device's prefix cache since the last call.
    pub(crate) fn take_changes(&mut self) -> Changes {
        self.device.take_changes()
    }

    /// The contents of the device's prefix cache, as events from empty.
    pub(crate) fn cached(&self) -> Vec<CacheEvent> {
        self.device.findable().map(CacheEvent::Stored).collect()
    }

    /// Gives a job a table of `blocks` device blocks: those of its first `reusable` full blocks that the device has, and private ones. If
    /// that would leave fewer than `spare` blocks, returns `false` and changes nothing.
    pub fn admit(&mut self, kv: &mut JobKv, reusable: usize, blocks: usize, spare: usize) -> bool {
        let parts = self.states.blocks;
        let reusable = if parts > 0 { self.device.usable_prefix(&kv.keys()[..reusable], parts) } else { reusable };
        let mut table = self.device.match_prefix(&kv.keys()[..reusable]);
        let (held, missing) = (table.len(), blocks - table.len());
        let state_keys: Vec<BlockKey> = table.last().map_or(Vec::new(), |_| kv.keys()[held - 1].state_parts(parts).collect());
        let state = self.device.match_prefix(&state_keys);
        let needed = missing + self.states.private();
        let fits = self.device.free_blocks() >= needed + spare;
        let Some(mut private) = fits.then(|| self.device.allocate(needed)).flatten() else {
            self.device.release(&table);
            self.device.release(&state);
            return false;
        };
        kv.state.begin(state, private.split_off(missing));
        table.extend(private);
        kv.table = table;
        kv.computed = held * BLOCK_TOKENS;
        true
    }

    /// Requests from the pool those of an admitted job's leading blocks that the device lacks: block `n` at `nodes[n]`; and the state after
    /// the last one, if layers keep one, at that one's node. Waits for blocks only at `home`. Returns `false` if there is nothing to fetch.
    pub fn fetch(&mut self, kv: &mut JobKv, nodes: &[PoolNode], home: Option<PoolNode>, wait: Duration, now: Duration) -> bool {
        let first = kv.computed_blocks();
        if nodes.len() <= first {
            return false;
        }
        let fetch = self.begin_fetch(kv.job);
        let (end, state) = (nodes.len(), self.states.blocks);
        let fetching = Fetching::new(fetch, first, nodes.to_vec(), state, now);
        let blocks = (first..end + state).map(|number| (fetching.node(number), kv.key(number, end)));
        self.actions.push(Action::Fetch { fetch, parts: pool_parts(blocks, home, wait) });
        kv.fetching = Some(fetching);
        true
    }

    /// Stops waiting in a job's fetch: requests the missing blocks once more, and takes those that are there now.
    pub fn fetch_without_waiting(&mut self, kv: &mut JobKv) {
        let Some(mut fetching) = self.end_fetch(kv) else { return };
        let fetch = self.begin_fetch(kv.job);
        let missing: Vec<usize> = fetching.restart(fetch).collect();
        let missing = missing.into_iter().map(|number| (fetching.node(number), kv.key(number, fetching.end())));
        self.actions.push(Action::Fetch { fetch, parts: pool_parts(missing, None, Duration::ZERO) });
        kv.fetching = Some(fetching);
    }

    /// The job of this fetch; `None` if it has ended.
    pub fn fetching_job(&self, fetch: FetchId) -> Option<JobId> {
        self.fetches.get(&fetch).copied()
    }

    /// Applies one answer of a job's fetch: an arrival, or a miss. Returns `None` for a duplicate, or a block that is no longer of use.
    /// With the last answer that matters, the fetched blocks become findable on the device. If the state at their end is missing, that of
    /// an earlier end is tried.
    pub fn fetched(&mut self, kv: &mut JobKv, index: usize, arrival: Option<Arrival>, now: Duration) -> Option<Fetched> {
        let fetching = kv.fetching.as_mut()?;
        let number = match arrival {
            Some(arrival) => Some(fetching.arrive(index, arrival)?),
            None => {
                fetching.miss(index);
                None
            }
        };
        let (end, waited, is_done) = (fetching.end(), now - fetching.started, fetching.is_done());
        let block = number.map(|number| kv.place(number, end));
        let finished = is_done.then(|| self.finish_fetch(kv)).flatten();
        Some(Fetched { block, waited, finished })
    }

    /// Adds one more block to an admitted job. Returns `false` if the device is full.
    pub fn grow(&mut self, kv: &mut JobKv) -> bool {
        let block = self.device.allocate(1);
        let grown = block.is_some();
        kv.table.extend(block.into_iter().flatten());
        grown
    }

    /// Notes that a chunk is computed. Returns the numbers of the blocks that became full, which are findable on the device from now on.
    pub fn advance(&mut self, kv: &mut JobKv, chunk: &ScheduledChunk) -> Range<usize> {
        assert_eq!(kv.computed, chunk.start, "a job's chunks are computed in order");
        let first = kv.computed_blocks();
        kv.computed += chunk.len;
        if self.states.blocks > 0 {
            let left = kv.state.advance(kv.computed);
            self.device.release(&left);
        }
        let full = first..kv.computed_blocks();
        self.publish_on_device(kv, full.clone());
        full
    }

    /// Starts to put full blocks of a job into the pool.
    pub fn put(&mut self, kv: &JobKv, numbers: Range<usize>, node: PoolNode, delivery: Delivery) {
        let (lineage, blocks) = (kv.lineage(numbers.start), kv.blocks(numbers));
        self.actions.push(Action::Put { node, lineage, blocks, delivery });
    }

    /// Keeps the state after a job's computed tokens, which end with a block, for other jobs: in the pool if `to` is given, and on the
    /// device if there is room for it beside the job's own. Returns the number of blocks in flight to the pool.
    pub fn keep_state(&mut self, kv: &mut JobKv, to: Option<(PoolNode, Delivery)>) -> usize {
        let at = kv.computed_blocks();
        assert!(at > 0 && kv.computed.is_multiple_of(BLOCK_TOKENS), "a state is kept at a block's end");
        let blocks: Vec<(BlockKey, u32)> =
            kv.keys()[at - 1].state_parts(self.states.blocks).zip(kv.state.current().iter().copied()).collect();
        let putting = self.put_state(kv, at, &blocks, to);
        if kv.state.is_at_private_end()
            && let Some(fresh) = self.device.allocate(self.states.blocks)
        {
            blocks.iter().for_each(|(key, block)| self.device.publish(*block, *key));
            kv.state.share(fresh);
            kv.state.note_kept(at);
        }
        putting
    }

    /// Keeps the state at the last block end of a job that has ended.
    pub fn keep_last_state(&mut self, kv: &mut JobKv, to: Option<(PoolNode, Delivery)>) {
        let Some((at, end)) = kv.state.last_end().filter(|(at, _)| *at != kv.state.kept_at()) else { return };
        let blocks: Vec<(BlockKey, u32)> = kv.keys()[at - 1].state_parts(self.states.blocks).zip(end.iter().copied()).collect();
        self.put_state(kv, at, &blocks, to);
        blocks.iter().for_each(|(key, block)| self.device.publish(*block, *key));
    }

    /// Starts to put the state after `at` blocks into the pool, if `to` is given. Returns the number of its blocks in flight.
    fn put_state(&mut self, kv: &mut JobKv, at: usize, blocks: &[(BlockKey, u32)], to: Option<(PoolNode, Delivery)>) -> usize {
        let Some((node, delivery)) = to else { return 0 };
        let lineage = Lineage { origin: kv.request, tenant: kv.tenant, parent: Some(kv.keys()[at - 1]), position: at as u32 };
        self.actions.push(Action::Put { node, lineage, blocks: blocks.to_vec(), delivery });
        kv.state.note_kept(at);
        blocks.len()
    }

    /// Gives up a job's fetch and its device blocks.
    pub fn release(&mut self, kv: &mut JobKv) {
        self.end_fetch(kv);
        self.device.release(&std::mem::take(&mut kv.table));
        for blocks in kv.state.give_up() {
            self.device.release(&blocks);
        }
        kv.computed = 0;
    }

    /// Checks the invariants that hold between calls, given all jobs. For tests.
    pub fn check_integrity<'a>(&self, jobs: impl IntoIterator<Item = &'a JobKv>) {
        self.device.check_integrity();
        let mut references = vec![0; self.device.total()];
        let mut fetches = 0;
        for kv in jobs {
            assert!(kv.computed <= kv.table.len() * BLOCK_TOKENS, "computed tokens have a block");
            kv.table.iter().copied().chain(kv.state.blocks()).for_each(|block| references[block as usize] += 1);
            kv.state.check_integrity(self.states, kv.computed, kv.is_admitted());
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
        let mut fetching = kv.fetching.take()?;
        self.fetches.remove(&fetching.id);
        if fetching.is_cut() {
            self.actions.push(Action::CancelFetch { fetch: fetching.id });
        }
        let (first, parts, mut arrivals) = (fetching.first, self.states.blocks, fetching.arrivals());
        if parts > 0 && fetching.is_cut() {
            let came = (first + arrivals.len()).min(fetching.end());
            let earlier = self.states.last_end(came.min(fetching.end() - 1));
            if earlier > first && fetching.may_shorten() {
                let fetch = self.begin_fetch(kv.job);
                let state = fetching.shorten(fetch, earlier, parts);
                let state = state.map(|number| (fetching.node(number), kv.key(number, earlier)));
                self.actions.push(Action::Fetch { fetch, parts: pool_parts(state, None, Duration::ZERO) });
                kv.fetching = Some(fetching);
                return None;
            }
            // Keys and values are useless without a state at their end: they are computed again.
            arrivals.clear();
        } else if parts > 0 {
            arrivals.truncate(fetching.end() - first);
            let left = kv.state.arrived(fetching.end());
            self.device.release(&left);
        }
        let ready = first + arrivals.len();
        kv.computed = ready * BLOCK_TOKENS;
        self.publish_on_device(kv, first..ready);
        if parts > 0 && ready > first {
            // The state is already in the pool.
            self.keep_state(kv, None);
        }
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

    /// A device of five blocks that has computed and released two.
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

    const STATES: StateRule = StateRule { blocks: 2, every: 2 };

    fn with_states(device_blocks: u32) -> Residency {
        let mut residency = Residency::new(device_blocks);
        residency.keep_states(STATES);
        residency
    }

    fn computed(residency: &mut Residency, kv: &mut JobKv, tokens: usize) {
        let chunk = ScheduledChunk { job: kv.job, start: kv.computed(), len: tokens - kv.computed() };
        residency.advance(kv, &chunk);
        residency.check_integrity([&*kv]);
    }

    fn next_fetch(residency: &mut Residency) -> (FetchId, Vec<BlockKey>) {
        let fetch = residency.take_actions().into_iter().rev().find_map(|action| match action {
            Action::Fetch { fetch, parts } => Some((fetch, parts.into_iter().flat_map(|part| part.keys).collect())),
            _ => None,
        });
        fetch.expect("it fetches")
    }

    const HERE: Option<Arrival> = Some(Arrival { origin: RequestId(1), source: Source::Dram });

    #[test]
    fn the_device_has_a_prefix_up_to_the_last_end_whose_state_it_has() {
        let (mut residency, mut first) = (with_states(16), job(1, 3, 4));
        assert!(residency.admit(&mut first, 0, 4, 0));
        assert_eq!((residency.free_blocks(), first.state(32).from), (8, None), "four blocks, and two states of two");
        computed(&mut residency, &mut first, 32);
        assert_eq!(residency.keep_state(&mut first, Some((node(), Delivery::BestEffort))), 2);
        let kept = first.state(40).from.expect("it goes on from the state that it shares").to_vec();
        let Some(Action::Put { blocks, lineage, .. }) = residency.take_actions().pop() else { panic!("it is put") };
        assert_eq!(blocks, first.keys()[1].state_parts(2).zip(kept.iter().copied()).collect::<Vec<_>>());
        assert_eq!((lineage.parent, lineage.position), (Some(first.keys()[1]), 2));
        computed(&mut residency, &mut first, 40);
        let running = first.state(41);
        assert!(running.from == Some(running.to) && running.to != kept, "what is shared is not written");
        computed(&mut residency, &mut first, 64);
        residency.release(&mut first);
        residency.check_integrity([&first]);

        let mut second = job(2, 3, 4);
        assert!(residency.admit(&mut second, 3, 4, 0));
        assert_eq!((second.computed_blocks(), second.state(33).from), (2, Some(&kept[..])), "the third block has no state after it");
        residency.check_integrity([&second]);
        residency.release(&mut second);
        residency.check_integrity([&second]);
    }

    #[test]
    fn the_state_of_an_answers_last_block_end_is_kept_when_it_is_over() {
        let (mut residency, mut first) = (with_states(16), job(1, 3, 3));
        assert!(residency.admit(&mut first, 0, 4, 0));
        for tokens in [32, 48, 50] {
            computed(&mut residency, &mut first, tokens);
        }
        residency.keep_last_state(&mut first, None);
        residency.release(&mut first);
        let mut second = job(2, 3, 4);
        assert!(residency.admit(&mut second, 3, 4, 0));
        assert_eq!(second.computed_blocks(), 3);
        residency.check_integrity([&second]);
    }

    #[test]
    fn a_fetched_prefix_without_its_state_ends_where_there_is_one() {
        for has_earlier in [true, false] {
            let (mut residency, mut kv) = (with_states(16), job(1, 5, 5));
            assert!(residency.admit(&mut kv, 5, 5, 0));
            assert!(residency.fetch(&mut kv, &[node(); 5], Some(node()), Duration::ZERO, Duration::ZERO));
            let (_, keys) = next_fetch(&mut residency);
            assert_eq!(keys, [kv.keys(), &kv.keys()[4].state_parts(2).collect::<Vec<_>>()].concat());
            (0..6).for_each(|index| assert!(residency.fetched(&mut kv, index, HERE, Duration::ZERO).unwrap().finished.is_none()));
            assert!(residency.fetched(&mut kv, 6, None, Duration::ZERO).unwrap().finished.is_none(), "half a state is none");

            let (_, keys) = next_fetch(&mut residency);
            assert_eq!(keys, kv.keys()[3].state_parts(2).collect::<Vec<_>>(), "that of the last end by the rule is sought");
            residency.check_integrity([&kv]);
            if has_earlier {
                let to = kv.destination(0).expect("it is wanted");
                assert_eq!(residency.fetched(&mut kv, 0, HERE, Duration::ZERO).unwrap().block, Some(to));
                let finished = residency.fetched(&mut kv, 1, HERE, Duration::ZERO).unwrap().finished.expect("all is here");
                assert_eq!((finished.arrivals.len(), kv.computed_blocks(), kv.kept_at()), (4, 4, 4));
                assert_eq!(kv.state(65).from.map(|blocks| blocks[0]), Some(to));
            } else {
                assert!(residency.fetched(&mut kv, 0, None, Duration::ZERO).unwrap().finished.is_none(), "and the one before");
                let (_, keys) = next_fetch(&mut residency);
                assert_eq!(keys, kv.keys()[1].state_parts(2).collect::<Vec<_>>());
                let finished = residency.fetched(&mut kv, 0, None, Duration::ZERO).unwrap().finished.expect("there is none");
                assert_eq!(
                    (finished.arrivals.len(), kv.computed(), kv.state(16).from),
                    (0, 0, None),
                    "all is computed, from the first token on"
                );
            }
            assert!(kv.is_ready());
            residency.check_integrity([&kv]);
            residency.release(&mut kv);
            residency.check_integrity([&kv]);
        }
    }

    #[test]
    fn a_full_device_keeps_states_in_the_pool_alone() {
        let (mut residency, mut kv) = (with_states(6), job(1, 2, 2));
        assert!(residency.admit(&mut kv, 0, 2, 0));
        computed(&mut residency, &mut kv, 32);
        assert_eq!(residency.keep_state(&mut kv, Some((node(), Delivery::BestEffort))), 2);
        assert_eq!(kv.kept_at(), 2);
        residency.check_integrity([&kv]);
        residency.release(&mut kv);
        assert!(residency.admit(&mut kv, 2, 2, 0));
        assert_eq!(kv.computed(), 0, "the device did not have the room for another state");
    }
}

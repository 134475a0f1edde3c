//! One coordinator's copy of the registry: the `raft` crate behind a facade. Ticks, messages and proposals go in, actions come out.
//!
//! ```text
//!   tick, message, propose ──► Replica ──poll──► Write(…) ─► the shell makes it durable, then calls `written`
//!                                           ├──► Send { to, bytes }    may be lost, late, doubled
//!                                           ├──► Done { ticket, … }    of this replica's own proposals
//!                                           └──► Changed, Warn, Halted
//! ```
//!
//! - `group`: the founding of a group, and changes of its members, one at a time

mod group;
mod incoming;

use crate::{
    command::{Command, Outcome, Proposal, ReplicaId, Unreadable, decode, encode},
    disk::{Found, Write},
    log::Log,
    state::{SESSION_WINDOW, State},
    wire::Wire,
};
pub use group::CannotRemove;
use group::Group;
pub use incoming::BadMessage;
use prost::Message as _;
use raft::{
    RawNode, Ready, StateRole,
    eraftpb::{ConfChange, ConfChangeType, Entry, EntryType, Message},
};
use std::collections::{BTreeMap, VecDeque};
use tidemill_proto::frame;

/// The minimum number of ticks without a message from a leader after which a replica stands for election; the maximum is twice as many.
pub const ELECTION_TICKS: u64 = 10;
const HEARTBEAT_TICKS: usize = 2;
/// The number of ticks between two attempts to submit a proposal: its message, or its leader, may be lost.
const RETRY_TICKS: u64 = 10;
/// The maximum number of own proposals without an outcome. Further ones are refused.
pub const PROPOSALS_MAX: usize = 64;
/// The number of entries applied since the last snapshot after which a new one is taken.
const SNAPSHOT_EVERY: u64 = 1024;
/// The number of entries kept before a snapshot, so that a follower that is slightly behind needs no snapshot.
const ENTRIES_KEPT: u64 = 256;

#[derive(Clone, Debug)]
pub struct Settings {
    /// This coordinator's name.
    pub name: String,
    /// The other coordinators' names, consistent at all coordinators.
    pub peers: Vec<String>,
    /// The seed of election timeouts.
    pub seed: u64,
    /// The group's number and its first epoch, in case this replica founds one.
    pub group: u64,
    pub first_epoch: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make this durable, all or nothing, then call [`Replica::written`]. No other action follows before that.
    Write(Vec<Write>),
    Send {
        to: String,
        bytes: Vec<u8>,
    },
    /// The outcome of a proposal.
    Done {
        ticket: Ticket,
        outcome: Result<Outcome, Unconfirmed>,
    },
    /// The state has changed.
    Changed,
    /// A warning for the operator.
    Warn(String),
    /// This replica has stopped for good; the state stays as it is.
    Halted(String),
}

/// A proposal whose outcome will follow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no majority of the coordinators confirmed it in time; it may still take effect")]
pub struct Unconfirmed;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    #[error("{PROPOSALS_MAX} changes wait for a majority of the coordinators already")]
    Full,
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error("this coordinator's registry has stopped: {0}")]
    Halted(String),
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the registry's file cannot be used: {0}")]
    Broken(String),
    #[error("the registry's state: {0}")]
    State(#[from] Unreadable),
}

/// The status of a replica.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub id: u64,
    pub part: Part,
    pub term: u64,
    pub leader: Option<String>,
    pub committed: u64,
    pub applied: u64,
    pub last: u64,
    /// The names of voters and of learners, in order.
    pub voters: Vec<String>,
    pub learners: Vec<String>,
    /// For a leader: the number of entries that each other member lacks.
    pub behind: BTreeMap<String, u64>,
    /// The number of own proposals without an outcome.
    pub waiting: usize,
    pub halted: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// Belongs to no group yet.
    #[default]
    Outside,
    Learner,
    Follower,
    Candidate,
    Leader,
    /// Was removed from the group.
    Removed,
}

pub struct Replica {
    settings: Settings,
    id: ReplicaId,
    boot: u64,
    raw: RawNode<Log>,
    /// `None` if it belongs to no group.
    state: Option<State>,
    group: Group,
    now: u64,
    /// The number of elections started here.
    campaigns: u64,
    /// The leader at the last tick.
    leader_seen: u64,
    next_number: u64,
    waiting: BTreeMap<u64, Waiting>,
    actions: VecDeque<Action>,
    /// Whether a `Write` was handed out and is not done.
    writing: bool,
    /// The part of raft's work that waits until then.
    ready: Option<Ready>,
    snapshot_due: bool,
    halted: Option<String>,
}

struct Waiting {
    bytes: Vec<u8>,
    deadline: u64,
    retry: u64,
}

impl Replica {
    pub fn open(settings: Settings, found: &Found) -> Result<Self, OpenError> {
        let log = Log::read(found).map_err(OpenError::Broken)?;
        let meta = log.snapshot.get_metadata();
        let (applied, of_group) = (meta.index, meta.index > 0);
        let state = if of_group { Some(State::of_snapshot(&log.snapshot.data, applied)?) } else { None };
        let alone = *log.conf.voters == [found.id.0];
        let mut replica = Self {
            raw: node(found.id, applied, log)?,
            id: found.id,
            boot: found.boot,
            group: Group::default(),
            state,
            now: 0,
            campaigns: 0,
            leader_seen: 0,
            next_number: 1,
            waiting: BTreeMap::new(),
            actions: VecDeque::new(),
            writing: false,
            ready: None,
            snapshot_due: false,
            halted: None,
            settings,
        };
        if !of_group && replica.settings.peers.is_empty() {
            replica.found()?;
        } else if alone {
            // There are no other voters to wait for.
            let _ = replica.raw.campaign();
        }
        replica.pin_timeout();
        Ok(replica)
    }

    /// Advances time by one tick.
    pub fn tick(&mut self) {
        self.now += 1;
        if self.halted.is_some() || self.writing {
            return;
        }
        let before = self.raw.raft.state;
        self.raw.tick();
        if before != self.raw.raft.state {
            self.campaigns += 1;
        }
        self.pin_timeout();
        let leader = self.raw.raft.leader_id;
        if std::mem::replace(&mut self.leader_seen, leader) != leader {
            // Proposals sent to the last leader may be lost.
            self.waiting.values_mut().for_each(|waiting| waiting.retry = self.now);
        }
        self.retry();
        self.tend_group();
    }

    /// Proposes a change. Its outcome follows within `ticks`.
    pub fn propose(&mut self, command: Command, ticks: u64) -> Result<Ticket, NotTaken> {
        if let Some(reason) = &self.halted {
            return Err(NotTaken::Halted(reason.clone()));
        }
        let oldest = self.waiting.keys().next().copied().unwrap_or(self.next_number);
        if self.waiting.len() >= PROPOSALS_MAX || self.next_number - oldest >= SESSION_WINDOW {
            return Err(NotTaken::Full);
        }
        let number = self.next_number;
        let bytes = encode(&Proposal { proposer: self.id, boot: self.boot, number, command })?;
        self.next_number += 1;
        self.waiting.insert(number, Waiting { bytes, deadline: self.now + ticks, retry: self.now });
        if !self.writing {
            self.retry();
        }
        Ok(Ticket(number))
    }

    /// Hands due proposals to raft, which may drop them, and ends overdue ones.
    fn retry(&mut self) {
        let now = self.now;
        while let Some((&number, _)) = self.waiting.iter().find(|(_, waiting)| waiting.deadline < now) {
            self.waiting.remove(&number);
            self.actions.push_back(Action::Done { ticket: Ticket(number), outcome: Err(Unconfirmed) });
        }
        for waiting in self.waiting.values_mut().filter(|waiting| waiting.retry <= now) {
            // Without a leader, it is tried again soon.
            let taken = self.raw.propose(Vec::new(), waiting.bytes.clone()).is_ok();
            waiting.retry = now + if taken { RETRY_TICKS } else { 1 };
        }
    }

    /// Returns the next action. Call it until `None` after every other call.
    pub fn poll(&mut self) -> Option<Action> {
        while self.actions.is_empty() && !self.writing && self.halted.is_none() {
            if self.snapshot_due {
                self.snapshot();
            } else if self.raw.has_ready() {
                self.begin_ready();
            } else {
                return None;
            }
        }
        self.actions.pop_front()
    }

    /// Reports that the last `Write` is durable.
    pub fn written(&mut self) {
        assert!(self.writing, "there was something to write");
        self.writing = false;
        if let Some(ready) = self.ready.take() {
            self.end_ready(ready);
        }
    }

    fn write(&mut self, writes: Vec<Write>) {
        self.writing = true;
        self.actions.push_back(Action::Write(writes));
    }

    fn begin_ready(&mut self) {
        let mut ready = self.raw.ready();
        self.send(ready.take_messages());
        let mut writes = Vec::new();
        if !ready.snapshot().is_empty() {
            let from = ready.snapshot().get_metadata().index + 1;
            writes.push(Write::Snapshot { bytes: ready.snapshot().encode_to_vec(), entries_from: from });
            writes.push(Write::Entries { from, entries: Vec::new() });
        }
        if let Some(first) = ready.entries().first() {
            let entries = ready.entries().iter().map(Entry::encode_to_vec).collect();
            writes.push(Write::Entries { from: first.index, entries });
        }
        if let Some(hard_state) = ready.hs() {
            writes.push(Write::HardState(hard_state.encode_to_vec()));
        }
        if writes.is_empty() {
            self.end_ready(ready);
        } else {
            self.ready = Some(ready);
            self.write(writes);
        }
    }

    fn end_ready(&mut self, mut ready: Ready) {
        let log = self.raw.mut_store();
        if let Some(hard_state) = ready.hs() {
            log.hard_state = hard_state.clone();
        }
        if !ready.snapshot().is_empty() {
            let snapshot = ready.snapshot().clone();
            let state = State::of_snapshot(&snapshot.data, snapshot.get_metadata().index).expect("it was read when it arrived");
            log.restore(snapshot);
            self.state = Some(state);
            self.actions.push_back(Action::Changed);
        }
        log.append(ready.entries());
        let mut committed = ready.take_committed_entries();
        let messages = ready.take_persisted_messages();
        self.send(messages);
        let mut light = self.raw.advance_append(ready);
        if let Some(commit) = light.commit_index() {
            self.raw.mut_store().hard_state.commit = commit;
        }
        self.send(light.take_messages());
        committed.append(&mut light.take_committed_entries());
        self.apply(committed);
        if self.halted.is_none() {
            self.raw.advance_apply();
        }
        self.pin_timeout();
    }

    fn apply(&mut self, entries: Vec<Entry>) {
        let changed = !entries.is_empty();
        for entry in entries {
            let index = entry.index;
            let state = self.state.as_mut().expect("entries follow a snapshot");
            if entry.get_entry_type() != EntryType::EntryNormal {
                self.apply_conf_change(&entry);
            } else if entry.data.is_empty() {
                state.advance(index);
            } else {
                match decode::<Proposal>(&entry.data) {
                    Ok(proposal) => {
                        let mine = (proposal.proposer == self.id && proposal.boot == self.boot).then_some(proposal.number);
                        let outcome = state.apply(index, proposal);
                        if let Some(number) = mine.filter(|number| self.waiting.remove(number).is_some()) {
                            self.actions.push_back(Action::Done { ticket: Ticket(number), outcome: Ok(outcome) });
                        }
                    }
                    // Older coordinators must not skip it, newer ones can apply it.
                    Err(error @ Unreadable::Newer { .. }) => return self.halt(format!("entry {index} of the log: {error}")),
                    // The entry is invalid for all replicas alike.
                    Err(error) => {
                        state.advance(index);
                        self.actions.push_back(Action::Warn(format!("entry {index} of the registry's log is skipped: {error}")));
                    }
                }
            }
        }
        if changed {
            self.actions.push_back(Action::Changed);
            let applied = self.state.as_ref().map_or(0, State::applied);
            self.snapshot_due |= applied >= self.raw.store().snapshot.get_metadata().index + SNAPSHOT_EVERY;
        }
    }

    fn apply_conf_change(&mut self, entry: &Entry) {
        let state = self.state.as_mut().expect("entries follow a snapshot");
        state.advance(entry.index);
        let Ok(change) = ConfChange::decode(&entry.data[..]) else { return };
        let Ok(name) = String::from_utf8(change.context.to_vec()) else { return };
        let id = ReplicaId(change.node_id);
        match self.raw.apply_conf_change(&change) {
            Ok(conf) => {
                self.raw.mut_store().conf = conf;
                match change.get_change_type() {
                    ConfChangeType::RemoveNode => state.remove_replica(entry.index, id),
                    ConfChangeType::AddNode | ConfChangeType::AddLearnerNode => state.add_replica(entry.index, id, &name),
                }
                // A new replica accepts only a snapshot that includes it as a member.
                self.snapshot_due = true;
            }
            Err(error) => self.actions.push_back(Action::Warn(format!("a change of the registry's group is skipped: {error}"))),
        }
    }

    /// Takes a snapshot of the state, and drops most of the log before it.
    fn snapshot(&mut self) {
        self.snapshot_due = false;
        let Some(state) = &self.state else { return };
        let (index, data) = (state.applied(), state.encode());
        let data = match data {
            Ok(data) => data,
            Err(error) => return self.halt(format!("the state does not fit a snapshot: {error}")),
        };
        let log = self.raw.mut_store();
        log.compact(index, data, ENTRIES_KEPT);
        let snapshot = Write::Snapshot { bytes: log.snapshot.encode_to_vec(), entries_from: log.base() };
        let hard_state = Write::HardState(log.hard_state.encode_to_vec());
        self.write(vec![snapshot, hard_state]);
    }

    /// Stops the replica. Also for a `Write` that failed: no action may follow from it until a restart finds out how much is durable.
    pub fn halt(&mut self, reason: String) {
        self.actions.push_back(Action::Halted(reason.clone()));
        self.halted = Some(reason);
    }

    fn send(&mut self, messages: Vec<Message>) {
        for message in messages {
            let to = ReplicaId(message.to);
            let Some(to) = self.name_of(to) else { continue };
            let group = self.state.as_ref().map_or(0, State::group);
            self.send_wire(to, &Wire::Raft { group, bytes: message.encode_to_vec() });
        }
    }

    fn send_wire(&mut self, to: String, wire: &Wire) {
        match frame::encode(wire) {
            Ok(bytes) => self.actions.push_back(Action::Send { to, bytes }),
            Err(error) => self.actions.push_back(Action::Warn(format!("a message for {to} cannot be sent: {error}"))),
        }
    }

    fn name_of(&self, id: ReplicaId) -> Option<String> {
        let known = self.state.as_ref().and_then(|state| state.replicas().get(&id)).cloned();
        known.or_else(|| self.group.heard_of(id))
    }

    /// Sets the election timeout from the seed: raft would draw it from the thread's generator.
    fn pin_timeout(&mut self) {
        let numbers = [self.settings.seed, self.id.0, self.raw.raft.term, self.campaigns];
        let drawn = numbers.into_iter().fold(0, |mixed, number| mix(mixed ^ number));
        self.raw.raft.set_randomized_election_timeout((ELECTION_TICKS + drawn % ELECTION_TICKS) as usize);
    }

    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    pub fn id(&self) -> ReplicaId {
        self.id
    }

    pub fn status(&self) -> Status {
        let conf = &self.raw.store().conf;
        let names = |ids: &[u64]| {
            let mut names: Vec<_> = ids.iter().filter_map(|id| self.name_of(ReplicaId(*id))).collect();
            names.sort_unstable();
            names
        };
        let raft = &self.raw.raft;
        let part = match raft.state {
            _ if self.state.is_none() => Part::Outside,
            _ if conf.learners.contains(&self.id.0) => Part::Learner,
            _ if !conf.voters.contains(&self.id.0) => Part::Removed,
            StateRole::Follower => Part::Follower,
            StateRole::Candidate | StateRole::PreCandidate => Part::Candidate,
            StateRole::Leader => Part::Leader,
        };
        let progress = raft.prs().iter().filter(|(id, _)| part == Part::Leader && **id != self.id.0);
        let behind = progress.filter_map(|(id, at)| Some((self.name_of(ReplicaId(*id))?, raft.raft_log.last_index() - at.matched)));
        Status {
            id: self.id.0,
            part,
            term: raft.term,
            leader: self.name_of(ReplicaId(raft.leader_id)),
            committed: raft.raft_log.committed,
            applied: self.state.as_ref().map_or(0, State::applied),
            last: raft.raft_log.last_index(),
            voters: names(&conf.voters),
            learners: names(&conf.learners),
            behind: behind.collect(),
            waiting: self.waiting.len(),
            halted: self.halted.clone(),
        }
    }

    /// Index, term and bytes of each durable entry that is kept: for tests that compare logs.
    pub fn entries(&self) -> impl Iterator<Item = (u64, u64, &[u8])> {
        let log = self.raw.store();
        (log.first()..=log.last()).filter_map(|index| log.get(index)).map(|entry| (entry.index, entry.term, &entry.data[..]))
    }

    /// Panics if an invariant is broken. Tests call it after every step.
    pub fn check_integrity(&self) {
        assert!(self.waiting.len() <= PROPOSALS_MAX);
        let log = self.raw.store();
        assert!(log.last() - log.base() <= SNAPSHOT_EVERY + ENTRIES_KEPT + self.raw.raft.raft_log.last_index() - self.applied());
        let Some(state) = &self.state else { return };
        state.check_integrity();
        assert!(state.applied() <= self.raw.raft.raft_log.committed, "only what is committed is applied");
        assert!(log.snapshot.get_metadata().index <= state.applied());
    }

    fn applied(&self) -> u64 {
        self.state.as_ref().map_or(0, State::applied)
    }
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica").field("name", &self.settings.name).field("status", &self.status()).finish_non_exhaustive()
    }
}

fn node(id: ReplicaId, applied: u64, log: Log) -> Result<RawNode<Log>, OpenError> {
    let config = raft::Config {
        id: id.0,
        election_tick: ELECTION_TICKS as usize,
        heartbeat_tick: HEARTBEAT_TICKS,
        applied,
        max_size_per_msg: 256 << 10,
        max_inflight_msgs: 64,
        check_quorum: true,
        pre_vote: true,
        max_uncommitted_size: 4 << 20,
        max_committed_size_per_ready: 1 << 20,
        ..raft::Config::default()
    };
    let logger = slog::Logger::root(slog::Discard, slog::o!());
    RawNode::new(&config, log, &logger).map_err(|error| OpenError::Broken(error.to_string()))
}

/// SplitMix64 (Steele et al. 2014).
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

//! The founding of a group, and changes of its members: one at a time.
//!
//! A replica without a group asks all its peers. If there is a group, it asks to join: first as a learner, by a snapshot, and then as a
//! voter when it has caught up. It takes the place of a replica of the same coordinator that lost its storage, which is removed first. If
//! all peers answer that they belong to no group either, the one whose name comes first founds it, and the others join.
//!
//! So all coordinators must be up to found a group, and after that a majority is enough; and a coordinator that starts with an empty disk
//! never mistakes itself for the first.

use super::{Action, OpenError, Replica, node};
use crate::{command::ReplicaId, log::Log, state::State, wire::Wire};
use prost::Message as _;
use raft::{
    ProgressState, SnapshotStatus, StateRole,
    eraftpb::{ConfChange, ConfChangeType},
};
use std::collections::BTreeMap;

/// The maximum number of replicas in a group, voting or learning.
const REPLICAS_MAX: usize = 7;
/// The number of ticks between two questions to the peers.
const ASK_TICKS: u64 = 5;
/// The number of ticks for which a peer's answer is valid.
const SAID_TICKS: u64 = 4 * ASK_TICKS;
/// The number of ticks between two checks of snapshots under way.
const SNAPSHOT_TICKS: u64 = 40;
/// The number of missing entries up to which a learner counts as caught up.
const CAUGHT_UP: u64 = 64;

#[derive(Debug, Default)]
pub(super) struct Group {
    /// The replica of each peer, from its last message.
    heard: BTreeMap<String, ReplicaId>,
    /// The time at which each peer last reported to be without a group.
    groupless: BTreeMap<String, u64>,
    /// For a leader: the replicas that ask to join or to vote, and the time of their last message.
    joining: BTreeMap<String, (ReplicaId, u64)>,
    asked: u64,
}

impl Group {
    pub(super) fn heard_of(&self, id: ReplicaId) -> Option<String> {
        self.heard.iter().find(|(_, heard)| **heard == id).map(|(name, _)| name.clone())
    }

    pub(super) fn heard(&mut self, name: &str, id: ReplicaId) {
        self.heard.insert(name.to_owned(), id);
    }
}

impl Replica {
    /// Founds a group of this replica alone.
    pub(super) fn found(&mut self) -> Result<(), OpenError> {
        let mut log = Log::default();
        let state = State::found(self.settings.group, self.settings.first_epoch, self.id, &self.settings.name);
        let meta = log.snapshot.mut_metadata();
        (meta.index, meta.term) = (FOUNDED_AT, FOUNDED_AT);
        meta.mut_conf_state().voters = vec![self.id.0];
        log.snapshot.data = state.encode()?;
        (log.hard_state.term, log.hard_state.commit) = (FOUNDED_AT.max(self.raw.raft.term), FOUNDED_AT);
        log.restore(log.snapshot.clone());
        let snapshot = crate::disk::Write::Snapshot { bytes: log.snapshot.encode_to_vec(), entries_from: FOUNDED_AT + 1 };
        let hard_state = crate::disk::Write::HardState(log.hard_state.encode_to_vec());
        self.raw = node(self.id, FOUNDED_AT, log)?;
        let mut state = state;
        state.advance(FOUNDED_AT);
        self.state = Some(state);
        self.write(vec![snapshot, hard_state]);
        self.actions.push_back(Action::Changed);
        let _ = self.raw.campaign();
        Ok(())
    }

    pub(super) fn tend_group(&mut self) {
        if self.raw.raft.state == StateRole::Leader {
            self.change_one();
            if self.now.is_multiple_of(SNAPSHOT_TICKS) {
                self.doubt_snapshots();
            }
        }
        if self.now < self.group.asked + ASK_TICKS {
            return;
        }
        self.group.asked = self.now;
        let conf = &self.raw.store().conf;
        let wire = match &self.state {
            None => {
                self.consider_founding();
                if self.state.is_some() {
                    return;
                }
                Wire::Hello { id: self.id }
            }
            Some(_) if conf.learners.contains(&self.id.0) => Wire::Join { id: self.id },
            Some(_) => return,
        };
        for peer in self.settings.peers.clone() {
            self.send_wire(peer, &wire);
        }
    }

    /// Raft waits indefinitely for the answer to a snapshot, which may be lost: replicas that still owe one are asked for their state.
    fn doubt_snapshots(&mut self) {
        let owing = |(id, progress): (&u64, &raft::Progress)| (progress.state == ProgressState::Snapshot).then_some(*id);
        let owing: Vec<_> = self.raw.raft.prs().iter().filter_map(owing).collect();
        for id in owing {
            self.raw.report_snapshot(id, SnapshotStatus::Failure);
        }
    }

    fn consider_founding(&mut self) {
        let first = self.settings.peers.iter().all(|peer| self.settings.name < *peer);
        let groupless = |peer: &String| self.group.groupless.get(peer).is_some_and(|said| said + SAID_TICKS >= self.now);
        if first
            && self.settings.peers.iter().all(groupless)
            && let Err(error) = self.found()
        {
            self.halt(error.to_string());
        }
    }

    pub(super) fn hello(&mut self, from: &str, id: ReplicaId) {
        self.group.heard(from, id);
        let group = self.state.as_ref().map(State::group);
        self.send_wire(from.to_owned(), &Wire::Welcome { to: id, id: self.id, group });
    }

    pub(super) fn welcome(&mut self, from: &str, to: ReplicaId, id: ReplicaId, group: Option<u64>) {
        self.group.heard(from, id);
        if to != self.id || self.state.is_some() {
            return;
        }
        match group {
            None => {
                self.group.groupless.insert(from.to_owned(), self.now);
            }
            Some(_) => {
                self.group.groupless.clear();
                for peer in self.settings.peers.clone() {
                    self.send_wire(peer, &Wire::Join { id: self.id });
                }
            }
        }
    }

    pub(super) fn join(&mut self, from: &str, id: ReplicaId) {
        self.group.heard(from, id);
        if self.raw.raft.state == StateRole::Leader {
            self.group.joining.insert(from.to_owned(), (id, self.now));
        }
    }

    /// For a leader: takes the next step for a replica that asks to join.
    fn change_one(&mut self) {
        let now = self.now;
        self.group.joining.retain(|_, (_, said)| *said + SAID_TICKS >= now);
        let raft = &self.raw.raft;
        if raft.has_pending_conf() || !raft.commit_to_current_term() {
            return;
        }
        let (Some(state), conf) = (&self.state, &self.raw.store().conf) else { return };
        let step = self.group.joining.iter().find_map(|(name, (id, _))| {
            let of_name = |other: &ReplicaId| state.replicas().get(other).is_some_and(|named| named == name);
            if conf.voters.contains(&id.0) {
                return None;
            }
            if !conf.learners.contains(&id.0) {
                let learner = conf.learners.iter().map(|id| ReplicaId(*id)).find(of_name);
                let (kind, id) = match learner {
                    Some(lost) => (ConfChangeType::RemoveNode, lost),
                    None if state.replicas().len() < REPLICAS_MAX => (ConfChangeType::AddLearnerNode, *id),
                    None => return None,
                };
                return Some((kind, id, name.clone()));
            }
            if raft.raft_log.last_index() - raft.prs().get(id.0)?.matched > CAUGHT_UP {
                return None;
            }
            match conf.voters.iter().map(|id| ReplicaId(*id)).find(of_name) {
                // It would vote twice. The leader itself has not lost its storage.
                Some(lost) if lost == self.id => None,
                Some(lost) => Some((ConfChangeType::RemoveNode, lost, name.clone())),
                None => Some((ConfChangeType::AddNode, *id, name.clone())),
            }
        });
        if let Some((kind, id, name)) = step {
            self.change(kind, id, &name);
        }
    }

    /// For a leader: removes a coordinator from the group. Its process should have ended.
    pub fn remove(&mut self, name: &str) -> Result<(), CannotRemove> {
        let Some(state) = self.state.as_ref().filter(|_| self.raw.raft.state == StateRole::Leader) else {
            return Err(CannotRemove::NotLeader(self.status().leader));
        };
        if name == self.settings.name {
            return Err(CannotRemove::Leader);
        }
        let found = state.replicas().iter().find(|(_, named)| *named == name).map(|(id, _)| *id);
        let id = found.ok_or(CannotRemove::Unknown)?;
        if self.raw.raft.has_pending_conf() {
            return Err(CannotRemove::Busy);
        }
        self.group.joining.remove(name);
        self.change(ConfChangeType::RemoveNode, id, name);
        Ok(())
    }

    fn change(&mut self, kind: ConfChangeType, id: ReplicaId, name: &str) {
        let mut change = ConfChange { node_id: id.0, context: name.as_bytes().to_vec(), ..ConfChange::default() };
        change.set_change_type(kind);
        // If the change is dropped, the next tick tries again.
        let _ = self.raw.propose_conf_change(Vec::new(), change);
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotRemove {
    #[error("only the registry's leader can do that: {}", .0.as_deref().map_or("there is none now".into(), |name| format!("ask `{name}`")))]
    NotLeader(Option<String>),
    #[error("it leads the registry: end its process first, then ask the next leader")]
    Leader,
    #[error("it is not in the group")]
    Unknown,
    #[error("another change of the group is under way: ask again")]
    Busy,
}

/// Index and term of a group's first snapshot.
const FOUNDED_AT: u64 = 1;

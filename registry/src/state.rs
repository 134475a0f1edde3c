//! The agreed state. The same commands in the same order lead to the same state everywhere: no clock, no randomness, no hash order.

use crate::command::{
    Command, KEY_BYTES_MAX, KIND_BYTES_MAX, MEMBERS_MAX, NAME_BYTES_MAX, NewMember, Outcome, Proposal, RECORD_BYTES_MAX, RECORDS_MAX,
    Refusal, ReplicaId, Revision, Unreadable, VALUE_BYTES_MAX, decode, encode,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tidemill_proto::{
    ids::{Epoch, Instance},
    message::Role,
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Drawn when the group was founded. Messages of a different group are ignored.
    group: u64,
    /// The index in the log of the last applied command.
    applied: u64,
    next_epoch: u64,
    members: BTreeMap<Instance, Member>,
    records: BTreeMap<RecordName, Record>,
    /// The group's replicas, voters and learners, with the names of their coordinators.
    replicas: BTreeMap<ReplicaId, String>,
    sessions: BTreeMap<ReplicaId, Session>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub epoch: Epoch,
    pub name: String,
    pub role: Role,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct RecordName {
    kind: String,
    key: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub value: Vec<u8>,
    pub revision: Revision,
}

/// The recent proposals of one replica since its last start, with their outcomes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Session {
    boot: u64,
    highest: u64,
    outcomes: BTreeMap<u64, Outcome>,
}

/// The number of proposals of one replica whose outcomes are remembered. An older one is refused, since it is unknown whether it was
/// performed.
pub const SESSION_WINDOW: u64 = 256;

impl State {
    /// The state of a new group with one replica. `first_epoch` differs between groups, so that the epochs of a lost group are not reused.
    pub fn found(group: u64, first_epoch: u64, founder: ReplicaId, name: &str) -> Self {
        Self {
            group,
            applied: 0,
            next_epoch: first_epoch,
            members: BTreeMap::new(),
            records: BTreeMap::new(),
            replicas: BTreeMap::from([(founder, name.to_owned())]),
            sessions: BTreeMap::new(),
        }
    }

    /// Applies the entry at `index`, unless the same proposal was applied before: then it returns the earlier outcome.
    pub fn apply(&mut self, index: u64, proposal: Proposal) -> Outcome {
        self.advance(index);
        let Proposal { proposer, boot, number, command } = proposal;
        if !self.replicas.contains_key(&proposer) {
            return Outcome::Refused(Refusal::Stranger);
        }
        let session = self.sessions.entry(proposer).or_default();
        if boot > session.boot {
            *session = Session { boot, ..Session::default() };
        }
        if boot < session.boot || number.saturating_add(SESSION_WINDOW) <= session.highest {
            return Outcome::Refused(Refusal::Expired);
        }
        if let Some(outcome) = session.outcomes.get(&number) {
            return outcome.clone();
        }
        let outcome = self.perform(index, command).unwrap_or_else(Outcome::Refused);
        let session = self.sessions.entry(proposer).or_default();
        session.highest = session.highest.max(number);
        session.outcomes.insert(number, outcome.clone());
        let oldest = (session.highest + 1).saturating_sub(SESSION_WINDOW);
        session.outcomes = session.outcomes.split_off(&oldest);
        outcome
    }

    fn perform(&mut self, index: u64, command: Command) -> Result<Outcome, Refusal> {
        match command {
            Command::Register(member) => self.register(member).map(Outcome::Registered),
            Command::Forget { epoch } => {
                self.members.retain(|_, member| member.epoch != epoch);
                Ok(Outcome::Forgotten)
            }
            Command::Put { kind, key, value, expected } => {
                let sized = |text: &str, max| (1..=max).contains(&text.len());
                if !sized(&kind, KIND_BYTES_MAX) || !sized(&key, KEY_BYTES_MAX) || value.len() > VALUE_BYTES_MAX {
                    return Err(Refusal::Size);
                }
                let name = RecordName { kind, key };
                self.check_revision(&name, expected)?;
                let before = self.records.get(&name).map_or(0, |record| cost(&name, record));
                let record = Record { value, revision: index };
                if self.record_bytes() - before + cost(&name, &record) > RECORD_BYTES_MAX
                    || (before == 0 && self.records.len() >= RECORDS_MAX)
                {
                    return Err(Refusal::RecordsFull);
                }
                self.records.insert(name, record);
                Ok(Outcome::Put(index))
            }
            Command::Delete { kind, key, expected } => {
                let name = RecordName { kind, key };
                self.check_revision(&name, expected)?;
                self.records.remove(&name).map(|_| Outcome::Deleted).ok_or(Refusal::NoRecord)
            }
        }
    }

    fn register(&mut self, NewMember { instance, name, role }: NewMember) -> Result<Epoch, Refusal> {
        if let Some(member) = self.members.get(&instance) {
            return Ok(member.epoch);
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(Refusal::Size);
        }
        if self.members.len() >= MEMBERS_MAX {
            return Err(Refusal::MembersFull);
        }
        let epoch = Epoch(self.next_epoch);
        self.next_epoch += 1;
        self.members.insert(instance, Member { epoch, name, role });
        Ok(epoch)
    }

    fn check_revision(&self, name: &RecordName, expected: Option<Revision>) -> Result<(), Refusal> {
        let found = self.records.get(name).map_or(0, |record| record.revision);
        match expected {
            Some(expected) if expected != found => Err(Refusal::Revision { found, expected }),
            _ => Ok(()),
        }
    }

    fn record_bytes(&self) -> usize {
        self.records.iter().map(|(name, record)| cost(name, record)).sum()
    }

    /// Adds a replica to the group, or updates it.
    pub(crate) fn add_replica(&mut self, index: u64, id: ReplicaId, name: &str) {
        self.advance(index);
        self.replicas.insert(id, name.to_owned());
    }

    pub(crate) fn remove_replica(&mut self, index: u64, id: ReplicaId) {
        self.advance(index);
        self.replicas.remove(&id);
        self.sessions.remove(&id);
    }

    /// Decodes the state from a snapshot of the log up to `index`.
    pub(crate) fn of_snapshot(data: &[u8], index: u64) -> Result<Self, Unreadable> {
        let mut state = Self::decode(data)?;
        if state.applied > index {
            return Err(Unreadable::Malformed(format!("it is a snapshot of entry {index}, with the state of entry {}", state.applied)));
        }
        state.advance(index);
        match state.fault() {
            Some(fault) => Err(Unreadable::Malformed(fault.into())),
            None => Ok(state),
        }
    }

    pub(crate) fn advance(&mut self, index: u64) {
        self.applied = self.applied.max(index);
    }

    pub fn group(&self) -> u64 {
        self.group
    }

    pub fn applied(&self) -> u64 {
        self.applied
    }

    pub fn member(&self, instance: Instance) -> Option<&Member> {
        self.members.get(&instance)
    }

    pub fn members(&self) -> impl Iterator<Item = (Instance, &Member)> {
        self.members.iter().map(|(instance, member)| (*instance, member))
    }

    pub fn record(&self, kind: &str, key: &str) -> Option<&Record> {
        self.records.get(&RecordName { kind: kind.to_owned(), key: key.to_owned() })
    }

    /// The kind, key and contents of each record, in order.
    pub fn records(&self) -> impl Iterator<Item = (&str, &str, &Record)> {
        self.records.iter().map(|(name, record)| (&*name.kind, &*name.key, record))
    }

    pub fn records_of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = (&'a str, &'a Record)> {
        self.records().filter(move |(of, ..)| *of == kind).map(|(_, key, record)| (key, record))
    }

    pub fn replicas(&self) -> &BTreeMap<ReplicaId, String> {
        &self.replicas
    }

    pub fn encode(&self) -> Result<Vec<u8>, Unreadable> {
        encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Unreadable> {
        decode(bytes)
    }

    /// Panics if an invariant is broken. Tests call it after every step.
    pub fn check_integrity(&self) {
        assert_eq!(self.fault(), None);
    }

    /// Describes the invariant that is broken, if any.
    fn fault(&self) -> Option<&'static str> {
        let mut epochs: Vec<_> = self.members.values().map(|member| member.epoch).collect();
        epochs.sort_unstable();
        let fits = self.members.len() <= MEMBERS_MAX && self.records.len() <= RECORDS_MAX && self.record_bytes() <= RECORD_BYTES_MAX;
        let faults = [
            (!fits, "it holds more than a registry may"),
            (epochs.windows(2).any(|pair| pair[0] == pair[1]), "an epoch is of two members"),
            (epochs.iter().any(|epoch| epoch.0 >= self.next_epoch), "an epoch was never given out"),
            (self.records.values().any(|record| record.revision > self.applied), "a record is from the future"),
            (self.sessions.keys().any(|id| !self.replicas.contains_key(id)), "a session is a stranger's"),
            (
                self.sessions.values().any(|session| session.outcomes.len() as u64 > SESSION_WINDOW),
                "a session has more outcomes than one keeps",
            ),
        ];
        faults.into_iter().find(|(is_broken, _)| *is_broken).map(|(_, fault)| fault)
    }
}

fn cost(name: &RecordName, record: &Record) -> usize {
    name.kind.len() + name.key.len() + record.value.len() + RECORD_COST
}

/// The maximum size of a record in a snapshot besides its bytes.
const RECORD_COST: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    const ME: ReplicaId = ReplicaId(7);

    fn state() -> State {
        State::found(1, 100, ME, "a")
    }

    #[test]
    fn a_snapshot_with_a_broken_invariant_is_refused() {
        let member = Member { epoch: Epoch(100), name: "d".into(), role: Role::Decode };
        let mut broken = state();
        broken.members.insert(Instance(1), member.clone());
        let refused = |state: &State| State::of_snapshot(&state.encode().unwrap(), 50).map(|_| ()).unwrap_err().to_string();
        assert!(refused(&broken).contains("never given out"));
        broken.next_epoch = 101;
        assert!(State::of_snapshot(&broken.encode().unwrap(), 50).is_ok());
        broken.members.insert(Instance(2), member);
        assert!(refused(&broken).contains("of two members"));
    }

    struct Applied {
        state: State,
        index: u64,
    }

    impl Applied {
        fn new() -> Self {
            Self { state: state(), index: 0 }
        }

        fn propose(&mut self, boot: u64, number: u64, command: Command) -> Outcome {
            self.index += 1;
            let outcome = self.state.apply(self.index, Proposal { proposer: ME, boot, number, command });
            self.state.check_integrity();
            outcome
        }
    }

    fn register(instance: u64) -> Command {
        Command::Register(NewMember { instance: Instance(instance), name: "decode-0".into(), role: Role::Decode })
    }

    fn put(key: &str, value: &[u8], expected: Option<Revision>) -> Command {
        Command::Put { kind: "alias".into(), key: key.into(), value: value.into(), expected }
    }

    #[test]
    fn a_worker_has_one_epoch_however_often_it_registers_and_a_forgotten_one_gets_another() {
        let mut applied = Applied::new();
        assert_eq!(applied.propose(1, 1, register(5)), Outcome::Registered(Epoch(100)));
        assert_eq!(applied.propose(1, 2, register(6)), Outcome::Registered(Epoch(101)));
        assert_eq!(applied.propose(1, 3, register(5)), Outcome::Registered(Epoch(100)));
        assert_eq!(applied.propose(1, 4, Command::Forget { epoch: Epoch(100) }), Outcome::Forgotten);
        assert_eq!(applied.propose(1, 5, register(5)), Outcome::Registered(Epoch(102)));
    }

    #[test]
    fn a_proposal_in_the_log_twice_is_done_once() {
        let mut applied = Applied::new();
        assert_eq!(applied.propose(1, 1, put("a", b"x", Some(0))), Outcome::Put(1));
        assert_eq!(applied.propose(1, 1, put("a", b"x", Some(0))), Outcome::Put(1));
        assert_eq!(applied.state.record("alias", "a").unwrap().revision, 1);
        for number in 2..=SESSION_WINDOW + 1 {
            applied.propose(1, number, put("b", b"y", None));
        }
        assert_eq!(applied.propose(1, 1, put("a", b"x", None)), Outcome::Refused(Refusal::Expired));
        assert!(matches!(applied.propose(2, 1, put("a", b"z", Some(1))), Outcome::Put(_)), "numbers begin anew with each start");
        assert_eq!(applied.propose(1, 900, put("a", b"x", None)), Outcome::Refused(Refusal::Expired), "an earlier start's");
    }

    #[test]
    fn a_record_changes_only_from_what_was_expected() {
        let mut applied = Applied::new();
        assert_eq!(applied.propose(1, 1, put("a", b"x", Some(3))), Outcome::Refused(Refusal::Revision { found: 0, expected: 3 }));
        assert_eq!(applied.propose(1, 2, put("a", b"x", Some(0))), Outcome::Put(2));
        let delete = |expected| Command::Delete { kind: "alias".into(), key: "a".into(), expected };
        assert_eq!(applied.propose(1, 3, delete(Some(1))), Outcome::Refused(Refusal::Revision { found: 2, expected: 1 }));
        assert_eq!(applied.propose(1, 4, delete(Some(2))), Outcome::Deleted);
        assert_eq!(applied.propose(1, 5, delete(None)), Outcome::Refused(Refusal::NoRecord));
    }

    #[test]
    fn a_full_state_is_one_frame_and_refuses_more() {
        let mut applied = Applied::new();
        let mut number = 0;
        let mut next = || {
            number += 1;
            number
        };
        let value = vec![7; VALUE_BYTES_MAX];
        while let Outcome::Put(_) = applied.propose(1, next(), put(&format!("k{}", applied.index), &value, None)) {}
        assert_eq!(applied.propose(1, next(), put("big", &vec![0; VALUE_BYTES_MAX + 1], None)), Outcome::Refused(Refusal::Size));
        let name = "n".repeat(NAME_BYTES_MAX);
        for instance in 0..=MEMBERS_MAX as u64 {
            let member = NewMember { instance: Instance(u64::MAX - instance), name: name.clone(), role: Role::Decode };
            let outcome = applied.propose(1, next(), Command::Register(member));
            assert_eq!(matches!(outcome, Outcome::Registered(_)), instance < MEMBERS_MAX as u64, "{outcome:?}");
        }
        let bytes = applied.state.encode().unwrap();
        assert!(bytes.len() < 6 << 20, "{}", bytes.len());
        assert_eq!(State::decode(&bytes).unwrap(), applied.state);
    }

    #[test]
    fn what_a_newer_version_wrote_is_not_guessed_at() {
        let mut bytes = state().encode().unwrap();
        assert_eq!(State::decode(&bytes), Ok(state()));
        bytes[0] += 1;
        assert_eq!(State::decode(&bytes), Err(Unreadable::Newer { found: 2 }));
        assert!(matches!(State::decode(&bytes[..1]), Err(Unreadable::Malformed(_))));
    }
}

//! Messages of peers, checked before raft sees them: raft trusts its peers, and panics on messages that contradict its own state.

use super::Replica;
use crate::{
    command::{ReplicaId, Unreadable},
    log::is_group,
    state::State,
    wire::Wire,
};
use prost::Message as _;
use raft::eraftpb::{EntryType, Message, MessageType};
use tidemill_proto::frame::{self, FrameError, HEADER_BYTES};

/// The upper bound of terms and log indices, so that the next number is also valid.
const NUMBER_MAX: u64 = 1 << 62;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    #[error("it is not a message of a registry: {0}")]
    Frame(#[from] FrameError),
    #[error("it is not a message of raft: {0}")]
    Raft(String),
    #[error("it belongs to another group: that coordinator's registry was founded apart from this one")]
    OtherGroup,
    #[error("it is not for this replica, or not from the replica that it names")]
    Impostor,
    #[error("it contradicts this replica's log ({0}): one of the two has lost entries, and should begin with an empty registry file")]
    Contradiction(&'static str),
    #[error("its snapshot: {0}")]
    Snapshot(#[from] Unreadable),
}

impl Replica {
    /// Handles a message of the coordinator named `from`. Not to be called while a write is under way.
    pub fn message(&mut self, from: &str, bytes: &[u8]) -> Result<(), BadMessage> {
        assert!(!self.writing, "`written` comes first");
        if self.halted.is_some() {
            return Ok(());
        }
        let payload = bytes.get(HEADER_BYTES..).unwrap_or_default();
        match frame::decode(payload)? {
            Wire::Hello { id } => self.hello(from, id),
            Wire::Welcome { to, id, group } => self.welcome(from, to, id, group),
            Wire::Join { id } => self.join(from, id),
            Wire::Raft { group, bytes } => {
                let message = Message::decode(&bytes[..]).map_err(|error| BadMessage::Raft(error.to_string()))?;
                self.check(from, group, &message)?;
                self.group.heard(from, ReplicaId(message.from));
                // The remaining errors are legitimate: proposals without a leader, answers of removed replicas.
                let _ = self.raw.step(message);
                self.pin_timeout();
            }
        }
        Ok(())
    }

    fn check(&self, from: &str, group: u64, message: &Message) -> Result<(), BadMessage> {
        if message.to != self.id.0 {
            // The message is for the replica before this storage.
            return Err(BadMessage::Impostor);
        }
        let of_other =
            self.state.as_ref().and_then(|state| state.replicas().get(&ReplicaId(message.from))).is_some_and(|name| name != from);
        if of_other || message.from == self.id.0 || message.from == 0 {
            return Err(BadMessage::Impostor);
        }
        // A replica that answered a vote before it had a group knows no group.
        if self.state.as_ref().is_some_and(|state| group != 0 && state.group() != group) {
            return Err(BadMessage::OtherGroup);
        }
        let meta = message.get_snapshot().get_metadata();
        let numbers = [
            message.term,
            message.log_term,
            message.index,
            message.commit,
            message.commit_term,
            meta.index,
            meta.term,
            message.reject_hint,
        ];
        if numbers.iter().any(|number| *number > NUMBER_MAX) {
            return Err(BadMessage::Raft("it has a number that no log comes to".into()));
        }
        let kind = MessageType::from_i32(message.msg_type).ok_or_else(|| BadMessage::Raft("of no kind".into()))?;
        let log = &self.raw.raft.raft_log;
        let contradiction = |what| Err(BadMessage::Contradiction(what));
        match kind {
            MessageType::MsgPropose if message.term == 0 => {
                let plain = |entry: &raft::eraftpb::Entry| entry.entry_type == EntryType::EntryNormal as i32 && !entry.data.is_empty();
                if message.entries.is_empty() || !message.entries.iter().all(plain) {
                    return Err(BadMessage::Raft("it proposes what only a leader may".into()));
                }
            }
            _ if message.term == 0 => return Err(BadMessage::Raft("without a term".into())),
            MessageType::MsgAppend => {
                let in_order = (message.index.wrapping_add(1)..).zip(&message.entries).all(|(index, entry)| entry.index == index);
                let kinds = message.entries.iter().all(|entry| EntryType::from_i32(entry.entry_type).is_some());
                // Raft would take it for the beginning of the log, and append its entries at any index.
                if message.log_term == 0 && message.index != 0 {
                    return Err(BadMessage::Raft("its entries follow one without a term".into()));
                }
                if !in_order || !kinds || message.entries.iter().any(|entry| entry.term == 0 || entry.term > message.term) {
                    return Err(BadMessage::Raft("its entries are out of order".into()));
                }
                let conflicts = |entry: &&raft::eraftpb::Entry| {
                    entry.index <= log.committed && log.term(entry.index).is_ok_and(|term| term != 0 && term != entry.term)
                };
                if message.term >= self.raw.raft.term && message.entries.iter().any(|entry| conflicts(&entry)) {
                    return contradiction("another entry is committed");
                }
            }
            MessageType::MsgHeartbeat => {
                if message.term >= self.raw.raft.term && message.commit > log.last_index() {
                    return contradiction("it commits what was never received");
                }
            }
            MessageType::MsgSnapshot => {
                let meta = message.get_snapshot().get_metadata();
                State::of_snapshot(&message.get_snapshot().data, meta.index)?;
                if !is_group(meta.get_conf_state()) {
                    return Err(BadMessage::Raft("its group is none".into()));
                }
            }
            MessageType::MsgAppendResponse => {
                if message.term == self.raw.raft.term && !message.reject && message.index > log.last_index() {
                    return contradiction("it has what was never sent");
                }
            }
            MessageType::MsgRequestVote | MessageType::MsgRequestPreVote => {
                // Replicas have no priority. A negative one would be refused, with the term of a replica that may have none yet.
                if message.priority != 0 || message.deprecated_priority != 0 {
                    return Err(BadMessage::Raft("it has a priority".into()));
                }
            }
            MessageType::MsgRequestVoteResponse
            | MessageType::MsgRequestPreVoteResponse
            | MessageType::MsgHeartbeatResponse
            | MessageType::MsgTimeoutNow => {}
            _ => return Err(BadMessage::Raft("of a kind that stays inside a process".into())),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Action, Settings},
        *,
    };
    use crate::disk::Found;
    use raft::eraftpb::{Entry, HardState, Snapshot};

    /// A replica that has founded its own group.
    fn alone() -> Replica {
        let found = Found { id: ReplicaId(5), boot: 1, hard_state: None, snapshot: None, entries: Vec::new() };
        let settings = Settings { name: "a".into(), peers: Vec::new(), seed: 1, group: 7, first_epoch: 1 };
        let mut replica = Replica::open(settings, &found).unwrap();
        settle(&mut replica);
        replica
    }

    fn settle(replica: &mut Replica) {
        while let Some(action) = replica.poll() {
            if let Action::Write(_) = action {
                replica.written();
            }
        }
        replica.check_integrity();
    }

    /// Sends a message as a peer of a later term, which the replica must accept.
    fn hear(replica: &mut Replica, kind: MessageType, message: Message) -> Result<(), BadMessage> {
        let term = if message.term == 0 { replica.raw.raft.term + 1 } else { message.term };
        let message = Message { msg_type: kind as i32, to: 5, from: 99, term, ..message };
        let outcome = replica.message("b", &frame::encode(&Wire::Raft { group: 7, bytes: message.encode_to_vec() }).unwrap());
        settle(replica);
        outcome
    }

    #[test]
    fn entries_that_follow_nothing_are_refused() {
        let mut replica = alone();
        let last = replica.raw.raft.raft_log.last_index();
        let entry = |index: u64| Entry { index, term: 1, ..Entry::default() };
        for index in [last + 1, last + 5] {
            let beyond = Message { index, log_term: 0, entries: vec![entry(index + 1)], ..Message::default() };
            assert!(matches!(hear(&mut replica, MessageType::MsgAppend, beyond), Err(BadMessage::Raft(_))));
        }
        assert_eq!(replica.raw.raft.raft_log.last_index(), last);
    }

    #[test]
    fn a_snapshot_with_the_state_of_another_place_is_refused() {
        let mut replica = alone();
        let mut state = replica.state.clone().unwrap();
        state.advance(100);
        let mut snapshot = Snapshot { data: state.encode().unwrap(), ..Snapshot::default() };
        let meta = snapshot.mut_metadata();
        (meta.index, meta.term) = (50, 1);
        meta.mut_conf_state().voters = vec![5, 99];
        let message = |snapshot: &Snapshot| Message { snapshot: Some(snapshot.clone()), ..Message::default() };
        assert!(matches!(hear(&mut replica, MessageType::MsgSnapshot, message(&snapshot)), Err(BadMessage::Snapshot(_))));
        snapshot.mut_metadata().index = 200;
        hear(&mut replica, MessageType::MsgSnapshot, message(&snapshot)).unwrap();
        assert_eq!(replica.status().applied, 200);
    }

    /// Rows of voters, and whether a replica with a snapshot of such a group opens.
    #[test]
    fn a_snapshot_on_disk_is_checked_as_one_of_a_peer_is() {
        let replica = alone();
        let state = replica.state.clone().unwrap();
        let open_in = |term: u64, voters: &[u64], data: Vec<u8>| {
            let mut snapshot = Snapshot { data, ..Snapshot::default() };
            let meta = snapshot.mut_metadata();
            (meta.index, meta.term) = (50, 1);
            meta.mut_conf_state().voters = voters.to_vec();
            let hard_state = HardState { term, commit: 50, ..HardState::default() };
            let found = Found {
                id: ReplicaId(5),
                boot: 2,
                hard_state: Some(hard_state.encode_to_vec()),
                snapshot: Some(snapshot.encode_to_vec()),
                entries: Vec::new(),
            };
            let settings = Settings { name: "a".into(), peers: vec!["b".into()], seed: 1, group: 7, first_epoch: 1 };
            Replica::open(settings, &found).err().map(|error| error.to_string())
        };
        let open = |voters: &[u64], data| open_in(1, voters, data);
        let data = state.encode().unwrap();
        assert_eq!(open(&[5, 9], data.clone()), None);
        for voters in [&[][..], &[5, 0], &[5, 9, 9]] {
            assert!(open(voters, data.clone()).is_some_and(|error| error.contains("group is none")), "{voters:?}");
        }
        assert!(open_in(0, &[5, 9], data).is_some_and(|error| error.contains("hard state of term 0")));
    }

    #[test]
    fn numbers_that_no_log_comes_to_are_refused() {
        let mut replica = alone();
        for wrong in [
            Message { term: u64::MAX, ..Message::default() },
            Message { index: u64::MAX, log_term: 1, ..Message::default() },
            Message { commit: u64::MAX, ..Message::default() },
        ] {
            assert!(matches!(hear(&mut replica, MessageType::MsgAppend, wrong), Err(BadMessage::Raft(_))));
        }
        let urgent = Message { priority: -1, ..Message::default() };
        assert!(matches!(hear(&mut replica, MessageType::MsgRequestPreVote, urgent), Err(BadMessage::Raft(_))));
    }
}

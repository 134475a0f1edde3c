//! Messages of peers, checked before raft sees them: raft trusts its peers, and panics where they contradict what it knows.

use super::Replica;
use crate::{
    command::{ReplicaId, Unreadable},
    state::State,
    wire::Wire,
};
use prost::Message as _;
use raft::eraftpb::{EntryType, Message, MessageType};
use tidemill_proto::frame::{self, FrameError, HEADER_BYTES};

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    #[error("it is no message of a registry: {0}")]
    Frame(#[from] FrameError),
    #[error("it is no message of raft: {0}")]
    Raft(String),
    #[error("it belongs to another group: that coordinator's registry was founded apart from this one")]
    OtherGroup,
    #[error("it speaks for another replica")]
    Impostor,
    #[error("it contradicts this replica's log ({0}): one of the two has lost entries, and should begin with an empty registry file")]
    Contradiction(&'static str),
    #[error("its snapshot: {0}")]
    Snapshot(#[from] Unreadable),
}

impl Replica {
    /// A message of the coordinator named `from`. While a write is under way there are none.
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
                // What is left to refuse is what it may: proposals without a leader, answers of those that were removed.
                let _ = self.raw.step(message);
                self.pin_timeout();
            }
        }
        Ok(())
    }

    fn check(&self, from: &str, group: u64, message: &Message) -> Result<(), BadMessage> {
        if message.to != self.id.0 {
            // For the one before this storage.
            return Err(BadMessage::Impostor);
        }
        let of_other =
            self.state.as_ref().and_then(|state| state.replicas().get(&ReplicaId(message.from))).is_some_and(|name| name != from);
        if of_other || message.from == self.id.0 || message.from == 0 {
            return Err(BadMessage::Impostor);
        }
        // One that answered a vote before it had a group knows none.
        if self.state.as_ref().is_some_and(|state| group != 0 && state.group() != group) {
            return Err(BadMessage::OtherGroup);
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
                State::decode(&message.get_snapshot().data)?;
                let conf = message.get_snapshot().get_metadata().get_conf_state();
                let joint = !conf.voters_outgoing.is_empty() || !conf.learners_next.is_empty() || conf.auto_leave;
                let twice = conf.learners.iter().any(|id| conf.voters.contains(id) || *id == 0);
                let mut ids: Vec<_> = conf.voters.iter().chain(&conf.learners).collect();
                ids.sort_unstable();
                if joint || twice || conf.voters.is_empty() || conf.voters.contains(&0) || ids.windows(2).any(|pair| pair[0] == pair[1]) {
                    return Err(BadMessage::Raft("its group is none".into()));
                }
            }
            MessageType::MsgAppendResponse => {
                if message.term == self.raw.raft.term && !message.reject && message.index > log.last_index() {
                    return contradiction("it has what was never sent");
                }
            }
            MessageType::MsgRequestVote
            | MessageType::MsgRequestVoteResponse
            | MessageType::MsgRequestPreVote
            | MessageType::MsgRequestPreVoteResponse
            | MessageType::MsgHeartbeatResponse
            | MessageType::MsgTimeoutNow => {}
            _ => return Err(BadMessage::Raft("of a kind that stays inside a process".into())),
        }
        Ok(())
    }
}

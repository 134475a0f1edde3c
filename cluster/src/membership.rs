//! Members by epoch, and the reasons to refuse one. No load, no clock: all coordinators can agree on it.
//!
//! ```text
//!   registered ──Leaving, or distrusted──► draining ──┐
//!       └───── link down, or silent ──────────────────┴──► gone (and back with its epoch, if the same process comes back)
//! ```

use std::{collections::BTreeMap, net::SocketAddr};
use tidemill_proto::{
    block::{BLOCK_TOKENS, LayoutFingerprint},
    frame::Version,
    ids::Epoch,
    message::{EngineInfo, Host, ModelIdentity, ModelKind, PoolNode, Register, Role, RoleInfo},
};

/// The maximum number of members: bounds the memory that misbehaving peers can take.
const MEMBERS_MAX: usize = 4096;
/// The number of bytes kept of a member's name, of its host's, and of its release's.
const NAME_BYTES_MAX: usize = 256;

#[derive(Debug)]
pub struct Membership {
    /// The gateway's model.
    model: ModelIdentity,
    members: BTreeMap<Epoch, Member>,
    next_epoch: u64,
}

#[derive(Debug)]
pub struct Member {
    pub name: String,
    pub host: Host,
    pub pid: u32,
    /// The release that it runs; `None` if it has not told.
    pub release: Option<String>,
    pub role: RoleInfo,
    /// The version of the protocol on its link.
    pub version: Version,
    /// Whether it takes no new work.
    pub draining: bool,
    /// Whether it computed wrongly, according to probes or an operator.
    pub unhealthy: bool,
}

/// The reason for refusing a registration. The operator of that worker reads it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "its model, KV dtype or block layout (fingerprint {theirs}) is not the one that `{other}` serves ({ours}): \
         all engines of a cluster run the same model with the same settings, and compute alike \
         (`--isa avx512bf16` on processors with AMX, where others have none)"
    )]
    Layout { theirs: LayoutFingerprint, ours: LayoutFingerprint, other: String },
    #[error("its model is not the one that this coordinator's `--model` names: {0}")]
    Model(String),
    #[error("no model named `{model}` is served here, but {served}: say with --model-name which of them this worker is for")]
    NotServed { model: String, served: String },
    #[error("several models are served here, {served}: say with --model-name which of them this worker is for")]
    Unnamed { served: String },
    #[error("its model is none of those that are served here, {served}: compared with `{first}`, {difference}")]
    NoneOf { served: String, first: String, difference: String },
    #[error("it has no KV blocks or no context: give it more device memory")]
    Empty,
    #[error("the cluster has {MEMBERS_MAX} workers already")]
    Full,
}

impl Membership {
    /// `first_epoch` differs between coordinator processes, so that epochs differ as well.
    pub fn new(first_epoch: u64, model: ModelIdentity) -> Self {
        Self { model, members: BTreeMap::new(), next_epoch: first_epoch }
    }

    /// The next epoch that no member has, for clusters without a registry.
    pub(crate) fn free_epoch(&self) -> Epoch {
        Epoch(self.next_epoch)
    }

    /// Checks whether a worker would be accepted.
    pub fn check(&self, register: &Register) -> Result<(), Refusal> {
        if self.members.len() >= MEMBERS_MAX {
            return Err(Refusal::Full);
        }
        engine_info(&register.role).map_or(Ok(()), |engine| self.check_engine(engine))
    }

    /// Accepts a worker under its epoch, which no member has.
    pub fn register(&mut self, epoch: Epoch, register: Register, version: Version) -> Result<(), Refusal> {
        self.check(&register)?;
        assert!(!self.members.contains_key(&epoch), "an epoch is one member's");
        self.next_epoch = self.next_epoch.max(epoch.0 + 1);
        let member = Member {
            name: bounded(register.name),
            host: Host(bounded(register.host.0)),
            pid: register.pid,
            release: None,
            role: register.role,
            version,
            draining: false,
            unhealthy: false,
        };
        self.members.insert(epoch, member);
        Ok(())
    }

    fn check_engine(&self, engine: &EngineInfo) -> Result<(), Refusal> {
        if engine.device_blocks == 0 || engine.context_tokens == 0 {
            return Err(Refusal::Empty);
        }
        if let Some(difference) = self.model.difference(&engine.model) {
            return Err(Refusal::Model(difference));
        }
        match self.first_engine() {
            Some((other, info)) if info.layout != engine.layout => {
                Err(Refusal::Layout { theirs: engine.layout, ours: info.layout, other: other.name.clone() })
            }
            Some(_) | None => Ok(()),
        }
    }

    pub fn remove(&mut self, epoch: Epoch) -> Option<Member> {
        self.members.remove(&epoch)
    }

    /// Notes the release that a member runs.
    pub fn runs(&mut self, epoch: Epoch, release: String) {
        if let Some(member) = self.members.get_mut(&epoch) {
            member.release = Some(bounded(release));
        }
    }

    /// Marks a member as draining: it takes no new work.
    pub fn drain(&mut self, epoch: Epoch) {
        if let Some(member) = self.members.get_mut(&epoch) {
            member.draining = true;
        }
    }

    /// Marks a member as unhealthy and draining. Returns `None` if it was already marked, or is no member.
    pub fn distrust(&mut self, epoch: Epoch) -> Option<&Member> {
        let member = self.members.get_mut(&epoch).filter(|member| !member.unhealthy)?;
        (member.unhealthy, member.draining) = (true, true);
        Some(member)
    }

    /// Whether the model reads a text as a whole, so that no prefix can be reused.
    pub fn reads_whole(&self) -> bool {
        self.model.kind != ModelKind::Decoder
    }

    /// The size of the model's vocabulary.
    pub fn vocabulary(&self) -> u32 {
        self.model.vocab_size
    }

    pub fn get(&self, epoch: Epoch) -> Option<&Member> {
        self.members.get(&epoch)
    }

    pub fn iter(&self) -> impl Iterator<Item = (Epoch, &Member)> {
        self.members.iter().map(|(epoch, member)| (*epoch, member))
    }

    /// Members that take new work.
    pub fn taking_work(&self) -> impl Iterator<Item = (Epoch, &Member)> {
        self.iter().filter(|(_, member)| !member.draining)
    }

    /// The engines' common layout, and the bytes of its blocks. The first registered engine decides.
    pub fn layout(&self) -> Option<(LayoutFingerprint, u64)> {
        self.first_engine().map(|(_, info)| (info.layout, info.block_bytes))
    }

    /// Blocks that a state of the engines' model takes; 0 if its layers keep none.
    pub fn state_blocks(&self) -> usize {
        self.first_engine().map_or(0, |(_, info)| info.state_blocks as usize)
    }

    /// The longest sequence that any decode worker can hold.
    pub fn context_tokens(&self) -> Option<u32> {
        self.taking_work().filter_map(|(_, member)| member.decode_info()).map(sequence_tokens_max).max()
    }

    /// Whether there are decode workers that take new work, and none of them keeps limits on thoughts.
    pub fn lack_thought_limits(&self) -> bool {
        let mut decode = self.taking_work().filter(|(_, member)| member.decode_info().is_some()).peekable();
        decode.peek().is_some() && !decode.any(|(_, member)| member.version.keeps_thought_limits())
    }

    /// A pool node as `reader` reaches it.
    pub fn pool_node(&self, node: Epoch, reader: Epoch) -> Option<PoolNode> {
        let (node, reader) = (self.get(node)?, self.get(reader)?);
        Some(PoolNode { addr: node.pool_addr()?, near: node.host == reader.host })
    }

    fn first_engine(&self) -> Option<(&Member, &EngineInfo)> {
        self.members.values().find_map(|member| Some((member, engine_info(&member.role)?)))
    }

    /// Panics if an invariant is broken. Tests call it after every step.
    pub fn check_integrity(&self) {
        assert!(self.members.len() <= MEMBERS_MAX);
        assert!(self.members.keys().all(|epoch| epoch.0 < self.next_epoch), "the next epoch is free");
        let engines = self.members.values().filter_map(|member| engine_info(&member.role));
        for engine in engines {
            assert_eq!(Some(engine.layout), self.layout().map(|(layout, _)| layout), "engines have one layout");
            assert_eq!(self.model.difference(&engine.model), None, "engines have the gateway's model");
        }
    }
}

impl Member {
    pub fn role(&self) -> Role {
        self.role.role()
    }

    pub fn pool_addr(&self) -> Option<SocketAddr> {
        match &self.role {
            RoleInfo::Kvpool { addr } => Some(*addr),
            RoleInfo::Prefill(_) | RoleInfo::Decode(_) => None,
        }
    }

    pub fn decode_info(&self) -> Option<&EngineInfo> {
        match &self.role {
            RoleInfo::Decode(info) => Some(info),
            RoleInfo::Prefill(_) | RoleInfo::Kvpool { .. } => None,
        }
    }
}

/// The longest sequence that the model and the device's blocks allow.
pub fn sequence_tokens_max(info: &EngineInfo) -> u32 {
    info.context_tokens.min(info.device_blocks.saturating_mul(BLOCK_TOKENS as u32))
}

fn engine_info(role: &RoleInfo) -> Option<&EngineInfo> {
    match role {
        RoleInfo::Prefill(info) | RoleInfo::Decode(info) => Some(info),
        RoleInfo::Kvpool { .. } => None,
    }
}

fn bounded(mut name: String) -> String {
    name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
    name
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn model() -> ModelIdentity {
        ModelIdentity {
            model_type: "llama".into(),
            vocab_size: 512,
            hidden_size: 64,
            num_hidden_layers: 2,
            kind: ModelKind::Decoder,
            tokenizer_digest: Some([1; 16]),
        }
    }

    pub(crate) fn engine(layout: u8) -> EngineInfo {
        EngineInfo {
            model: model(),
            layout: LayoutFingerprint([layout; 16]),
            block_bytes: 4096,
            device_blocks: 64,
            state_blocks: 0,
            context_tokens: 2048,
            work_max: 64,
        }
    }

    pub(crate) fn register(name: &str, role: RoleInfo) -> Register {
        register_at("here", name, role)
    }

    pub(crate) fn register_at(host: &str, name: &str, role: RoleInfo) -> Register {
        Register { name: name.into(), host: Host(host.into()), pid: 1, model: None, role }
    }

    impl Membership {
        pub(crate) fn take(&mut self, register: Register) -> Result<Epoch, Refusal> {
            let epoch = self.free_epoch();
            self.register(epoch, register, Version::NEWEST).map(|()| epoch)
        }
    }

    #[test]
    fn the_first_engine_sets_the_layout_until_it_is_gone() {
        let mut membership = Membership::new(7, model());
        let first = membership.take(register("decode-0", RoleInfo::Decode(engine(1)))).unwrap();
        let other = || register("prefill-0", RoleInfo::Prefill(engine(2)));
        let refusal = membership.take(other()).unwrap_err();
        assert!(refusal.to_string().contains("decode-0"), "{refusal}");
        membership.check_integrity();
        membership.remove(first);
        let second = membership.take(other()).unwrap();
        assert_ne!(first, second, "an epoch is never used again");
        membership.check_integrity();
    }

    #[test]
    fn an_engine_of_another_model_is_refused_with_what_differs() {
        let mut membership = Membership::new(0, model());
        let mut with = |model| membership.take(register("d", RoleInfo::Decode(EngineInfo { model, ..engine(1) })));
        let others = [
            (ModelIdentity { vocab_size: 513, ..model() }, "vocab_size is 513, not 512"),
            (ModelIdentity { num_hidden_layers: 3, ..model() }, "num_hidden_layers"),
            (ModelIdentity { model_type: "qwen2".into(), ..model() }, "model_type"),
            (ModelIdentity { kind: ModelKind::Encoder, ..model() }, "kind of model"),
            (ModelIdentity { tokenizer_digest: Some([2; 16]), ..model() }, "tokenizer.json"),
        ];
        for (other, words) in others {
            let refusal = with(other).unwrap_err().to_string();
            assert!(refusal.contains(words), "{refusal}");
        }
        with(ModelIdentity { tokenizer_digest: None, ..model() }).expect("a worker needs no tokenizer");
    }

    #[test]
    fn context_is_bounded_by_device_blocks() {
        let mut membership = Membership::new(0, model());
        assert_eq!(membership.context_tokens(), None);
        let epoch = membership.take(register("decode-0", RoleInfo::Decode(engine(1)))).unwrap();
        assert_eq!(membership.context_tokens(), Some(64 * 16));
        membership.drain(epoch);
        assert_eq!(membership.context_tokens(), None, "a draining worker takes nothing new");
    }
}

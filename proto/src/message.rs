//! What coordinator and workers tell each other over one ordered stream per worker.
//!
//! A worker opens the stream, sends [`Register`], and is given an epoch. From then on both ends send what they have;
//! nothing is answered in lockstep. Every event carries the epoch that the worker was given, and an old one is refused.

use crate::{
    block::{BlockKey, LayoutFingerprint, Token},
    grammar::Constraint,
    ids::{Epoch, Instance, RequestId, SequenceId},
    pool::{Direction, Tier, Transport},
    sampling::{Sampling, StopRule, TokenLogprob},
    tokens::Tokens,
    urgency::Urgency,
};
use serde::{Deserialize, Serialize, Serializer};
use std::{
    net::SocketAddr,
    ops::{Index, IndexMut},
};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Prefill,
    Decode,
    Kvpool,
}

/// A worker introduces itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Register {
    /// For people: `decode-0`. Uniqueness comes from the epoch.
    pub name: String,
    pub host: Host,
    /// Process id, for people and for tests that stop one.
    pub pid: u32,
    /// The name of the model that it belongs to. `None`: the operator did not say.
    pub model: Option<String>,
    pub role: RoleInfo,
}

/// The machine that a process runs on. Processes of one host share its memory, so blocks between them need no network.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Host(pub String);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RoleInfo {
    Prefill(EngineInfo),
    Decode(EngineInfo),
    Kvpool {
        /// Where clients of the pool connect.
        addr: SocketAddr,
    },
}

impl RoleInfo {
    pub fn role(&self) -> Role {
        match self {
            RoleInfo::Prefill(_) => Role::Prefill,
            RoleInfo::Decode(_) => Role::Decode,
            RoleInfo::Kvpool { .. } => Role::Kvpool,
        }
    }
}

/// What a worker that holds a model can do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineInfo {
    pub model: ModelIdentity,
    pub layout: LayoutFingerprint,
    /// Bytes of one KV block.
    pub block_bytes: u64,
    /// KV blocks of its device memory: no sequence can be longer.
    pub device_blocks: u32,
    /// Blocks that the state after a block takes, where layers keep one; 0: none does.
    pub state_blocks: u32,
    /// Longest sequence that the model allows, in tokens.
    pub context_tokens: u32,
    /// Most sequences, or prompts to prefill, to give it at a time: those that it computes and some that wait there.
    pub work_max: u32,
}

/// The facts about a model on which coordinator and workers, each with its own model directory, must agree for a token id to mean the same
/// to both. The fields are keys of `config.json`. Only workers read the weights; their digest is in the layout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    #[serde(default)]
    pub model_type: String,
    pub vocab_size: u32,
    pub hidden_size: u32,
    pub num_hidden_layers: u32,
    #[serde(default)]
    pub kind: ModelKind,
    /// Digest of `tokenizer.json`. `None`: the directory has none; a worker needs none.
    #[serde(default)]
    pub tokenizer_digest: Option<[u8; 16]>,
}

/// What a model does with a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelKind {
    /// Continues it, token by token.
    #[default]
    Decoder,
    /// Makes an embedding of it.
    Encoder,
    /// Gives a number for each of its labels to it, or to a pair of texts.
    Classifier,
}

impl ModelKind {
    /// The kind of a Hugging Face architecture: encoders end in `Model` or `ForMaskedLM`, decoders in another word.
    pub fn of_architecture(name: &str) -> Self {
        if name.ends_with("LMHeadModel") {
            Self::Decoder
        } else if name.ends_with("ForSequenceClassification") {
            Self::Classifier
        } else if name.ends_with("Model") || name.ends_with("ForMaskedLM") {
            Self::Encoder
        } else {
            Self::Decoder
        }
    }
}

/// A job that reports its prompt's embedding and generates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Embeds {
    /// The place of the first token of the second of two texts; the prompt's length for one text.
    pub second_text: u32,
}

/// The keys of `config.json` that make up a [`ModelIdentity`]: those of the text model, where it is one among several.
#[derive(Default, Deserialize)]
pub struct IdentityKeys {
    #[serde(default)]
    architectures: Vec<String>,
    #[serde(default)]
    model_type: String,
    vocab_size: Option<u32>,
    #[serde(alias = "n_embd")]
    hidden_size: Option<u32>,
    #[serde(alias = "n_layer")]
    num_hidden_layers: Option<u32>,
    #[serde(alias = "n_positions")]
    max_position_embeddings: Option<u32>,
    text_config: Option<Box<IdentityKeys>>,
}

/// What the published configurations of a text model inside another leave out.
const GEMMA3_TEXT: (&str, u32, u32) = ("gemma3_text", 262_208, 131_072);

impl IdentityKeys {
    /// The identity, and the context in tokens. The error completes "config.json: …".
    pub fn identity(self) -> Result<(ModelIdentity, u32), String> {
        let kind = self.architectures.first().map_or(ModelKind::Decoder, |name| ModelKind::of_architecture(name));
        let mut keys = self.text_config.map_or(Self { text_config: None, ..self }, |text| *text);
        if keys.model_type == GEMMA3_TEXT.0 {
            keys.vocab_size = keys.vocab_size.or(Some(GEMMA3_TEXT.1));
            keys.max_position_embeddings = keys.max_position_embeddings.or(Some(GEMMA3_TEXT.2));
        }
        let need = |value: Option<u32>, key| value.ok_or(format!("missing field `{key}`"));
        let context = need(keys.max_position_embeddings, "max_position_embeddings")?;
        let identity = ModelIdentity {
            model_type: keys.model_type,
            vocab_size: need(keys.vocab_size, "vocab_size")?,
            hidden_size: need(keys.hidden_size, "hidden_size")?,
            num_hidden_layers: need(keys.num_hidden_layers, "num_hidden_layers")?,
            kind,
            tokenizer_digest: None,
        };
        Ok((identity, context))
    }
}

impl ModelIdentity {
    pub fn digest(tokenizer: &[u8]) -> [u8; 16] {
        *blake3::hash(tokenizer).as_bytes().first_chunk().expect("a hash has 32 bytes")
    }

    /// The first thing in which another directory differs, for people.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let text = |name: &str, a: &str, b: &str| (a != b).then(|| format!("{name} is {b}, not {a}"));
        let number = |name, a: u32, b: u32| text(name, &a.to_string(), &b.to_string());
        let tokenizers_differ = matches!((self.tokenizer_digest, other.tokenizer_digest), (Some(a), Some(b)) if a != b);
        text("model_type", &self.model_type, &other.model_type)
            .or_else(|| number("vocab_size", self.vocab_size, other.vocab_size))
            .or_else(|| number("hidden_size", self.hidden_size, other.hidden_size))
            .or_else(|| number("num_hidden_layers", self.num_hidden_layers, other.num_hidden_layers))
            .or_else(|| text("the kind of model", &format!("{:?}", self.kind), &format!("{:?}", other.kind)))
            .or_else(|| tokenizers_differ.then(|| "its tokenizer.json is another".to_owned()))
    }
}

/// Worker to coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToCoordinator {
    Register {
        instance: Instance,
        register: Register,
    },
    /// Everything after registration. An event with an epoch that is not the link's own is refused.
    Event {
        epoch: Epoch,
        event: WorkerEvent,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum WorkerEvent {
    Heartbeat(Box<Report>),
    /// What one decode step produced, for all sequences of this coordinator.
    Tokens(Vec<SequenceToken>),
    /// A sequence ended, well or not. The last event of a sequence, after its last token.
    Finished {
        sequence: SequenceId,
        reason: Finish,
        provenance: Provenance,
    },
    /// Log-probabilities of the prompt's tokens (first is `None`), before the first token.
    PromptLogprobs {
        sequence: SequenceId,
        logprobs: Vec<Option<TokenLogprob>>,
    },
    /// The hidden state of the prompt's last token, after the final norm.
    Embedding {
        sequence: SequenceId,
        values: Vec<f32>,
    },
    /// Where the prompt's K and V come from, once per sequence and worker, before the first token.
    Sources {
        sequence: SequenceId,
        tokens: TokensBySource,
    },
    /// A prefill job ended, in good order or not.
    Prefilled {
        request: RequestId,
        outcome: PrefillOutcome,
    },
    /// Pool node: what came and went. `from` numbers the first event; the stream has no gap.
    PoolEvents {
        from: u64,
        events: Vec<PoolEvent>,
    },
    /// Engine: what came and went in its device's prefix cache. Numbered like a pool node's events.
    CacheEvents {
        from: u64,
        events: Vec<CacheEvent>,
    },
    /// This worker drains: give it nothing new.
    Leaving,
}

/// Coordinator to worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    Registered {
        epoch: Epoch,
    },
    /// Registration refused; the text says what to change.
    Refused {
        reason: String,
    },
    /// Not registered, for want of something that comes back by itself; the text says what. Try again soon.
    NotYet {
        reason: String,
    },
    Prefill(PrefillJob),
    Decode(DecodeJob),
    /// Forget a sequence at once; no answer is expected.
    CancelSequence {
        sequence: SequenceId,
    },
    /// Forget a prefill job at once; no answer is expected.
    CancelPrefill {
        request: RequestId,
    },
    /// No worker computes this sequence's missing blocks any more: compute them locally.
    StopWaiting {
        sequence: SequenceId,
    },
    /// Certificates that are revoked, by their serials (hexadecimal): all of them, as of this place in the registry's log. An earlier
    /// place in the same log says nothing new; another log adds to what is known.
    Denied {
        log: u64,
        version: u64,
        serials: Vec<String>,
    },
    /// To a pool node that said [`WorkerEvent::Leaving`]: who may take over what it holds, the best first.
    Peers(Vec<Peer>),
}

/// A pool node as one worker is to reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PoolNode {
    pub addr: SocketAddr,
    /// It is on the worker's own host: blocks go through shared memory. Else they go over the network, even if this process
    /// could map the node's memory.
    pub near: bool,
}

/// Where the next `blocks` blocks of a sequence are to be read. Runs follow one another from the sequence's first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub node: PoolNode,
    pub blocks: u32,
}

impl Run {
    /// For each block that `runs` cover, where to read it. At most `blocks_max` of them: a peer may claim any number.
    pub fn nodes(runs: &[Run], blocks_max: usize) -> Vec<PoolNode> {
        runs.iter().flat_map(|run| std::iter::repeat_n(run.node, run.blocks as usize)).take(blocks_max).collect()
    }
}

/// A pool node that another one may move blocks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    pub node: PoolNode,
    /// What it can take in without evicting anything.
    pub free_blocks: u64,
}

/// Compute and publish those of the first `blocks` full blocks of `tokens` that do not exist.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillJob {
    pub request: RequestId,
    /// At least `blocks * 16` tokens.
    pub tokens: Tokens,
    pub blocks: u32,
    /// Tenant's cache salt.
    pub salt: Vec<u8>,
    /// Leading blocks that exist.
    pub read: Vec<Run>,
    /// Takes what is computed.
    pub home: PoolNode,
    /// Give up after this long.
    pub deadline_ms: u64,
    pub urgency: Urgency,
}

/// Generate one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeJob {
    pub request: RequestId,
    pub sequence: SequenceId,
    /// Prompt, and for a rescued sequence the tokens already generated.
    pub tokens: Tokens,
    /// How many of `tokens` are the prompt; the rest were generated before.
    pub prompt_tokens: u32,
    pub salt: Vec<u8>,
    /// Leading blocks that exist: fetch them.
    pub read: Vec<Run>,
    /// Where blocks come that are being computed, and where to publish those computed here. `None`: no pool node takes any.
    pub home: Option<PoolNode>,
    /// Leading blocks that exist or are on their way to `home`: fetch them, and wait up to `wait_ms` for each that `home` does not have
    /// yet. Blocks after these are computed locally (the tail).
    pub expected_blocks: u32,
    pub wait_ms: u64,
    /// Number of leading blocks that are read often: those fetched from elsewhere are also published at `home`.
    pub hot_blocks: u32,
    pub sampling: Sampling,
    pub stop: StopRule,
    /// What the generated text must follow.
    pub constraint: Option<Constraint>,
    pub urgency: Urgency,
    /// `Some(n)`: also report log-probabilities of the prompt's tokens, with the `n` likeliest of each.
    pub prompt_logprobs: Option<u32>,
    /// Report the prompt's embedding, and generate nothing.
    pub embeds: Option<Embeds>,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceToken {
    pub sequence: SequenceId,
    /// 0 for the first generated token of the sequence; counts on across rescues.
    pub index: u32,
    pub token: Token,
    pub logprob: Option<TokenLogprob>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finish {
    /// Drew this stop token (reported as a token, too).
    Stop { token: Token },
    /// Reached `max_tokens`, or the model's context.
    Length,
    /// The job can never run here (its blocks exceed the device's memory, say); the text says why.
    Failed { reason: String },
    /// The worker drains or could not take the job now; the sequence should go elsewhere.
    Returned,
}

/// Where a sequence's prompt came from and where its time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    pub tokens: TokensBySource,
    /// Waiting for room in the batch and in device memory.
    pub queue_ms: f64,
    /// From asking the pool to the last block that had existed before.
    pub fetch_ms: f64,
    /// From asking the pool to the last block that a prefill worker computed for this request.
    pub transfer_ms: f64,
    /// From the last block to the first token: the tail, and whatever was computed locally.
    pub tail_ms: f64,
    /// From the first token to the last.
    pub decode_ms: f64,
    pub preemptions: u32,
    /// Tokens that the decode worker guessed and computed ahead,
    pub drafted: u64,
    /// and those of them that turned out right.
    pub accepted: u64,
}

/// Prompt tokens by where their KV came from when the sequence was first admitted. They add up to the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokensBySource {
    /// This worker's device blocks.
    pub hbm: u64,
    /// A pool node's DRAM over shared memory, there before this request.
    pub dram: u64,
    /// A pool node's NVMe, there before this request.
    pub nvme: u64,
    /// Object storage, by a pool node on this host, there before this request.
    pub object: u64,
    /// A pool node over the network, there before this request.
    pub remote: u64,
    /// Computed for this request by a prefill worker and handed over through the pool.
    pub prefill: u64,
    /// Computed by the decode worker itself (the tail).
    pub local: u64,
}

impl TokensBySource {
    /// Tokens that nobody had to compute for this request.
    pub fn cached(&self) -> u64 {
        self.hbm + self.dram + self.nvme + self.object + self.remote
    }

    pub fn total(&self) -> u64 {
        self.cached() + self.prefill + self.local
    }

    pub fn add(&mut self, other: &Self) {
        self.hbm += other.hbm;
        self.dram += other.dram;
        self.nvme += other.nvme;
        self.object += other.object;
        self.remote += other.remote;
        self.prefill += other.prefill;
        self.local += other.local;
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PrefillOutcome {
    /// All blocks are published.
    Done {
        /// Tokens that existed and tokens that were computed.
        cached_tokens: u32,
        computed_tokens: u32,
        queue_ms: f64,
        compute_ms: f64,
    },
    Failed {
        reason: String,
    },
}

/// What changed at a pool node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolEvent {
    /// The node holds a block that it did not hold before.
    Stored { key: BlockKey, tier: Tier },
    /// The node holds it elsewhere than before.
    Moved { key: BlockKey, tier: Tier },
    /// The node holds it no longer, in any tier.
    Evicted(BlockKey),
    /// All earlier events are void. The node's next events describe it from empty.
    Cleared,
}

/// What changed in the prefix cache of an engine's device. Only that engine can read these blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheEvent {
    Stored(BlockKey),
    Evicted(BlockKey),
    /// All earlier events are void. The next ones describe the cache from empty.
    Cleared,
}

/// A worker's report, once per heartbeat: current gauges, and counters since the process started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Jobs that wait for room.
    pub waiting: u32,
    /// Sequences in the batch, or prefill jobs being computed.
    pub running: u32,
    /// Prompt tokens not computed yet.
    pub tokens_queued: u64,
    pub blocks: TierBlocks,
    pub counters: Counters,
    /// Recent steps, for the cost model; bounded by [`Report::STEPS_MAX`].
    pub steps: Vec<StepSample>,
}

impl Report {
    pub const STEPS_MAX: usize = 64;

    /// Keeps a step for the next heartbeat, unless it has enough of them.
    pub fn push_step(&mut self, step: StepSample) {
        if self.steps.len() < Self::STEPS_MAX {
            self.steps.push(step);
        }
    }
}

/// Blocks of each tier that a worker has; zero for the others. A block in two tiers counts in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierBlocks {
    /// Device blocks of a prefill or decode worker.
    pub hbm: Blocks,
    /// A pool node's arena.
    pub dram: Blocks,
    /// A pool node's disk.
    pub nvme: Blocks,
    /// The object storage that a pool node shares with others. All of them count the same blocks.
    pub object: Blocks,
}

/// Blocks of one tier by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    pub total: u64,
    /// Neither findable by key nor reserved.
    pub free: u64,
    /// Findable by key and not in use.
    pub cached: u64,
    /// In use: by sequences (HBM), leased or being written (pool).
    pub used: u64,
    pub bytes_per_block: u64,
}

/// Monotone since the process started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    pub tokens: TokensBySource,
    /// Tokens computed by a prefill worker.
    pub prefill_computed_tokens: u64,
    /// Prefix tokens a prefill worker did not need to compute.
    pub prefill_cached_tokens: u64,
    pub tokens_generated: u64,
    /// Tokens that were guessed and computed ahead, by their place in the draft,
    pub tokens_drafted: Vec<u64>,
    /// and those of them that turned out right. They are among those generated.
    pub tokens_accepted: Vec<u64>,
    pub preemptions: u64,
    pub steps: u64,
    /// Rows that went through each expert, by its number, in all layers together. Empty where there are no experts or nobody counts them.
    pub expert_rows: Vec<u64>,
    pub transfer: Transfer,
    pub misses: Misses,
    pub disk: Disk,
    pub objects: Objects,
    pub rails: Rails,
    pub fetched: Fetched,
}

/// Blocks moved by this process, by transport and direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct Transfer(pub [[Moved; Direction::ALL.len()]; Transport::ALL.len()]);

impl Transfer {
    /// Every transport's, in the order of [`Transport::ALL`].
    pub fn lanes(&self) -> impl Iterator<Item = (Transport, Direction, &Moved)> {
        let of = |transport, lanes| Direction::ALL.into_iter().zip(lanes).map(move |(direction, moved)| (transport, direction, moved));
        Transport::ALL.into_iter().zip(&self.0).flat_map(move |(transport, lanes)| of(transport, lanes))
    }
}

/// By place on the wire, by name (`shm_put`) for people.
impl Serialize for Transfer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !serializer.is_human_readable() {
            return serializer.serialize_newtype_struct("Transfer", &self.0);
        }
        serializer
            .collect_map(self.lanes().map(|(transport, direction, moved)| (format!("{}_{}", transport.name(), direction.name()), moved)))
    }
}

impl Index<(Transport, Direction)> for Transfer {
    type Output = Moved;

    fn index(&self, (transport, direction): (Transport, Direction)) -> &Moved {
        &self.0[transport as usize][direction as usize]
    }
}

impl IndexMut<(Transport, Direction)> for Transfer {
    fn index_mut(&mut self, (transport, direction): (Transport, Direction)) -> &mut Moved {
        &mut self.0[transport as usize][direction as usize]
    }
}

/// What went one way over one transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    pub bytes: u64,
    /// Puts count batches, gets count blocks, and the disk counts reads and writes: one per wait.
    pub transfers: u64,
    /// Added up over transfers, which may run at the same time.
    pub seconds: f64,
    /// Transfers that took longer than the bound before and at most this one of [`Moved::BOUNDS_S`].
    pub times: [u64; Moved::BOUNDS_S.len()],
}

impl Moved {
    /// Seconds: from copying a small block to a transfer that nobody waits for any more.
    pub const BOUNDS_S: [f64; 16] =
        [0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0];
}

/// What a pool node did with its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disk {
    pub stored: Moved,
    pub loaded: Moved,
    /// Blocks whose bytes on disk had changed.
    pub corrupt: u64,
    /// Reads and writes that failed.
    pub errors: u64,
    /// Whether the disk was given up because of errors: 0 or 1.
    pub given_up: u64,
}

/// What a pool node did with its object storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Objects {
    /// Packs written, with their indexes.
    pub stored: Moved,
    /// Reads of blocks that somebody waited for.
    pub loaded: Moved,
    /// Requests to read, of indexes too,
    pub reads: u64,
    /// to write and to list,
    pub writes: u64,
    /// and to delete.
    pub deletes: u64,
    /// Requests that failed,
    pub errors: u64,
    /// and those that were not answered in time.
    pub late: u64,
    /// Blocks and indexes that were not what was written.
    pub corrupt: u64,
    /// Requests that were not made: beyond the rate or the day's dollars, or after failures.
    pub refused: u64,
    /// Whether nothing is read at the moment, because of failures: 0 or 1.
    pub left_alone: u64,
    /// Since the day began (UTC), or the process. Present, not monotone, as are the next two:
    pub spent_usd: f64,
    /// from asking for blocks to their first byte, of late,
    pub latency_ms: f64,
    /// and how fast the others follow.
    pub bytes_per_ms: f64,
}

/// Bytes of blocks that were got and valid, by what copied them to where the engine computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// A device, straight from the pool node's memory.
    pub by_device: u64,
    /// The host. Where a GPU computes, it passes them on.
    pub by_host: u64,
}

/// RDMA connections of a process. A reader or writer whose rails are all lost goes on over QUIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rails {
    pub opened: u64,
    /// Opened ones that broke, or that their node closed.
    pub lost: u64,
    /// A pool node's: how often it closed a client's rails because the client was late to fill a slot.
    pub fenced: u64,
}

/// Blocks that were asked for and unusable, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Misses {
    /// Not there, and not there before the wait's deadline.
    pub absent: u64,
    /// Slot was reused while it was read.
    pub stale: u64,
    /// Bytes differ from what was published.
    pub corrupt: u64,
    /// Node could not be reached, or the transfer broke off.
    pub unreachable: u64,
}

/// One engine step, as measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepSample {
    /// Prompt tokens computed.
    pub prefill_tokens: u32,
    /// Sum over those tokens of their position: the attention work.
    pub prefill_context: u64,
    /// Sequences that decoded one token.
    pub decode_rows: u32,
    /// Sum of their context lengths.
    pub decode_context: u64,
    pub ms: f32,
}

//! Messages between a coordinator and a worker, over one ordered stream per worker.
//!
//! A worker opens the stream, sends [`Register`], and is given an epoch. From then on both ends send at any time; nothing is answered in
//! lockstep. Every event carries the epoch that the worker was given, and an event with an old one is refused.

use crate::{
    block::{BlockKey, LayoutFingerprint, Token},
    grammar::Constraint,
    ids::{Epoch, Instance, RequestId, SequenceId},
    pool::{Direction, Tier, Transport},
    sampling::{Sampling, StopRule, TokenLogprob},
    thought::ThoughtLimit,
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
    /// A name for operators, such as `decode-0`. It need not be unique: the epoch identifies the worker.
    pub name: String,
    pub host: Host,
    /// The process id, for operators and for tests that stop a process.
    pub pid: u32,
    /// The name of the model that the worker belongs to, if the operator has set one.
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
        /// The address to which clients of the pool connect.
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

/// The capabilities of a worker that holds a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineInfo {
    pub model: ModelIdentity,
    pub layout: LayoutFingerprint,
    /// Bytes of one KV block.
    pub block_bytes: u64,
    /// KV blocks of its device memory: the limit of a sequence's length.
    pub device_blocks: u32,
    /// Blocks that the state after a block takes, for a model with layers that keep a state; 0 for other models.
    pub state_blocks: u32,
    /// Longest sequence that the model allows, in tokens.
    pub context_tokens: u32,
    /// Most sequences (or prompts to prefill) to send to it at a time: those that it computes, and some that wait there.
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
    /// Digest of `tokenizer.json`, if the directory has one. A worker needs none.
    #[serde(default)]
    pub tokenizer_digest: Option<[u8; 16]>,
}

/// The use of a model: its output for a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelKind {
    /// Continues the text, token by token.
    #[default]
    Decoder,
    /// Computes an embedding of the text.
    Encoder,
    /// Computes a score for each of its labels, for one text or a pair of texts.
    Classifier,
}

impl ModelKind {
    /// Derives the kind from a Hugging Face architecture: encoders end in `Model` or `ForMaskedLM`, decoders in other words.
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
    /// The position of the second text's first token, if there are two texts; else the prompt's length.
    pub second_text: u32,
}

/// The keys of `config.json` that make up a [`ModelIdentity`]. For a multimodal model, those of its text model.
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

/// Values that published configurations leave out where this text model is part of a larger one: `model_type`, `vocab_size`, context.
const GEMMA3_TEXT: (&str, u32, u32) = ("gemma3_text", 262_208, 131_072);

/// The largest vocabulary: sixteen times the largest known one, Gemma's. Rows of logits and masks have as many entries.
pub const VOCAB_MAX: u32 = 1 << 22;

impl IdentityKeys {
    /// Returns the identity, and the context in tokens. The error completes "config.json: …".
    pub fn identity(self) -> Result<(ModelIdentity, u32), String> {
        let kind = self.architectures.first().map_or(ModelKind::Decoder, |name| ModelKind::of_architecture(name));
        let mut keys = self.text_config.map_or(Self { text_config: None, ..self }, |text| *text);
        if keys.model_type == GEMMA3_TEXT.0 {
            keys.vocab_size = keys.vocab_size.or(Some(GEMMA3_TEXT.1));
            keys.max_position_embeddings = keys.max_position_embeddings.or(Some(GEMMA3_TEXT.2));
        }
        let need = |value: Option<u32>, key| value.ok_or(format!("missing field `{key}`"));
        let context = need(keys.max_position_embeddings, "max_position_embeddings")?;
        let vocab_size = need(keys.vocab_size, "vocab_size")?;
        if vocab_size > VOCAB_MAX {
            return Err(format!("vocab_size is {vocab_size}, more than the {VOCAB_MAX} that any model has"));
        }
        let identity = ModelIdentity {
            model_type: keys.model_type,
            vocab_size,
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

    /// Describes the first difference from another directory's identity.
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

/// A message from worker to coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToCoordinator {
    Register {
        instance: Instance,
        register: Register,
    },
    /// Any message after registration. An event with an epoch that is not the link's own is refused.
    Event {
        epoch: Epoch,
        event: WorkerEvent,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum WorkerEvent {
    Heartbeat(Box<Report>),
    /// The tokens of one decode step, for all sequences of this coordinator.
    Tokens(Vec<SequenceToken>),
    /// A sequence ended, successfully or not. This is the sequence's last event, after its last token.
    Finished {
        sequence: SequenceId,
        reason: Finish,
        provenance: Provenance,
    },
    /// Log-probabilities of the prompt's tokens, sent before the first generated token. The first entry is `None`.
    PromptLogprobs {
        sequence: SequenceId,
        logprobs: Vec<Option<TokenLogprob>>,
    },
    /// The hidden state of the prompt's last token, after the final norm.
    Embedding {
        sequence: SequenceId,
        values: Vec<f32>,
    },
    /// The sources of the prompt's K and V, once per sequence and worker, before the first token.
    Sources {
        sequence: SequenceId,
        tokens: TokensBySource,
    },
    /// A prefill job ended, successfully or not.
    Prefilled {
        request: RequestId,
        outcome: PrefillOutcome,
    },
    /// Changes of a pool node's blocks. `from` numbers the first event; the stream has no gap.
    PoolEvents {
        from: u64,
        events: Vec<PoolEvent>,
    },
    /// Changes of the prefix cache on an engine's device. Numbered like a pool node's events.
    CacheEvents {
        from: u64,
        events: Vec<CacheEvent>,
    },
    /// The worker drains and takes no new work.
    Leaving,
    /// The release that the worker runs, once per link.
    Release(String),
}

/// A message from coordinator to worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    Registered {
        epoch: Epoch,
    },
    /// Registration refused; the text says what to change.
    Refused {
        reason: String,
    },
    /// Registration refused for want of a resource that returns by itself, which the text names. The worker tries again soon.
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
    /// No worker will compute this sequence's missing blocks: compute them locally.
    StopWaiting {
        sequence: SequenceId,
    },
    /// The serials (hexadecimal) of all revoked certificates as of this index of the registry's log. An earlier index of the same log adds
    /// nothing; the entries of another log are added to those already known.
    Denied {
        log: u64,
        version: u64,
        serials: Vec<String>,
    },
    /// The answer to [`WorkerEvent::Leaving`] of a pool node: nodes that can take over its blocks, the best first.
    Peers(Vec<Peer>),
    /// Like `Decode`, with a limit on the sequence's thought. Only for a worker that [keeps](crate::frame::Version::keeps_thought_limits)
    /// one.
    DecodeLimited {
        job: DecodeJob,
        limit: ThoughtLimit,
    },
}

/// A pool node, and how one worker reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PoolNode {
    pub addr: SocketAddr,
    /// Whether the node is on the worker's own host, so that blocks go through shared memory. Otherwise they go over the network, even if
    /// this process could map the node's memory.
    pub near: bool,
}

/// The pool node from which the next `blocks` blocks of a sequence are read. Runs follow one another from the sequence's first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub node: PoolNode,
    pub blocks: u32,
}

impl Run {
    /// Lists the node to read from for each block that `runs` cover, at most `blocks_max` of them: a peer may claim any number.
    pub fn nodes(runs: &[Run], blocks_max: usize) -> Vec<PoolNode> {
        runs.iter().flat_map(|run| std::iter::repeat_n(run.node, run.blocks as usize)).take(blocks_max).collect()
    }
}

/// A pool node to which a draining one may move blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    pub node: PoolNode,
    /// Blocks that it can take in without evicting any.
    pub free_blocks: u64,
}

/// A job to compute and publish those of the first `blocks` full blocks of `tokens` that do not exist.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillJob {
    pub request: RequestId,
    /// The prompt's tokens: at least `blocks * 16`.
    pub tokens: Tokens,
    pub blocks: u32,
    /// The tenant's cache salt.
    pub salt: Vec<u8>,
    /// The leading blocks that exist, by the node to read them from.
    pub read: Vec<Run>,
    /// The node that stores the computed blocks.
    pub home: PoolNode,
    /// Time after which the job is abandoned.
    pub deadline_ms: u64,
    pub urgency: Urgency,
}

/// A job to generate one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeJob {
    pub request: RequestId,
    pub sequence: SequenceId,
    /// The prompt, and for a rescued sequence also the tokens generated before.
    pub tokens: Tokens,
    /// The number of `tokens` that belong to the prompt; the rest were generated before.
    pub prompt_tokens: u32,
    pub salt: Vec<u8>,
    /// The leading blocks that exist and are to be fetched.
    pub read: Vec<Run>,
    /// The node to which other workers write the blocks that this sequence waits for, and where this worker publishes its own. `None` if no
    /// pool node accepts blocks.
    pub home: Option<PoolNode>,
    /// The number of leading blocks that exist or are on their way to `home`. The worker fetches them, and waits up to `wait_ms` for each
    /// that `home` does not have yet. It computes the blocks after these itself (the tail).
    pub expected_blocks: u32,
    pub wait_ms: u64,
    /// The number of leading blocks that are read often: those fetched from another node are also published at `home`.
    pub hot_blocks: u32,
    pub sampling: Sampling,
    pub stop: StopRule,
    /// The grammar that the generated text must follow.
    pub constraint: Option<Constraint>,
    pub urgency: Urgency,
    /// `Some(n)`: also report the log-probabilities of the prompt's tokens, with the `n` likeliest at each position.
    pub prompt_logprobs: Option<u32>,
    /// Report the prompt's embedding, and generate nothing.
    pub embeds: Option<Embeds>,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceToken {
    pub sequence: SequenceId,
    /// 0 for the first generated token of the sequence. A rescue continues the numbering.
    pub index: u32,
    pub token: Token,
    pub logprob: Option<TokenLogprob>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finish {
    /// Drew this stop token, which is reported as a token as well.
    Stop { token: Token },
    /// Reached `max_tokens`, or the model's context.
    Length,
    /// The job can never run here (its blocks exceed the device's memory, say); the text says why.
    Failed { reason: String },
    /// The worker drains or could not take the job now; the sequence should go elsewhere.
    Returned,
}

/// The sources of a sequence's prompt, and the time spent in each phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    pub tokens: TokensBySource,
    /// Time spent waiting for room in the batch and in device memory.
    pub queue_ms: f64,
    /// Time from asking the pool to the last block that had existed before.
    pub fetch_ms: f64,
    /// Time from asking the pool to the last block that a prefill worker computed for this request.
    pub transfer_ms: f64,
    /// Time from the last block to the first token: the tail, and any blocks computed locally.
    pub tail_ms: f64,
    /// Time from the first token to the last.
    pub decode_ms: f64,
    pub preemptions: u32,
    /// Tokens that the decode worker drafted (guessed and computed ahead).
    pub drafted: u64,
    /// Drafted tokens that were confirmed.
    pub accepted: u64,
}

/// Prompt tokens by the source of their KV when the sequence was first admitted. They add up to the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokensBySource {
    /// Read from this worker's device blocks.
    pub hbm: u64,
    /// Read from a pool node's DRAM over shared memory, present before this request.
    pub dram: u64,
    /// Read from a pool node's NVMe, present before this request.
    pub nvme: u64,
    /// Read from object storage by a pool node on this host, present before this request.
    pub object: u64,
    /// Read from a pool node over the network, present before this request.
    pub remote: u64,
    /// Computed for this request by a prefill worker and handed over through the pool.
    pub prefill: u64,
    /// Computed by the decode worker itself (the tail).
    pub local: u64,
}

impl TokensBySource {
    /// Tokens that did not have to be computed for this request.
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
        /// Tokens that existed before, and tokens that were computed.
        cached_tokens: u32,
        computed_tokens: u32,
        queue_ms: f64,
        compute_ms: f64,
    },
    Failed {
        reason: String,
    },
}

/// A change at a pool node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolEvent {
    /// The node holds a block that it did not hold before.
    Stored { key: BlockKey, tier: Tier },
    /// The node holds the block in a different tier than before.
    Moved { key: BlockKey, tier: Tier },
    /// The node no longer holds the block in any tier.
    Evicted(BlockKey),
    /// All earlier events are void. The node's next events describe its contents from empty.
    Cleared,
}

/// A change in the prefix cache of an engine's device. Only that engine can read these blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheEvent {
    Stored(BlockKey),
    Evicted(BlockKey),
    /// All earlier events are void. The next ones describe the cache's contents from empty.
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

    /// Keeps a step for the next heartbeat, unless the report is full.
    pub fn push_step(&mut self, step: StepSample) {
        if self.steps.len() < Self::STEPS_MAX {
            self.steps.push(step);
        }
    }
}

/// Blocks of a worker in each tier; zero for tiers that it lacks. A block in two tiers counts in both.
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

/// Counters that only grow from the start of the process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    pub tokens: TokensBySource,
    /// Tokens computed by a prefill worker.
    pub prefill_computed_tokens: u64,
    /// Prefix tokens a prefill worker did not need to compute.
    pub prefill_cached_tokens: u64,
    pub tokens_generated: u64,
    /// Drafted tokens (guessed and computed ahead), by their position in the draft.
    pub tokens_drafted: Vec<u64>,
    /// Drafted tokens that were confirmed, by position. They are among `tokens_generated`.
    pub tokens_accepted: Vec<u64>,
    pub preemptions: u64,
    pub steps: u64,
    /// Rows that went through each expert, by its number, summed over the layers. Empty if the model has no experts or the backend does not
    /// count them.
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
    /// Every combination of transport and direction, in the order of [`Transport::ALL`].
    pub fn lanes(&self) -> impl Iterator<Item = (Transport, Direction, &Moved)> {
        let of = |transport, lanes| Direction::ALL.into_iter().zip(lanes).map(move |(direction, moved)| (transport, direction, moved));
        Transport::ALL.into_iter().zip(&self.0).flat_map(move |(transport, lanes)| of(transport, lanes))
    }
}

/// Positional on the wire; by name (`shm_put`) in human-readable formats.
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

/// Blocks moved in one direction over one transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    pub bytes: u64,
    /// Number of waits: puts count batches, gets count blocks, and the disk counts reads and writes.
    pub transfers: u64,
    /// Sum over transfers, which may overlap in time.
    pub seconds: f64,
    /// Histogram of durations: element `i` counts transfers that took at most [`Moved::BOUNDS_S`]`[i]` and longer than the bound before it.
    pub times: [u64; Moved::BOUNDS_S.len()],
}

impl Moved {
    /// Bounds in seconds, from copying a small block to a transfer that no request can still wait for.
    pub const BOUNDS_S: [f64; 16] =
        [0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0];
}

/// A pool node's use of its disk.
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

/// The use that a pool node has made of its object storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Objects {
    /// Packs written, with their indexes.
    pub stored: Moved,
    /// Reads of blocks for which a reader waited.
    pub loaded: Moved,
    /// Requests that read, indexes included.
    pub reads: u64,
    /// Requests that write or list.
    pub writes: u64,
    /// Requests that delete.
    pub deletes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Requests that were not answered in time.
    pub late: u64,
    /// Blocks and indexes with other bytes than were written.
    pub corrupt: u64,
    /// Requests that were not made: beyond the rate or the day's dollars, or after failures.
    pub refused: u64,
    /// Whether reads are suspended at the moment, after failures: 0 or 1.
    pub left_alone: u64,
    /// Dollars spent since the day (UTC) or the process began. Not monotone.
    pub spent_usd: f64,
    /// The moving average of the time from a request for blocks to its first byte, in milliseconds.
    pub latency_ms: f64,
    /// The moving average of the rate of the bytes that follow.
    pub bytes_per_ms: f64,
}

/// Bytes of valid blocks that were fetched, by the processor that copied them to the engine's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// Copied by a device, straight from the pool node's memory.
    pub by_device: u64,
    /// Copied by the host, which passes them on if a GPU computes.
    pub by_host: u64,
}

/// RDMA connections of a process. A reader or writer that has lost all its rails continues over QUIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rails {
    pub opened: u64,
    /// Opened rails that broke, or that their node closed.
    pub lost: u64,
    /// For a pool node: how often it closed a client's rails because the client was late to fill a slot.
    pub fenced: u64,
}

/// Blocks that were requested but unusable, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Misses {
    /// Not present by the deadline of the wait.
    pub absent: u64,
    /// The slot was reused while it was read.
    pub stale: u64,
    /// The bytes differ from those that were published.
    pub corrupt: u64,
    /// The node could not be reached, or the transfer broke off.
    pub unreachable: u64,
}

/// One engine step, as measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepSample {
    /// Prompt tokens computed.
    pub prefill_tokens: u32,
    /// Sum over those tokens of their position: the attention work.
    pub prefill_context: u64,
    /// Rows that decode: one for each sequence, and one for each drafted token.
    pub decode_rows: u32,
    /// Sum of their context lengths.
    pub decode_context: u64,
    /// Sequences that decode.
    pub sequences: u32,
    /// Tokens that these sequences drew.
    pub drawn: u32,
    pub ms: f32,
    /// Time that the draft model took before this step, which `ms` leaves out.
    pub drafting_ms: f32,
}

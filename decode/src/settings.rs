//! Flags and config file of `tidemill-decode`.

use crate::{
    limits::Limits,
    scheduler::Scheduler,
    speculation::{Speculation, draft_model::DraftBounds, ngram::Ngram},
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tidemill_engine::{
    draft::DraftSettings,
    flags::{EngineFlags, EngineSettings, STEP_TOKENS_MAX, Settings},
    worker::{EngineBounds, RoleSettings},
};
use tidemill_net::{
    config::{ConfigError, invalid, required},
    worker::{WorkerError, WorkerFlags},
};
use tidemill_proto::{
    message::{EngineInfo, RoleInfo},
    step::DRAFT_TOKENS_MAX,
};

/// Sections `[worker]`, `[engine]` and `[decode]` of the config file.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Flags {
    #[command(flatten)]
    pub worker: WorkerFlags,
    #[command(flatten)]
    pub engine: EngineFlags,
    #[command(flatten)]
    pub decode: DecodeFlags,
}

#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[command(next_help_heading = "[decode]")]
pub struct DecodeFlags {
    /// Most sequences that run, and hold device blocks, at once [default: 64]
    #[arg(long)]
    pub sequences_max: Option<usize>,
    /// Most sequences that wait beside those; more go back to their coordinator [default: 1024]
    #[arg(long)]
    pub waiting_max: Option<usize>,
    /// Source of guesses at the next tokens, of which a step verifies several at once: ngram (what followed the last tokens when they occurred
    /// before), draft (by a small model, and as ngram does where that is as likely right), or off. Answers are the same bytes either way.
    /// Models on a GPU decode without [default: off]
    #[arg(long)]
    pub speculation: Option<String>,
    /// Most tokens guessed for a sequence in one step, up to 32; fewer where they do not pay [default: 12]
    #[arg(long)]
    pub draft_tokens_max: Option<usize>,
    /// Tokens guessed for a sequence in each step whether they pay or not: to measure, and to test [default: 0]
    #[arg(long)]
    pub draft_tokens_min: Option<usize>,
    /// Hugging Face directory of the draft model, which has the vocabulary of the model, for `speculation` draft [default: none, required
    /// there]
    #[arg(long)]
    pub draft_model: Option<PathBuf>,
    /// Arithmetic of the draft model's projections: none, int8, int4 or dequantize, as `quantize` says of the model's [default: none]
    #[arg(long)]
    pub draft_quantize: Option<String>,
    /// Memory for the draft model's own KV blocks; sequences that find no room there are not guessed by it [default: 256MiB]
    #[arg(long)]
    pub draft_kv_memory: Option<String>,
    /// Most rows of a step in which tokens are guessed: those of sequences that decode and the guessed ones together [default: 16]
    #[arg(long)]
    pub draft_rows_max: Option<usize>,
}

/// Section `[decode]`, checked.
#[derive(Debug)]
pub struct DecodeSettings {
    pub sequences_max: usize,
    pub waiting_max: usize,
    /// The settings of speculation; `None` if it is off.
    pub speculation: Option<Speculation>,
    /// The settings of the draft model, if there is one.
    pub draft: Option<DraftSettings>,
}

impl Flags {
    pub fn check(self) -> Result<Settings<DecodeSettings>, WorkerError> {
        Settings::check("decode", self.worker, self.engine, |engine| self.decode.check(engine))
    }
}

impl DecodeFlags {
    fn check(self, engine: &EngineSettings) -> Result<DecodeSettings, ConfigError> {
        let sequences_max = self.sequences_max.unwrap_or(64);
        let most = engine.step_tokens.unwrap_or(STEP_TOKENS_MAX);
        if !(1..=most).contains(&sequences_max) {
            let reason = format!("must be from 1 to step_tokens ({most}), so that each sequence gets its token in every step");
            return Err(invalid("sequences_max", sequences_max, reason));
        }
        let (speculation, draft) = (self.speculation()?, self.draft()?);
        Ok(DecodeSettings { sequences_max, waiting_max: self.waiting_max.unwrap_or(1024), speculation, draft })
    }

    fn speculation(&self) -> Result<Option<Speculation>, ConfigError> {
        let draft_tokens_max = self.draft_tokens_max.unwrap_or(DRAFT_TOKENS);
        if !(1..=DRAFT_TOKENS_MAX).contains(&draft_tokens_max) {
            let reason = format!("must be from 1 to {DRAFT_TOKENS_MAX}; to guess none, set speculation to off");
            return Err(invalid("draft_tokens_max", draft_tokens_max, reason));
        }
        let rows_max = self.draft_rows_max.unwrap_or(DRAFT_ROWS);
        if rows_max == 0 {
            return Err(invalid("draft_rows_max", rows_max, "must be at least 1; to guess no tokens, set speculation to off"));
        }
        let draft_tokens_min = self.draft_tokens_min.unwrap_or(0);
        if draft_tokens_min > draft_tokens_max {
            return Err(invalid("draft_tokens_min", draft_tokens_min, format!("is more than draft_tokens_max ({draft_tokens_max})")));
        }
        match self.speculation.as_deref().unwrap_or("off") {
            "off" => Ok(None),
            "ngram" | "draft" => {
                let (proposer, draft_model) = (Ngram::boxed as fn() -> _, None);
                Ok(Some(Speculation { proposer, draft_model, draft_tokens_max, draft_tokens_min, rows_max }))
            }
            other => Err(invalid("speculation", other, "must be ngram, draft or off")),
        }
    }

    fn draft(&self) -> Result<Option<DraftSettings>, ConfigError> {
        if self.speculation.as_deref() != Some("draft") {
            return match &self.draft_model {
                Some(model) => Err(invalid("draft_model", model.display(), "is given, and `speculation` is not draft")),
                None => Ok(None),
            };
        }
        let model = required(Some("decode"), "draft_model", self.draft_model.clone())?;
        DraftSettings::check(model, self.draft_quantize.as_deref(), self.draft_kv_memory.as_deref()).map(Some)
    }
}

/// The default limit of guessed tokens: few repetitions continue for longer without a change, and a proposal that is wrong early has cost
/// all its rows.
const DRAFT_TOKENS: usize = 12;
/// The default limit of rows: on CPUs, rows beyond this many cost nearly as much as the first ones.
const DRAFT_ROWS: usize = 16;

/// The number of assigned sequences for each running one: waiting ones are ready to start within a step, and more would wait in the wrong
/// place.
const GIVEN_FOR_EACH: usize = 4;

impl RoleSettings for DecodeSettings {
    type Role = Scheduler;

    fn draws_max(&self) -> usize {
        self.sequences_max
    }

    /// The most assigned sequences, none of which is returned.
    fn work_max(&self) -> usize {
        (GIVEN_FOR_EACH * self.sequences_max).min(self.sequences_max.saturating_add(self.waiting_max))
    }

    fn role_info(info: EngineInfo) -> RoleInfo {
        RoleInfo::Decode(info)
    }

    fn draft(&self) -> Option<&DraftSettings> {
        self.draft.as_ref()
    }

    fn scheduler(&self, bounds: &EngineBounds) -> Scheduler {
        let EngineBounds { info, device_blocks, states, vocab, step_tokens, reads_whole, verifies_drafts, draft, .. } = bounds;
        let limits = Limits {
            sequences_max: self.sequences_max,
            waiting_max: self.waiting_max,
            step_tokens: *step_tokens,
            context_tokens: info.context_tokens as usize,
            vocab: *vocab,
            reads_whole: *reads_whole,
        };
        let draft_model = draft.map(|draft| DraftBounds {
            blocks: draft.device_blocks,
            vocab: draft.vocab,
            context_tokens: draft.context_tokens,
            step_tokens: draft.step_tokens,
        });
        let speculation = self.speculation.filter(|_| *verifies_drafts).map(|speculation| Speculation { draft_model, ..speculation });
        Scheduler::new(info.layout, *device_blocks, limits).with_states(*states).with_speculation(speculation)
    }
}

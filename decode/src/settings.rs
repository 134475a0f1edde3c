//! Flags and config file of `tidemill-decode`.

use crate::{limits::Limits, scheduler::Scheduler};
use serde::{Deserialize, Serialize};
use tidemill_engine::{
    flags::{EngineFlags, EngineSettings, STEP_TOKENS_MAX, Settings},
    worker::{EngineBounds, RoleSettings},
};
use tidemill_net::{
    config::{ConfigError, invalid},
    worker::{WorkerError, WorkerFlags},
};
use tidemill_proto::message::{EngineInfo, RoleInfo};

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
}

/// Section `[decode]`, checked.
#[derive(Debug)]
pub struct DecodeSettings {
    pub sequences_max: usize,
    pub waiting_max: usize,
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
        Ok(DecodeSettings { sequences_max, waiting_max: self.waiting_max.unwrap_or(1024) })
    }
}

/// Sequences to be given for each that runs: those that wait are ready to start within a step, and more would wait in the wrong place.
const GIVEN_FOR_EACH: usize = 4;

impl RoleSettings for DecodeSettings {
    type Role = Scheduler;

    fn draws_max(&self) -> usize {
        self.sequences_max
    }

    /// None of them is returned.
    fn work_max(&self) -> usize {
        (GIVEN_FOR_EACH * self.sequences_max).min(self.sequences_max.saturating_add(self.waiting_max))
    }

    fn role_info(info: EngineInfo) -> RoleInfo {
        RoleInfo::Decode(info)
    }

    fn scheduler(&self, EngineBounds { info, device_blocks, states, vocab, step_tokens, reads_whole, .. }: &EngineBounds) -> Scheduler {
        let limits = Limits {
            sequences_max: self.sequences_max,
            waiting_max: self.waiting_max,
            step_tokens: *step_tokens,
            context_tokens: info.context_tokens as usize,
            vocab: *vocab,
            reads_whole: *reads_whole,
        };
        Scheduler::new(info.layout, *device_blocks, limits).with_states(*states)
    }
}

//! Flags and config file of `tidemill-decode`.

use serde::{Deserialize, Serialize};
use tidemill_engine::flags::{EngineFlags, EngineSettings, STEP_TOKENS_MAX};
use tidemill_net::{
    config::invalid,
    worker::{WorkerError, WorkerFlags, WorkerSettings},
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
    /// Sequences that hold device blocks at once
    #[arg(long)]
    pub sequences_max: Option<usize>,
    /// Sequences that wait beside those; more altogether are returned to their coordinator
    #[arg(long)]
    pub waiting_max: Option<usize>,
}

#[derive(Debug)]
pub struct Settings {
    pub worker: WorkerSettings,
    pub engine: EngineSettings,
    pub sequences_max: usize,
    pub waiting_max: usize,
}

/// Sequences to be given for each that runs: what waits is ready to start within a step, and more would only wait in the wrong place.
const GIVEN_FOR_EACH: usize = 4;

impl Settings {
    /// Sequences that are to be given at a time: none of them is returned.
    pub(crate) fn work_max(&self) -> usize {
        (GIVEN_FOR_EACH * self.sequences_max).min(self.sequences_max.saturating_add(self.waiting_max))
    }
}

impl Flags {
    pub fn check(self) -> Result<Settings, WorkerError> {
        let worker = self.worker.check("decode")?;
        let engine = self.engine.check()?;
        let sequences_max = self.decode.sequences_max.unwrap_or(64);
        let most = engine.step_tokens.unwrap_or(STEP_TOKENS_MAX);
        if !(1..=most).contains(&sequences_max) {
            let reason = format!("must be from 1 to step_tokens ({most}), so that each sequence gets its token in every step");
            return Err(invalid("sequences_max", sequences_max, reason).into());
        }
        Ok(Settings { worker, engine, sequences_max, waiting_max: self.decode.waiting_max.unwrap_or(1024) })
    }
}

//! Flags and config file of `tidemill-decode`.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tidemill_proto::{
    config::{self, invalid},
    engine::{EngineFlags, EngineSettings},
    worker::{WorkerError, WorkerFlags, WorkerSettings},
};

/// Generates tokens: continuous batching over KV blocks that it fetches, computes and publishes
#[derive(Debug, clap::Parser)]
#[command(name = "tidemill-decode", version)]
pub struct Cli {
    /// TOML file with the same keys as the flags, in sections [worker], [engine] and [decode]
    #[arg(long)]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub flags: Flags,
}

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
pub struct DecodeFlags {
    /// Sequences that hold device blocks at once
    #[arg(long)]
    pub sequences_max: Option<usize>,
    /// Sequences that wait for room; more are returned to their coordinator
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

impl Cli {
    pub fn resolve(self) -> Result<Settings, WorkerError> {
        let flags = config::resolve(&self.flags, self.config.as_deref())?;
        let worker = flags.worker.check("decode")?;
        let engine = flags.engine.check()?;
        let sequences_max = flags.decode.sequences_max.unwrap_or(64);
        if !(1..=engine.step_tokens).contains(&sequences_max) {
            let reason =
                format!("must be from 1 to step_tokens ({}), so that each sequence gets its token in every step", engine.step_tokens);
            return Err(invalid("sequences_max", sequences_max, reason).into());
        }
        Ok(Settings { worker, engine, sequences_max, waiting_max: flags.decode.waiting_max.unwrap_or(1024) })
    }
}

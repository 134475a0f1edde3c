//! Flags and config file of `tidemill-prefill`.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tidemill_proto::{
    config::{self, invalid},
    engine::{EngineFlags, EngineSettings},
    worker::{WorkerError, WorkerFlags, WorkerSettings},
};

/// Computes prompts in chunks and puts their KV blocks into the pool
#[derive(Debug, clap::Parser)]
#[command(name = "tidemill-prefill", version)]
pub struct Cli {
    /// TOML file with the same keys as the flags, in sections [worker], [engine] and [prefill]
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
    pub prefill: PrefillFlags,
}

#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillFlags {
    /// Jobs that hold device blocks at once
    #[arg(long)]
    pub admitted_max: Option<usize>,
    /// Jobs altogether; more are refused at once
    #[arg(long)]
    pub jobs_max: Option<usize>,
}

#[derive(Debug)]
pub struct Settings {
    pub worker: WorkerSettings,
    pub engine: EngineSettings,
    pub admitted_max: usize,
    pub jobs_max: usize,
}

impl Cli {
    pub fn resolve(self) -> Result<Settings, WorkerError> {
        let flags = config::resolve(&self.flags, self.config.as_deref())?;
        let worker = flags.worker.check("prefill")?;
        let engine = flags.engine.check()?;
        let admitted_max = flags.prefill.admitted_max.unwrap_or(8);
        if admitted_max == 0 {
            return Err(invalid("admitted_max", 0, "must be at least 1").into());
        }
        Ok(Settings { worker, engine, admitted_max, jobs_max: flags.prefill.jobs_max.unwrap_or(1024) })
    }
}

//! Flags and config file of `tidemill-prefill`.

use serde::{Deserialize, Serialize};
use tidemill_engine::flags::{EngineFlags, EngineSettings};
use tidemill_net::{
    config::invalid,
    worker::{WorkerError, WorkerFlags, WorkerSettings},
};

/// Sections `[worker]`, `[engine]` and `[prefill]` of the config file.
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
#[command(next_help_heading = "[prefill]")]
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

impl Flags {
    pub fn check(self) -> Result<Settings, WorkerError> {
        let worker = self.worker.check("prefill")?;
        let engine = self.engine.check()?;
        let admitted_max = self.prefill.admitted_max.unwrap_or(8);
        let jobs_max = self.prefill.jobs_max.unwrap_or(1024);
        for (key, value) in [("admitted_max", admitted_max), ("jobs_max", jobs_max)] {
            if value == 0 {
                return Err(invalid(key, 0, "must be at least 1").into());
            }
        }
        Ok(Settings { worker, engine, admitted_max, jobs_max })
    }
}

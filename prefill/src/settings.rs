//! Flags and config file of `tidemill-prefill`.

use crate::scheduler::{Limits, Scheduler};
use serde::{Deserialize, Serialize};
use tidemill_engine::{
    flags::{EngineFlags, Settings},
    worker::{EngineBounds, RoleSettings},
};
use tidemill_net::{
    config::{ConfigError, invalid},
    worker::{WorkerError, WorkerFlags},
};
use tidemill_proto::message::{EngineInfo, RoleInfo};

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
    /// Most jobs that hold device blocks at once [default: 8]
    #[arg(long)]
    pub admitted_max: Option<usize>,
    /// Most jobs in all; more are refused at once [default: 1024]
    #[arg(long)]
    pub jobs_max: Option<usize>,
}

/// Section `[prefill]`, checked.
#[derive(Debug)]
pub struct PrefillSettings {
    pub admitted_max: usize,
    pub jobs_max: usize,
}

impl Flags {
    pub fn check(self) -> Result<Settings<PrefillSettings>, WorkerError> {
        Settings::check("prefill", self.worker, self.engine, |_| self.prefill.check())
    }
}

impl PrefillFlags {
    fn check(self) -> Result<PrefillSettings, ConfigError> {
        let admitted_max = self.admitted_max.unwrap_or(8);
        let jobs_max = self.jobs_max.unwrap_or(1024);
        for (key, value) in [("admitted_max", admitted_max), ("jobs_max", jobs_max)] {
            if value == 0 {
                return Err(invalid(key, 0, "must be at least 1"));
            }
        }
        Ok(PrefillSettings { admitted_max, jobs_max })
    }
}

impl RoleSettings for PrefillSettings {
    type Role = Scheduler;

    fn draws_max(&self) -> usize {
        0
    }

    fn work_max(&self) -> usize {
        self.jobs_max
    }

    fn role_info(info: EngineInfo) -> RoleInfo {
        RoleInfo::Prefill(info)
    }

    fn scheduler(
        &self,
        &EngineBounds { ref info, device_blocks, states, vocab, step_tokens, putting_max, .. }: &EngineBounds,
    ) -> Scheduler {
        let limits = Limits { admitted_max: self.admitted_max, jobs_max: self.jobs_max, step_tokens, putting_max, vocab };
        Scheduler::new(info.layout, device_blocks, limits).with_states(states)
    }
}

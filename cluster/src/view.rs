//! The cluster as operators and dashboards see it: `/cluster`, `/ready` and the workers' part of `/metrics`.

use crate::{Cluster, autoscale::Wanted, cost::StepCoefficients, decisions::DecisionView, membership::Member, probes::ProbeOutcome};
use serde::Serialize;
use std::time::Duration;
use tidemill_proto::{
    ids::Epoch,
    message::{Report, Role},
};

#[derive(Debug, Default, Serialize)]
pub struct ClusterView {
    pub members: Vec<MemberView>,
    /// The part of each model.
    pub models: Vec<ModelView>,
    /// The hexadecimal fingerprint that all engines share, if there is one model.
    pub layout: Option<String>,
    /// The longest sequence that the cluster can hold.
    pub context_tokens: Option<u32>,
    pub requests: usize,
    pub sequences_waiting: usize,
    pub sequences_running: usize,
    pub rescues: u64,
    /// The last placements, the newest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<DecisionView>,
    /// The probes, if there is one model.
    #[serde(skip)]
    pub probes: Option<ProbesView>,
    /// The wanted numbers of workers, if there is one model and it is autoscaled.
    #[serde(skip)]
    pub wanted: Option<Wanted>,
}

/// The results of the probes of a model's engines.
#[derive(Clone, Debug, Serialize)]
pub struct ProbesView {
    pub every_s: f64,
    /// The number of rounds that have ended.
    pub rounds: u64,
    /// The number of workers whose answers were right.
    pub same: u64,
    /// The number of workers whose answers were wrong.
    pub differs: u64,
    /// The number of workers whose answers were missing.
    pub unanswered: u64,
    /// The number of decode workers that gave the reference answer.
    pub votes: usize,
    /// The time since the last round ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_s: Option<f64>,
}

/// The result of an engine's last round.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ProbeView {
    pub outcome: ProbeOutcome,
    pub age_s: f64,
}

/// One model's part of the cluster.
#[derive(Debug, Serialize)]
pub struct ModelView {
    pub name: String,
    /// The hexadecimal fingerprint that its engines share.
    pub layout: Option<String>,
    pub context_tokens: Option<u32>,
    pub requests: usize,
    pub sequences_waiting: usize,
    pub sequences_running: usize,
    pub rescues: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbesView>,
    /// The wanted numbers of its workers, if it is autoscaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<Wanted>,
}

#[derive(Debug, Serialize)]
pub struct MemberView {
    pub name: String,
    /// The name of its model.
    pub model: String,
    /// The host; its members share memory.
    pub host: String,
    pub role: Role,
    pub pid: u32,
    /// The release that it runs; one before 0.3.0 does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release: Option<String>,
    /// The epoch in hexadecimal.
    pub epoch: String,
    pub draining: bool,
    /// Whether it computed wrongly, according to probes or an operator.
    pub unhealthy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe: Option<ProbeView>,
    pub seconds_since_heartbeat: f64,
    /// The number of reports that this coordinator got since it registered. The second one from now on is made after now.
    pub reports: u64,
    /// The number of its sequences or prefill jobs from this coordinator that have not ended.
    pub assigned: usize,
    /// Its last report, without steps.
    pub report: Report,
    /// The recent error of predicted step times, as a share of the actual time, for engines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction_error: Option<PredictionError>,
    /// The current cost model of a step, for engines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_cost: Option<StepCoefficients>,
    /// The number of blocks there that the prefix index knows: a pool node's, or those on an engine's own device.
    pub indexed_blocks: usize,
    /// The address to which clients connect, for pool nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<std::net::SocketAddr>,
}

/// Quantiles of the recent prediction errors: 50 and 90 percent were off by no more than this.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PredictionError {
    pub p50: f64,
    pub p90: f64,
}

impl Cluster {
    /// A view of the cluster as the only model, without its name.
    pub fn view(&self, now: Duration) -> ClusterView {
        ClusterView {
            members: self.membership.iter().filter_map(|(epoch, member)| self.member_view(now, epoch, member)).collect(),
            models: Vec::new(),
            layout: self.membership.layout().map(|(layout, _)| layout.to_string()),
            context_tokens: self.membership.context_tokens(),
            requests: self.requests.len(),
            sequences_waiting: self.requests.waiting(),
            sequences_running: self.requests.running_count(),
            rescues: self.rescues,
            decisions: self.decisions.view(now, &self.membership),
            probes: self.probes.as_ref().map(|probes| probes.view(now)),
            wanted: self.wanted(),
        }
    }

    fn member_view(&self, now: Duration, epoch: Epoch, member: &Member) -> Option<MemberView> {
        let load = self.load.get(epoch)?;
        let report = Report { steps: Vec::new(), ..load.report.clone() };
        Some(MemberView {
            name: member.name.clone(),
            model: String::new(),
            host: member.host.0.clone(),
            role: member.role(),
            pid: member.pid,
            release: member.release.clone(),
            epoch: epoch.to_string(),
            draining: member.draining,
            unhealthy: member.unhealthy,
            probe: self.probes.as_ref().and_then(|probes| probes.of_worker(now, epoch)),
            seconds_since_heartbeat: now.saturating_sub(load.heard).as_secs_f64(),
            reports: load.reports,
            assigned: load.decode.sequences as usize + load.prefill.len(),
            report,
            step_cost: self.cost.step_errors(epoch).map(|_| self.cost.steps(epoch, member.role()).coefficients()),
            prediction_error: self
                .cost
                .step_errors(epoch)
                .and_then(|errors| Some(PredictionError { p50: errors.quantile(0.5)?, p90: errors.quantile(0.9)? })),
            indexed_blocks: self.index.len(epoch),
            addr: member.pool_addr(),
        })
    }
}

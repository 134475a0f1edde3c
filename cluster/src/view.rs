//! The cluster as people and dashboards see it: `/cluster`, `/ready` and the workers' part of `/metrics`.

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
    /// Each model's part.
    pub models: Vec<ModelView>,
    /// Hexadecimal fingerprint that all engines share, where there is one model.
    pub layout: Option<String>,
    /// Longest sequence the cluster can hold.
    pub context_tokens: Option<u32>,
    pub requests: usize,
    pub sequences_waiting: usize,
    pub sequences_running: usize,
    pub rescues: u64,
    /// The last placements, the newest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<DecisionView>,
    /// Of the only model.
    #[serde(skip)]
    pub probes: Option<ProbesView>,
    /// Of the only model.
    #[serde(skip)]
    pub wanted: Option<Wanted>,
}

/// What probes of a model's engines came to.
#[derive(Clone, Debug, Serialize)]
pub struct ProbesView {
    pub every_s: f64,
    /// Rounds that ended.
    pub rounds: u64,
    /// Workers' answers to a round.
    pub same: u64,
    pub differs: u64,
    pub unanswered: u64,
    /// Decode workers that gave the answer which counts as right.
    pub votes: usize,
    /// Since the last round ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_s: Option<f64>,
}

/// An engine's last round.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ProbeView {
    pub outcome: ProbeOutcome,
    pub age_s: f64,
}

/// One model's part of the cluster.
#[derive(Debug, Serialize)]
pub struct ModelView {
    pub name: String,
    /// Hexadecimal fingerprint that its engines share.
    pub layout: Option<String>,
    pub context_tokens: Option<u32>,
    pub requests: usize,
    pub sequences_waiting: usize,
    pub sequences_running: usize,
    pub rescues: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbesView>,
    /// Workers that it wants, where something decides about that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<Wanted>,
}

#[derive(Debug, Serialize)]
pub struct MemberView {
    pub name: String,
    /// The model that it belongs to.
    pub model: String,
    /// Members of one host share its memory.
    pub host: String,
    pub role: Role,
    pub pid: u32,
    /// Hexadecimal.
    pub epoch: String,
    pub draining: bool,
    /// It computed wrongly, as probes or an operator say.
    pub unhealthy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe: Option<ProbeView>,
    pub seconds_since_heartbeat: f64,
    /// Sequences or prefill jobs that this coordinator has given it and that have not ended.
    pub assigned: usize,
    /// Its last report, without steps.
    pub report: Report,
    /// Engines: how far predictions of its steps were off, as a share of the time that they took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction_error: Option<PredictionError>,
    /// and what is believed of them now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_cost: Option<StepCoefficients>,
    /// Blocks that the prefix index knows there: a pool node's, or those on an engine's own device.
    pub indexed_blocks: usize,
    /// Pool nodes: where their clients connect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<std::net::SocketAddr>,
}

/// Half, and nine tenths, of the last predictions were off by no more than this.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PredictionError {
    pub p50: f64,
    pub p90: f64,
}

impl Cluster {
    /// As the only model, without its name.
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
            epoch: epoch.to_string(),
            draining: member.draining,
            unhealthy: member.unhealthy,
            probe: self.probes.as_ref().and_then(|probes| probes.of_worker(now, epoch)),
            seconds_since_heartbeat: now.saturating_sub(load.heard).as_secs_f64(),
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

//! Background jobs, which run for as long as the process does.

use super::{Gateway, retention::Sweep};
use crate::{base::stamp::unix_seconds, metrics};
use axum::Router as Routes;
use hyper_util::service::TowerToHyperService;
use std::{sync::Arc, time::Duration};
use tidemill_cluster::ClusterView;
use tidemill_proto::message::Role;

/// The interval at which old things are looked for.
const EXPIRE_EVERY: Duration = Duration::from_secs(600);
/// The interval at which the load is observed.
const TENDED_EVERY: Duration = Duration::from_millis(500);
/// The number of these intervals between two reloads of other processes' changes.
const REFRESHED_EACH: u64 = 2;
/// The number of these intervals after which the sums of what was spent are written.
const SPEND_KEPT_EACH: u64 = 120;
/// The interval at which crossed budgets are written to the audit log.
const CROSSINGS_NOTED_EVERY: Duration = Duration::from_secs(1);

impl Gateway {
    /// Background loop: updates load shedding, reloads tenants changed elsewhere, reports lost usage records. Never returns.
    pub async fn tend_tenants(&self) {
        let mut interval = tokio::time::interval(TENDED_EVERY);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for tick in 0_u64.. {
            interval.tick().await;
            let tenants = self.tenants();
            if tenants.sheds() {
                tenants.observe_load(kv_used(&self.view()));
            }
            if tick % REFRESHED_EACH == 0 {
                let worker = Arc::clone(tenants);
                // A panic there was logged.
                let _ = tokio::task::spawn_blocking(move || worker.refresh()).await;
                tenants.sweep();
                self.operators().into_iter().for_each(|operators| operators.show());
                self.shared.settings.kafka.iter().for_each(|sink| metrics::show_kafka(sink.log(), &sink.counts()));
            }
            if tick % SPEND_KEPT_EACH == 0 {
                let worker = Arc::clone(tenants);
                let _ = tokio::task::spawn_blocking(move || worker.keep_spend()).await;
            }
        }
    }

    /// Background loop: writes the soft budgets that were crossed into the audit log, if there is one. Never returns.
    pub async fn tend_crossings(&self) {
        loop {
            self.note_crossings().await;
            tokio::time::sleep(CROSSINGS_NOTED_EVERY).await;
        }
    }

    /// Writes all crossings that wait. What cannot be written stays for the next time.
    async fn note_crossings(&self) {
        let tenants = self.tenants();
        let Some(audit) = self.audit() else { return tenants.crossings().forget() };
        while let Some(crossing) = tenants.crossings().next() {
            if let Err(error) = audit.note_once(&crossing.name(), crossing.event()).await {
                tracing::error!(%error, "a soft budget's crossing is not in the audit log; it is tried again");
                return;
            }
            tenants.crossings().noted(&crossing);
        }
    }

    /// Background loop: judges and advances rollouts. Never returns.
    pub async fn tend_rollouts(&self) {
        self.shared.rollouts.tend(self.registry()).await;
    }

    /// Background loop: keeps connections to servers of tools, until `ServerTools::end`.
    pub async fn tend_server_tools(&self) {
        match self.server_tools() {
            Some(tools) => tools.tend().await,
            None => std::future::pending().await,
        }
    }

    /// Background loop: runs clients' batches. Never returns.
    pub async fn run_batches(self: Arc<Self>) {
        match &self.shared.settings.batches {
            Some(batches) => Arc::clone(batches).run(self.generating(), Arc::clone(self.tenants()), self.request_timeout()).await,
            None => std::future::pending().await,
        }
    }

    /// Stops batches. Their running requests are not to blame for this process's end.
    pub fn stop_batches(&self) {
        if let Some(batches) = &self.shared.settings.batches {
            batches.stop();
        }
    }

    /// The routes of the generating endpoints, as a service.
    pub(super) fn generating(self: &Arc<Self>) -> TowerToHyperService<Routes> {
        TowerToHyperService::new((self.shared.generating)(self).with_state(Arc::clone(self)))
    }

    /// Background loop: deletes what is too old, by its kind. Never returns.
    pub async fn expire_stored(&self) {
        let shared = &self.shared.settings;
        let sweep = Sweep {
            ages: shared.requests.ages,
            store: shared.store.as_ref(),
            batches: shared.batches.as_deref(),
            feedback: shared.feedback.as_ref(),
        };
        loop {
            sweep.at(unix_seconds()).await;
            self.shared.recall.iter().for_each(|recall| recall.expire());
            tokio::time::sleep(EXPIRE_EVERY).await;
        }
    }

    /// Background loop: deletes expired records of the audit log. Never returns.
    pub async fn expire_audit(&self) {
        match self.audit() {
            Some(audit) => audit.expire().await,
            None => std::future::pending().await,
        }
    }
}

/// The share of the decode workers' blocks that sequences use.
fn kv_used(cluster: &ClusterView) -> Option<f64> {
    let workers = cluster.members.iter().filter(|member| member.role == Role::Decode).map(|member| member.report.blocks.hbm);
    let (used, total) = workers.fold((0, 0), |(used, total), blocks| (used + blocks.used, total + blocks.total));
    (total > 0).then(|| used as f64 / total as f64)
}

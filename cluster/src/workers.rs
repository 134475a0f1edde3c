//! Workers that join, report and leave.

use crate::{Cluster, Refusal, candidates};
use std::time::Duration;
use tidemill_proto::{
    frame::Version,
    ids::Epoch,
    message::{CacheEvent, PoolEvent, Register, Report, Role, ToWorker, WorkerEvent},
};

impl Cluster {
    /// Accepts a worker of this release under the next free epoch, or refuses it with the reason.
    pub fn register(&mut self, now: Duration, register: Register) -> Result<Epoch, Refusal> {
        let epoch = self.membership.free_epoch();
        self.admit(now, epoch, register, Version::NEWEST).map(|()| epoch)
    }

    /// Accepts a worker under the epoch that the coordinators agreed on, which no member has here. `version` is its link's.
    pub fn admit(&mut self, now: Duration, epoch: Epoch, register: Register, version: Version) -> Result<(), Refusal> {
        self.membership.register(epoch, register, version)?;
        let host = &self.membership.get(epoch).expect("it has just come").host;
        self.shortlist.join(epoch, host);
        self.load.add_worker(now, epoch);
        self.index.add_node(epoch);
        self.members_changed(now);
        if self.distrusted.contains(epoch) {
            self.distrust(now, epoch);
        }
        self.place_queued(now);
        Ok(())
    }

    /// Checks whether a worker would be accepted.
    pub fn check(&self, register: &Register) -> Result<(), Refusal> {
        self.membership.check(register)
    }

    /// Applies a member's event. Events of a worker that is gone, or about work that it no longer has, are ignored.
    pub fn worker_event(&mut self, now: Duration, worker: Epoch, event: WorkerEvent) {
        let Some(role) = self.membership.get(worker).map(|member| member.role()) else { return };
        self.load.heard(now, worker);
        match event {
            WorkerEvent::Heartbeat(report) => self.heartbeat(worker, role, *report),
            WorkerEvent::Tokens(tokens) => tokens.into_iter().for_each(|token| self.token(now, worker, token)),
            WorkerEvent::Finished { sequence, reason, provenance } => self.finished(now, worker, sequence, reason, provenance),
            WorkerEvent::PromptLogprobs { sequence, logprobs } => self.prompt_logprobs(worker, sequence, logprobs),
            WorkerEvent::Embedding { sequence, values } => self.embedding(worker, sequence, values),
            WorkerEvent::Sources { sequence, tokens } => self.sources(worker, sequence, tokens),
            WorkerEvent::Prefilled { request, outcome } => self.prefilled(now, worker, request, &outcome),
            WorkerEvent::PoolEvents { from, events } if role == Role::Kvpool => self.pool_events(now, worker, from, &events),
            WorkerEvent::CacheEvents { from, events } if role != Role::Kvpool => self.cache_events(now, worker, from, &events),
            // Events that do not belong to its role are ignored.
            WorkerEvent::PoolEvents { .. } | WorkerEvent::CacheEvents { .. } => {}
            WorkerEvent::Release(release) => self.membership.runs(worker, release),
            WorkerEvent::Leaving => {
                self.membership.drain(worker);
                self.load.touch(worker);
                self.members_changed(now);
                if role == Role::Kvpool {
                    let peers = candidates::peers(&self.membership, &self.load, worker);
                    self.send(worker, ToWorker::Peers(peers));
                }
            }
        }
        self.place_queued(now);
    }

    /// Handles the loss of a worker's link: all its work goes elsewhere.
    pub fn worker_down(&mut self, now: Duration, worker: Epoch) {
        let Some(member) = self.membership.remove(worker) else { return };
        self.shortlist.leave(worker, &member.host);
        self.members_changed(now);
        let jobs = self.load.remove_worker(worker);
        self.cost.forget(worker);
        if let Some(probes) = &mut self.probes {
            probes.forget(worker);
        }
        self.index.remove_node(worker);
        match member.role() {
            Role::Decode => self.decode_worker_down(now, worker, member.draining && !member.unhealthy),
            Role::Prefill => self.prefill_worker_down(now, &jobs),
            Role::Kvpool => self.pool_node_down(now, worker),
        }
        self.place_queued(now);
    }

    fn heartbeat(&mut self, worker: Epoch, role: Role, mut report: Report) {
        report.steps.truncate(Report::STEPS_MAX);
        self.cost.observe_steps(worker, role, &report.steps);
        let after = report.counters.transfer;
        let reported = self.autoscaler.is_some().then(|| report.clone());
        if let Some(before) = self.load.reported(worker, report) {
            if let (Some(scaler), Some(after)) = (&mut self.autoscaler, reported) {
                scaler.report(role, self.cost.steps(worker, role), &before, &after);
            }
            self.cost.observe_transfer(&before.counters.transfer, &after);
        }
    }

    fn pool_events(&mut self, now: Duration, node: Epoch, from: u64, events: &[PoolEvent]) {
        if let Err(gap) = self.index.apply(node, from, events) {
            self.close(node, gap.to_string());
            self.worker_down(now, node);
        }
    }

    fn cache_events(&mut self, now: Duration, engine: Epoch, from: u64, events: &[CacheEvent]) {
        if let Err(gap) = self.index.apply_cache(engine, from, events) {
            self.close(engine, gap.to_string());
            self.worker_down(now, engine);
        }
    }
}

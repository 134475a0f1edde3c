//! The cluster as people and dashboards see it: `/cluster`, `/ready` and the workers' part of `/metrics`.

use crate::{Cluster, membership::Worker, request::Place};
use serde::Serialize;
use std::time::Instant;
use tidemill_proto::{
    ids::Epoch,
    message::{Report, Role},
};

#[derive(Debug, Serialize)]
pub struct ClusterView {
    pub members: Vec<MemberView>,
    /// Hexadecimal fingerprint that all engines share.
    pub layout: Option<String>,
    /// Longest sequence the cluster can hold.
    pub context_tokens: Option<u32>,
    pub requests: usize,
    pub sequences_waiting: usize,
    pub sequences_running: usize,
    pub rescues: u64,
}

#[derive(Debug, Serialize)]
pub struct MemberView {
    pub name: String,
    /// Members of one host share its memory.
    pub host: String,
    pub role: Role,
    pub pid: u32,
    /// Hexadecimal.
    pub epoch: String,
    pub draining: bool,
    pub seconds_since_heartbeat: f64,
    /// What this coordinator has given it and has not ended: sequences, or prefill jobs.
    pub assigned: usize,
    /// What it last said about itself.
    pub report: Report,
    /// Pool nodes: blocks that the prefix index knows there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub indexed_blocks: Option<usize>,
    /// Pool nodes: where their clients connect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<std::net::SocketAddr>,
}

impl Cluster {
    pub fn view(&self, now: Instant) -> ClusterView {
        ClusterView {
            members: self.registry.iter().map(|(epoch, worker)| self.member(now, epoch, worker)).collect(),
            layout: self.registry.layout().map(|(layout, _)| layout.to_string()),
            context_tokens: self.registry.context_tokens(),
            requests: self.requests.len(),
            sequences_waiting: self.queue.len(),
            sequences_running: self.sequences.len() - self.queue.len(),
            rescues: self.rescues,
        }
    }

    fn member(&self, now: Instant, epoch: Epoch, worker: &Worker) -> MemberView {
        let role = worker.role.role();
        let mut report = worker.report.clone();
        report.steps.clear();
        MemberView {
            name: worker.name.clone(),
            host: worker.host.0.clone(),
            role,
            pid: worker.pid,
            epoch: epoch.to_string(),
            draining: worker.draining,
            seconds_since_heartbeat: now.saturating_duration_since(worker.heard).as_secs_f64(),
            assigned: worker.decode.sequences as usize + worker.prefill.requests().count(),
            report,
            indexed_blocks: (role == Role::Kvpool).then(|| self.index.len(epoch)),
            addr: worker.pool_addr(),
        }
    }

    /// Panics if the books do not balance. Tests call it after every step.
    pub fn check_integrity(&self) {
        let mut queued = 0;
        let mut live = 0;
        let mut loads = std::collections::BTreeMap::<Epoch, crate::membership::DecodeLoad>::new();
        for (id, request) in &self.requests {
            assert!(!request.is_done(), "request {id} is done and still remembered");
            for (choice, sequence) in request.sequences.iter().enumerate() {
                let known = self.sequences.get(&sequence.id);
                match sequence.place {
                    Place::Done => assert_eq!(known, None, "sequence {} is done and still known", sequence.id),
                    Place::Queued { .. } => {
                        assert_eq!(self.queue.iter().filter(|queued| **queued == sequence.id).count(), 1, "queued once");
                        queued += 1;
                    }
                    Place::Running(running) => {
                        let load = loads.entry(running.worker).or_default();
                        load.sequences += 1;
                        load.tokens += u64::from(request.len_of(choice));
                        load.tail_tokens += running.tail_tokens;
                    }
                }
                if sequence.place != Place::Done {
                    assert_eq!(known, Some(&(*id, choice)));
                    live += 1;
                }
            }
            if let Some(job) = &request.job {
                let worker = self.registry.get(job.worker).expect("a job's worker is registered");
                assert_eq!(worker.prefill.requests().filter(|job| job == id).count(), 1, "job {id} is on its worker's list once");
                assert!(self.registry.get(job.home).is_some(), "a job's pool node is registered");
            }
        }
        assert_eq!((queued, live), (self.queue.len(), self.sequences.len()), "queued and live sequences");
        for (epoch, worker) in self.registry.iter() {
            assert_eq!(worker.decode, loads.remove(&epoch).unwrap_or_default(), "load of {}", worker.name);
            for request in worker.prefill.requests() {
                let job = self.requests.get(&request).and_then(|r| r.job.as_ref());
                assert!(job.is_some_and(|job| job.worker == epoch), "{} lists a job it does not have", worker.name);
            }
        }
        assert!(loads.is_empty(), "sequences run at workers that are gone");
        let pools: Vec<_> = self.registry.iter().filter(|(_, w)| w.pool_addr().is_some()).map(|(epoch, _)| epoch).collect();
        self.index.check_integrity();
        assert_eq!(self.index.nodes().collect::<Vec<_>>(), pools, "the index covers the pool nodes");
    }
}

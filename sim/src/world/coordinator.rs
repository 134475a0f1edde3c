//! A coordinator: the production core, and a model of its shell, which carries out its actions on links and for clients.

use super::{
    CoordinatorIndex,
    io::Io,
    network::{ConnId, SERVER},
};
use crate::faults::mutation::Mutation;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tidemill_cluster::{Action, Cluster, NewRequest, Rejection, RequestEvent};
use tidemill_proto::{
    ids::{Epoch, RequestId},
    message::{DecodeJob, Finish, ToCoordinator, ToWorker, WorkerEvent},
};

pub(crate) struct Coordinator {
    pub(crate) index: CoordinatorIndex,
    pub(crate) cluster: Cluster,
    /// The first request id of this incarnation.
    pub(crate) id_base: u64,
    links: BTreeMap<Epoch, ConnId>,
    epochs: BTreeMap<ConnId, Epoch>,
    /// Epochs whose links are down.
    gone: BTreeSet<Epoch>,
    /// The open requests of clients.
    pub(crate) requests: BTreeMap<RequestId, Taken>,
    /// The number of links that the core decided to close.
    pub(crate) closed: u64,
    pub(crate) warnings: u64,
}

#[derive(Clone, Copy)]
pub(crate) struct Taken {
    /// The number of the client's request.
    pub(crate) ask: usize,
    /// The time at which the request was accepted, by the coordinator's own clock.
    pub(crate) at: Duration,
    pub(crate) timeout: Duration,
}

impl Coordinator {
    pub(crate) fn new(index: CoordinatorIndex, cluster: Cluster, id_base: u64) -> Self {
        Self {
            index,
            cluster,
            id_base,
            links: BTreeMap::new(),
            epochs: BTreeMap::new(),
            gone: BTreeSet::new(),
            requests: BTreeMap::new(),
            closed: 0,
            warnings: 0,
        }
    }

    pub(crate) fn submit(&mut self, io: &mut Io, ask: usize, mut request: NewRequest) -> Result<RequestId, Rejection> {
        let timeout = request.timeout;
        if io.has(Mutation::LoseDeadline) {
            request.timeout = Duration::from_secs(3600);
        }
        let id = self.cluster.submit(io.here, request)?;
        self.requests.insert(id, Taken { ask, at: io.here, timeout });
        Ok(id)
    }

    /// Handles a worker's message.
    pub(crate) fn receive(&mut self, io: &mut Io, conn: ConnId, message: ToCoordinator) {
        match (message, self.epochs.get(&conn).copied()) {
            // Simulated coordinators assign epochs themselves: the registry has its own simulation.
            (ToCoordinator::Register { register, .. }, None) => match self.cluster.register(io.here, register) {
                Ok(epoch) => {
                    if let Some(faulty) = &mut io.faulty {
                        faulty.granted.insert(conn, epoch);
                        if !faulty.epochs.insert(epoch) {
                            faulty.violations.push(format!("epoch {epoch} is given out twice"));
                        }
                    }
                    self.links.insert(epoch, conn);
                    self.epochs.insert(conn, epoch);
                    io.tell_worker(conn, ToWorker::Registered { epoch });
                }
                Err(refusal) => {
                    io.tell_worker(conn, ToWorker::Refused { reason: refusal.to_string() });
                }
            },
            (ToCoordinator::Event { epoch, event }, Some(own)) if epoch == own || io.has(Mutation::ObeyStaleEpoch) => {
                let returned = matches!(event, WorkerEvent::Finished { reason: Finish::Returned, .. });
                if !(returned && io.has(Mutation::ForgetRequeue)) {
                    self.cluster.worker_event(io.here, own, event);
                }
            }
            // An event of a different epoch, a second registration, or an event before registration.
            _ => {
                io.note(|| format!("coordinator-{} ends a link that breaks the protocol", self.index.0));
                self.drop_link(io, conn);
            }
        }
    }

    /// Handles the end of a connection.
    pub(crate) fn ended(&mut self, io: &mut Io, conn: ConnId) {
        if let Some(epoch) = self.epochs.remove(&conn) {
            self.links.remove(&epoch);
            self.gone.insert(epoch);
            self.cluster.worker_down(io.here, epoch);
        }
    }

    fn drop_link(&mut self, io: &mut Io, conn: ConnId) {
        io.close(conn, SERVER, false);
        self.ended(io, conn);
    }

    /// Carries out the core's actions. Returns the events for clients.
    pub(crate) fn perform(&mut self, io: &mut Io) -> Vec<(RequestId, RequestEvent)> {
        let mut heard = Vec::new();
        while let Some(action) = self.cluster.poll_action() {
            match action {
                Action::Send { worker, message } => {
                    if self.gone.contains(&worker) {
                        io.violated(|| format!("coordinator-{} sends to epoch {worker}, which is gone", self.index.0));
                    }
                    if let Some(&conn) = self.links.get(&worker)
                        && let Some(message) = planted(io, message)
                    {
                        io.tell_worker(conn, message);
                    }
                }
                Action::Close { worker, reason } => {
                    self.closed += 1;
                    io.note(|| format!("coordinator-{} closes the link of {worker}: {reason}", self.index.0));
                    if let Some(conn) = self.links.remove(&worker) {
                        self.epochs.remove(&conn);
                        self.gone.insert(worker);
                        io.close(conn, SERVER, false);
                    }
                }
                Action::Client { request, event } => heard.push((request, event)),
                Action::Warn(warning) => {
                    self.warnings += 1;
                    io.note(|| format!("coordinator-{} warns: {warning}", self.index.0));
                }
            }
        }
        heard
    }

    /// Panics if the state is inconsistent: exactly the members have links, and exactly the requests have waiting clients.
    pub(crate) fn check(&self) {
        self.cluster.check_integrity();
        let (view, name) = (self.cluster.view(Duration::ZERO), self.index.0);
        assert_eq!((self.links.len(), view.members.len()), (self.epochs.len(), self.links.len()), "coordinator-{name}: members have links");
        assert_eq!(view.requests, self.requests.len(), "coordinator-{name}: a client waits for each request");
    }

    /// The number of members.
    pub(crate) fn members(&self) -> usize {
        self.links.len()
    }
}

/// The message after planted bugs have altered it, or `None` if one drops it.
fn planted(io: &Io, message: ToWorker) -> Option<ToWorker> {
    match message {
        ToWorker::CancelSequence { .. } if io.has(Mutation::ForgetCancel) => None,
        ToWorker::StopWaiting { .. } if io.has(Mutation::ForgetStopWaiting) => None,
        ToWorker::Decode(job) if io.has(Mutation::ResumeEarly) && job.tokens.len() > job.prompt_tokens as usize => {
            Some(ToWorker::Decode(DecodeJob {
                tokens: job.tokens.prefix(job.tokens.len() - 1),
                prompt_tokens: job.prompt_tokens - 1,
                ..job
            }))
        }
        message => Some(message),
    }
}

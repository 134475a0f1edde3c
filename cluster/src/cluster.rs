//! The cluster's core: clients' requests and workers' events go in, actions come out, time is an argument.
//!
//! ```text
//!            submit / cancel                        poll_action
//!   gateway ────────────────►┌─────────┐──► Send(worker, message) · Close(worker)
//!                            │ Cluster │
//!   workers ────────────────►└─────────┘──► Client(request, event) · Warn
//!     register / worker_event / worker_down / tick
//! ```

use crate::{
    RequestEvent,
    admission::AdmissionPolicy,
    autoscale::{AutoscaleSettings, Autoscaler},
    candidates::{self, Books, Candidates},
    class::Classes,
    cost::CostModel,
    decisions::Decisions,
    distrust::Distrusted,
    fairness::Fairness,
    index::{Leading, PrefixIndex, frequency::FrequencySketch},
    lifecycle::WAITING_TOLD_EVERY,
    load::Load,
    membership::Membership,
    pace::Pace,
    probes::{ProbeSettings, Probes},
    requests::Requests,
    schedule::{Policy, Snapshot},
    shortlist::Shortlist,
};
use std::{collections::VecDeque, time::Duration};
use tidemill_proto::{
    block::{Era, LayoutFingerprint},
    ids::{Epoch, RequestId, SequenceId},
    message::{ModelIdentity, ToWorker},
};

/// The time within which a disconnected worker returns: it notices a broken link after five seconds, and registers again.
const RETURN_MAX: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct ClusterSettings {
    /// Added to all ids and epochs. Drawn at random into the high 32 bits, so that two coordinators never collide.
    pub id_base: u64,
    pub admission: AdmissionPolicy,
    pub policy: Policy,
    pub classes: Classes,
    /// The longest wait for a place.
    pub queue_wait_max: Duration,
    /// A worker that is silent for this long is considered dead.
    pub heartbeat_dead: Duration,
    /// Settings of the probes that check engines' answers; `None` turns probes off.
    pub probes: Option<ProbeSettings>,
    /// Whether a number of workers is wanted here; `None`: not.
    pub autoscale: Option<AutoscaleSettings>,
}

/// The origin of an answer. Answers to the same request from the same origin are the same, unless a worker computes wrongly undetected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Origin {
    pub layout: LayoutFingerprint,
    pub era: Era,
}

/// An action for the shell to carry out.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Send {
        worker: Epoch,
        message: ToWorker,
    },
    /// End the link. The worker has been removed already and may register again.
    Close {
        worker: Epoch,
        reason: String,
    },
    Client {
        request: RequestId,
        event: RequestEvent,
    },
    /// Log it.
    Warn(Warning),
}

/// A problem that the cluster has handled and that an operator should know of.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    #[error("worker {worker} sent token {index} of sequence {sequence} where {expected} was due: the sequence goes elsewhere")]
    SkippedToken { worker: Epoch, sequence: SequenceId, index: u32, expected: u32 },
    #[error("worker {worker} failed the prefill job of request {request}: {reason}")]
    PrefillFailed { request: RequestId, worker: Epoch, reason: String },
    #[error(
        "worker `{name}` ({worker}) is unhealthy: it computed wrongly, as probes, another coordinator or an operator say. It gets no more work, \
         and no block that was computed before is read any more. End it, and look at its machine's memory and processor"
    )]
    Unhealthy { worker: Epoch, name: String },
    #[error(
        "{workers} decode workers answer probes, and no majority of them alike: one is at fault, and it is unknown which. Restart them"
    )]
    NoMajority { workers: usize },
}

/// The core of one model's cluster. Each part owns its data and is the only one that changes it. `lifecycle` has the stages of a request,
/// `workers` the events of workers.
///
/// Time is a `Duration` since a start that the caller chooses.
#[derive(Debug)]
pub struct Cluster {
    pub(crate) settings: ClusterSettings,
    pub(crate) membership: Membership,
    pub(crate) load: Load,
    pub(crate) index: PrefixIndex,
    pub(crate) frequency: FrequencySketch,
    pub(crate) cost: CostModel,
    pub(crate) requests: Requests,
    pub(crate) fairness: Fairness,
    pub(crate) shortlist: Shortlist,
    /// The longest sequence that any decode worker can hold.
    pub(crate) context_tokens: Option<u32>,
    /// The time of the loss of the last decode worker, and the longest sequence that it held.
    last_decode: Option<(Duration, u32)>,
    actions: VecDeque<Action>,
    pub(crate) next_id: u64,
    pub(crate) rescues: u64,
    /// Whether an event may have made room for a waiting sequence since the last attempt to place.
    pub(crate) unsettled: bool,
    /// Consecutive requests refused because of predictions, since one of a rejecting class was served.
    pub(crate) refused_in_a_row: u32,
    /// The number of places given to sequences so far.
    pub(crate) places: u64,
    pub(crate) pace: Pace,
    pub(crate) decisions: Decisions,
    /// The time of the last position events to waiting clients.
    pub(crate) waiting_told: Duration,
    pub(crate) probes: Option<Probes>,
    pub(crate) distrusted: Distrusted,
    pub(crate) autoscaler: Option<Autoscaler>,
}

impl Cluster {
    /// `model` is the gateway's model.
    pub fn new(settings: ClusterSettings, model: ModelIdentity) -> Self {
        Self {
            membership: Membership::new(settings.id_base + 1, model),
            load: Load::default(),
            index: PrefixIndex::default(),
            frequency: FrequencySketch::default(),
            cost: CostModel::default(),
            requests: Requests::default(),
            fairness: Fairness::default(),
            shortlist: Shortlist::default(),
            context_tokens: None,
            last_decode: None,
            actions: VecDeque::new(),
            next_id: settings.id_base + 1,
            rescues: 0,
            unsettled: false,
            refused_in_a_row: 0,
            places: 0,
            pace: Pace::default(),
            decisions: Decisions::default(),
            waiting_told: Duration::ZERO,
            probes: settings.probes.map(Probes::new),
            distrusted: Distrusted::default(),
            autoscaler: settings.autoscale.clone().map(Autoscaler::new),
            settings,
        }
    }

    /// Accounts for other coordinators that place sequences at the same workers.
    pub fn share_workers(&mut self) {
        self.load.share();
    }

    /// Returns the next action. Call it until `None` after every other call.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The layout that all engines share; `None` without an engine.
    pub fn layout(&self) -> Option<LayoutFingerprint> {
        self.membership.layout().map(|(layout, _)| layout)
    }

    /// The origin of answers computed now; `None` without an engine.
    pub fn origin(&self) -> Option<Origin> {
        Some(Origin { layout: self.layout()?, era: self.distrusted.era() })
    }

    /// The longest sequence that the cluster can hold now; `None` without a decode worker. A cluster that has just lost its last decode
    /// worker still accepts requests, which wait: a worker that restarts or was only unreachable returns within seconds. One that scales to
    /// zero always does, as its next request brings a worker.
    pub fn context_tokens(&self, now: Duration) -> Option<u32> {
        let returns = self.autoscaler.as_ref().is_some_and(Autoscaler::scales_to_zero);
        let within = RETURN_MAX.min(self.settings.queue_wait_max);
        let awaited = self.last_decode.filter(|(gone, _)| returns || now.saturating_sub(*gone) < within);
        self.context_tokens.or(awaited.map(|(_, context)| context))
    }

    /// Advances time: handles dead workers, deadlines and sequences that wait for room.
    pub fn tick(&mut self, now: Duration) {
        for worker in self.load.silent(now, self.settings.heartbeat_dead) {
            let reason = format!("silent for {:?}", self.settings.heartbeat_dead);
            self.close(worker, reason);
            self.worker_down(now, worker);
        }
        self.end_overdue(now);
        self.end_handovers(now);
        self.end_waiting(now);
        self.unsettled = true;
        self.place_queued(now);
        self.probe(now);
        self.index.sweep();
        self.autoscale(now);
        if now.saturating_sub(self.waiting_told) >= WAITING_TOLD_EVERY {
            self.waiting_told = now;
            self.tell_waiting(now);
        }
    }

    pub(crate) fn books(&self) -> Books<'_> {
        Books { membership: &self.membership, load: &self.load, cost: &self.cost }
    }

    /// The cluster as a decision among `candidates` sees it. `blocks` has the holders of the sequence's leading blocks.
    pub(crate) fn snapshot<'a>(&'a self, candidates: Candidates<'a>, blocks: &'a Leading, now: Duration) -> Snapshot<'a> {
        let Candidates { prefill, decode, pools } = candidates;
        Snapshot {
            prefill,
            decode,
            pools,
            blocks,
            block_bytes: self.membership.layout().map_or(0, |(_, bytes)| bytes),
            cost: &self.cost,
            classes: &self.settings.classes,
            now,
            context_tokens: self.context_tokens,
        }
    }

    /// Called after a member has joined, started to drain, or left.
    pub(crate) fn members_changed(&mut self, now: Duration) {
        self.unsettled = true;
        let before = std::mem::replace(&mut self.context_tokens, self.membership.context_tokens());
        if let (Some(context), None) = (before, self.context_tokens) {
            self.last_decode = Some((now, context));
        }
    }

    /// Updates the shortlist's orders.
    pub(crate) fn reorder(&mut self, now: Duration) {
        for worker in self.load.take_touched() {
            let standing = candidates::standing(&self.books(), worker, &self.settings.policy, &self.settings.classes, now);
            self.shortlist.stand(worker, standing);
        }
    }

    pub(crate) fn send(&mut self, worker: Epoch, message: ToWorker) {
        self.actions.push_back(Action::Send { worker, message });
    }

    pub(crate) fn close(&mut self, worker: Epoch, reason: String) {
        self.actions.push_back(Action::Close { worker, reason });
    }

    pub(crate) fn tell(&mut self, request: RequestId, event: RequestEvent) {
        if self.requests.get(request).is_some_and(|request| request.pin.is_some()) {
            if let Some(probes) = &mut self.probes {
                probes.hear(request, &event);
            }
            return;
        }
        self.actions.push_back(Action::Client { request, event });
    }

    pub(crate) fn warn(&mut self, warning: Warning) {
        self.actions.push_back(Action::Warn(warning));
    }

    /// Panics if the state is inconsistent, within each part or between parts. Tests call it after every step.
    pub fn check_integrity(&self) {
        self.membership.check_integrity();
        self.load.check_integrity();
        self.shortlist.check_integrity(self.membership.iter().map(|(epoch, _)| epoch));
        assert_eq!(self.context_tokens, self.membership.context_tokens());
        self.index.check_integrity();
        self.cost.check_integrity();
        self.autoscaler.iter().for_each(Autoscaler::check_integrity);
        self.requests.check_integrity();
        self.fairness.check_integrity(self.requests.iter().map(|(_, request)| request.tenant));
        assert!(self.cost.workers().all(|worker| self.membership.get(worker).is_some()), "costs of workers that are gone");
        let members: Vec<Epoch> = self.membership.iter().map(|(epoch, _)| epoch).collect();
        assert!(self.load.workers().eq(members.iter().copied()), "every member has a load, and nobody else");
        assert!(self.index.nodes().eq(members.iter().copied()), "the index covers every member");
        for &member in &members {
            let load = self.load.get(member).expect("just compared");
            let running = self.requests.running().filter(|(_, running)| running.worker == member);
            let running = running.map(|((id, choice), _)| self.requests.get(id).expect("it runs").len_of(choice));
            let (count, tokens) = running.fold((0, 0), |(count, tokens), len| (count + 1, tokens + u64::from(len)));
            assert_eq!((load.decode.sequences, load.decode.tokens), (count, tokens), "load of {member}");
            for request in load.prefill.requests() {
                let job = self.requests.get(request).and_then(|request| request.prefill.as_ref());
                assert!(job.is_some_and(|job| job.worker == member), "{member} lists a job it does not have");
            }
        }
        for (id, request) in self.requests.iter() {
            if let Some(job) = &request.prefill {
                let load = self.load.get(job.worker).expect("a job's worker is a member");
                assert_eq!(load.prefill.requests().filter(|job| *job == id).count(), 1, "job {id} is on its worker's list once");
                assert!(self.membership.get(job.home).is_some(), "a job's pool node is a member");
            }
        }
        let gone = self.requests.running().find(|(_, running)| self.membership.get(running.worker).is_none());
        assert_eq!(gone, None, "sequences run at workers that are gone");
    }
}

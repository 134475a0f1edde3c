//! The models' clusters behind a lock, with their actions carried out: messages to workers' links, events to waiting clients.
//!
//! Every call locks, asks the core, and carries out its actions before it unlocks; nothing inside waits. Queues to links and clients are
//! bounded: a link that does not keep up is dropped like a dead worker, a client like one that left.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_cluster::{
    Action, ChoiceUsage, ClusterSettings, ClusterView, Forecast, ModelId, Models, NewRequest, Origin, Refusal, Rejection, RequestEvent,
    Warning, class::ClassId,
};
use tidemill_gateway::serving::backend::{Accepted, Backend};
use tidemill_proto::{
    frame::Version,
    ids::{Epoch, RequestId},
    message::{ModelIdentity, Register, ToWorker, WorkerEvent},
};
use tokio::sync::mpsc;

/// The maximum number of messages on their way to one worker.
pub const LINK_QUEUE_MAX: usize = 4096;
/// The maximum number of unread events of a client: minutes of one choice.
const CLIENT_QUEUE_MAX: usize = 4096;
/// The maximum number of unread events per choice of a client with many choices, whose tokens arrive together.
const CHOICE_QUEUE_MAX: usize = 1024;
/// The length of the core's ticks: the resolution of its deadlines.
const TICK: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub struct Driver {
    state: Mutex<State>,
    /// The start of the cluster's time.
    started: Instant,
}

#[derive(Debug)]
struct State {
    models: Models,
    /// The last link of each worker. Dropping a sender ends the link.
    links: HashMap<Epoch, (WorkerLink, mpsc::Sender<ToWorker>)>,
    links_made: u64,
    /// The current list of revoked certificates, for every worker that registers.
    denied: Option<ToWorker>,
    clients: HashMap<RequestId, mpsc::Sender<(RequestId, RequestEvent)>>,
}

/// One link of one worker. Messages over an earlier link are void: they may still arrive after the worker has returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkerLink {
    epoch: Epoch,
    number: u64,
}

impl Driver {
    /// `models` are the gateway's, by name.
    pub fn new(settings: &ClusterSettings, models: Vec<(String, ModelIdentity)>) -> Arc<Self> {
        let state =
            State { models: Models::new(settings, models), links: HashMap::new(), links_made: 0, denied: None, clients: HashMap::new() };
        Arc::new(Self { state: Mutex::new(state), started: Instant::now() })
    }

    /// Accounts for other coordinators that place sequences at the same workers.
    pub fn share_workers(&self) {
        let models = &mut self.state.lock().models;
        models.ids().for_each(|model| models.cluster_mut(model).share_workers());
    }

    /// The gateway's access to each of the models, in the given order.
    pub fn backends(self: &Arc<Self>) -> Vec<Arc<dyn Backend>> {
        let backend = |model| Arc::new(ModelBackend { driver: Arc::clone(self), model }) as Arc<dyn Backend>;
        self.state.lock().models.ids().map(backend).collect()
    }

    /// Checks whether a worker would be accepted.
    pub fn check(&self, register: &Register) -> Result<(), Refusal> {
        self.state.lock().models.check(register)
    }

    /// Accepts a worker, on a link of this version of the protocol. Its messages go to `link`, in order, after the answer to its registration.
    pub fn register(
        &self,
        epoch: Epoch,
        (register, version): (Register, Version),
        link: mpsc::Sender<ToWorker>,
    ) -> Result<WorkerLink, Refusal> {
        self.with(|state, now| {
            state.links.remove(&epoch);
            state.models.register(now, epoch, register, version)?;
            state.links_made += 1;
            if let Some(denied) = &state.denied {
                // The queue is empty.
                let _ = link.try_send(denied.clone());
            }
            let made = WorkerLink { epoch, number: state.links_made };
            state.links.insert(epoch, (made, link));
            Ok(made)
        })
    }

    pub fn worker_event(&self, link: WorkerLink, event: WorkerEvent) {
        self.with(|state, now| {
            if state.is_last(link) {
                state.models.worker_event(now, link.epoch, event);
            }
        });
    }

    pub fn worker_down(&self, link: WorkerLink) {
        self.with(|state, now| {
            if state.is_last(link) || !state.links.contains_key(&link.epoch) {
                state.links.remove(&link.epoch);
                state.models.worker_down(now, link.epoch);
            }
        });
    }

    /// Whether a worker has a link here.
    pub fn is_linked(&self, epoch: Epoch) -> bool {
        self.state.lock().links.contains_key(&epoch)
    }

    /// Sends the list of revoked certificates to every worker, including those that register later.
    pub fn deny(&self, log: u64, version: u64, serials: Vec<String>) {
        let message = ToWorker::Denied { log, version, serials };
        let mut state = self.state.lock();
        for (_, link) in state.links.values() {
            let _ = link.try_send(message.clone());
        }
        state.denied = Some(message);
    }

    /// Distrusts workers that computed wrongly, given by the model's name and the epoch.
    pub fn distrust<'a>(&self, workers: impl IntoIterator<Item = (&'a str, Epoch)>) {
        self.with(|state, now| workers.into_iter().for_each(|(model, worker)| state.models.distrust(now, model, worker)));
    }

    /// Resets models' caches, each by the number that the coordinators agree on.
    pub fn reset_caches(&self, number_of: impl Fn(&str) -> u64) {
        self.with(|state, _| state.models.reset_caches(number_of));
    }

    /// All workers that are known here to have computed wrongly, with their models' names.
    pub fn distrusted(&self) -> Vec<(String, Epoch)> {
        self.state.lock().models.distrusted().map(|(model, worker)| (model.to_owned(), worker)).collect()
    }

    /// Advances the core's time. Never returns.
    pub async fn tick(&self) {
        let mut interval = tokio::time::interval(TICK);
        loop {
            interval.tick().await;
            self.with(|state, now| state.models.tick(now));
        }
    }

    /// A view of all models.
    pub fn view(&self) -> ClusterView {
        self.state.lock().models.view(self.started.elapsed())
    }

    fn with<T>(&self, act: impl FnOnce(&mut State, Duration) -> T) -> T {
        let mut state = self.state.lock();
        let now = self.started.elapsed();
        let result = act(&mut state, now);
        state.perform(now);
        result
    }
}

/// The gateway's access to one model.
#[derive(Debug)]
struct ModelBackend {
    driver: Arc<Driver>,
    model: ModelId,
}

impl Backend for ModelBackend {
    fn submit(&self, requests: Vec<NewRequest>) -> Result<Accepted, Rejection> {
        let choices: usize = requests.iter().map(|request| request.choices as usize).sum();
        let (sender, events) = mpsc::channel((choices * CHOICE_QUEUE_MAX).max(CLIENT_QUEUE_MAX));
        self.driver.with(|state, now| {
            state.models.cluster(self.model).check_choices(choices)?;
            let taken = state.models.cluster_mut(self.model).submit_all(now, requests)?;
            state.clients.extend(taken.iter().map(|id| (*id, sender.clone())));
            Ok(Accepted { requests: taken, events })
        })
    }

    fn end_choice(&self, request: RequestId, choice: u32) -> ChoiceUsage {
        self.driver.with(|state, now| {
            let cluster = state.models.cluster_mut(self.model);
            let usage = cluster.usage(request, choice).unwrap_or_default();
            cluster.cancel(now, request, Some(choice));
            if !cluster.is_active(request) {
                state.clients.remove(&request);
            }
            usage
        })
    }

    fn cancel(&self, requests: &[RequestId]) {
        self.driver.with(|state, now| state.cancel(now, requests));
    }

    fn context_tokens(&self) -> Option<u32> {
        let now = self.driver.started.elapsed();
        self.driver.state.lock().models.cluster(self.model).context_tokens(now)
    }

    fn origin(&self) -> Option<Origin> {
        self.driver.state.lock().models.cluster(self.model).origin()
    }

    fn forecast(&self, tokens: u32, class: ClassId) -> Forecast {
        let now = self.driver.started.elapsed();
        self.driver.state.lock().models.cluster_mut(self.model).forecast(now, tokens, class)
    }

    fn view(&self) -> ClusterView {
        self.driver.view()
    }
}

impl State {
    fn is_last(&self, link: WorkerLink) -> bool {
        self.links.get(&link.epoch).is_some_and(|(last, _)| *last == link)
    }

    fn cancel(&mut self, now: Duration, requests: &[RequestId]) {
        for request in requests {
            self.clients.remove(request);
        }
        // They were submitted together, for one model.
        let Some(first) = requests.first() else { return };
        if let Some(cluster) = self.models.of_request(*first) {
            cluster.cancel_all(now, requests);
        }
    }

    fn give_up(&mut self, now: Duration, request: RequestId) {
        self.clients.remove(&request);
        if let Some(cluster) = self.models.of_request(request) {
            cluster.cancel(now, request, None);
        }
    }

    fn perform(&mut self, now: Duration) {
        let mut ended = Vec::new();
        while let Some(action) = self.models.poll_action() {
            match action {
                Action::Send { worker, message } => {
                    if self.links.get(&worker).is_some_and(|(_, link)| link.try_send(message).is_err()) {
                        tracing::warn!(%worker, "worker does not keep up with its messages: link dropped");
                        self.links.remove(&worker);
                        self.models.worker_down(now, worker);
                    }
                }
                Action::Close { worker, reason } => {
                    tracing::warn!(%worker, reason, "link dropped");
                    self.links.remove(&worker);
                }
                Action::Warn(warning @ (Warning::Unhealthy { .. } | Warning::NoMajority { .. })) => tracing::error!("{warning}"),
                Action::Warn(warning) => tracing::warn!("{warning}"),
                Action::Client { request, event } => {
                    if self.clients.get(&request).is_some_and(|client| client.try_send((request, event)).is_err()) {
                        tracing::warn!(%request, "client does not keep up with its tokens: cancelled");
                        self.give_up(now, request);
                    } else if self.models.of_request(request).is_none_or(|cluster| !cluster.is_active(request)) {
                        ended.push(request);
                    }
                }
            }
        }
        // Only now: the core removes a request before its last events are delivered.
        for request in ended {
            self.clients.remove(&request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_cluster::{Outcome, admission::AdmissionPolicy, class::Classes, schedule::Policy};
    use tidemill_gateway::serving::backend::Submission;
    use tidemill_proto::{
        block::LayoutFingerprint,
        ids::SequenceId,
        message::{EngineInfo, Finish, Host, Provenance, RoleInfo, SequenceToken},
        sampling::{Sampling, StopRule},
    };

    fn decode_0() -> Register {
        let engine = EngineInfo {
            model: ModelIdentity::default(),
            layout: LayoutFingerprint([1; 16]),
            block_bytes: 4096,
            device_blocks: 64,
            state_blocks: 0,
            context_tokens: 2048,
            work_max: 64,
        };
        Register { name: "decode-0".into(), host: Host("here".into()), pid: 1, model: None, role: RoleInfo::Decode(engine) }
    }

    fn submit(driver: &Arc<Driver>, requests: Vec<NewRequest>) -> Result<Submission, Rejection> {
        Submission::new(driver.backends().swap_remove(0), requests)
    }

    fn driver() -> Arc<Driver> {
        let settings = ClusterSettings {
            id_base: 0,
            admission: AdmissionPolicy { queue_max: 64 },
            policy: Policy::default(),
            classes: Classes::default(),
            queue_wait_max: Duration::from_secs(60),
            heartbeat_dead: Duration::from_secs(60),
            probes: None,
            autoscale: None,
        };
        Driver::new(&settings, vec![("tiny".into(), ModelIdentity::default())])
    }

    fn request(choices: u32) -> NewRequest {
        NewRequest {
            prompt: vec![1, 2, 3].into(),
            salt: Vec::new(),
            class: ClassId::default(),
            sampling: Sampling::default(),
            stop: StopRule { max_tokens: 1000, ..StopRule::default() },
            constraint: None,
            thought: None,
            choices,
            prompt_logprobs: None,
            embeds: None,
            timeout: Duration::from_secs(60),
        }
    }

    fn decode_worker(driver: &Driver) -> (WorkerLink, mpsc::Receiver<ToWorker>) {
        let (link, messages) = mpsc::channel(LINK_QUEUE_MAX);
        (driver.register(Epoch(7), (decode_0(), Version::NEWEST), link).unwrap(), messages)
    }

    fn sequences(messages: &mut mpsc::Receiver<ToWorker>) -> Vec<SequenceId> {
        let job = |message| if let ToWorker::Decode(job) = message { Some(job.sequence) } else { None };
        std::iter::from_fn(|| messages.try_recv().ok()).filter_map(job).collect()
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_is_cut_and_frees_everything() {
        let driver = driver();
        let (epoch, mut messages) = decode_worker(&driver);
        let mut submission = submit(&driver, vec![request(8)]).unwrap();
        let sequences = sequences(&mut messages);
        for index in 0..2000 {
            let step = sequences.iter().map(|&sequence| SequenceToken { sequence, index, token: 5, logprob: None });
            driver.worker_event(epoch, WorkerEvent::Tokens(step.collect()));
        }
        assert_eq!(driver.view().requests, 0);
        let cancelled = std::iter::from_fn(|| messages.try_recv().ok()).filter(|m| matches!(m, ToWorker::CancelSequence { .. }));
        assert_eq!(cancelled.count(), 8);
        let mut events = 0;
        while submission.next().await.is_some() {
            events += 1;
        }
        assert_eq!(events, 8 * CHOICE_QUEUE_MAX, "what was queued is still read, then nothing");
    }

    #[tokio::test]
    async fn choices_that_end_in_one_moment_are_all_heard_of() {
        let driver = driver();
        let (epoch, mut messages) = decode_worker(&driver);
        let mut request = request(2);
        request.stop.max_tokens = 1;
        let mut submission = submit(&driver, vec![request]).unwrap();
        let token = |sequence| SequenceToken { sequence, index: 0, token: 5, logprob: None };
        driver.worker_event(epoch, WorkerEvent::Tokens(sequences(&mut messages).into_iter().map(token).collect()));
        driver.worker_down(epoch);
        let mut finished = Vec::new();
        while let Some((_, event)) = submission.next().await {
            if let RequestEvent::Finished { choice, outcome: Outcome::Length, .. } = event {
                finished.push(choice);
            }
        }
        finished.sort_unstable();
        assert_eq!(finished, [0, 1]);
        assert!(driver.state.lock().clients.is_empty());
    }

    #[tokio::test]
    async fn more_choices_than_may_ever_wait_are_refused_for_good() {
        let driver = driver();
        let _worker = decode_worker(&driver);
        for requests in [vec![request(65)], vec![request(1); 65]] {
            let rejection = submit(&driver, requests).map(|_| ()).unwrap_err();
            assert_eq!(rejection, Rejection::TooManyChoices { choices: 65, limit: 64 });
        }
        assert_eq!(driver.view().requests, 0);
        assert!(submit(&driver, vec![request(64)]).is_ok());
    }

    #[tokio::test]
    async fn all_prompts_are_taken_or_none() {
        let driver = driver();
        let (epoch, mut messages) = decode_worker(&driver);
        let too_long = NewRequest { prompt: vec![1; 5000].into(), ..request(1) };
        assert!(submit(&driver, vec![request(1), too_long]).is_err());
        assert_eq!(driver.view().requests, 0, "the first prompt went with the second");

        sequences(&mut messages);
        let mut submission = submit(&driver, vec![request(1), request(1)]).unwrap();
        let second = sequences(&mut messages)[1];
        let finished = WorkerEvent::Finished { sequence: second, reason: Finish::Length, provenance: Provenance::default() };
        driver.worker_event(epoch, finished);
        let Some((1, RequestEvent::Finished { choice: 0, outcome: Outcome::Length, .. })) = submission.next().await else { panic!() };
        drop(submission);
        assert_eq!(driver.view().requests, 0);
    }

    #[tokio::test]
    async fn a_worker_that_does_not_read_is_dropped() {
        let driver = driver();
        let (link, messages) = mpsc::channel(1);
        driver.register(Epoch(7), (decode_0(), Version::NEWEST), link).unwrap();
        let _submission = submit(&driver, vec![request(3)]).unwrap();
        assert!(driver.view().members.is_empty());
        assert!(messages.is_closed(), "its link ends");
    }

    #[tokio::test]
    async fn a_worker_that_comes_back_ends_its_last_link_and_what_comes_late_over_that_is_void() {
        let driver = driver();
        let (first, mut messages) = decode_worker(&driver);
        let _submission = submit(&driver, vec![request(1)]).unwrap();
        let sequence = sequences(&mut messages)[0];
        let (second, mut again) = decode_worker(&driver);
        assert!(messages.is_closed() && first != second);
        assert_eq!(sequences(&mut again), [sequence], "the sequence goes on over the new link");
        let token = SequenceToken { sequence, index: 5, token: 5, logprob: None };
        driver.worker_event(first, WorkerEvent::Tokens(vec![token]));
        driver.worker_down(first);
        assert_eq!((driver.view().members.len(), driver.view().sequences_running), (1, 1));
        driver.worker_down(second);
        assert!(driver.view().members.is_empty());
    }
}

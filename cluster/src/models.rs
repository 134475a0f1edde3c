//! Several models behind one gateway: a [`Cluster`] for each, so that no model's work ever waits for that of a different model.
//!
//! Each model has its own members, index, costs, queue and limits. A member belongs to one model: an engine to the one that it computes, a
//! pool node to the one whose blocks it keeps. A node that keeps blocks of several models registers once for each, with that model's blocks
//! and figures. The upper half of a request id tells its model.

use crate::{
    Action, Cluster, ClusterSettings, ClusterView, DecisionView, Refusal,
    view::{MemberView, ModelView},
};
use std::{collections::BTreeMap, time::Duration};
use tidemill_proto::{
    frame::Version,
    ids::{Epoch, RequestId},
    message::{ModelIdentity, Register, RoleInfo, WorkerEvent},
};

/// The index of a model in the list of served models.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModelId(usize);

#[derive(Debug)]
pub struct Models {
    /// The served models: at least one.
    models: Vec<Model>,
    id_base: u64,
    /// The model of each member.
    workers: BTreeMap<Epoch, ModelId>,
}

#[derive(Debug)]
struct Model {
    name: String,
    identity: ModelIdentity,
    cluster: Cluster,
}

/// The number of bits reserved for the ids of one model.
const ID_BITS: u32 = 32;

impl Models {
    /// `models` is not empty, and their names differ.
    pub fn new(settings: &ClusterSettings, models: Vec<(String, ModelIdentity)>) -> Self {
        assert!(!models.is_empty(), "a coordinator serves a model");
        let model = |(place, (name, identity)): (u64, (String, ModelIdentity))| {
            let settings = ClusterSettings { id_base: settings.id_base.wrapping_add(place << ID_BITS), ..settings.clone() };
            Model { name, cluster: Cluster::new(settings, identity.clone()), identity }
        };
        Self { models: (0..).zip(models).map(model).collect(), id_base: settings.id_base, workers: BTreeMap::new() }
    }

    pub fn ids(&self) -> impl Iterator<Item = ModelId> + use<> {
        (0..self.models.len()).map(ModelId)
    }

    pub fn cluster(&self, model: ModelId) -> &Cluster {
        &self.models[model.0].cluster
    }

    pub fn cluster_mut(&mut self, model: ModelId) -> &mut Cluster {
        &mut self.models[model.0].cluster
    }

    /// The cluster that a worker belongs to; `None` if it is no member.
    pub fn of_worker(&mut self, worker: Epoch) -> Option<&mut Cluster> {
        let model = self.workers.get(&worker).copied()?;
        Some(self.cluster_mut(model))
    }

    /// The cluster that a request belongs to; `None` if the id was not given out here.
    pub fn of_request(&mut self, request: RequestId) -> Option<&mut Cluster> {
        let place = usize::try_from(request.0.wrapping_sub(self.id_base) >> ID_BITS).ok()?;
        self.models.get_mut(place).map(|model| &mut model.cluster)
    }

    /// Checks whether a worker would be accepted.
    pub fn check(&self, register: &Register) -> Result<(), Refusal> {
        self.cluster(self.choose(register)?).check(register)
    }

    /// Accepts a worker under its epoch, or refuses it with the reason. If it is already a member, it is first removed: its process has
    /// started over with this coordinator.
    pub fn register(&mut self, now: Duration, epoch: Epoch, register: Register, version: Version) -> Result<(), Refusal> {
        let model = self.choose(&register)?;
        self.worker_down(now, epoch);
        self.cluster_mut(model).admit(now, epoch, register, version)?;
        self.workers.insert(epoch, model);
        Ok(())
    }

    /// The model that a worker names, or else the only one to which it can belong.
    fn choose(&self, register: &Register) -> Result<ModelId, Refusal> {
        if let Some(name) = &register.model {
            let place = self.models.iter().position(|model| model.name == *name);
            return place.map(ModelId).ok_or_else(|| Refusal::NotServed { model: name.clone(), served: self.names() });
        }
        if self.models.len() == 1 {
            return Ok(ModelId(0));
        }
        let (RoleInfo::Prefill(engine) | RoleInfo::Decode(engine)) = &register.role else {
            return Err(Refusal::Unnamed { served: self.names() });
        };
        let alike = |model: &ModelId| self.models[model.0].identity.difference(&engine.model).is_none();
        let mut alike = self.ids().filter(alike);
        match (alike.next(), alike.next()) {
            (Some(model), None) => Ok(model),
            (Some(_), Some(_)) => Err(Refusal::Unnamed { served: self.names() }),
            (None, _) => {
                let first = &self.models[0];
                let difference = first.identity.difference(&engine.model).unwrap_or_default();
                Err(Refusal::NoneOf { served: self.names(), first: first.name.clone(), difference })
            }
        }
    }

    fn names(&self) -> String {
        self.models.iter().map(|model| format!("`{}`", model.name)).collect::<Vec<_>>().join(", ")
    }

    pub fn worker_event(&mut self, now: Duration, worker: Epoch, event: WorkerEvent) {
        if let Some(cluster) = self.of_worker(worker) {
            cluster.worker_event(now, worker, event);
        }
    }

    pub fn worker_down(&mut self, now: Duration, worker: Epoch) {
        if let Some(cluster) = self.of_worker(worker) {
            cluster.worker_down(now, worker);
        }
        self.workers.remove(&worker);
    }

    /// Distrusts a model's worker. A model that is not served is ignored.
    pub fn distrust(&mut self, now: Duration, model: &str, worker: Epoch) {
        if let Some(model) = self.models.iter_mut().find(|known| known.name == model) {
            model.cluster.distrust(now, worker);
        }
    }

    /// Resets each model's cache, unless it has been reset by this number before.
    pub fn reset_caches(&mut self, number_of: impl Fn(&str) -> u64) {
        self.models.iter_mut().for_each(|model| model.cluster.reset_cache(number_of(&model.name)));
    }

    /// All workers that computed wrongly, with their models' names.
    pub fn distrusted(&self) -> impl Iterator<Item = (&str, Epoch)> {
        self.models.iter().flat_map(|model| model.cluster.distrusted().map(|worker| (&*model.name, worker)))
    }

    pub fn tick(&mut self, now: Duration) {
        self.models.iter_mut().for_each(|model| model.cluster.tick(now));
    }

    /// Returns the next action. Call it until `None` after every other call.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.models.iter_mut().find_map(|model| model.cluster.poll_action())
    }

    /// A view of all models together, and of each model.
    pub fn view(&self, now: Duration) -> ClusterView {
        let mut whole = ClusterView::default();
        for Model { name, cluster, .. } in &self.models {
            let view = cluster.view(now);
            whole.requests += view.requests;
            whole.sequences_waiting += view.sequences_waiting;
            whole.sequences_running += view.sequences_running;
            whole.rescues += view.rescues;
            whole.context_tokens = whole.context_tokens.max(view.context_tokens);
            whole.layout = view.layout.clone().filter(|_| self.models.len() == 1);
            whole.members.extend(view.members.into_iter().map(|member| MemberView { model: name.clone(), ..member }));
            whole.decisions.extend(view.decisions.into_iter().map(|decision| DecisionView { model: name.clone(), ..decision }));
            whole.models.push(ModelView {
                name: name.clone(),
                layout: view.layout,
                context_tokens: view.context_tokens,
                requests: view.requests,
                sequences_waiting: view.sequences_waiting,
                sequences_running: view.sequences_running,
                rescues: view.rescues,
                probes: view.probes,
                wanted: view.wanted,
            });
        }
        whole.decisions.sort_by(|a, b| a.age_ms.total_cmp(&b.age_ms));
        whole
    }

    /// Panics if the state is inconsistent. Tests call it after every step.
    pub fn check_integrity(&self) {
        for (place, model) in (0..).zip(&self.models) {
            model.cluster.check_integrity();
            let mut members = model.cluster.membership.iter().map(|(epoch, _)| epoch);
            assert!(members.all(|epoch| self.workers.get(&epoch) == Some(&ModelId(place))), "members' models are known");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Rejection,
        membership::tests::{engine, model, register},
        tests::{request, settings},
    };
    use tidemill_proto::message::{EngineInfo, ToWorker};

    const NOW: Duration = Duration::ZERO;

    fn qwen() -> ModelIdentity {
        ModelIdentity { model_type: "qwen2".into(), vocab_size: 900, ..model() }
    }

    /// Serves a llama and two qwens with equal identities.
    fn models() -> Models {
        let of = |name: &str, identity| (name.to_owned(), identity);
        Models::new(&settings(), vec![of("llama", model()), of("qwen", qwen()), of("qwen-tuned", qwen())])
    }

    fn decode(model: ModelIdentity) -> RoleInfo {
        RoleInfo::Decode(EngineInfo { model, ..engine(1) })
    }

    fn named(model: Option<&str>, role: RoleInfo) -> Register {
        Register { model: model.map(str::to_owned), ..register("w", role) }
    }

    fn take(models: &mut Models, register: Register) -> Result<Epoch, Refusal> {
        let epoch = Epoch(100 + models.workers.len() as u64);
        models.register(NOW, epoch, register, Version::NEWEST).map(|()| epoch)
    }

    #[test]
    fn a_worker_belongs_to_the_model_that_it_names_or_else_to_the_only_one_it_can_be() {
        let pool = || RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 1).into() };
        let other = ModelIdentity { vocab_size: 7, ..model() };
        let rows = [
            (None, decode(model()), Ok("llama")),
            (Some("llama"), decode(model()), Ok("llama")),
            (Some("qwen-tuned"), decode(qwen()), Ok("qwen-tuned")),
            (None, decode(qwen()), Err("--model-name")),
            (Some("llama"), decode(qwen()), Err("model_type is qwen2, not llama")),
            (Some("gpt"), decode(model()), Err("no model named `gpt`")),
            (None, decode(other), Err("vocab_size is 7, not 512")),
            (Some("qwen"), pool(), Ok("qwen")),
            (None, pool(), Err("`llama`, `qwen`, `qwen-tuned`")),
        ];
        for (name, role, expected) in rows {
            let mut models = models();
            match (take(&mut models, named(name, role)), expected) {
                (Ok(_), Ok(model)) => assert_eq!(models.view(NOW).members[0].model, model),
                (Err(refusal), Err(words)) => assert!(refusal.to_string().contains(words), "{refusal}"),
                (got, expected) => panic!("{name:?}: {got:?} instead of {expected:?}"),
            }
            models.check_integrity();
        }
        // With one model, workers need not name it.
        let mut one = Models::new(&settings(), vec![("llama".into(), model())]);
        assert!(take(&mut one, named(None, pool())).is_ok());
    }

    #[test]
    fn one_models_lack_of_workers_is_not_the_others() {
        let mut models = models();
        let [llama, qwen, _] = models.ids().collect::<Vec<_>>()[..] else { panic!() };
        let worker = take(&mut models, named(None, decode(model()))).unwrap();
        let lonely = take(&mut models, named(Some("qwen"), decode(self::qwen()))).unwrap();
        let submit = |models: &mut Models, model| models.cluster_mut(model).submit(NOW, request(40, 1));
        let first = submit(&mut models, qwen).unwrap();
        let second = submit(&mut models, llama).unwrap();
        assert!(models.of_request(first).unwrap().is_active(first) && models.of_request(second).unwrap().is_active(second));
        let sent = |models: &mut Models| {
            let job = |action| match action {
                Action::Send { worker, message: ToWorker::Decode(job) } => Some((worker, job.request)),
                _ => None,
            };
            std::iter::from_fn(|| models.poll_action()).filter_map(job).collect::<Vec<_>>()
        };
        assert_eq!(sent(&mut models), [(worker, second), (lonely, first)], "each at its own model's worker");

        models.worker_down(NOW, lonely);
        models.check_integrity();
        let later = NOW + Duration::from_secs(10);
        assert!(models.cluster(qwen).context_tokens(later - Duration::from_millis(1)).is_some(), "it may come back");
        assert_eq!(models.cluster_mut(qwen).submit(later, request(40, 1)), Err(Rejection::NoWorker));
        let third = submit(&mut models, llama).unwrap();
        assert_eq!(sent(&mut models), [(worker, third)]);
        let view = models.view(NOW);
        let waiting: Vec<_> = view.models.iter().map(|model| (model.sequences_running, model.sequences_waiting)).collect();
        assert_eq!(waiting, [(2, 0), (0, 1), (0, 0)], "a rescued sequence waits for its own model's workers");
        assert_eq!((view.requests, view.sequences_waiting, view.members.len()), (3, 1, 1));
    }
}

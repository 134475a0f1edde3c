use super::*;
use crate::{
    Action, ClusterSettings,
    membership::tests::{engine, model, register},
    tests::{request, settings},
};
use tidemill_proto::{
    frame::Version,
    message::{EngineInfo, Finish, PrefillOutcome, Provenance, Register, RoleInfo, SequenceToken, ToWorker, TokensBySource, WorkerEvent},
};

/// Shorter than a request's timeout.
const EVERY: Duration = Duration::from_secs(30);

/// A cluster, and engines that answer at once.
struct World {
    cluster: Cluster,
    now: Duration,
    /// Engines with a flipped bit.
    wrong: Vec<Epoch>,
    warnings: Vec<Warning>,
    /// The decode workers of clients' sequences.
    served_by: Vec<Epoch>,
}

impl World {
    fn new(tolerance: f32) -> Self {
        let probes = Some(ProbeSettings { every: EVERY, tolerance });
        let cluster = Cluster::new(ClusterSettings { probes, ..settings() }, model());
        Self { cluster, now: Duration::from_secs(1000), wrong: Vec::new(), warnings: Vec::new(), served_by: Vec::new() }
    }

    fn join(&mut self, role: RoleInfo) -> Epoch {
        self.cluster.register(self.now, register("w", role)).unwrap()
    }

    fn decode(&mut self) -> Epoch {
        self.join(RoleInfo::Decode(EngineInfo { work_max: 8, ..engine(1) }))
    }

    fn engines(&mut self, prefill: bool) -> [Epoch; 3] {
        self.join(RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 1).into() });
        let first = if prefill { self.join(RoleInfo::Prefill(engine(1))) } else { self.decode() };
        [first, self.decode(), self.decode()]
    }

    /// Advances time until all probes of a round, if one is due, have ended.
    fn round(&mut self) {
        for _ in 0..20 {
            self.now += Duration::from_millis(50);
            self.cluster.tick(self.now);
            self.answer();
            self.cluster.check_integrity();
        }
    }

    fn next_round(&mut self) {
        self.now += EVERY;
        let engines: Vec<Epoch> = self.cluster.membership.iter().map(|(epoch, _)| epoch).collect();
        engines.iter().for_each(|engine| self.cluster.load.heard(self.now, *engine));
        self.round();
    }

    fn answer(&mut self) {
        let mut prefilled: BTreeMap<RequestId, Epoch> = BTreeMap::new();
        let mut jobs = Vec::new();
        while let Some(action) = self.cluster.poll_action() {
            match action {
                Action::Send { worker, message: ToWorker::Prefill(job) } => drop(prefilled.insert(job.request, worker)),
                Action::Send { worker, message: ToWorker::Decode(job) } => jobs.push((worker, job)),
                Action::Warn(warning) => self.warnings.push(warning),
                Action::Client { request, event } => panic!("a client hears {event:?} of {request}"),
                Action::Send { .. } | Action::Close { .. } => {}
            }
        }
        for (worker, job) in jobs {
            if !job.salt.starts_with(b"tidemill probes") {
                self.served_by.push(worker);
                continue;
            }
            let prefill = prefilled.get(&job.request);
            if let Some(prefill) = prefill {
                let outcome = PrefillOutcome::Done { cached_tokens: 0, computed_tokens: 48, queue_ms: 0.0, compute_ms: 0.0 };
                self.cluster.worker_event(self.now, *prefill, WorkerEvent::Prefilled { request: job.request, outcome });
            }
            let is_wrong = self.wrong.contains(&worker) || prefill.is_some_and(|prefill| self.wrong.contains(prefill));
            let (sequence, tokens) = (job.sequence, job.tokens.len() as u32);
            for index in 0..job.stop.max_tokens {
                // The smallest possible error: one bit of the last log-probability.
                let bit = u32::from(is_wrong && index == 7);
                let logprob = f32::from_bits((-1.5f32).to_bits() ^ bit);
                let token = SequenceToken { sequence, index, token: tokens + index, logprob: Some(TokenLogprob { logprob, top: vec![] }) };
                self.cluster.worker_event(self.now, worker, WorkerEvent::Tokens(vec![token]));
            }
            let by_prefill = if prefill.is_some() { 48 } else { 0 };
            let tokens = TokensBySource { prefill: by_prefill, local: 64 - by_prefill, ..TokensBySource::default() };
            let provenance = Provenance { tokens, ..Provenance::default() };
            self.cluster.worker_event(self.now, worker, WorkerEvent::Finished { sequence, reason: Finish::Length, provenance });
        }
    }

    fn unhealthy(&self) -> Vec<Epoch> {
        self.cluster.membership.iter().filter(|(_, member)| member.unhealthy).map(|(epoch, _)| epoch).collect()
    }

    fn counts(&self) -> (u64, u64, u64, u64) {
        let ProbesView { rounds, same, differs, unanswered, .. } = self.cluster.view(self.now).probes.unwrap();
        (rounds, same, differs, unanswered)
    }
}

#[test]
fn one_bit_makes_a_decode_worker_unhealthy_and_it_gets_no_more_work() {
    let mut world = World::new(0.0);
    let [bad, ..] = world.engines(false);
    world.round();
    assert_eq!((world.unhealthy(), world.counts()), (vec![], (1, 3, 0, 0)));
    world.round();
    assert_eq!(world.counts(), (1, 3, 0, 0), "a round per period");
    world.wrong.push(bad);
    // Clients' sequences on that worker then move elsewhere.
    let ids: Vec<_> = (0..3).map(|_| world.cluster.submit(world.now, request(40, 1)).unwrap()).collect();
    world.answer();
    let had = world.served_by.iter().filter(|worker| **worker == bad).count();
    assert!(had > 0, "{:?}", world.served_by);
    world.next_round();
    assert_eq!((world.unhealthy(), world.counts()), (vec![bad], (2, 5, 1, 0)));
    assert!(matches!(&world.warnings[..], [Warning::Unhealthy { worker, .. }] if *worker == bad), "{:?}", world.warnings);
    assert_eq!(world.served_by.len(), 3 + had);
    ids.into_iter().for_each(|id| world.cluster.cancel(world.now, id, None));
    world.served_by.clear();
    for _ in 0..6 {
        let id = world.cluster.submit(world.now, request(40, 1)).unwrap();
        world.answer();
        world.cluster.cancel(world.now, id, None);
    }
    assert!(world.served_by.len() == 6 && !world.served_by.contains(&bad));
    world.next_round();
    assert_eq!(world.counts(), (3, 7, 1, 0), "it is not asked again");
    // A lost link does not make a worker healthy.
    world.cluster.worker_down(world.now, bad);
    let back = Register { pid: 2, ..register("w", RoleInfo::Decode(engine(1))) };
    world.cluster.admit(world.now, bad, back, Version::NEWEST).unwrap();
    assert_eq!(world.unhealthy(), [bad]);
}

#[test]
fn a_prefill_worker_is_told_from_the_decode_worker_that_it_works_for() {
    let mut world = World::new(0.0);
    let [prefill, ..] = world.engines(true);
    world.round();
    assert_eq!(world.counts(), (1, 3, 0, 0));
    world.wrong.push(prefill);
    world.next_round();
    assert_eq!((world.unhealthy(), world.counts()), (vec![prefill], (2, 5, 1, 0)));
}

#[test]
fn a_worker_alone_is_compared_with_what_it_said_first() {
    let mut world = World::new(0.0);
    let alone = world.decode();
    world.round();
    world.wrong.push(alone);
    world.next_round();
    assert_eq!(world.unhealthy(), [alone]);
}

#[test]
fn of_two_nobody_is_accused_until_a_third_one_decides() {
    let mut world = World::new(0.0);
    let [bad, _] = [world.decode(), world.decode()];
    world.wrong.push(bad);
    world.round();
    assert_eq!((world.unhealthy(), world.counts()), (vec![], (1, 0, 0, 2)));
    assert!(matches!(world.warnings[..], [Warning::NoMajority { workers: 2 }]), "{:?}", world.warnings);
    world.decode();
    world.next_round();
    assert_eq!((world.unhealthy(), world.counts()), (vec![bad], (2, 2, 1, 2)));
}

#[test]
fn what_a_lonely_bad_worker_said_first_is_outvoted() {
    let mut world = World::new(0.0);
    let bad = world.decode();
    world.wrong.push(bad);
    world.round();
    let _two = [world.decode(), world.decode()];
    world.next_round();
    assert_eq!(world.unhealthy(), [bad]);
}

#[test]
fn a_tolerance_lets_bits_differ() {
    let mut world = World::new(0.01);
    let [bad, ..] = world.engines(false);
    world.wrong.push(bad);
    world.round();
    assert_eq!((world.unhealthy(), world.counts()), (vec![], (1, 3, 0, 0)));
    let of = |token, logprob, top: &[(Token, f32)]| Answer(vec![(token, TokenLogprob { logprob, top: top.to_vec() })]);
    let near_tie = [(1, -0.700), (2, -0.704)];
    assert!(of(1, -0.700, &near_tie).agrees(&of(2, -0.699, &[]), 0.01), "as good as a tie");
    assert!(!of(1, -0.700, &near_tie).agrees(&of(3, -0.699, &[]), 0.01));
    assert!(!of(1, -0.700, &near_tie).agrees(&of(1, -0.72, &[]), 0.01));
}

#[test]
fn a_worker_that_goes_away_holds_nothing_up() {
    let mut world = World::new(0.0);
    let [gone, ..] = world.engines(false);
    world.cluster.tick(world.now);
    world.cluster.worker_down(world.now, gone);
    world.round();
    assert_eq!((world.unhealthy(), world.counts()), (vec![], (1, 2, 0, 0)));
    assert_eq!(world.cluster.view(world.now).requests, 0);
}

#[test]
fn prompts_are_spread_over_the_vocabulary() {
    for vocabulary in [1, 100, 256, 512, 151_936] {
        let tokens: Vec<Token> = (0..PROMPTS).flat_map(|number| prompt(number, vocabulary)).collect();
        assert_eq!(tokens.len(), PROMPTS * PROMPT_TOKENS);
        assert!(tokens.is_sorted() && tokens[0] == 0);
        let last = tokens[tokens.len() - 1];
        assert!(last < vocabulary && last >= vocabulary - vocabulary.div_ceil(256), "{last} of {vocabulary}");
    }
}

//! Silent-quality probes: prompts whose greedy answers are known go through every engine on a schedule. An engine whose answers differ is
//! unhealthy without reporting it, and gets no more work.
//!
//! A row of logits depends only on its sequence, and engines of one layout compute alike (ARCHITECTURE §1), so "is it healthy" is a
//! yes-or-no question: the same tokens, and the same bits of their log-probabilities. The latter reveal wrong weights that do not change a
//! token yet. `tolerance` is for devices that do not compute bit for bit alike.
//!
//! ```text
//!   every period:  decode workers compute the prompts alone ──vote──► the reference ──► those that differ are unhealthy
//!                  then each prefill worker, with a decode worker that was right  ────► it differs: it is the prefill worker
//! ```
//!
//! The reference is the answer of the majority of decode workers; an answer that was a round's reference before counts as many votes as it
//! had then. So a lone worker is compared with its own first answer, given soon after its weights' digest was checked; and no file can be
//! out of date.
//!
//! Prompts are spread over the vocabulary, so that a probe reads all matrices and some rows of the embedding. Each probe has a salt of its
//! own, so that it neither finds cached blocks nor leaves any for others.

use crate::{
    Cluster, NewRequest, Outcome, RequestEvent, Warning,
    class::ClassId,
    requests::Pin,
    view::{ProbeView, ProbesView},
};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};
use tidemill_proto::{
    block::{LayoutFingerprint, TENANT_SALT_BYTES, Token},
    ids::{Epoch, RequestId},
    message::Role,
    sampling::{Sampling, StopRule, TokenLogprob},
};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProbeSettings {
    /// The time from the start of one round to the start of the next.
    pub every: Duration,
    /// The tolerated difference of a log-probability; 0 requires identical bits.
    pub tolerance: f32,
}

/// The number of prompts, tokens of each, and tokens that are drawn after each.
const PROMPTS: usize = 4;
const PROMPT_TOKENS: usize = 64;
const ANSWER_TOKENS: u32 = 8;
/// The number of likeliest tokens whose log-probabilities are compared.
const TOP: u32 = 4;
/// The number of concurrent probes, so that a large cluster is not flooded.
const AT_ONCE: usize = 8;
/// The time after which a probe counts as unanswered: the cluster may be full, and probes go last.
const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Probes {
    settings: ProbeSettings,
    next: Duration,
    /// The number of probes so far, which makes salts differ.
    asked: u64,
    round: Option<Round>,
    reference: Option<Reference>,
    /// The layout that the reference belongs to.
    layout: Option<LayoutFingerprint>,
    outcomes: BTreeMap<Epoch, (Duration, ProbeOutcome)>,
    counts: Counts,
    last_round: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    rounds: u64,
    same: u64,
    differs: u64,
    unanswered: u64,
}

/// The outcome of one round for a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeOutcome {
    Same,
    Differs,
    /// The worker was too busy or went away, or there was no reference.
    Unanswered,
}

#[derive(Debug)]
struct Round {
    role: Role,
    todo: VecDeque<(Target, usize)>,
    running: BTreeMap<RequestId, Running>,
    answers: BTreeMap<Epoch, [Option<Answer>; PROMPTS]>,
}

#[derive(Clone, Copy, Debug)]
struct Target {
    worker: Epoch,
    pin: Pin,
}

#[derive(Debug)]
struct Running {
    target: Target,
    prompt: usize,
    answer: Answer,
    /// Set when the probe has ended: whether its answer says anything about the worker.
    ended: Option<bool>,
}

/// The drawn tokens, each with the likeliest ones.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer(Vec<(Token, TokenLogprob)>);

#[derive(Debug)]
struct Reference {
    answers: [Option<Answer>; PROMPTS],
    /// The largest number of workers that gave this answer in one round.
    votes: usize,
}

impl Answer {
    /// Whether two engines that compute alike within `tolerance` could have given both answers.
    fn agrees(&self, other: &Self, tolerance: f32) -> bool {
        if tolerance == 0.0 {
            return self.is_same(other);
        }
        if self.0.len() != other.0.len() {
            return false;
        }
        let near = |a: f32, b: f32| (a - b).abs() <= tolerance;
        for ((token, ours), (drawn, theirs)) in self.0.iter().zip(&other.0) {
            if token == drawn {
                if !near(ours.logprob, theirs.logprob) {
                    return false;
                }
            } else {
                // Close to a tie, which the other engine saw as well; the tokens after it cannot be compared.
                let seen = ours.top.iter().find(|(likely, _)| likely == drawn);
                return seen.is_some_and(|&(_, logprob)| near(logprob, ours.logprob) && near(logprob, theirs.logprob));
            }
        }
        true
    }

    /// Compares bit by bit: a NaN equals itself.
    fn is_same(&self, other: &Self) -> bool {
        let bits = |answer: &Self| {
            let of_token = |(token, logprob): &(Token, TokenLogprob)| {
                let top = logprob.top.iter().map(|(token, logprob)| (*token, logprob.to_bits()));
                (*token, logprob.logprob.to_bits(), top.collect::<Vec<_>>())
            };
            answer.0.iter().map(of_token).collect::<Vec<_>>()
        };
        bits(self) == bits(other)
    }
}

fn agree(a: &[Option<Answer>; PROMPTS], b: &[Option<Answer>; PROMPTS], tolerance: f32) -> bool {
    a.iter().zip(b).all(|pair| matches!(pair, (Some(a), Some(b)) if a.agrees(b, tolerance)))
}

/// The prompt with number `prompt`. Together the prompts are spread evenly over the vocabulary.
pub(crate) fn prompt(prompt: usize, vocabulary: u32) -> Vec<Token> {
    let place = |i: usize| (prompt * PROMPT_TOKENS + i) as u64;
    let token = |place: u64| (place * u64::from(vocabulary) / (PROMPTS * PROMPT_TOKENS) as u64) as Token;
    (0..PROMPT_TOKENS).map(|i| token(place(i))).collect()
}

impl Probes {
    pub(crate) fn new(settings: ProbeSettings) -> Self {
        Self {
            settings,
            next: Duration::ZERO,
            asked: 0,
            round: None,
            reference: None,
            layout: None,
            outcomes: BTreeMap::new(),
            counts: Counts::default(),
            last_round: None,
        }
    }

    pub(crate) fn hear(&mut self, request: RequestId, event: &RequestEvent) {
        let Some(round) = &mut self.round else { return };
        let Some(running) = round.running.get_mut(&request) else { return };
        match event {
            RequestEvent::Token { token, logprob, .. } => {
                let none = || TokenLogprob { logprob: 0.0, top: Vec::new() };
                running.answer.0.push((*token, logprob.clone().unwrap_or_else(none)));
            }
            RequestEvent::Finished { outcome, usage, .. } => {
                let answered = !matches!(outcome, Outcome::Failed(_));
                // A decode worker that had to compute the whole prompt itself says nothing about the prefill worker.
                running.ended = Some(answered && (round.role == Role::Decode || usage.provenance.tokens.prefill > 0));
            }
            RequestEvent::Waiting { .. } | RequestEvent::PromptLogprobs(_) | RequestEvent::Embedding(_) | RequestEvent::Sources(_) => {}
        }
    }

    /// Updates the reference from a round of decode workers. Returns `false` if there were answers but no majority.
    fn vote(&mut self, answers: &BTreeMap<Epoch, [Option<Answer>; PROMPTS]>) -> bool {
        let tolerance = self.settings.tolerance;
        let whole: Vec<_> = answers.values().filter(|answers| answers.iter().all(Option::is_some)).collect();
        let votes = |answer: &[Option<Answer>; PROMPTS]| whole.iter().filter(|other| agree(answer, other, tolerance)).count();
        let Some((best, most)) = whole.iter().map(|answer| (*answer, votes(answer))).max_by_key(|(_, votes)| *votes) else { return true };
        let known = self.reference.as_ref().map_or(0, |reference| reference.votes);
        if most > known && 2 * most > whole.len() {
            // The earlier answer, given by fewer workers, was wrong.
            self.reference = Some(Reference { answers: best.clone(), votes: most });
        }
        self.reference.is_some()
    }

    fn judge(&self, answers: &[Option<Answer>; PROMPTS]) -> ProbeOutcome {
        let Some(reference) = &self.reference else { return ProbeOutcome::Unanswered };
        let tolerance = self.settings.tolerance;
        let pairs = || answers.iter().zip(&reference.answers);
        // One wrong answer is enough to differ; for `Same`, all must agree.
        if pairs().any(|pair| matches!(pair, (Some(a), Some(b)) if !a.agrees(b, tolerance))) {
            ProbeOutcome::Differs
        } else if agree(answers, &reference.answers, tolerance) {
            ProbeOutcome::Same
        } else {
            ProbeOutcome::Unanswered
        }
    }

    fn note(&mut self, now: Duration, worker: Epoch, outcome: ProbeOutcome) {
        match outcome {
            ProbeOutcome::Same => self.counts.same += 1,
            ProbeOutcome::Differs => self.counts.differs += 1,
            ProbeOutcome::Unanswered => self.counts.unanswered += 1,
        }
        self.outcomes.insert(worker, (now, outcome));
    }

    pub(crate) fn forget(&mut self, worker: Epoch) {
        self.outcomes.remove(&worker);
    }

    pub(crate) fn of_worker(&self, now: Duration, worker: Epoch) -> Option<ProbeView> {
        let (at, outcome) = *self.outcomes.get(&worker)?;
        Some(ProbeView { outcome, age_s: now.saturating_sub(at).as_secs_f64() })
    }

    pub(crate) fn view(&self, now: Duration) -> ProbesView {
        let Counts { rounds, same, differs, unanswered } = self.counts;
        let age_s = self.last_round.map(|at| now.saturating_sub(at).as_secs_f64());
        let votes = self.reference.as_ref().map_or(0, |reference| reference.votes);
        ProbesView { every_s: self.settings.every.as_secs_f64(), rounds, same, differs, unanswered, votes, age_s }
    }
}

impl Cluster {
    /// Continues the running round, or starts one that is due.
    pub(crate) fn probe(&mut self, now: Duration) {
        let Some(mut probes) = self.probes.take() else { return };
        if probes.round.is_none()
            && now >= probes.next
            && let Some(layout) = self.layout()
        {
            // Engines of a different layout give different answers.
            if probes.layout.replace(layout) != Some(layout) {
                probes.reference = None;
            }
            probes.next = now + probes.settings.every;
            probes.round = Some(self.round(Role::Decode, &[]));
        }
        if let Some(round) = &mut probes.round {
            self.collect(now, round);
        }
        let ended = probes.round.take_if(|round| round.todo.is_empty() && round.running.is_empty());
        let Some(round) = ended else {
            return self.ask(now, probes);
        };
        if round.role == Role::Decode && !probes.vote(&round.answers) {
            self.warn(Warning::NoMajority { workers: round.answers.len() });
        }
        let says_something = !round.answers.is_empty();
        let mut right = Vec::new();
        let mut wrong = Vec::new();
        for (worker, answers) in round.answers {
            if self.membership.get(worker).is_none() {
                continue;
            }
            let outcome = probes.judge(&answers);
            probes.note(now, worker, outcome);
            match outcome {
                ProbeOutcome::Same => right.push(worker),
                ProbeOutcome::Differs => wrong.push(worker),
                ProbeOutcome::Unanswered => {}
            }
        }
        if round.role == Role::Decode && !right.is_empty() {
            probes.round = Some(self.round(Role::Prefill, &right));
        } else if says_something || round.role == Role::Prefill {
            probes.counts.rounds += 1;
            probes.last_round = Some(now);
        }
        self.probes = Some(probes);
        wrong.into_iter().for_each(|worker| self.distrust(now, worker));
    }

    /// A round over all workers of this role. `right`: decode workers that are trusted to judge prefill workers' blocks.
    fn round(&self, role: Role, right: &[Epoch]) -> Round {
        let workers: Vec<Epoch> =
            self.membership.taking_work().filter(|(_, member)| member.role() == role).map(|(epoch, _)| epoch).collect();
        let has_pool = self.membership.taking_work().any(|(_, member)| member.role() == Role::Kvpool);
        let target = |(place, worker): (usize, Epoch)| {
            let pin = match role {
                Role::Prefill => Pin { decode: right[place % right.len()], prefill: Some(worker) },
                Role::Decode | Role::Kvpool => Pin { decode: worker, prefill: None },
            };
            Target { worker, pin }
        };
        let targets = workers.into_iter().enumerate().map(target).filter(|_| role == Role::Decode || has_pool);
        Round {
            role,
            todo: targets.flat_map(|target| (0..PROMPTS).map(move |prompt| (target, prompt))).collect(),
            running: BTreeMap::new(),
            answers: BTreeMap::new(),
        }
    }

    /// Collects the probes that have ended, and cancels those that can no longer end.
    fn collect(&mut self, now: Duration, round: &mut Round) {
        let is_there = |worker: Epoch| self.membership.taking_work().any(|(epoch, _)| epoch == worker);
        let lost: Vec<RequestId> = round
            .running
            .iter()
            .filter(|(_, running)| running.ended.is_none())
            .filter(|(id, running)| {
                let Pin { decode, prefill } = running.target.pin;
                !(self.is_active(**id) && is_there(decode) && prefill.is_none_or(is_there))
            })
            .map(|(id, _)| *id)
            .collect();
        for id in lost {
            self.cancel(now, id, None);
            round.running.get_mut(&id).expect("just listed").ended = Some(false);
        }
        for (_, Running { target, prompt, answer, ended }) in round.running.extract_if(.., |_, running| running.ended.is_some()) {
            let answers = round.answers.entry(target.worker).or_default();
            answers[prompt] = (ended == Some(true)).then_some(answer);
        }
    }

    /// Sends the next probes.
    fn ask(&mut self, now: Duration, mut probes: Probes) {
        let class = self.settings.classes.iter().min_by_key(|(_, class)| class.priority).map_or(ClassId::default(), |(id, _)| id);
        let vocabulary = self.membership.vocabulary();
        if let Some(round) = &mut probes.round {
            while round.running.len() < AT_ONCE
                && let Some((target, number)) = round.todo.pop_front()
            {
                probes.asked += 1;
                let new = NewRequest {
                    prompt: prompt(number, vocabulary).into(),
                    salt: salt(self.settings.id_base, probes.asked),
                    class,
                    sampling: Sampling { temperature: 0.0, logprobs: Some(TOP), ..Sampling::default() },
                    stop: StopRule { max_tokens: ANSWER_TOKENS, ..StopRule::default() },
                    constraint: None,
                    thought: None,
                    choices: 1,
                    prompt_logprobs: None,
                    embeds: None,
                    timeout: TIMEOUT,
                };
                // A full cluster refuses the probe; the worker is asked again in the next round.
                let id = self.submit_at(now, new, Some(target.pin)).ok();
                round.answers.entry(target.worker).or_default();
                if let Some(id) = id {
                    round.running.insert(id, Running { target, prompt: number, answer: Answer::default(), ended: None });
                }
            }
        }
        self.probes = Some(probes);
    }
}

/// A salt that belongs to one probe of one coordinator. All probes are one tenant's.
fn salt(id_base: u64, number: u64) -> Vec<u8> {
    let mut salt = b"tidemill probes".to_vec();
    salt.resize(TENANT_SALT_BYTES, 0);
    salt.extend(id_base.to_le_bytes());
    salt.extend(number.to_le_bytes());
    salt
}

#[cfg(test)]
mod tests;

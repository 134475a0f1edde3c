//! The joint choice: of every decode worker with every prefill worker, or none, the one with the greatest expected goodput.
//!
//! ```text
//!   worth = weight · P(TTFT kept) · P(TPOT kept)  −  loss of other requests
//! ```
//!
//! - **Chances** come from the past errors of the cost model (`cost::Errors`), so a plan well inside its limits is worth more than one that
//!   just keeps them.
//! - **Other requests**: prompts behind this one in the prefill worker's queue whose first token becomes late, and sequences at the decode
//!   worker whose steps become too long.
//! - **TPOT is judged** for the time when the prompt's prefill is done: some of today's sequences will have ended, and those whose prompts
//!   are still being computed will have arrived. Judged by the present load, the two kinds of workers fill and empty by turns (Mooncake,
//!   FAST'25, §7.4).
//!
//! Among choices of equal worth, a prompt stays at the decode worker that would finish it before a prefill worker could start; then the
//! least predicted TTFT wins.

use super::{
    Considered, Decision, DecodeCandidate, Demand, Placement, PrefillCandidate,
    plan::{At, Planner, Pooling, Times},
};
use crate::class::{Class, OnMiss};
use std::{cmp::Ordering, ops::RangeInclusive, time::Duration};

/// A chance below this means that the limits cannot be met, as far as can be predicted.
const CHANCE_MIN: f64 = 0.5;
/// A prompt whose chance to be in time is below this, and that is served all the same, no longer goes before those that can be in time.
/// Otherwise, in an overload, all would become late in turn.
pub const GIVE_UP: f64 = 0.1;
/// Worths that differ by less are equal: the cost model is no more precise.
const WORTH_STEP: f64 = 0.02;
/// The share of the tightest limit that a decode worker's steps may take, prompts included, and the least share of its time for prompts, so
/// that they never starve.
const PACED: f64 = 0.9;
const PACED_LEFT_MIN: f64 = 0.1;
/// The number of choices that a decision remembers.
const CONSIDERED_MAX: usize = 4;
/// Bounds on the time after which a refused client may retry.
const RETRY_MS: RangeInclusive<f64> = 250.0..=60_000.0;

/// One choice with its predictions.
#[derive(Debug)]
struct Offer<'a> {
    decode: usize,
    prefill: Option<&'a PrefillCandidate<'a>>,
    times: Times,
    tpot_ms: f64,
    ttft_chance: f64,
    tpot_chance: f64,
    harm: f64,
}

impl Offer<'_> {
    fn chance(&self) -> f64 {
        self.ttft_chance * self.tpot_chance
    }

    fn worth(&self, class: &Class) -> f64 {
        f64::from(class.weight) * self.chance() - self.harm
    }

    /// The sort key. Worths are rounded, so that nearly equal ones compare as equal and the order is transitive.
    fn merit(&self, class: &Class) -> (i64, Duration) {
        let steps = (self.worth(class) / WORTH_STEP).round() as i64;
        (-steps, Duration::from_secs_f64(self.times.ttft_ms.clamp(0.0, 1e12) / 1e3))
    }
}

/// A prefill worker for this sequence, independent of the decode worker.
struct Prefiller<'a> {
    worker: &'a PrefillCandidate<'a>,
    ahead_ms: f64,
    own_ms: f64,
    harm: f64,
}

pub(super) fn decide(planner: &Planner<'_>) -> Decision {
    let class = planner.snapshot.classes.get(planner.demand.class);
    let places: Vec<At<'_, '_>> = planner.roomy().map(|decode| planner.at(decode, Pooling::Shared, None)).collect();
    if places.is_empty() {
        return Decision::Queue;
    }
    let due = planner.demand.due_ms.map(|ms| planner.snapshot.now + Duration::from_secs_f64(ms.max(0.0) / 1e3));
    let mut offers = judge(planner, class, &places, due);
    let best = &offers[0];
    let decode = places[best.decode].decode;
    let hopeless = best.chance() < CHANCE_MIN;
    match class.on_miss {
        OnMiss::Reject if !planner.demand.probe && (hopeless || best.worth(class) < 0.0) => {
            return Decision::Reject { retry_after_ms: retry_after_ms(planner, class, best, decode) };
        }
        // An idle worker has no other sequences to harm, and there will be no quieter time.
        OnMiss::Queue if decode.sequences > 0 && (best.tpot_chance < CHANCE_MIN || best.worth(class) < 0.0) => return Decision::Hold,
        OnMiss::Late if due.is_some() && best.ttft_chance < GIVE_UP => offers = judge(planner, class, &places, None),
        OnMiss::Reject | OnMiss::Queue | OnMiss::Late => {}
    }
    let best = &offers[0];
    let considered = offers.iter().take(CONSIDERED_MAX).map(|offer| Considered {
        decode: places[offer.decode].decode.worker,
        prefill: offer.prefill.map(|worker| worker.worker),
        ttft_ms: offer.times.ttft_ms,
        tpot_ms: offer.tpot_ms,
        chance: offer.chance(),
        harm: offer.harm,
    });
    let considered = considered.collect();
    let placement = places[best.decode].plan(best.times, best.prefill);
    Decision::Place(Placement { considered, tpot_ms: best.tpot_ms, chance: best.chance(), ..placement })
}

/// The best choice for each decode worker, the best of all first. The sequence enters prefill queues as one that is `due`.
fn judge<'a>(planner: &Planner<'a>, class: &Class, places: &[At<'_, 'a>], due: Option<Duration>) -> Vec<Offer<'a>> {
    let queues = planner.snapshot.prefill.iter().map(|worker| judge_queue(planner, class, worker, due, places[0].found));
    let queues: Vec<Prefiller<'_>> = queues.collect();
    let mut offers: Vec<Offer<'_>> = places.iter().enumerate().map(|(place, at)| best_at(planner, class, at, place, &queues)).collect();
    offers.sort_by(|a, b| a.merit(class).cmp(&b.merit(class)).then(key(planner, places, a).cmp(&key(planner, places, b))));
    offers
}

fn key(planner: &Planner<'_>, places: &[At<'_, '_>], offer: &Offer<'_>) -> (u32, u64) {
    let decode = places[offer.decode].decode;
    (decode.sequences, planner.tie(decode.worker))
}

/// The queue that this sequence would find at a prefill worker, and the loss of the jobs behind it.
fn judge_queue<'a>(
    planner: &Planner<'a>,
    class: &Class,
    worker: &'a PrefillCandidate<'a>,
    due: Option<Duration>,
    found: u32,
) -> Prefiller<'a> {
    let (now, cost) = (planner.snapshot.now, planner.snapshot.cost);
    let more_ms = planner.prefill_ms(worker, found);
    let harm = worker.queue.behind(now, class.priority, due).map(|(job, done_ms)| {
        let Some(due) = job.due else { return 0.0 };
        let left_ms = due.saturating_sub(now).as_secs_f64() * 1e3;
        let chance = |done_ms: f64| cost.ttft(job.class).chance(done_ms + cost.handover_ms, left_ms);
        f64::from(planner.snapshot.classes.get(job.class).weight) * (chance(done_ms) - chance(done_ms + more_ms))
    });
    Prefiller { worker, ahead_ms: worker.queue.ahead_ms(now, class.priority, due), own_ms: more_ms, harm: harm.sum() }
}

/// The best choice with this decode worker.
fn best_at<'a>(planner: &Planner<'a>, class: &Class, at: &At<'_, 'a>, place: usize, prefillers: &[Prefiller<'a>]) -> Offer<'a> {
    let offer = |prefill: Option<&Prefiller<'a>>, times: Times| {
        let arrival_ms = times.ttft_ms;
        let after = steps_after(planner, at.decode, arrival_ms);
        Offer {
            decode: place,
            prefill: prefill.map(|prefiller| prefiller.worker),
            times,
            tpot_ms: after.tpot_ms,
            ttft_chance: ttft_chance(planner, times.ttft_ms),
            tpot_chance: class.tpot_ms.map_or(1.0, |limit| planner.snapshot.cost.tpot.chance(after.tpot_ms, limit)),
            harm: after.harm + prefill.map_or(0.0, |prefiller| prefiller.harm),
        }
    };
    let local = offer(None, paced(planner, at));
    if !at.can_hand_over() {
        return local;
    }
    let timed = prefillers.iter().map(|prefiller| (prefiller, at.remote(prefiller.worker, prefiller.ahead_ms, prefiller.own_ms)));
    // The decode worker's part differs little between prefill workers: the chance of the first token and the queue decide.
    let judged = timed.map(|(prefiller, times)| {
        let worth = f64::from(class.weight) * ttft_chance(planner, times.ttft_ms) - prefiller.harm;
        ((-worth / WORTH_STEP).round() as i64, prefiller, times)
    });
    let best = judged.min_by(|(a, p, a_times), (b, q, b_times)| {
        a.cmp(b).then(a_times.ttft_ms.total_cmp(&b_times.ttft_ms)).then(p.worker.worker.cmp(&q.worker.worker))
    });
    let Some((_, prefiller, times)) = best else { return local };
    let remote = offer(Some(prefiller), times);
    let stays = planner.stays_local(at.found, local.times.ttft_ms - planner.step_ms(at.decode), times.begin_ms);
    match (planner.policy.local_tail_tokens, local.merit(class).0.cmp(&remote.merit(class).0)) {
        (Some(_), _) | (None, Ordering::Equal) => {
            if stays {
                local
            } else {
                remote
            }
        }
        (None, Ordering::Less) => local,
        (None, Ordering::Greater) => remote,
    }
}

/// The decode worker computes the missing blocks in chunks that fit into the tightest limit of its sequences. So the prompt's cost falls on
/// the prompt itself and not on the other sequences.
fn paced(planner: &Planner<'_>, at: &At<'_, '_>) -> Times {
    let (worker, times) = (at.decode, at.local());
    let present = planner.snapshot.classes.iter().filter(|(id, _)| worker.classes[usize::from(id.0)].sequences > 0);
    let Some(limit_ms) = present.filter_map(|(_, class)| class.tpot_ms).min_by(f64::total_cmp).filter(|_| worker.decoding > 0) else {
        return times;
    };
    let plain_ms = worker.cost.plain_ms(worker.decoding.into(), worker.tokens);
    let left = (1.0 - plain_ms / (PACED * limit_ms)).max(PACED_LEFT_MIN);
    let prompts_ms = times.tail_ms + planner.tails_ms(worker);
    Times { ttft_ms: times.ttft_ms + prompts_ms * (1.0 / left - 1.0), ..times }
}

fn ttft_chance(planner: &Planner<'_>, ttft_ms: f64) -> f64 {
    let Demand { due_ms, class, .. } = *planner.demand;
    due_ms.map_or(1.0, |due_ms| planner.snapshot.cost.ttft(class).chance(ttft_ms, due_ms))
}

struct StepsAfter {
    tpot_ms: f64,
    harm: f64,
}

/// A decode worker's steps when this sequence arrives after `arrival_ms`, and the loss of its other sequences.
fn steps_after(planner: &Planner<'_>, worker: &DecodeCandidate<'_>, arrival_ms: f64) -> StepsAfter {
    let (cost, demand) = (planner.snapshot.cost, planner.demand);
    let output = cost.output_tokens();
    let now_ms = worker.cost.token_ms(worker.sequences.into(), worker.tokens).max(1e-3);
    // An answer is taken to end at any token with the same probability: only the mean of its length is known.
    let stay = (-arrival_ms / (output * now_ms)).exp();
    let (sequences, decoding) = (f64::from(worker.sequences), f64::from(worker.decoding));
    let rows = decoding * stay + (sequences - decoding);
    let share = if sequences > 0.0 { rows / sequences } else { 0.0 };
    let context = worker.tokens as f64 * share;
    let before_ms = worker.cost.token_ms(rows.round() as u64, context as u64);
    let grown = f64::from(demand.tokens) + output / 2.0;
    let tpot_ms = worker.cost.token_ms(rows.round() as u64 + 1, (context + grown) as u64);
    let lost = planner.snapshot.classes.iter().filter_map(|(id, class)| {
        let there = f64::from(worker.classes[usize::from(id.0)].sequences) * share;
        let limit = class.tpot_ms.filter(|_| there > 0.0)?;
        let chance = |ms| cost.tpot.chance(ms, limit);
        Some(there * f64::from(class.weight) * (chance(before_ms) - chance(tpot_ms)))
    });
    StepsAfter { tpot_ms, harm: lost.sum() }
}

/// Time after which the limits could be kept: the lateness of the first token, or the time until enough sequences have ended.
fn retry_after_ms(planner: &Planner<'_>, class: &Class, best: &Offer<'_>, decode: &DecodeCandidate<'_>) -> u64 {
    let late_ms = planner.demand.due_ms.map_or(0.0, |due_ms| best.times.ttft_ms - due_ms);
    let crowded_ms = class.tpot_ms.filter(|&limit| best.tpot_ms > limit).map_or(0.0, |limit| {
        let rows = u64::from(decode.sequences);
        let token_ms = |rows_left: u64| decode.cost.token_ms(rows_left + 1, decode.tokens * rows_left / rows.max(1));
        let (mut fits, mut breaks) = (0, rows);
        while fits + 1 < breaks {
            let middle = (fits + breaks) / 2;
            *(if token_ms(middle) <= limit { &mut fits } else { &mut breaks }) = middle;
        }
        planner.snapshot.cost.output_tokens() * best.tpot_ms * (rows as f64 / fits.max(1) as f64).max(1.0).ln()
    });
    late_ms.max(crowded_ms).clamp(*RETRY_MS.start(), *RETRY_MS.end()) as u64
}

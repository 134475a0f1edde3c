//! The number of workers that a model wants, of each role. The view publishes it; another component starts, drains and ends workers.
//!
//! ```text
//!   workers' reports ──► [`trend`] ──► [`demand`]: workers needed ──► [`steps`]: workers wanted ──► view, `tidemill_wanted_workers`
//! ```
//!
//! - [`demand`]: the workers needed to keep the classes' limits, by predicted queue seconds, predicted step times and KV use
//! - [`steps`]: from needed to wanted workers: up at once, down slowly, between a floor and a ceiling; [`schedule`]: floors for hours of the
//!   week
//! - [`trend`]: signals, smoothed and extrapolated to the time when a worker that is started now will serve
//!
//! All signals but two are from the workers' reports, which all coordinators get. The other two, the prompts that wait behind others and
//! the sequences without a place, are a coordinator's own. So several coordinators want nearly the same, and the largest of their numbers
//! is the cluster's.

pub mod demand;
pub mod schedule;
pub mod steps;
pub mod trend;

use crate::{
    Cluster,
    cost::StepCost,
    membership::{Member, sequence_tokens_max},
};
use demand::{DecodeLimits, DecodeLoad, Jobs, PrefillLoad, decode_needed, prefill_needed};
use schedule::Schedule;
use serde::Serialize;
use std::time::Duration;
use steps::{Range, Steps};
use tidemill_proto::{
    ids::Epoch,
    message::{Report, Role},
};
use trend::{Horizon, Outlook, Trend};

#[derive(Clone, Debug, PartialEq)]
pub struct AutoscaleSettings {
    pub prefill: Range,
    pub decode: Range,
    /// The number of workers of each role beyond those that are needed, so that a sudden load finds some loaded and idle.
    pub warm: u32,
    /// The time over which signals are averaged.
    pub window: Duration,
    /// The time from a worker's start until it serves.
    pub start: Duration,
    /// The time for which fewer workers must have been enough before one is given up, and the least time from one change to the next
    /// decrease.
    pub cooldown: Duration,
    /// Least numbers of workers in hours of the week, up to the ceilings.
    pub schedules: Vec<Schedule>,
    /// The time since 1970 at which the cluster's clock is zero.
    pub clock_zero: Duration,
}

/// The wanted number of workers, by role.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Wanted {
    pub prefill: u32,
    pub decode: u32,
}

/// The number of looks at the signals within their averaging time.
const LOOKS: u32 = 6;
/// The number of looks before a number is wanted, since workers have to reconnect after a coordinator's restart.
const GATHER_LOOKS: u32 = 3;
/// The share of the tightest TTFT limit after which a sequence that only its decode worker delays counts as waiting there.
const STUCK_SHARE: f64 = 0.5;
/// The multiple of its predicted time, too: a worker that computes a long prompt delays it by nothing but that prompt.
const STUCK_TIMES: f64 = 1.5;

/// The state between looks at the signals.
#[derive(Debug)]
pub(crate) struct Autoscaler {
    settings: AutoscaleSettings,
    /// The times of the first look and the last; `None` before the first.
    looked: Option<(Duration, Duration)>,
    /// The time of prefill workers' steps since the last look, as reported.
    prefill_ms: f64,
    /// The time of the prompts in decode workers' steps since the last look, as reported.
    prompts_ms: f64,
    jobs: Jobs,
    busy: Trend,
    queued: Trend,
    prompts: Trend,
    rows: Trend,
    context: Trend,
    used: Trend,
    unserved: Trend,
    prefill: Steps,
    decode: Steps,
}

impl Autoscaler {
    pub(crate) fn new(settings: AutoscaleSettings) -> Self {
        let horizon = Horizon { start: settings.start, replace: settings.start + settings.cooldown };
        let trend = || Trend::new(settings.window, horizon);
        Self {
            looked: None,
            prefill_ms: 0.0,
            prompts_ms: 0.0,
            jobs: Jobs::default(),
            busy: trend(),
            queued: trend(),
            prompts: trend(),
            rows: trend(),
            context: trend(),
            used: trend(),
            unserved: trend(),
            prefill: Steps::new(settings.prefill, settings.cooldown),
            decode: Steps::new(settings.decode, settings.cooldown),
            settings,
        }
    }

    /// The time between two looks at the signals.
    fn every(&self) -> Duration {
        self.settings.window / LOOKS
    }

    /// The wanted numbers, or `None` if too little is known yet.
    pub(crate) fn wanted(&self) -> Option<Wanted> {
        Some(Wanted { prefill: self.prefill.wanted()?, decode: self.decode.wanted()? })
    }

    /// Takes account of a prefill job of this predicted time that was given to a worker.
    pub(crate) fn job(&mut self, ms: f64) {
        self.jobs.observe(ms);
    }

    /// Takes account of a worker's steps between two of its reports.
    pub(crate) fn report(&mut self, role: Role, cost: &StepCost, before: &Report, after: &Report) {
        let reported = after.steps.len() as f64;
        let done = after.counters.steps.saturating_sub(before.counters.steps) as f64;
        // A worker that other coordinators already know counts from its start in its first report.
        let times = if before.counters.steps == 0 || reported == 0.0 { 1.0 } else { (done / reported).max(1.0) };
        match role {
            Role::Prefill => self.prefill_ms += times * after.steps.iter().map(|step| f64::from(step.ms)).sum::<f64>(),
            Role::Decode => self.prompts_ms += times * after.steps.iter().map(|step| cost.prompts_ms(step)).sum::<f64>(),
            Role::Kvpool => {}
        }
    }

    /// Whether all decode workers may be given up.
    pub(crate) fn scales_to_zero(&self) -> bool {
        self.settings.decode.floor == 0
    }

    /// Wants a decode worker for the first request after none was wanted, without waiting for the next look.
    fn wake(&mut self, now: Duration) {
        if self.decode.wanted() == Some(0) {
            self.decode.look(now, 1, 1, 0);
        }
    }

    /// The time since the last look, or `None` if it is too early for another.
    fn is_due(&mut self, now: Duration) -> Option<Duration> {
        let (_, looked) = *self.looked.get_or_insert((now, now));
        Some(now.saturating_sub(looked)).filter(|passed| *passed >= self.every())
    }

    fn look(&mut self, now: Duration, passed: Duration, seen: &Seen, limits: Limits, cost: &StepCost) {
        let (first, _) = *self.looked.get_or_insert((now, now));
        self.looked = Some((first, now));
        let passed_ms = passed.as_secs_f64() * 1e3;
        let busy = std::mem::take(&mut self.prefill_ms) / passed_ms;
        let prompts = std::mem::take(&mut self.prompts_ms) / passed_ms;
        let prompts = self.prompts.observe(passed, prompts);
        let busy = self.busy.observe(passed, busy);
        let [queued, rows, context, used, unserved] = [
            (&mut self.queued, seen.queued_ms),
            (&mut self.rows, seen.rows),
            (&mut self.context, seen.context),
            (&mut self.used, seen.used),
            (&mut self.unserved, seen.unserved),
        ]
        .map(|(trend, value)| trend.observe(passed, value));
        if now.saturating_sub(first) < self.every() * GATHER_LOOKS {
            return;
        }
        let AutoscaleSettings { warm, prefill: prefill_range, decode: decode_range, .. } = self.settings;
        let scheduled = self.scheduled(now);
        let prefill = |of: fn(&Outlook) -> f64| {
            let load = PrefillLoad {
                // Prompts that decode workers compute because they have time count here, or each role would grow as the other shrinks.
                busy: of(&busy) + of(&prompts),
                queued_ms: of(&queued),
            };
            prefill_needed(load, &self.jobs, limits.ttft_ms, prefill_range.ceiling).saturating_add(warm).max(scheduled.prefill)
        };
        let (needed, enough) = (prefill(|outlook| outlook.soon), prefill(|outlook| outlook.most));
        self.prefill.look(now, needed, enough, seen.prefill_workers);
        let room = DecodeLimits { tpot_ms: limits.tpot_ms, blocks: seen.blocks, work_max: seen.work_max };
        let may_go = self.scales_to_zero() && !seen.is_awaited;
        let decode = |of: fn(&Outlook) -> f64| {
            // By what is there and not by averages, which take long to come to rest: the cooldown waits long enough.
            if may_go {
                return warm.max(scheduled.decode);
            }
            let (rows, context, used) = (of(&rows), of(&context), of(&used));
            let prompts = if prefill_range.ceiling == 0 { of(&prompts) } else { 0.0 };
            // A queue that is gone says nothing of the next one: its noise is not planned for.
            let load = DecodeLoad { rows, context, used, prompts, unserved: unserved.soon, workers: seen.decode_workers };
            decode_needed(load, room, cost, decode_range.ceiling).saturating_add(warm).max(scheduled.decode)
        };
        let (needed, enough) = (decode(|outlook| outlook.soon), decode(|outlook| outlook.most));
        self.decode.look(now, needed, enough, seen.decode_workers);
    }

    /// The least numbers by schedule, at the time when a worker that is started now will serve.
    fn scheduled(&self, now: Duration) -> Wanted {
        let AutoscaleSettings { schedules, clock_zero, start, .. } = &self.settings;
        let most = |of: fn(&Schedule) -> u32| schedules.iter().filter(|schedule| schedule.holds(*clock_zero + now + *start)).map(of).max();
        Wanted { prefill: most(|schedule| schedule.prefill).unwrap_or(0), decode: most(|schedule| schedule.decode).unwrap_or(0) }
    }

    pub(crate) fn check_integrity(&self) {
        self.prefill.check_integrity();
        self.decode.check_integrity();
    }
}

/// The tightest limits of all classes.
#[derive(Clone, Copy, Debug)]
struct Limits {
    tpot_ms: f64,
    ttft_ms: f64,
}

/// The signals that a look collects in addition to the sums over reports.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    prefill_workers: u32,
    decode_workers: u32,
    /// The predicted time of the prompts behind those that are being computed.
    queued_ms: f64,
    rows: f64,
    context: f64,
    /// The number of device blocks in use.
    used: f64,
    /// The mean number of device blocks of a worker.
    blocks: f64,
    /// The number of sequences that one worker takes at a time.
    work_max: f64,
    /// The number of sequences without a place, or whose decode worker has kept them waiting.
    unserved: f64,
    /// Whether a request is under way, in whatever state, or a worker has to come to tell what it can hold.
    is_awaited: bool,
}

impl Cluster {
    /// The number of workers wanted now, or `None` if autoscaling is off, or knows too little yet.
    pub fn wanted(&self) -> Option<Wanted> {
        self.autoscaler.as_ref().and_then(Autoscaler::wanted)
    }

    /// Looks at the signals, if it is time.
    pub(crate) fn autoscale(&mut self, now: Duration) {
        let Some(scaler) = &mut self.autoscaler else { return };
        if self.requests.waiting() > 0 {
            scaler.wake(now);
        }
        let Some(passed) = scaler.is_due(now) else { return };
        let (seen, limits) = (self.look(now), self.tightest_limits());
        if let Some(scaler) = &mut self.autoscaler {
            scaler.look(now, passed, &seen, limits, self.cost.of_role(Role::Decode));
        }
    }

    fn look(&self, now: Duration) -> Seen {
        let mut seen = Seen::default();
        for (epoch, member) in self.membership.taking_work() {
            let Some(load) = self.load.get(epoch) else { continue };
            match member.role() {
                Role::Prefill => {
                    seen.prefill_workers += 1;
                    seen.queued_ms += load.prefill.behind_head_ms();
                }
                Role::Decode => {
                    seen.decode_workers += 1;
                    self.look_at_decode(&mut seen, epoch, member);
                }
                Role::Kvpool => {}
            }
        }
        let workers = f64::from(seen.decode_workers.max(1));
        (seen.blocks, seen.work_max) = (seen.blocks / workers, seen.work_max / workers);
        seen.unserved = (self.requests.waiting() + self.stuck(now)) as f64;
        seen.is_awaited = self.requests.len() > 0 || seen.rows > 0.0 || self.context_tokens(now).is_none();
        seen
    }

    fn look_at_decode(&self, seen: &mut Seen, worker: Epoch, member: &Member) {
        let (Some(load), Some(info)) = (self.load.get(worker), member.decode_info()) else { return };
        let (sequences, tokens) = load.whole(u64::from(sequence_tokens_max(info)) / 4);
        let rows = f64::from(load.decode.decoding.saturating_add(load.others));
        seen.rows += rows;
        seen.context += tokens as f64 * rows / f64::from(sequences.max(1));
        seen.used += load.report.blocks.hbm.used as f64;
        seen.blocks += f64::from(info.device_blocks);
        seen.work_max += f64::from(self.settings.policy.decode_sequences_max.map_or(info.work_max, |most| most.min(info.work_max)));
    }

    /// The number of sequences that have no first token and have long been waiting for their decode worker only.
    fn stuck(&self, now: Duration) -> usize {
        let patience = Duration::from_secs_f64(STUCK_SHARE * self.tightest_limits().ttft_ms / 1e3);
        let waits = |(at, running): &(crate::requests::ChoiceId, crate::requests::Running)| {
            let (request, sequence) = self.requests.choice(*at);
            let since = request.handed_over.map_or(running.since, |(handed_over, _)| handed_over.max(running.since));
            let predicted =
                Duration::try_from_secs_f64(STUCK_TIMES * running.predicted_ttft_ms.unwrap_or(0.0) / 1e3).unwrap_or(Duration::MAX);
            sequence.generated.is_empty() && request.prefill.is_none() && now.saturating_sub(since) > patience.max(predicted)
        };
        self.requests.running().filter(waits).count()
    }

    /// The tightest limits of all classes, or default ones if no class has any.
    fn tightest_limits(&self) -> Limits {
        let least = |of: fn(&crate::class::Class) -> Option<f64>, otherwise: f64| {
            let limits = self.settings.classes.iter().filter_map(|(_, class)| of(class));
            limits.reduce(f64::min).unwrap_or(otherwise)
        };
        Limits { tpot_ms: least(|class| class.tpot_ms, TPOT_MS), ttft_ms: least(|class| class.ttft_ms, TTFT_MS) }
    }
}

/// The TPOT limit if no class has one.
const TPOT_MS: f64 = 100.0;
/// The TTFT limit if no class has one.
const TTFT_MS: f64 = 2000.0;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidemill_proto::message::StepSample;

    const SETTINGS: AutoscaleSettings = AutoscaleSettings {
        prefill: Range { floor: 0, ceiling: 12 },
        decode: Range { floor: 1, ceiling: 12 },
        warm: 0,
        window: Duration::from_secs(30),
        start: Duration::from_secs(60),
        cooldown: Duration::from_secs(120),
        schedules: Vec::new(),
        clock_zero: Duration::ZERO,
    };

    /// The numbers wanted under a constant load with random noise: `prefill` workers' time, and `rows` that decode.
    fn under(prefill: f64, rows: f64, chance: &[f64]) -> Vec<Wanted> {
        let mut scaler = Autoscaler::new(SETTINGS);
        let (every, mut cost) = (scaler.every(), StepCost::default());
        (0..500).for_each(|step| {
            let rows = 1 + step % 64;
            let ms = 10.0 + rows as f32;
            cost.observe(&StepSample { decode_rows: rows, sequences: rows, drawn: rows, ms, ..StepSample::default() });
        });
        let mut all = Vec::new();
        for (number, chance) in (0..600).zip(chance.iter().cycle()) {
            let now = every * number;
            let Some(passed) = scaler.is_due(now) else { continue };
            scaler.prefill_ms = prefill * chance * passed.as_secs_f64() * 1e3;
            scaler.job(400.0);
            let there = all.last().copied().unwrap_or(Wanted { prefill: 1, decode: 1 });
            let seen = Seen {
                prefill_workers: there.prefill.max(1),
                decode_workers: there.decode,
                rows: rows * chance,
                context: 500.0 * rows * chance,
                blocks: 4000.0,
                used: 32.0 * rows * chance,
                work_max: 256.0,
                ..Seen::default()
            };
            scaler.look(now, passed, &seen, Limits { tpot_ms: 50.0, ttft_ms: 2000.0 }, &cost);
            scaler.check_integrity();
            all.extend(scaler.wanted());
        }
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_steady_load_does_not_flap_and_more_of_it_wants_no_fewer(
            prefill in 0.0..14.0_f64, rows in 0.0..400.0_f64, more in 1.0..2.0_f64, chance in prop::collection::vec(0.8..1.2_f64, 7..20),
        ) {
            let all = under(prefill, rows, &chance);
            prop_assert!(all.iter().all(|wanted| wanted.prefill <= 12 && (1..=12).contains(&wanted.decode)));
            // Half an hour is more than enough to give up the surplus from the start, step by step.
            let steady = &all[all.len() - 200..];
            prop_assert!(steady.iter().all(|wanted| wanted == &steady[0]), "{:?}", steady);
            let with_more = *under(more * prefill, more * rows, &chance).last().unwrap();
            prop_assert!(with_more.prefill >= steady[0].prefill && with_more.decode >= steady[0].decode, "{:?}, {:?}", steady[0], with_more);
        }
    }
}

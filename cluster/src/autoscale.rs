//! How many workers a model wants, of each role. It only wants: what starts workers, and drains and ends them, is told by the view.
//!
//! ```text
//!   workers' reports ──► [`trend`] ──► [`demand`]: what is needed ──► [`steps`]: what is wanted ──► view, `tidemill_wanted_workers`
//! ```
//!
//! - [`demand`]: workers that keep the classes' limits, by predicted queue seconds, predicted step times and KV use
//! - [`steps`]: from what is needed to what is wanted: up at once, down slowly, between a floor and a ceiling
//! - [`trend`]: signals, smoothed and extrapolated to the time when a worker that is started now will serve
//!
//! Every signal but two is of the workers' reports, which all coordinators get. A coordinator's own are the prompts that wait behind others,
//! and the sequences without a place. So several coordinators want nearly the same, and the largest of their numbers is the cluster's.

pub mod demand;
pub mod steps;
pub mod trend;

use crate::{
    Cluster,
    cost::StepCost,
    membership::{Member, sequence_tokens_max},
};
use demand::{DecodeLimits, DecodeLoad, Jobs, PrefillLoad, decode_needed, prefill_needed};
use serde::Serialize;
use std::time::Duration;
use steps::{Range, Steps};
use tidemill_proto::{
    ids::Epoch,
    message::{Report, Role},
};
use trend::Trend;

#[derive(Clone, Debug, PartialEq)]
pub struct AutoscaleSettings {
    pub prefill: Range,
    pub decode: Range,
    /// Workers of each role beyond those that are needed: what comes suddenly finds them loaded and idle.
    pub warm: u32,
    /// From a worker's start until it serves.
    pub start: Duration,
    /// How long less must have been enough before a worker is given up, and the least time from one change to the next smaller number.
    pub cooldown: Duration,
}

/// Workers that are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Wanted {
    pub prefill: u32,
    pub decode: u32,
}

/// Between two looks at the signals.
pub const EVERY: Duration = Duration::from_secs(5);
/// Until then nothing is wanted: after a coordinator's restart its workers have to come back first.
const GATHER: Duration = Duration::from_secs(15);
/// Time constant of the signals' moving averages.
const WINDOW: Duration = Duration::from_secs(30);
/// Share of the tightest TTFT limit after which a sequence that only its decode worker delays counts as waiting there.
const STUCK_SHARE: f64 = 0.5;

/// The state between looks.
#[derive(Debug)]
pub(crate) struct Autoscaler {
    settings: AutoscaleSettings,
    /// The first look, and the last; `None`: there was none.
    looked: Option<(Duration, Duration)>,
    /// Since the last look, as workers have reported: time of prefill workers' steps,
    prefill_ms: f64,
    /// and of the prompts in decode workers' steps.
    prompts_ms: f64,
    jobs: Jobs,
    busy: Trend,
    prompts: Trend,
    rows: Trend,
    context: Trend,
    used: Trend,
    prefill: Steps,
    decode: Steps,
}

impl Autoscaler {
    pub(crate) fn new(settings: AutoscaleSettings) -> Self {
        let trend = || Trend::new(WINDOW, settings.start);
        Self {
            looked: None,
            prefill_ms: 0.0,
            prompts_ms: 0.0,
            jobs: Jobs::default(),
            busy: trend(),
            prompts: trend(),
            rows: trend(),
            context: trend(),
            used: trend(),
            prefill: Steps::new(settings.prefill, settings.cooldown),
            decode: Steps::new(settings.decode, settings.cooldown),
            settings,
        }
    }

    /// `None`: it knows too little yet.
    pub(crate) fn wanted(&self) -> Option<Wanted> {
        Some(Wanted { prefill: self.prefill.wanted()?, decode: self.decode.wanted()? })
    }

    /// A prefill job of this predicted time was given to a worker.
    pub(crate) fn job(&mut self, ms: f64) {
        self.jobs.observe(ms);
    }

    /// A worker's steps between two of its reports.
    pub(crate) fn report(&mut self, role: Role, cost: &StepCost, before: &Report, after: &Report) {
        let reported = after.steps.len() as f64;
        let done = after.counters.steps.saturating_sub(before.counters.steps) as f64;
        // The first report of a worker that other coordinators know counts from its start.
        let times = if before.counters.steps == 0 || reported == 0.0 { 1.0 } else { (done / reported).max(1.0) };
        match role {
            Role::Prefill => self.prefill_ms += times * after.steps.iter().map(|step| f64::from(step.ms)).sum::<f64>(),
            Role::Decode => self.prompts_ms += times * after.steps.iter().map(|step| cost.prompts_ms(step)).sum::<f64>(),
            Role::Kvpool => {}
        }
    }

    pub(crate) fn check_integrity(&self) {
        self.prefill.check_integrity();
        self.decode.check_integrity();
    }
}

/// What a look finds besides what reports have added up.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    prefill_workers: u32,
    decode_workers: u32,
    /// Predicted time of the prompts behind those that are being computed.
    queued_ms: f64,
    rows: f64,
    context: f64,
    /// Device blocks in use,
    used: f64,
    /// and of one worker, on average.
    blocks: f64,
    /// Sequences that one worker takes at a time.
    work_max: f64,
    /// Sequences without a place, or whose decode worker has kept them waiting.
    unserved: f64,
}

impl Cluster {
    /// Workers that are wanted by now; `None`: nothing decides about that here, or not yet.
    pub fn wanted(&self) -> Option<Wanted> {
        self.autoscaler.as_ref().and_then(Autoscaler::wanted)
    }

    /// Looks at the signals, if it is time.
    pub(crate) fn autoscale(&mut self, now: Duration) {
        let Some(scaler) = &self.autoscaler else { return };
        let Some((first, looked)) = scaler.looked else {
            self.autoscaler.iter_mut().for_each(|scaler| scaler.looked = Some((now, now)));
            return;
        };
        let passed = now.saturating_sub(looked);
        if passed < EVERY {
            return;
        }
        let seen = self.look(now);
        let (tpot_ms, ttft_ms) = self.tightest_limits();
        let Some(scaler) = &mut self.autoscaler else { return };
        scaler.looked = Some((first, now));
        let passed_ms = passed.as_secs_f64() * 1e3;
        let busy = std::mem::take(&mut scaler.prefill_ms) / passed_ms;
        let prompts = std::mem::take(&mut scaler.prompts_ms) / passed_ms;
        let prompts = scaler.prompts.observe(passed, prompts);
        let prefill = PrefillLoad {
            // Without a prefill worker, decode workers compute what the first one would.
            busy: if seen.prefill_workers == 0 { prompts } else { scaler.busy.observe(passed, busy) },
            queued_ms: seen.queued_ms,
        };
        let decode = DecodeLoad {
            rows: scaler.rows.observe(passed, seen.rows),
            context: scaler.context.observe(passed, seen.context),
            used: scaler.used.observe(passed, seen.used),
            prompts,
            unserved: seen.unserved,
            workers: seen.decode_workers,
        };
        let limits = DecodeLimits { tpot_ms, blocks: seen.blocks, work_max: seen.work_max };
        if now.saturating_sub(first) < GATHER {
            return;
        }
        let warm = scaler.settings.warm;
        let needed = prefill_needed(prefill, &scaler.jobs, ttft_ms, scaler.settings.prefill.ceiling);
        scaler.prefill.look(now, needed.saturating_add(warm), seen.prefill_workers);
        let needed = decode_needed(decode, limits, self.cost.of_role(Role::Decode), scaler.settings.decode.ceiling);
        scaler.decode.look(now, needed.saturating_add(warm), seen.decode_workers);
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

    /// Sequences without a first token that wait for nothing but their decode worker, and have done so for long.
    fn stuck(&self, now: Duration) -> usize {
        let (_, ttft_ms) = self.tightest_limits();
        let patience = Duration::from_secs_f64(STUCK_SHARE * ttft_ms / 1e3);
        let waits = |(at, running): &(crate::requests::ChoiceId, crate::requests::Running)| {
            let (request, sequence) = self.requests.choice(*at);
            let since = request.handed_over.map_or(running.since, |(handed_over, _)| handed_over.max(running.since));
            sequence.generated.is_empty() && request.prefill.is_none() && now.saturating_sub(since) > patience
        };
        self.requests.running().filter(waits).count()
    }

    /// Of all classes: limits for TPOT and TTFT, those of the default classes if no class has any.
    fn tightest_limits(&self) -> (f64, f64) {
        let least = |of: fn(&crate::class::Class) -> Option<f64>, otherwise: f64| {
            let limits = self.settings.classes.iter().filter_map(|(_, class)| of(class));
            limits.reduce(f64::min).unwrap_or(otherwise)
        };
        (least(|class| class.tpot_ms, TPOT_MS), least(|class| class.ttft_ms, TTFT_MS))
    }
}

/// Limits where no class has any.
const TPOT_MS: f64 = 100.0;
const TTFT_MS: f64 = 2000.0;

//! Runs to figures: latencies, goodput, sources of tokens, and the steadiness of the load.

use crate::load::percentiles::Percentiles;
use serde::Serialize;
use std::time::Duration;
use tidemill_sim::{
    outcome::{Answer, End, LoadPoint},
    settings::{Class, WorkloadSettings},
    world::Run,
};

/// Several runs of one cell, with different seeds, taken together.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub requests: usize,
    pub complete: usize,
    pub rejected: usize,
    pub failed: usize,
    /// The number of requests per second, and of good ones among them.
    pub requests_per_s: f64,
    pub good_per_s: f64,
    /// The share of all requests that were complete and met both limits of their class.
    pub goodput_ratio: f64,
    pub ttft_ms: Option<Percentiles>,
    pub tpot_ms: Option<Percentiles>,
    /// The share of the prompts' tokens that came from a cache.
    pub cached_share: f64,
    /// The share of the prompts' tokens that prefill workers computed.
    pub prefill_share: f64,
    /// The share of the prompts' tokens that decode workers computed.
    pub local_share: f64,
    /// |predicted − actual| / actual TTFT.
    pub prediction_error_p50: Option<f64>,
    pub prediction_error_p90: Option<f64>,
    /// The longest wait of rejected clients for that answer.
    pub rejection_ms_max: Option<f64>,
    pub classes: Vec<ClassSummary>,
    pub load: Steadiness,
    pub workers: WorkersUsed,
    pub network_gb: f64,
    pub virtual_s: f64,
    pub events: u64,
    /// The time on one core.
    pub cpu_s: f64,
    pub events_per_s: f64,
    /// The mean TTFT of each seed's run.
    pub ttft_mean_ms_by_seed: Vec<f64>,
    /// The number of prefill jobs that failed, and of links that were closed.
    pub faults: u64,
    pub digest: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct ClassSummary {
    pub name: String,
    pub requests: usize,
    pub rejected: usize,
    pub goodput_ratio: f64,
    pub ttft_ms: Option<Percentiles>,
    pub tpot_ms: Option<Percentiles>,
}

/// Mean and standard deviation of the load over time.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Steadiness {
    pub prefill_mean: f64,
    pub prefill_deviation: f64,
    pub decode_mean: f64,
    pub decode_deviation: f64,
    /// The mean of the decode instances' sequences.
    pub sequences_mean: f64,
    pub sequences_deviation: f64,
}

impl Summary {
    pub fn new(runs: &[(Run, Duration)], workload: &WorkloadSettings) -> Self {
        let counted = |run: &Run| warmup(run.answers.len(), workload);
        let answers: Vec<&Answer> = runs.iter().flat_map(|(run, _)| run.answers.iter().skip(counted(run))).collect();
        let is_good =
            |answer: &Answer| workload.classes.get(answer.class).map_or(answer.end == End::Complete, |class| answer.is_good(class));
        let good = answers.iter().filter(|answer| is_good(answer)).count();
        let ended = |wanted: fn(&End) -> bool| answers.iter().filter(|answer| wanted(&answer.end)).count();
        let sent_s: f64 = runs.iter().map(|(run, _)| sent_s(&run.answers[counted(run)..])).sum();
        let prompts: f64 = answers.iter().map(|answer| answer.sources.total() as f64).sum::<f64>().max(1.0);
        let share = |of: fn(&Answer) -> u64| answers.iter().map(|answer| of(answer) as f64).sum::<f64>() / prompts;
        let mut errors: Vec<f64> =
            answers.iter().filter_map(|answer| Some((answer.predicted_ttft_ms? / answer.ttft_ms()? - 1.0).abs())).collect();
        errors.sort_by(f64::total_cmp);
        let error_at = |share: f64| errors.get((errors.len() as f64 * share) as usize).copied();
        let rejections = answers.iter().filter(|answer| matches!(answer.end, End::Rejected(_)));
        let events: u64 = runs.iter().map(|(run, _)| run.events).sum();
        let cpu_s: f64 = runs.iter().map(|(_, cpu)| cpu.as_secs_f64()).sum();
        Self {
            requests: answers.len(),
            complete: ended(|end| *end == End::Complete),
            rejected: ended(|end| matches!(end, End::Rejected(_))),
            failed: ended(|end| matches!(end, End::Failed(_) | End::Open)),
            requests_per_s: answers.len() as f64 / sent_s,
            good_per_s: good as f64 / sent_s,
            goodput_ratio: good as f64 / answers.len().max(1) as f64,
            ttft_ms: percentiles(&answers, Answer::ttft_ms),
            tpot_ms: percentiles(&answers, Answer::tpot_ms),
            cached_share: share(|answer| answer.sources.cached()),
            prefill_share: share(|answer| answer.sources.prefill),
            local_share: share(|answer| answer.sources.local),
            prediction_error_p50: error_at(0.5),
            prediction_error_p90: error_at(0.9),
            rejection_ms_max: rejections.map(|answer| (answer.ended - answer.at).as_secs_f64() * 1e3).reduce(f64::max),
            classes: workload.classes.iter().enumerate().map(|(number, class)| ClassSummary::new(&answers, number, class)).collect(),
            load: Steadiness::of(runs.iter().flat_map(|(run, _)| counted_load(run, workload.warmup))),
            workers: WorkersUsed::of(runs),
            network_gb: runs.iter().map(|(run, _)| run.network_bytes / 1e9).sum(),
            virtual_s: runs.iter().map(|(run, _)| run.virtual_time.as_secs_f64()).sum(),
            events,
            cpu_s,
            events_per_s: events as f64 / cpu_s,
            ttft_mean_ms_by_seed: runs
                .iter()
                .filter_map(|(run, _)| Some(percentiles(&run.answers[counted(run)..].iter().collect::<Vec<_>>(), Answer::ttft_ms)?.mean))
                .collect(),
            faults: runs.iter().map(|(run, _)| run.closed + run.warnings).sum(),
            digest: runs.iter().map(|(run, _)| format!("{:016x}", run.digest)).collect::<Vec<_>>().join(" "),
        }
    }
}

/// Workers that ran: while requests came, over all seeds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct WorkersUsed {
    pub prefill_hours: f64,
    pub decode_hours: f64,
    pub prefill_max: u32,
    pub decode_max: u32,
    /// Changes to a larger and to a smaller number,
    pub ups: usize,
    pub downs: usize,
    /// and ups of a role within five minutes after a down of it.
    pub flaps: usize,
}

/// An up so soon after a down took back what should not have been given.
const FLAP_S: f64 = 300.0;

impl WorkersUsed {
    fn of(runs: &[(Run, Duration)]) -> Self {
        let mut used = Self::default();
        for (run, _) in runs {
            let points: Vec<LoadPoint> = counted_load(run, 0.0).collect();
            used.prefill_hours += points.iter().map(|point| f64::from(point.workers.prefill)).sum::<f64>() / 3600.0;
            used.decode_hours += points.iter().map(|point| f64::from(point.workers.decode)).sum::<f64>() / 3600.0;
            used.prefill_max = points.iter().map(|point| point.workers.prefill).fold(used.prefill_max, u32::max);
            used.decode_max = points.iter().map(|point| point.workers.decode).fold(used.decode_max, u32::max);
            used.count_changes(&points, |point| point.workers.prefill);
            used.count_changes(&points, |point| point.workers.decode);
        }
        used
    }

    fn count_changes(&mut self, points: &[LoadPoint], of: fn(&LoadPoint) -> u32) {
        let mut fell = f64::NEG_INFINITY;
        for (before, after) in points.iter().zip(points.iter().skip(1)) {
            if of(after) > of(before) {
                self.ups += 1;
                self.flaps += usize::from(after.s - fell < FLAP_S);
            } else if of(after) < of(before) {
                (self.downs, fell) = (self.downs + 1, after.s);
            }
        }
    }

    pub fn hours(&self) -> f64 {
        self.prefill_hours + self.decode_hours
    }
}

impl ClassSummary {
    fn new(answers: &[&Answer], number: usize, class: &Class) -> Self {
        let own: Vec<&Answer> = answers.iter().copied().filter(|answer| answer.class == number).collect();
        Self {
            name: class.name.clone(),
            requests: own.len(),
            rejected: own.iter().filter(|answer| matches!(answer.end, End::Rejected(_))).count(),
            goodput_ratio: own.iter().filter(|answer| answer.is_good(class)).count() as f64 / own.len().max(1) as f64,
            ttft_ms: percentiles(&own, Answer::ttft_ms),
            tpot_ms: percentiles(&own, Answer::tpot_ms),
        }
    }
}

impl Steadiness {
    fn of(points: impl Iterator<Item = LoadPoint>) -> Self {
        let points: Vec<LoadPoint> = points.collect();
        let moments = |of: fn(&LoadPoint) -> f64| {
            let n = points.len().max(1) as f64;
            let mean = points.iter().map(of).sum::<f64>() / n;
            (mean, (points.iter().map(|point| (of(point) - mean).powi(2)).sum::<f64>() / n).sqrt())
        };
        let (prefill_mean, prefill_deviation) = moments(|point| point.prefill_load);
        let (decode_mean, decode_deviation) = moments(|point| point.decode_load);
        let (sequences_mean, sequences_deviation) = moments(|point| point.decode_sequences);
        Self { prefill_mean, prefill_deviation, decode_mean, decode_deviation, sequences_mean, sequences_deviation }
    }
}

/// The load while requests come, without the warm-up.
fn counted_load(run: &Run, warmup: f64) -> impl Iterator<Item = LoadPoint> {
    let (first, last) = (run.answers.first(), run.answers.last());
    let end = first.zip(last).map_or(0.0, |(first, last)| (last.at - first.at).as_secs_f64());
    run.load.iter().copied().filter(move |point| (end * warmup..=end).contains(&point.s))
}

fn sent_s(answers: &[Answer]) -> f64 {
    let ends = answers.first().zip(answers.last());
    ends.map_or(1.0, |(first, last)| (last.at - first.at).as_secs_f64()).max(1e-9)
}

/// The number of requests that warm the cluster up.
pub fn warmup(requests: usize, workload: &WorkloadSettings) -> usize {
    (requests as f64 * workload.warmup.clamp(0.0, 0.9)) as usize
}

pub fn percentiles(answers: &[&Answer], of: fn(&Answer) -> Option<f64>) -> Option<Percentiles> {
    Percentiles::of(answers.iter().filter_map(|answer| of(answer)).map(|ms| Duration::from_secs_f64(ms / 1e3)))
}

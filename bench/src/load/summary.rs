//! Turns all samples into percentiles, rates and goodput, and prints them.

use super::{
    drive::Sample,
    percentiles::{Latencies, Percentiles},
    timeline::Answer,
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, time::Duration};

/// Limits that a good request meets. A missing limit is always met.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slo {
    pub ttft: Option<Duration>,
    pub tpot: Option<Duration>,
    /// The limit of the longest tenth of the gaps, in place of `tpot`, for the effective request capacity.
    pub tbt: Option<Duration>,
}

/// The reason why a request failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// A short name to count by.
    pub kind: String,
    pub message: String,
}

/// Requests that were answered within the limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    pub requests_per_s: f64,
    /// The share of all requests, failed ones included.
    pub ratio: f64,
}

/// Failed requests of one kind, with the first one's message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ErrorKind {
    pub count: u64,
    pub example: String,
}

/// The results. A percentile without samples is `null`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    pub requests: u64,
    pub completed: u64,
    pub errors: u64,
    pub errors_by_kind: BTreeMap<String, ErrorKind>,
    /// The time from the start to the last answer's end, without the warm-up.
    pub duration_s: f64,
    pub requests_per_s: f64,
    pub output_tokens_per_s: f64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub ttft_ms: Option<Percentiles>,
    pub tpot_ms: Option<Percentiles>,
    pub itl_ms: Option<Percentiles>,
    /// The mean of each request's longest tenth of gaps.
    pub tbt_ms: Option<Percentiles>,
    pub e2e_ms: Option<Percentiles>,
    /// The delay with which this program sent requests. Large values mean that it was the bottleneck, not the server.
    pub send_lag_ms: Option<Percentiles>,
    /// The requests that kept TTFT and TPOT, if there are such limits.
    pub goodput: Option<Goodput>,
    /// The requests that kept TTFT and TBT, if there is a limit of TBT: Mooncake's effective request capacity.
    pub capacity: Option<Goodput>,
    /// TTFT by the share of the prompt that was cached, if any was.
    pub by_cached: Vec<Group>,
    /// TTFT by turn, if there were several.
    pub by_turn: Vec<Group>,
    /// For plots: milliseconds, and the share of answers that took at most as long.
    pub distributions: BTreeMap<String, Vec<(f64, f64)>>,
    pub timeline: Vec<Interval>,
}

/// Requests that have something in common.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub name: String,
    pub completed: u64,
    pub ttft_ms: Option<Percentiles>,
}

/// The events in a part of the measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The beginning of the interval, after the start.
    pub s: f64,
    pub due: u64,
    pub answered: u64,
    pub failed: u64,
    pub output_tokens_per_s: f64,
    /// The median TTFT of the requests that were due in the interval.
    pub ttft_ms_p50: Option<f64>,
}

/// The most intervals, as more cannot be distinguished on a plot.
const INTERVALS_MAX: f64 = 120.0;

impl Summary {
    /// Summarizes a measurement that took `duration`, without the requests that were due in the first `warmup` of it.
    pub fn new(samples: &[Sample], duration: Duration, warmup: Duration, slo: Slo) -> Summary {
        let counted: Vec<&Sample> = samples.iter().filter(|sample| sample.due >= warmup).collect();
        let answers: Vec<&Answer> = counted.iter().filter_map(|sample| sample.outcome.as_ref().ok()).collect();
        let duration_s = duration.saturating_sub(warmup).as_secs_f64();
        let per_s = |count: u64| if duration_s > 0.0 { count as f64 / duration_s } else { 0.0 };
        let total = |tokens: fn(&Answer) -> u64| answers.iter().map(|answer| tokens(answer)).sum();
        let output_tokens = total(|answer| answer.output_tokens);
        let kept = |slo: Slo| {
            let good = answers.iter().filter(|answer| slo.is_met(answer)).count() as u64;
            Goodput { requests_per_s: per_s(good), ratio: good as f64 / counted.len().max(1) as f64 }
        };
        let mut errors_by_kind = BTreeMap::<String, ErrorKind>::new();
        for failure in counted.iter().filter_map(|sample| sample.outcome.as_ref().err()) {
            let first = || ErrorKind { count: 0, example: failure.message.clone() };
            errors_by_kind.entry(failure.kind.clone()).or_insert_with(first).count += 1;
        }
        let ttft: Latencies = answers.iter().map(|answer| answer.ttft).collect();
        let tpot: Latencies = answers.iter().filter_map(|answer| answer.tpot()).collect();
        let itl: Latencies = answers.iter().flat_map(|answer| answer.gaps.iter().copied()).collect();
        let e2e: Latencies = answers.iter().map(|answer| answer.e2e).collect();
        let tbt: Latencies = answers.iter().filter_map(|answer| answer.tbt()).collect();
        let lag: Latencies = counted.iter().map(|sample| sample.lag).collect();
        let plotted = [("ttft_ms", &ttft), ("tpot_ms", &tpot), ("itl_ms", &itl), ("e2e_ms", &e2e)];
        Summary {
            requests: counted.len() as u64,
            completed: answers.len() as u64,
            errors: (counted.len() - answers.len()) as u64,
            errors_by_kind,
            duration_s,
            requests_per_s: per_s(answers.len() as u64),
            output_tokens_per_s: per_s(output_tokens),
            prompt_tokens: total(|answer| answer.prompt_tokens),
            cached_tokens: total(|answer| answer.cached_tokens),
            output_tokens,
            ttft_ms: ttft.percentiles(),
            tpot_ms: tpot.percentiles(),
            itl_ms: itl.percentiles(),
            tbt_ms: tbt.percentiles(),
            e2e_ms: e2e.percentiles(),
            send_lag_ms: lag.percentiles(),
            goodput: (slo.ttft.is_some() || slo.tpot.is_some()).then(|| kept(Slo { tbt: None, ..slo })),
            capacity: slo.tbt.is_some().then(|| kept(Slo { tpot: None, ..slo })),
            by_cached: by_cached(&answers),
            by_turn: by_turn(&counted),
            distributions: plotted.into_iter().map(|(name, latencies)| (name.to_owned(), latencies.cdf())).collect(),
            timeline: timeline(samples, duration),
        }
    }
}

fn by_cached(answers: &[&Answer]) -> Vec<Group> {
    const NAMES: [&str; 6] =
        ["nothing", "below a quarter", "a quarter to a half", "a half to three quarters", "three quarters or more", "all but a block"];
    if answers.iter().all(|answer| answer.cached_tokens == 0) {
        return Vec::new();
    }
    let place = |answer: &Answer| match answer.cached_tokens as f64 / answer.prompt_tokens.max(1) as f64 {
        0.0 => 0,
        _ if answer.prompt_tokens.saturating_sub(answer.cached_tokens) <= BLOCK_TOKENS => 5,
        share => 1 + (4.0 * share).min(3.0) as usize,
    };
    let group = |(number, name): (usize, &str)| group(name.to_owned(), answers.iter().filter(|answer| place(answer) == number).copied());
    NAMES.into_iter().enumerate().map(group).filter(|group| group.completed > 0).collect()
}

/// The smallest unit of a server's cache: the last tokens are always computed.
const BLOCK_TOKENS: u64 = 16;

fn by_turn(samples: &[&Sample]) -> Vec<Group> {
    let turns = samples.iter().map(|sample| sample.turn + 1).max().unwrap_or(0);
    if turns < 2 {
        return Vec::new();
    }
    let answers = |turn| samples.iter().filter(move |sample| sample.turn == turn).filter_map(|sample| sample.outcome.as_ref().ok());
    (0..turns).map(|turn| group(format!("turn {}", turn + 1), answers(turn))).collect()
}

pub fn group<'a>(name: String, answers: impl Iterator<Item = &'a Answer>) -> Group {
    let ttft: Vec<Duration> = answers.map(|answer| answer.ttft).collect();
    Group { name, completed: ttft.len() as u64, ttft_ms: ttft.into_iter().collect::<Latencies>().percentiles() }
}

fn timeline(samples: &[Sample], duration: Duration) -> Vec<Interval> {
    let every_s = (duration.as_secs_f64() / INTERVALS_MAX).ceil().max(1.0);
    let count = (duration.as_secs_f64() / every_s).ceil().max(1.0) as usize;
    let mut intervals: Vec<Interval> = (0..count).map(|n| Interval { s: n as f64 * every_s, ..Interval::default() }).collect();
    let mut ttfts: Vec<Vec<Duration>> = vec![Vec::new(); count];
    let place = |at: Duration| ((at.as_secs_f64() / every_s) as usize).min(count - 1);
    for sample in samples {
        intervals[place(sample.due)].due += 1;
        let Ok(answer) = &sample.outcome else {
            intervals[place(sample.due)].failed += 1;
            continue;
        };
        intervals[place(sample.due + answer.e2e)].answered += 1;
        ttfts[place(sample.due)].push(answer.ttft);
        // A chunk may have several tokens.
        let chunk = answer.output_tokens as f64 / (answer.gaps.len() + 1) as f64 / every_s;
        let mut at = sample.due + answer.ttft;
        intervals[place(at)].output_tokens_per_s += chunk;
        for gap in &answer.gaps {
            at += *gap;
            intervals[place(at)].output_tokens_per_s += chunk;
        }
    }
    for (interval, ttfts) in intervals.iter_mut().zip(ttfts) {
        interval.ttft_ms_p50 = Percentiles::of(ttfts.into_iter()).map(|ttft| ttft.p50);
    }
    intervals
}

impl Slo {
    pub fn is_met(&self, answer: &Answer) -> bool {
        // An answer of one token has no second one that could be late.
        let within = |limit: Option<Duration>, value: Option<Duration>| limit.is_none_or(|limit| value.is_none_or(|value| value <= limit));
        within(self.ttft, Some(answer.ttft)) && within(self.tpot, answer.tpot()) && within(self.tbt, self.tbt.and_then(|_| answer.tbt()))
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "completed          {:>10} of {} in {:.1} s", self.completed, self.requests, self.duration_s)?;
        writeln!(f, "requests/s         {:>10.3}", self.requests_per_s)?;
        writeln!(f, "output tokens/s    {:>10.1}", self.output_tokens_per_s)?;
        let cached = 100.0 * self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64;
        writeln!(f, "prompt tokens      {:>10}   {cached:.1} % of them cached", self.prompt_tokens)?;
        writeln!(f, "output tokens      {:>10}", self.output_tokens)?;
        for (name, kept) in [("goodput", &self.goodput), ("effective capacity", &self.capacity)] {
            if let Some(kept) = kept {
                writeln!(f, "{name:<18} {:>10.3} requests/s, {:.1} % of all", kept.requests_per_s, 100.0 * kept.ratio)?;
            }
        }
        writeln!(f, "\n{:<12}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}", "ms", "mean", "p50", "p90", "p99", "p99.9", "max")?;
        let rows = [
            ("TTFT", &self.ttft_ms),
            ("TPOT", &self.tpot_ms),
            ("ITL", &self.itl_ms),
            ("TBT", &self.tbt_ms),
            ("end to end", &self.e2e_ms),
            ("send lag", &self.send_lag_ms),
        ];
        rows.iter().try_for_each(|(name, percentiles)| row(f, name, 12, percentiles.as_ref()))?;
        for (title, groups) in [("TTFT, cached", &self.by_cached), ("TTFT", &self.by_turn)] {
            if !groups.is_empty() {
                writeln!(f, "\n{title:<38}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}", "mean", "p50", "p90", "p99", "p99.9", "max")?;
            }
            for Group { name, completed, ttft_ms } in groups {
                row(f, &format!("{name} ({completed})"), 38, ttft_ms.as_ref())?;
            }
        }
        for (kind, ErrorKind { count, example }) in &self.errors_by_kind {
            writeln!(f, "\n{count} × {kind}, such as: {example}")?;
        }
        Ok(())
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, width: usize, percentiles: Option<&Percentiles>) -> fmt::Result {
    match percentiles {
        Some(Percentiles { mean, p50, p90, p99, p99_9, max, .. }) => {
            writeln!(f, "{name:<width$}{mean:>10.2}{p50:>10.2}{p90:>10.2}{p99:>10.2}{p99_9:>10.2}{max:>10.2}")
        }
        None => writeln!(f, "{name:<width$}{:>10}", "-"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(ttft_ms: u64, e2e_ms: u64, output_tokens: u64) -> Answer {
        let (ttft, e2e) = (Duration::from_millis(ttft_ms), Duration::from_millis(e2e_ms));
        Answer { ttft, e2e, gaps: vec![e2e - ttft], prompt_tokens: 10, cached_tokens: 4, output_tokens }
    }

    fn failure(kind: &str) -> Failure {
        Failure { kind: kind.into(), message: format!("{kind}!") }
    }

    /// Samples that are due a second apart.
    fn samples(outcomes: impl IntoIterator<Item = Result<Answer, Failure>>) -> Vec<Sample> {
        let sample = |(n, outcome)| Sample { session: n as usize, due: Duration::from_secs(n), lag: Duration::ZERO, turn: 0, outcome };
        (0..).zip(outcomes).map(sample).collect()
    }

    fn summary(samples: &[Sample], duration_s: u64, slo: Slo) -> Summary {
        Summary::new(samples, Duration::from_secs(duration_s), Duration::ZERO, slo)
    }

    #[test]
    fn rates_count_what_was_answered() {
        let outcomes = [Ok(answer(100, 200, 11)), Ok(answer(300, 900, 7)), Err(failure("timeout")), Err(failure("timeout"))];
        let summary = summary(&samples(outcomes), 2, Slo::default());
        assert_eq!((summary.requests, summary.completed, summary.errors), (4, 2, 2));
        assert_eq!((summary.requests_per_s, summary.output_tokens_per_s), (1.0, 9.0));
        assert_eq!((summary.prompt_tokens, summary.cached_tokens), (20, 8));
        assert_eq!(summary.errors_by_kind["timeout"], ErrorKind { count: 2, example: "timeout!".into() });
        assert_eq!((summary.goodput.as_ref(), summary.capacity.as_ref()), (None, None));
        assert!(summary.to_string().contains("2 × timeout, such as: timeout!"));
    }

    #[test]
    fn goodput_wants_every_limit_kept() {
        // The TPOTs are 10, 100 and (one token) none at all; the only gaps are 100, 600 and 0.
        let samples = samples([Ok(answer(100, 200, 11)), Ok(answer(100, 700, 7)), Ok(answer(400, 400, 1)), Err(failure("http_500"))]);
        let slo = |ttft: Option<u64>, tpot: Option<u64>, tbt: Option<u64>| {
            let [ttft, tpot, tbt] = [ttft, tpot, tbt].map(|ms| ms.map(Duration::from_millis));
            summary(&samples, 1, Slo { ttft, tpot, tbt })
        };
        let good = |ttft, tpot| slo(ttft, tpot, Some(1)).goodput.unwrap();
        assert_eq!(good(Some(100), Some(10)), Goodput { requests_per_s: 1.0, ratio: 0.25 });
        assert_eq!(good(Some(400), Some(100)), Goodput { requests_per_s: 3.0, ratio: 0.75 });
        assert_eq!(good(None, Some(99)), Goodput { requests_per_s: 2.0, ratio: 0.5 });
        assert_eq!(slo(Some(400), Some(1), Some(100)).capacity.unwrap().ratio, 0.5);
    }

    #[test]
    fn a_warm_up_is_sent_and_not_counted() {
        let samples = samples((1..=4).map(|n| Ok(answer(n * 100, 1000, 5))));
        let summary = Summary::new(&samples, Duration::from_secs(6), Duration::from_secs(2), Slo::default());
        assert_eq!((summary.requests, summary.duration_s, summary.requests_per_s), (2, 4.0, 0.5));
        assert!((summary.ttft_ms.unwrap().p50 - 300.0).abs() < 0.5);
        assert_eq!(summary.timeline.iter().map(|interval| interval.due).sum::<u64>(), 4, "a time line shows it");
    }

    #[test]
    fn groups_and_time_lines_have_every_answer_once() {
        let mut samples = samples((0..5).map(|n| Ok(Answer { prompt_tokens: 100, cached_tokens: 24 * n, ..answer(10 + n, 1500, 4) })));
        samples[4].turn = 1;
        let summary = summary(&samples, 7, Slo::default());
        let names: Vec<_> = summary.by_cached.iter().map(|group| (group.name.as_str(), group.completed)).collect();
        let expected = ["nothing", "below a quarter", "a quarter to a half", "a half to three quarters", "all but a block"];
        assert_eq!(names, expected.map(|name| (name, 1)));
        assert_eq!(summary.by_turn.iter().map(|group| group.completed).collect::<Vec<_>>(), [4, 1]);
        let tokens: f64 = summary.timeline.iter().map(|interval| interval.output_tokens_per_s).sum();
        assert!((tokens - 20.0).abs() < 1e-9, "{:?}", summary.timeline);
        assert_eq!((summary.timeline.len(), summary.timeline[1].answered), (7, 1));
    }

    #[test]
    fn json_has_the_agreed_names() {
        let json = serde_json::to_value(summary(&samples([Ok(answer(1, 2, 2))]), 1, Slo::default())).unwrap();
        for name in ["ttft_ms", "tpot_ms", "itl_ms"] {
            assert!(["p50", "p90", "p99"].iter().all(|p| json[name][p].is_f64()), "{json}");
        }
        for name in ["requests_per_s", "output_tokens_per_s", "errors"] {
            assert!(json[name].is_number(), "{name}");
        }
    }
}

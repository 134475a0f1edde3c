//! Turns all answers into percentiles, rates and goodput, and prints them.

use super::timeline::Answer;
use serde::Serialize;
use std::{collections::BTreeMap, fmt, time::Duration};

/// Limits that a good request meets. A missing limit is always met.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slo {
    pub ttft: Option<Duration>,
    pub tpot: Option<Duration>,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// A short name to count by.
    pub kind: String,
    pub message: String,
}

/// Milliseconds. Percentiles are exact, interpolated between neighbours.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

/// Requests that were answered within the SLO.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goodput {
    pub requests_per_s: f64,
    /// Share of all requests, failed ones included.
    pub ratio: f64,
}

/// Failed requests of one kind, with the first one's message.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ErrorKind {
    pub count: u64,
    pub example: String,
}

/// The results. A percentile without samples is `null`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub requests: u64,
    pub completed: u64,
    pub errors: u64,
    pub errors_by_kind: BTreeMap<String, ErrorKind>,
    /// From the start to the last answer's end.
    pub duration_s: f64,
    pub requests_per_s: f64,
    pub output_tokens_per_s: f64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub ttft_ms: Option<Percentiles>,
    pub tpot_ms: Option<Percentiles>,
    pub itl_ms: Option<Percentiles>,
    pub e2e_ms: Option<Percentiles>,
    /// How late this program sent requests. Large values mean that it, not the server, was the bottleneck.
    pub send_lag_ms: Option<Percentiles>,
    pub goodput: Option<Goodput>,
}

impl Summary {
    /// Summarizes a measurement that took `duration`. `lags` are the delays between due and sent, one per request.
    pub fn new(outcomes: &[Result<Answer, Failure>], lags: &[Duration], duration: Duration, slo: Slo) -> Summary {
        let answers: Vec<&Answer> = outcomes.iter().flatten().collect();
        let duration_s = duration.as_secs_f64();
        let per_s = |count: u64| if duration_s > 0.0 { count as f64 / duration_s } else { 0.0 };
        let total = |tokens: fn(&Answer) -> u64| answers.iter().map(|answer| tokens(answer)).sum();
        let output_tokens = total(|answer| answer.output_tokens);
        let good = answers.iter().filter(|answer| slo.is_met(answer)).count() as u64;
        let goodput = Goodput { requests_per_s: per_s(good), ratio: good as f64 / outcomes.len().max(1) as f64 };
        let mut errors_by_kind = BTreeMap::<String, ErrorKind>::new();
        for failure in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
            let first = || ErrorKind { count: 0, example: failure.message.clone() };
            errors_by_kind.entry(failure.kind.clone()).or_insert_with(first).count += 1;
        }
        Summary {
            requests: outcomes.len() as u64,
            completed: answers.len() as u64,
            errors: (outcomes.len() - answers.len()) as u64,
            errors_by_kind,
            duration_s,
            requests_per_s: per_s(answers.len() as u64),
            output_tokens_per_s: per_s(output_tokens),
            prompt_tokens: total(|answer| answer.prompt_tokens),
            cached_tokens: total(|answer| answer.cached_tokens),
            output_tokens,
            ttft_ms: Percentiles::of(answers.iter().map(|answer| answer.ttft)),
            tpot_ms: Percentiles::of(answers.iter().filter_map(|answer| answer.tpot())),
            itl_ms: Percentiles::of(answers.iter().flat_map(|answer| answer.gaps.iter().copied())),
            e2e_ms: Percentiles::of(answers.iter().map(|answer| answer.e2e)),
            send_lag_ms: Percentiles::of(lags.iter().copied()),
            goodput: (slo.ttft.is_some() || slo.tpot.is_some()).then_some(goodput),
        }
    }
}

impl Slo {
    fn is_met(&self, answer: &Answer) -> bool {
        // An answer of one token has no second one to be late.
        let within = |limit: Option<Duration>, value: Option<Duration>| limit.is_none_or(|limit| value.is_none_or(|value| value <= limit));
        within(self.ttft, Some(answer.ttft)) && within(self.tpot, answer.tpot())
    }
}

impl Percentiles {
    /// `None` without samples.
    pub fn of(values: impl Iterator<Item = Duration>) -> Option<Percentiles> {
        let mut sorted: Vec<f64> = values.map(|value| value.as_secs_f64() * 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        let max = *sorted.last()?;
        let at = |quantile: f64| {
            let rank = quantile * (sorted.len() - 1) as f64;
            let (below, above) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
            below + (above - below) * rank.fract()
        };
        Some(Percentiles { mean: sorted.iter().sum::<f64>() / sorted.len() as f64, p50: at(0.5), p90: at(0.9), p99: at(0.99), max })
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
        if let Some(goodput) = &self.goodput {
            writeln!(f, "goodput            {:>10.3} requests/s, {:.1} % of all", goodput.requests_per_s, 100.0 * goodput.ratio)?;
        }
        writeln!(f, "\n{:<12}{:>10}{:>10}{:>10}{:>10}{:>10}", "ms", "mean", "p50", "p90", "p99", "max")?;
        let rows = [
            ("TTFT", &self.ttft_ms),
            ("TPOT", &self.tpot_ms),
            ("ITL", &self.itl_ms),
            ("end to end", &self.e2e_ms),
            ("send lag", &self.send_lag_ms),
        ];
        for (name, percentiles) in rows {
            match percentiles {
                Some(Percentiles { mean, p50, p90, p99, max }) => {
                    writeln!(f, "{name:<12}{mean:>10.2}{p50:>10.2}{p90:>10.2}{p99:>10.2}{max:>10.2}")?
                }
                None => writeln!(f, "{name:<12}{:>10}", "-")?,
            }
        }
        for (kind, ErrorKind { count, example }) in &self.errors_by_kind {
            writeln!(f, "\n{count} × {kind}, such as: {example}")?;
        }
        Ok(())
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

    #[test]
    fn percentiles_interpolate_like_numpys() {
        // numpy.percentile(range(1, 12), [50, 90, 99]) == [6, 10, 10.9]
        let percentiles = Percentiles::of((1..=11).rev().map(Duration::from_millis)).unwrap();
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(percentiles.p50, 6.0) && close(percentiles.p90, 10.0) && close(percentiles.p99, 10.9), "{percentiles:?}");
        assert!(close(percentiles.mean, 6.0) && close(percentiles.max, 11.0));
        assert_eq!(Percentiles::of(std::iter::empty()), None);
        assert_eq!(Percentiles::of([Duration::from_secs(1)].into_iter()).unwrap().p99, 1000.0);
    }

    #[test]
    fn rates_count_what_was_answered() {
        let outcomes = [Ok(answer(100, 200, 11)), Ok(answer(300, 900, 7)), Err(failure("timeout")), Err(failure("timeout"))];
        let summary = Summary::new(&outcomes, &[], Duration::from_secs(2), Slo::default());
        assert_eq!((summary.requests, summary.completed, summary.errors), (4, 2, 2));
        assert_eq!((summary.requests_per_s, summary.output_tokens_per_s), (1.0, 9.0));
        assert_eq!((summary.prompt_tokens, summary.cached_tokens), (20, 8));
        assert_eq!(summary.errors_by_kind["timeout"], ErrorKind { count: 2, example: "timeout!".into() });
        assert_eq!(summary.goodput, None);
        assert!(summary.to_string().contains("2 × timeout, such as: timeout!"));
    }

    #[test]
    fn goodput_wants_every_limit_kept() {
        // TPOT 10, 100 and (one token) none at all.
        let outcomes = [Ok(answer(100, 200, 11)), Ok(answer(100, 700, 7)), Ok(answer(400, 400, 1)), Err(failure("http_500"))];
        let goodput = |ttft_ms: Option<u64>, tpot_ms: Option<u64>| {
            let slo = Slo { ttft: ttft_ms.map(Duration::from_millis), tpot: tpot_ms.map(Duration::from_millis) };
            Summary::new(&outcomes, &[], Duration::from_secs(1), slo).goodput.unwrap()
        };
        assert_eq!(goodput(Some(100), Some(10)), Goodput { requests_per_s: 1.0, ratio: 0.25 });
        assert_eq!(goodput(Some(400), Some(100)), Goodput { requests_per_s: 3.0, ratio: 0.75 });
        assert_eq!(goodput(None, Some(99)), Goodput { requests_per_s: 2.0, ratio: 0.5 });
    }

    #[test]
    fn json_has_the_agreed_names() {
        let summary = Summary::new(&[Ok(answer(1, 2, 2))], &[], Duration::from_secs(1), Slo::default());
        let json = serde_json::to_value(summary).unwrap();
        for name in ["ttft_ms", "tpot_ms", "itl_ms"] {
            assert!(["p50", "p90", "p99"].iter().all(|p| json[name][p].is_f64()), "{json}");
        }
        for name in ["requests_per_s", "output_tokens_per_s", "errors"] {
            assert!(json[name].is_number(), "{name}");
        }
    }
}

//! The judgement of a rollout: it advances, waits or goes back. It is judged often, each time with all current figures.
//!
//! `to` is compared with `from` at the same time, so that a problem of both (a full cluster, a slow network) is not held against it; once
//! no user is at `from` any more, it is compared with the earlier figures of `from`. Few requests prove little: both models need
//! `requests_min` of them, and a share must also be worse by `CASES_MIN` requests.

use super::{
    record::{Rollout, State, Summary},
    seen::Seen,
};
use std::time::Duration;

#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Wait, for this reason.
    Hold(String),
    Advance,
    RollBack(String),
}

/// The least excess of bad requests that counts: one or two are chance.
const CASES_MIN: u64 = 3;
/// The least difference of two latencies that counts: smaller ones are noticed neither by people nor by the clock.
const TTFT_SLACK_MS: f64 = 50.0;
const TPOT_SLACK_MS: f64 = 5.0;
/// The number of votes on a model from which they count.
const VOTES_MIN: u64 = 20;
/// The maximum share of failed shadows.
const SHADOWS_FAILED_MAX: f64 = 0.1;

/// Judges a rollout. `now` is on the clock of its records.
pub fn judge(rollout: &Rollout, seen: &Seen, now: Duration) -> Verdict {
    if !rollout.state.is_open() {
        return Verdict::Hold(rollout.state.name().into());
    }
    if let Some(breach) = breach(rollout, seen) {
        return Verdict::RollBack(breach);
    }
    if rollout.state == State::Paused {
        return Verdict::Hold("paused".into());
    }
    let left = Duration::from_secs(rollout.step_s).saturating_sub(rollout.step_lasted(now));
    if !left.is_zero() {
        return Verdict::Hold(format!("{} s of this step are left", left.as_millis().div_ceil(1000)));
    }
    let wanted = rollout.limits.requests_min;
    let (what, got) = if rollout.share() > 0.0 {
        (format!("requests of {} in this step", rollout.to), seen.step_requests)
    } else if rollout.shadow > 0.0 {
        ("shadows".into(), seen.shadows.ran())
    } else {
        return Verdict::Advance;
    };
    if got < wanted { Verdict::Hold(format!("{got} of {wanted} {what}")) } else { Verdict::Advance }
}

/// Describes the first limit that `to` breaks, if it breaks one.
fn breach(rollout: &Rollout, seen: &Seen) -> Option<String> {
    let limits = &rollout.limits;
    if let Some(breach) = rollout.golden.and_then(|golden| golden.breach(limits)) {
        return Some(breach);
    }
    let shadows = &seen.shadows;
    if shadows.ran() >= limits.requests_min && shadows.failed as f64 > SHADOWS_FAILED_MAX * shadows.ran() as f64 {
        return Some(format!("{} of {} shadows failed", shadows.failed, shadows.ran()));
    }
    let (from, to) = seen.summaries();
    if let Some(breach) = votes(rollout, &from, &to) {
        return Some(breach);
    }
    let from = if seen.from.requests >= limits.requests_min { Some(from) } else { rollout.baseline };
    // Requests that hang fail slowly: failures count even while there are few.
    let from_errors = from.map_or(0.0, |from| from.error_rate);
    let enough = to.requests >= limits.requests_min || seen.to.failed >= CASES_MIN && to.error_rate >= 0.5;
    if enough && worse(to.error_rate, from_errors + limits.errors_over, seen.to.failed, from_errors, to.requests) {
        return Some(format!("{:.1} % of requests failed, against {:.1} %", to.error_rate * 100.0, from_errors * 100.0));
    }
    let from = from?;
    if to.requests < limits.requests_min {
        return None;
    }
    let answered = seen.to.requests - seen.to.failed;
    let (missed, usual) = (1.0 - to.goodput, 1.0 - from.goodput);
    if worse(missed, usual + limits.goodput_under, answered - seen.to.kept, usual, answered) {
        return Some(format!("{:.1} % of answers kept their limits, against {:.1} %", to.goodput * 100.0, from.goodput * 100.0));
    }
    let slower = |of: fn(&Summary) -> Option<f64>, slack_ms: f64, what: &str| {
        let (to, from) = (of(&to)?, of(&from)?);
        (to > from * limits.latency_ratio && to > from + slack_ms).then(|| format!("{what} p95 {to:.0} ms against {from:.0} ms"))
    };
    slower(|summary| summary.ttft_p95_ms, TTFT_SLACK_MS, "TTFT").or_else(|| slower(|summary| summary.tpot_p95_ms, TPOT_SLACK_MS, "TPOT"))
}

/// Whether a share is above the allowed one, and by more than a few cases above the usual one.
fn worse(share: f64, allowed: f64, cases: u64, usual: f64, of: u64) -> bool {
    share > allowed + 1e-9 && cases as f64 - usual * of as f64 >= CASES_MIN as f64
}

fn votes(rollout: &Rollout, from: &Summary, to: &Summary) -> Option<String> {
    let usual = if from.votes >= VOTES_MIN {
        from.thumbs_down
    } else {
        rollout.baseline.filter(|baseline| baseline.votes >= VOTES_MIN)?.thumbs_down
    };
    let bad = to.votes >= VOTES_MIN && to.thumbs_down > usual + rollout.limits.thumbs_over;
    bad.then(|| format!("{:.0} % thumbs down, against {:.0} %", to.thumbs_down * 100.0, usual * 100.0))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            record::{
                Golden, Limits,
                tests::{at, rollout},
            },
            seen::{Counts, Ended, Shadows},
            votes::Voter,
        },
        *,
    };

    /// Counts for a model with `requests` requests, `failed` of them failed and `missed` late.
    fn counts(requests: u64, failed: u64, missed: u64, ttft_ms: u64, tpot_ms: u64) -> Counts {
        let mut counts = Counts::default();
        for number in 0..requests {
            let failed = number < failed;
            counts.add(&Ended {
                failed,
                kept: number >= missed,
                ttft: (!failed).then_some(Duration::from_millis(ttft_ms)),
                tpot: (!failed).then_some(Duration::from_millis(tpot_ms)),
            });
        }
        counts
    }

    fn good() -> Counts {
        counts(100, 0, 0, 200, 20)
    }

    fn seen(from: Counts, to: Counts) -> Seen {
        Seen { step_requests: to.requests, from, to, shadows: Shadows::default() }
    }

    #[test]
    fn each_breach_rolls_back_by_name_and_what_is_usual_does_not() {
        let rollout = rollout();
        let sick = counts(100, 40, 70, 900, 90);
        for (from, to, words) in [
            (good(), good(), None),
            (good(), counts(100, 2, 0, 200, 20), None),
            (good(), counts(100, 3, 0, 200, 20), Some("3.0 % of requests failed")),
            (good(), counts(100, 0, 5, 200, 20), None),
            (good(), counts(100, 0, 9, 200, 20), Some("91.0 % of answers kept")),
            (good(), counts(100, 0, 0, 260, 20), None),
            (good(), counts(100, 0, 0, 400, 20), Some("TTFT")),
            (good(), counts(100, 0, 0, 200, 40), Some("TPOT")),
            // Differences too small to notice.
            (counts(100, 0, 0, 10, 1), counts(100, 0, 0, 40, 4), None),
            // A problem of both models is not held against one.
            (sick.clone(), sick.clone(), None),
            (good(), sick, Some("failed")),
            // Few requests prove little,
            (good(), counts(49, 3, 20, 900, 90), None),
            // unless hardly any succeeds.
            (good(), counts(4, 3, 0, 200, 20), Some("75.0 %")),
            (good(), counts(2, 2, 0, 200, 20), None),
            (counts(3, 0, 0, 200, 20), counts(100, 0, 50, 900, 90), None),
            (Counts::default(), counts(60, 30, 0, 200, 20), Some("failed")),
        ] {
            let verdict = judge(&rollout, &seen(from.clone(), to.clone()), at(1001));
            match (&verdict, words) {
                (Verdict::RollBack(why), Some(words)) => assert!(why.contains(words), "{why}"),
                (Verdict::Hold(_), None) => {}
                _ => panic!("{verdict:?} for {from:?} and {to:?}"),
            }
        }
    }

    #[test]
    fn a_step_ends_when_its_time_is_over_and_enough_was_seen() {
        let rollout = rollout();
        let judged = |seen: &Seen, second| judge(&rollout, seen, at(second));
        let hold = |verdict: &Verdict, words: &str| matches!(verdict, Verdict::Hold(why) if why.contains(words));
        assert!(hold(&judged(&seen(good(), good()), 1059), "1 s of this step"));
        assert_eq!(judged(&seen(good(), good()), 1060), Verdict::Advance);
        assert!(hold(&judged(&seen(good(), counts(49, 0, 0, 200, 20)), 2000), "49 of 50 requests of b"));
        let paused = rollout.paused(at(1030)).unwrap();
        assert!(hold(&judge(&paused, &seen(good(), good()), at(9000)), "paused"));
        assert!(matches!(judge(&paused, &seen(good(), counts(100, 50, 0, 1, 1)), at(9000)), Verdict::RollBack(_)), "a pause is no licence");
        assert!(hold(&judge(&rollout.aborted(at(1)).unwrap(), &seen(good(), good()), at(9000)), "aborted"));
    }

    #[test]
    fn at_the_last_step_the_baseline_counts() {
        let baseline = seen(counts(100, 0, 0, 200, 20), Counts::default()).summaries().0;
        let mut all = rollout();
        while all.share() < 1.0 {
            all = all.advanced(at(2000), Some(baseline));
        }
        let judged = |to: Counts| judge(&all, &seen(Counts::default(), to), at(2060));
        assert_eq!(judged(good()), Verdict::Advance);
        assert!(matches!(judged(counts(100, 0, 0, 900, 20)), Verdict::RollBack(why) if why.contains("TTFT")));
        assert!(matches!(judged(counts(100, 0, 30, 200, 20)), Verdict::RollBack(why) if why.contains("limits")));
        assert_eq!(all.advanced(at(2060), None).state, State::Done);
    }

    #[test]
    fn scores_votes_and_shadows_roll_back_too() {
        let rollout = rollout();
        let worse = rollout.scored(at(1001), Golden { from: 0.91, to: 0.85 }).unwrap();
        assert!(matches!(judge(&worse, &seen(good(), good()), at(1002)), Verdict::RollBack(why) if why.contains("golden")));
        let voted = |from: (u64, u64), to: (u64, u64)| {
            let mut seen = seen(good(), good());
            seen.from.votes.add(Voter::Operator, from.0, from.1);
            seen.to.votes.add(Voter::Operator, to.0, to.1);
            judge(&rollout, &seen, at(1001))
        };
        assert!(matches!(voted((90, 10), (60, 40)), Verdict::RollBack(why) if why.contains("40 % thumbs down, against 10 %")));
        for (from, to) in [((90, 10), (90, 14)), ((90, 10), (0, 19)), ((0, 0), (0, 50))] {
            assert!(matches!(voted(from, to), Verdict::Hold(_)), "{to:?}");
        }
        let mut flooded = seen(good(), good());
        for (tenant, from, to) in [("a", 300, 300), ("b", 30, 0), ("c", 5, 5)] {
            flooded.from.votes.add(Voter::Tenant(Some(tenant)), from, 0);
            flooded.to.votes.add(Voter::Tenant(Some(tenant)), 0, to);
        }
        assert!(matches!(judge(&rollout, &flooded, at(1001)), Verdict::Hold(_)), "one tenant votes down, and another a little");
        flooded.to.votes.add(Voter::Tenant(Some("b")), 0, 10);
        assert!(matches!(judge(&rollout, &flooded, at(1001)), Verdict::RollBack(why) if why.contains("thumbs down")));
        let mut dark = rollout;
        (dark.steps, dark.shadow) = (vec![0.0, 1.0], 0.5);
        let shadowed = |ran: u64, failed: u64| {
            let shadows = Shadows { drawn: ran - failed, failed, ..Shadows::default() };
            judge(&dark, &Seen { shadows, ..Seen::default() }, at(1060))
        };
        assert!(matches!(shadowed(49, 0), Verdict::Hold(why) if why.contains("49 of 50 shadows")));
        assert_eq!(shadowed(50, 5), Verdict::Advance);
        assert!(matches!(shadowed(60, 10), Verdict::RollBack(why) if why.contains("shadows failed")));
        dark.limits = Limits { requests_min: 1, ..dark.limits };
        dark.shadow = 0.0;
        assert_eq!(judge(&dark, &Seen::default(), at(1060)), Verdict::Advance, "nobody is there: nothing to wait for");
    }
}

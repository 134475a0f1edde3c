//! The outcome of the attacks, as a table, and whether it is good enough.

use super::{AbuseArgs, attacker::Seen, attacks::Attack, cluster::Watched, premium::Chats};
use crate::load::percentiles::Percentiles;
use serde::Serialize;
use std::{collections::BTreeMap, fmt, time::Duration};

/// The most that the coordinator's memory may grow in an attack, including that of the grammar helper's processes.
const EXTRA_MIB_MAX: f64 = 512.0;
/// The factor by which the premium tenant's p99 may grow.
const TTFT_TIMES_MAX: f64 = 1.25;
const TTFT_MORE_MS_MAX: f64 = 50.0;

/// The outcome of one attack.
#[derive(Debug, Serialize)]
pub struct Outcome {
    pub attack: &'static str,
    pub what: &'static str,
    /// The premium tenant's time to first token, in milliseconds.
    pub ttft_ms: Option<Percentiles>,
    pub premium_failed: BTreeMap<String, (u64, String)>,
    #[serde(flatten)]
    pub watched: Watched,
    /// The attacker's answers, by status.
    pub answers: BTreeMap<String, u64>,
    /// Answers that the attacker should not have got.
    pub findings: Vec<String>,
    /// Other tenants' data that has changed.
    pub lost: Vec<String>,
    /// The work that still ran long after the attack.
    pub left_running: Option<String>,
}

/// The targets.
pub struct Limits {
    /// The premium tenant's time to first token without attacks.
    pub alone: Option<Percentiles>,
    /// The limit of its p99 under attack; `None` if times are not judged.
    ttft_p99_ms_max: Option<f64>,
}

impl Limits {
    pub fn new(alone: &[Duration], short: bool) -> Self {
        let alone = Percentiles::of(alone.iter().copied());
        let most = alone.as_ref().map(|alone| alone.p99 * TTFT_TIMES_MAX + TTFT_MORE_MS_MAX);
        Self { ttft_p99_ms_max: most.filter(|_| !short), alone }
    }
}

impl Outcome {
    pub fn new(attack: &Attack, chats: &Chats, watched: Watched, seen: Seen, lost: Vec<String>, left_running: Option<String>) -> Self {
        let Seen { answers, findings } = seen;
        let (ttft_ms, premium_failed) = (chats.percentiles(), chats.failed.clone());
        Self { attack: attack.name, what: attack.what, ttft_ms, premium_failed, watched, answers, findings, lost, left_running }
    }

    /// The targets that it missed.
    pub fn failures(&self, limits: &Limits) -> Vec<String> {
        let Self { watched, premium_failed, answers, findings, lost, left_running, .. } = self;
        let mut failures = Vec::new();
        if let (Some(ttft), Some(most)) = (&self.ttft_ms, limits.ttft_p99_ms_max)
            && ttft.p99 > most
        {
            failures.push(format!("the premium tenant's p99 was {:.0} ms, {most:.0} is the most", ttft.p99));
        }
        let failed =
            premium_failed.iter().map(|(kind, (count, text))| format!("{count} chats of the premium tenant failed: {kind}: {text}"));
        failures.extend(failed);
        if self.ttft_ms.is_none() {
            failures.push("no chat of the premium tenant was answered".into());
        }
        let extra = watched.extra_mib + watched.helpers_mib;
        if extra > EXTRA_MIB_MAX {
            failures.push(format!("{extra:.0} MiB more memory, {EXTRA_MIB_MAX} is the most"));
        }
        let listed = [
            ("links lost", &watched.links_lost),
            ("processes ended", &watched.processes_ended),
            ("said", &watched.alarms),
            ("got through", findings),
            ("lost", lost),
        ];
        failures.extend(listed.into_iter().filter(|(_, all)| !all.is_empty()).map(|(what, all)| format!("{what}: {}", all.join("; "))));
        failures.extend(left_running.iter().map(|what| format!("still runs: {what}")));
        if answers.is_empty() {
            failures.push("the attacker was told nothing: the attack did not reach the front door".into());
        }
        failures
    }
}

#[derive(Serialize)]
pub struct Report<'a> {
    pub settings: &'a AbuseArgs,
    /// The premium tenant's time to first token without attacks.
    pub alone: Option<&'a Percentiles>,
    /// The premium tenant's chats that failed without attacks.
    pub alone_failed: BTreeMap<String, (u64, String)>,
    /// The peak of the coordinator's memory in the whole run, and its increase since the beginning.
    pub peak_mib: f64,
    pub extra_mib: f64,
    pub attacks: Vec<Outcome>,
}

impl Report<'_> {
    /// A line for each attack that missed a target, and for chats that failed without one.
    pub fn failures(&self, limits: &Limits) -> Vec<String> {
        let of = |outcome: &Outcome| {
            let failures = outcome.failures(limits);
            (!failures.is_empty()).then(|| format!("{}: {}", outcome.attack, failures.join(", ")))
        };
        let alone = self.alone_failed.iter().map(|(kind, (count, text))| format!("between attacks: {count} chats failed: {kind}: {text}"));
        alone.chain(self.attacks.iter().filter_map(of)).collect()
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ttft = |ttft: Option<&Percentiles>| ttft.map_or("–".into(), |ttft| format!("{:.0} / {:.0}", ttft.p50, ttft.p99));
        let delay = |watched: &Watched, name: &str| watched.delay_s.get(name).map_or("–".into(), |s| format!("{:.0}", s * 1e3));
        writeln!(
            f,
            "premium alone: TTFT p50 / p99 {} ms; coordinator: {:.0} MiB at most, {:.0} more than at first\n",
            ttft(self.alone),
            self.peak_mib,
            self.extra_mib
        )?;
        writeln!(
            f,
            "| attack | premium TTFT p50 / p99, ms | failed | memory, MiB more (helpers) | loop delay ≤ ms, clients / links | links lost, restarts | others' data | attacker saw |"
        )?;
        writeln!(f, "|---|---:|---:|---:|---:|---:|---|---|")?;
        for outcome in &self.attacks {
            let Outcome { watched, .. } = outcome;
            let failed: u64 = outcome.premium_failed.values().map(|(count, _)| count).sum();
            let answers: Vec<_> = outcome.answers.iter().map(|(status, count)| format!("{status} × {count}")).collect();
            let data = if outcome.lost.is_empty() { "whole".to_owned() } else { format!("{} LOST", outcome.lost.len()) };
            writeln!(
                f,
                "| {} | {} | {failed} | {:.0} ({:.0}) | {} / {} | {}, {} | {data} | {} |",
                outcome.attack,
                ttft(outcome.ttft_ms.as_ref()),
                watched.extra_mib,
                watched.helpers_mib,
                delay(watched, "front_door"),
                delay(watched, "links"),
                watched.links_lost.len(),
                watched.processes_ended.len(),
                answers.join(", "),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abuse::attacks::ALL;

    fn outcome(ttft_ms: &[u64]) -> Outcome {
        let answered = ttft_ms.iter().copied().map(Duration::from_millis).collect();
        let chats = Chats { answered, ..Chats::default() };
        let seen = Seen { answers: BTreeMap::from([("400".into(), 1)]), findings: Vec::new() };
        Outcome::new(&ALL[0], &chats, Watched::default(), seen, Vec::new(), None)
    }

    #[test]
    fn an_attack_is_felt_by_time_memory_links_or_loss() {
        let alone = [Duration::from_millis(40); 3];
        let limits = Limits::new(&alone, false);
        assert_eq!(outcome(&[60, 100]).failures(&limits), Vec::<String>::new());
        assert!(outcome(&[60, 120]).failures(&limits)[0].contains("100 is the most"));
        assert!(outcome(&[60, 120]).failures(&Limits::new(&alone, true)).is_empty(), "times are not judged");
        let changes: [fn(&mut Outcome); 6] = [
            |outcome| outcome.watched.extra_mib = 600.0,
            |outcome| outcome.watched.links_lost.push("decode-0".into()),
            |outcome| outcome.lost.push("a file".into()),
            |outcome| outcome.findings.push("another's answer".into()),
            |outcome| outcome.answers.clear(),
            |outcome| outcome.left_running = Some("1 requests".into()),
        ];
        for change in changes {
            let mut felt = outcome(&[60]);
            change(&mut felt);
            assert_eq!(felt.failures(&limits).len(), 1, "{felt:?}");
        }
    }
}

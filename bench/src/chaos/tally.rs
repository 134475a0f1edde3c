//! The results as seen by clients, and the duration of the faults' effects.

use super::{Suffered, fault::Kind, is_allowed};
use serde::Serialize;
use serde_json::Value;
use std::{collections::BTreeMap, fmt, time::Duration};

/// The end of one request.
#[derive(Debug, PartialEq, Eq)]
pub enum Seen {
    Right,
    Wrong,
    /// The request had not ended after a minute.
    Hung,
    /// The error's kind and its text.
    Failed(String, String),
}

/// The results of all clients.
#[derive(Debug, Default)]
pub struct Tally {
    right: u64,
    wrong: u64,
    hung: u64,
    /// Failed requests: the error's kind and text, and the times at which they were sent and ended.
    failed: Vec<(String, String, Duration, Duration)>,
    /// Long times between two tokens of an answer, from and to; the wait for a first token also counts.
    pauses: Vec<(Duration, Duration)>,
}

/// The shortest pause that is recorded.
const PAUSE_LEAST: Duration = Duration::from_millis(20);
/// The time after a fault in which pauses are attributed to it.
const FELT: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize)]
pub struct Counts {
    pub right: u64,
    pub wrong: u64,
    pub hung: u64,
    /// Errors of clients whose coordinator died, by kind.
    pub allowed: BTreeMap<String, u64>,
    /// All other errors, with an example.
    pub not_allowed: BTreeMap<String, (u64, String)>,
}

/// The recovery from one kind of fault of one role. Times are in milliseconds.
#[derive(Debug, Serialize)]
pub struct Recovery {
    kind: Kind,
    role: String,
    times: usize,
    /// The time until the member was gone: the median and the maximum.
    gone_ms: Option<(f64, f64)>,
    /// The longest pause of any stream after each fault: the median and the maximum.
    pause_ms: Option<(f64, f64)>,
}

impl Tally {
    pub fn add(&mut self, seen: Seen, asked: Duration, ended: Duration, pauses: Vec<(Duration, Duration)>) {
        self.pauses.extend(pauses.into_iter().filter(|(from, to)| *to - *from >= PAUSE_LEAST));
        match seen {
            Seen::Right => self.right += 1,
            Seen::Wrong => self.wrong += 1,
            Seen::Hung => self.hung += 1,
            Seen::Failed(kind, text) => self.failed.push((kind, text, asked, ended)),
        }
    }

    pub fn counts(&self, suffered: &[Suffered]) -> Counts {
        let (mut allowed, mut not_allowed) = (BTreeMap::new(), BTreeMap::new());
        for (kind, text, asked, ended) in &self.failed {
            if is_allowed(kind, *asked, *ended, suffered) {
                *allowed.entry(kind.clone()).or_default() += 1;
            } else {
                not_allowed.entry(kind.clone()).or_insert_with(|| (0, text.clone())).0 += 1;
            }
        }
        Counts { right: self.right, wrong: self.wrong, hung: self.hung, allowed, not_allowed }
    }
}

pub fn recoveries(suffered: &[Suffered], tally: &Tally) -> Vec<Recovery> {
    let mut by_kind = BTreeMap::<(Kind, &str), Vec<&Suffered>>::new();
    for one in suffered {
        by_kind.entry((one.0.kind, &one.0.role)).or_default().push(one);
    }
    let of = |((kind, role), faults): ((Kind, &str), Vec<&Suffered>)| {
        let felt = |at: Duration| {
            let after = tally.pauses.iter().filter(|(from, to)| *to > at && *from < at + FELT && *from + FELT > at);
            after.map(|(from, to)| *to - *from).max()
        };
        Recovery {
            kind,
            role: role.into(),
            times: faults.len(),
            gone_ms: half_and_all(faults.iter().filter_map(|(.., gone)| *gone)),
            pause_ms: half_and_all(faults.iter().filter_map(|(_, at, _)| felt(*at))),
        }
    };
    by_kind.into_iter().map(of).collect()
}

fn half_and_all(times: impl Iterator<Item = Duration>) -> Option<(f64, f64)> {
    let mut ms: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
    ms.sort_by(f64::total_cmp);
    Some((ms[ms.len().checked_sub(1)? / 2], *ms.last()?))
}

/// The work that a cluster still does or the blocks that it holds; `None` if there are none.
pub fn busy(view: &Value) -> Option<String> {
    if view["requests"].as_u64() != Some(0) {
        return Some(format!("{} requests", view["requests"]));
    }
    let held = |member: &&Value| {
        let used = |tier: &str| member["report"]["blocks"][tier]["used"].as_u64().unwrap_or(0);
        used("hbm") + used("dram") + used("nvme") > 0
    };
    let holder = view["members"].as_array().into_iter().flatten().find(held)?;
    Some(format!("{} has blocks in use", holder["name"]))
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} answers right, {} wrong, {} hung", self.right, self.wrong, self.hung)?;
        for (kind, count) in &self.allowed {
            writeln!(f, "{count} × {kind}, of clients whose coordinator died")?;
        }
        for (kind, (count, example)) in &self.not_allowed {
            writeln!(f, "{count} × {kind} NOT ALLOWED, such as: {example}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pair = |pair: Option<(f64, f64)>| pair.map_or("–".into(), |(half, all)| format!("{half:.0}, {all:.0}"));
        let kind = format!("{:?}", self.kind).to_lowercase();
        write!(f, "{kind:10} {:22} {:>6} {:>22} {:>28}", self.role, self.times, pair(self.gone_ms), pair(self.pause_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_cluster_that_holds_anything_is_busy() {
        let member = |used: u64| json!({"name": "d", "report": {"blocks": {"hbm": {"used": used}}}});
        assert_eq!(busy(&json!({"requests": 0, "members": [member(0)]})), None);
        assert!(busy(&json!({"requests": 2, "members": []})).unwrap().contains("2 requests"));
        assert!(busy(&json!({"requests": 0, "members": [member(3)]})).unwrap().contains("blocks in use"));
    }

    #[test]
    fn an_error_without_a_coordinators_death_is_not_allowed() {
        let mut tally = Tally::default();
        let s = Duration::from_secs;
        tally.add(Seen::Failed("broken_stream".into(), "x".into()), s(1), s(2), vec![(s(1), s(2))]);
        let counts = tally.counts(&[]);
        assert_eq!((counts.not_allowed["broken_stream"].0, counts.allowed.len()), (1, 0));
    }
}

//! A rollout as the coordinators agree on it: one record of the registry, which any coordinator changes by its revision.

use crate::routing::sticky;
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// Drawn at the start. Users are hashed with it.
    pub id: String,
    pub from: String,
    pub to: String,
    /// The shares of users at `to`, in percent, ascending.
    pub steps: Vec<f64>,
    /// The minimum duration of each step.
    pub step_s: u64,
    /// The index of the current step.
    pub step: usize,
    /// The time at which the step started; pauses move it.
    pub since_ms: u64,
    pub state: State,
    /// The reason for its state.
    pub why: String,
    pub limits: Limits,
    /// The scores on the golden set.
    pub golden: Option<Golden>,
    /// The share of `from`'s requests that `to` answers as well, unseen.
    pub shadow: f64,
    /// The figures of `from` at the last step: at 100 % no users are left there to compare with.
    pub baseline: Option<Summary>,
    pub started_ms: u64,
    pub paused_ms: Option<u64>,
    /// The last `EVENTS_MAX` events.
    pub events: Vec<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The steps follow one another.
    Running,
    /// Users stay where they are.
    Paused,
    /// The last step is over. Users stay at `to`.
    Done,
    /// `to` was worse: all users are back.
    RolledBack,
    /// An operator ended it: all users are back.
    Aborted,
}

/// The differences by which `to` may be worse than `from`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// The least number of requests in the window before a model is judged, and of `to` before a step can end.
    pub requests_min: u64,
    /// The length of the window in seconds.
    pub window_s: u64,
    /// The time in seconds after which a missing first token counts as a failure.
    pub overdue_s: u64,
    /// The tolerated excess of the share of failures.
    pub errors_over: f64,
    /// The tolerated deficit of the share of requests within their class's limits.
    pub goodput_under: f64,
    /// The tolerated ratio of the 95th percentiles of TTFT and TPOT.
    pub latency_ratio: f64,
    /// The tolerated deficit of the golden score.
    pub golden_under: f64,
    /// The tolerated excess of the share of thumbs down.
    pub thumbs_over: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Golden {
    pub from: f64,
    pub to: f64,
}

/// The figures of a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub requests: u64,
    pub error_rate: f64,
    /// The share of answers within their class's limits.
    pub goodput: f64,
    pub ttft_p95_ms: Option<f64>,
    pub tpot_p95_ms: Option<f64>,
    /// The share among the votes.
    pub thumbs_down: f64,
    pub votes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    pub at_ms: u64,
    pub what: String,
}

/// An operator's request for a rollout.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewRollout {
    pub from: String,
    pub to: String,
    #[serde(default)]
    pub steps: Option<Vec<f64>>,
    #[serde(default)]
    pub step_s: Option<u64>,
    #[serde(default)]
    pub limits: Limits,
    #[serde(default)]
    pub golden: Option<Golden>,
    /// Whether it may start without golden scores.
    #[serde(default)]
    pub no_gate: bool,
    #[serde(default)]
    pub shadow: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    #[error("`{0}` {1}")]
    Field(&'static str, String),
    #[error(
        "the golden scores of both models are missing, and without them nothing says that `to` is any good: give them (--golden-from, --golden-to), \
         or say that you do without (--no-gate)"
    )]
    Gate,
    #[error("it is {0}: {1}")]
    State(&'static str, &'static str),
}

const EVENTS_MAX: usize = 32;
const STEPS_MAX: usize = 32;
const STEPS: [f64; 4] = [1.0, 5.0, 25.0, 100.0];
const STEP_S: u64 = 15 * 60;
/// The maximum duration of a step: a month.
const STEP_S_MAX: u64 = 31 * 24 * 3600;

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests_min: 50,
            window_s: 60,
            overdue_s: 5,
            errors_over: 0.02,
            goodput_under: 0.05,
            latency_ratio: 1.5,
            golden_under: 0.02,
            thumbs_over: 0.05,
        }
    }
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Done => "done",
            Self::RolledBack => "rolled back",
            Self::Aborted => "aborted",
        }
    }

    /// Whether it may still change by itself.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Running | Self::Paused)
    }
}

impl Limits {
    fn check(&self) -> Result<(), Wrong> {
        let wrong = |field, reason: &str| Err(Wrong::Field(field, reason.to_owned()));
        let share = |value: f64| (0.0..=1.0).contains(&value);
        match self {
            Self { requests_min: 0, .. } => wrong("requests_min", "must be at least 1"),
            Self { window_s, .. } if !(1..=3600).contains(window_s) => wrong("window_s", "must be from 1 to 3600"),
            Self { overdue_s, .. } if !(1..=3600).contains(overdue_s) => wrong("overdue_s", "must be from 1 to 3600"),
            Self { latency_ratio, .. } if !(1.0..).contains(latency_ratio) => wrong("latency_ratio", "must be at least 1"),
            Self { errors_over, .. } if !share(*errors_over) => wrong("errors_over", "must be from 0 to 1"),
            Self { goodput_under, .. } if !share(*goodput_under) => wrong("goodput_under", "must be from 0 to 1"),
            Self { golden_under, .. } if !share(*golden_under) => wrong("golden_under", "must be from 0 to 1"),
            Self { thumbs_over, .. } if !share(*thumbs_over) => wrong("thumbs_over", "must be from 0 to 1"),
            _ => Ok(()),
        }
    }
}

impl Golden {
    /// Describes the first golden score of `to` that breaks a limit, if one does.
    pub fn breach(&self, limits: &Limits) -> Option<String> {
        // Scores are given with few digits; their difference has many.
        let under = self.from - self.to;
        (under > limits.golden_under + 1e-9).then(|| format!("golden score {:.3} against {:.3}: down by {under:.3}", self.to, self.from))
    }

    fn check(&self) -> Result<(), Wrong> {
        let sound = [self.from, self.to].into_iter().all(|score| (0.0..=1.0).contains(&score));
        if sound { Ok(()) } else { Err(Wrong::Field("golden", "has scores from 0 to 1".into())) }
    }
}

impl Rollout {
    /// Creates a rollout at its first step.
    pub fn start(wanted: NewRollout, id: String, now: Duration) -> Result<Self, Wrong> {
        let NewRollout { from, to, steps, step_s, limits, golden, no_gate, shadow } = wanted;
        let rollout = Self {
            id,
            from,
            to,
            steps: steps.unwrap_or_else(|| STEPS.to_vec()),
            step_s: step_s.unwrap_or(STEP_S),
            step: 0,
            since_ms: now.as_millis() as u64,
            state: State::Running,
            why: String::new(),
            limits,
            golden,
            shadow,
            baseline: None,
            started_ms: now.as_millis() as u64,
            paused_ms: None,
            events: Vec::new(),
        };
        rollout.check()?;
        match golden {
            None if !no_gate => return Err(Wrong::Gate),
            Some(golden) => {
                if let Some(breach) = golden.breach(&limits) {
                    return Err(Wrong::Field("golden", format!("bars this rollout: {breach}")));
                }
            }
            None => {}
        }
        let first = rollout.steps[0];
        Ok(rollout.told(now, State::Running, format!("started at {first} %")))
    }

    /// Checks all that does not depend on the time.
    pub fn check(&self) -> Result<(), Wrong> {
        let wrong = |field, reason: &str| Err(Wrong::Field(field, reason.to_owned()));
        if self.from == self.to {
            return wrong("to", "is the model that users are to move from");
        }
        let rising = self.steps.windows(2).all(|pair| pair[0] < pair[1]);
        let shares = self.steps.iter().all(|share| (0.0..=100.0).contains(share));
        if self.steps.is_empty() || self.steps.len() > STEPS_MAX || !rising || !shares || self.step >= self.steps.len() {
            return Err(Wrong::Field("steps", format!("are 1 to {STEPS_MAX} rising shares from 0 to 100, in percent")));
        }
        if !(1..=STEP_S_MAX).contains(&self.step_s) {
            return Err(Wrong::Field("step_s", format!("must be from 1 to {STEP_S_MAX} seconds")));
        }
        if !(0.0..=1.0).contains(&self.shadow) {
            return wrong("shadow", "is a share from 0 to 1");
        }
        self.golden.map_or(Ok(()), |golden| golden.check())?;
        self.limits.check()
    }

    /// The share of users at `to`, from 0 to 1.
    pub fn share(&self) -> f64 {
        match self.state {
            State::Running | State::Paused | State::Done => self.steps[self.step] / 100.0,
            State::RolledBack | State::Aborted => 0.0,
        }
    }

    /// Whether a user is at `to`. A user who is there at one step is there at all later ones.
    pub fn takes(&self, user: &str) -> bool {
        let share = self.share();
        share > 0.0 && sticky::place(&self.id, user) < share
    }

    pub fn step_lasted(&self, now: Duration) -> Duration {
        let until = self.paused_ms.map_or(now, Duration::from_millis);
        until.saturating_sub(Duration::from_millis(self.since_ms))
    }

    /// Returns the rollout at its next step, or its end. `baseline` are the current figures of `from`.
    pub fn advanced(&self, now: Duration, baseline: Option<Summary>) -> Self {
        let baseline = baseline.or(self.baseline);
        match self.steps.get(self.step + 1) {
            Some(share) => {
                let what = format!("{share} % of users at {}", self.to);
                Self { step: self.step + 1, since_ms: now.as_millis() as u64, baseline, ..self.clone() }.told(now, State::Running, what)
            }
            None => self.told(now, State::Done, format!("done: {} % of users stay at {}", self.steps[self.step], self.to)),
        }
    }

    pub fn rolled_back(&self, now: Duration, why: &str) -> Self {
        self.told(now, State::RolledBack, format!("rolled back: {why}"))
    }

    pub fn paused(&self, now: Duration) -> Result<Self, Wrong> {
        match self.state {
            State::Running => Ok(Self { paused_ms: Some(now.as_millis() as u64), ..self.clone() }.told(
                now,
                State::Paused,
                "paused by an operator".into(),
            )),
            state => Err(Wrong::State(state.name(), "only a rollout that is running can be paused")),
        }
    }

    /// Resumes the step where it was paused.
    pub fn resumed(&self, now: Duration) -> Result<Self, Wrong> {
        match (self.state, self.paused_ms) {
            (State::Paused, Some(paused)) => {
                let since_ms = self.since_ms + (now.as_millis() as u64).saturating_sub(paused);
                Ok(Self { paused_ms: None, since_ms, ..self.clone() }.told(now, State::Running, "resumed by an operator".into()))
            }
            (state, _) => Err(Wrong::State(state.name(), "only a rollout that is paused can be resumed")),
        }
    }

    /// Takes all users back, even from a rollout that is done.
    pub fn aborted(&self, now: Duration) -> Result<Self, Wrong> {
        match self.state {
            State::Running | State::Paused | State::Done => Ok(self.told(now, State::Aborted, "aborted by an operator".into())),
            state => Err(Wrong::State(state.name(), "all users are back already")),
        }
    }

    /// Sets later scores, which are judged like all other figures.
    pub fn scored(&self, now: Duration, golden: Golden) -> Result<Self, Wrong> {
        golden.check()?;
        if !self.state.is_open() {
            return Err(Wrong::State(self.state.name(), "its users do not move any more"));
        }
        let what = format!("golden scores {:.3} and {:.3}", golden.from, golden.to);
        Ok(Self { golden: Some(golden), ..self.clone() }.told(now, self.state, what))
    }

    fn told(&self, now: Duration, state: State, what: String) -> Self {
        let mut events = self.events.clone();
        if events.len() == EVENTS_MAX {
            events.remove(0);
        }
        events.push(Event { at_ms: now.as_millis() as u64, what: what.clone() });
        Self { state, why: what, events, ..self.clone() }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn wanted() -> NewRollout {
        NewRollout {
            from: "a".into(),
            to: "b".into(),
            steps: None,
            step_s: Some(60),
            limits: Limits::default(),
            golden: Some(Golden { from: 0.91, to: 0.90 }),
            no_gate: false,
            shadow: 0.0,
        }
    }

    pub(crate) fn rollout() -> Rollout {
        Rollout::start(wanted(), "id".into(), at(1000)).unwrap()
    }

    pub(crate) fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn who_is_there_stays_there() {
        let mut rollout = rollout();
        let mut there = Vec::new();
        for share in STEPS {
            let now: Vec<_> = (0..2000).map(|user| format!("u{user}")).filter(|user| rollout.takes(user)).collect();
            assert!(there.iter().all(|user| now.contains(user)), "nobody leaves at {share} %");
            let got = now.len() as f64 / 20.0;
            assert!((got - share).abs() < 5.0 * (share * (100.0 - share) / 2000.0).sqrt() + 1e-9, "{got} instead of {share}");
            there = now;
            rollout = rollout.advanced(at(2000), None);
        }
        assert_eq!((there.len(), rollout.state), (2000, State::Done));
        assert!(rollout.takes("u1"), "they stay when it is done");
        assert!(!rollout.aborted(at(3000)).unwrap().takes("u1"));
    }

    #[test]
    fn a_pause_takes_no_time() {
        let running = rollout();
        assert_eq!(running.step_lasted(at(1010)), at(10));
        let paused = running.paused(at(1010)).unwrap();
        assert_eq!((paused.step_lasted(at(5000)), paused.share()), (at(10), 0.01));
        let resumed = paused.resumed(at(5000)).unwrap();
        assert_eq!(resumed.step_lasted(at(5020)), at(30));
        assert!(paused.paused(at(1)).is_err() && resumed.resumed(at(1)).is_err());
        let over = resumed.rolled_back(at(6000), "slow");
        assert!(over.paused(at(1)).is_err() && over.aborted(at(1)).is_err() && over.scored(at(1), Golden { from: 1.0, to: 1.0 }).is_err());
        assert_eq!((over.share(), over.why.as_str()), (0.0, "rolled back: slow"));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let start = |wanted: NewRollout| Rollout::start(wanted, "id".into(), at(1)).map(drop).map_err(|wrong| wrong.to_string());
        assert_eq!(start(wanted()), Ok(()));
        assert_eq!(start(NewRollout { golden: None, no_gate: true, ..wanted() }), Ok(()));
        let limits = Limits::default();
        for (wanted, words) in [
            (NewRollout { golden: None, ..wanted() }, "--no-gate"),
            (NewRollout { golden: Some(Golden { from: 0.9, to: 0.87 }), ..wanted() }, "down by 0.030"),
            (NewRollout { golden: Some(Golden { from: 2.0, to: 2.0 }), ..wanted() }, "golden"),
            (NewRollout { to: "a".into(), ..wanted() }, "`to`"),
            (NewRollout { steps: Some(vec![]), ..wanted() }, "steps"),
            (NewRollout { steps: Some(vec![5.0, 5.0]), ..wanted() }, "steps"),
            (NewRollout { steps: Some(vec![1.0, 101.0]), ..wanted() }, "steps"),
            (NewRollout { steps: Some(vec![f64::NAN]), ..wanted() }, "steps"),
            (NewRollout { step_s: Some(0), ..wanted() }, "step_s"),
            (NewRollout { shadow: 1.5, ..wanted() }, "shadow"),
            (NewRollout { limits: Limits { requests_min: 0, ..limits }, ..wanted() }, "requests_min"),
            (NewRollout { limits: Limits { latency_ratio: f64::NAN, ..limits }, ..wanted() }, "latency_ratio"),
            (NewRollout { limits: Limits { errors_over: -1.0, ..limits }, ..wanted() }, "errors_over"),
            (NewRollout { limits: Limits { window_s: 0, ..limits }, ..wanted() }, "window_s"),
        ] {
            let error = start(wanted).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_drop_of_two_points_is_still_allowed() {
        let breach = |to| Golden { from: 0.91, to }.breach(&Limits::default()).is_some();
        assert_eq!([0.95, 0.90, 0.89, 0.889].map(breach), [false, false, false, true]);
    }

    #[test]
    fn the_record_is_what_it_was_after_a_trip_through_the_registry() {
        let mut rollout = rollout();
        for second in 0..100 {
            rollout = rollout.scored(at(second), Golden { from: 0.5, to: 0.5 }).unwrap();
        }
        assert_eq!(rollout.events.len(), EVENTS_MAX);
        let text = serde_json::to_vec(&rollout).unwrap();
        assert_eq!(serde_json::from_slice::<Rollout>(&text).unwrap(), rollout);
    }
}

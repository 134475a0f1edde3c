//! Rollouts at this gateway: the side of each user, the figures of both models, and the consequences.
//!
//! Every coordinator follows the registry's records, and publishes its own figures in records as well: each judges by all of them. Any of
//! them goes back when necessary, and stops sending users to the new model before the others have agreed. Only the registry's leader starts
//! the next step, so that a single clock counts.

use super::{
    KIND, SEEN_KIND,
    judge::{Verdict, judge},
    metrics,
    record::{Rollout, State, Summary},
    seen::{Counts, Ended, Report, Seen, Shadows, Side, Window},
    votes::Voter,
};
use crate::base::{
    registry::{ChangeError, RecordView, Registry, RegistryView},
    stamp::unix,
};
use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use serde_json::json;
use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time,
};

/// The interval between two judgements.
const JUDGED_EVERY: Duration = Duration::from_millis(250);
/// The interval between two reports to the other coordinators.
const TOLD_EVERY: Duration = Duration::from_secs(1);
/// The time limit of one report; a lost one is made up for by the next.
const TELLING_MAX: Duration = Duration::from_secs(2);
/// The extra time for which a coordinator's report stays valid after its window.
const TOLD_LATE: Duration = Duration::from_secs(5);
/// The time after a coordinator's start within which all workers connect.
const YOUNG: Duration = Duration::from_secs(15);
/// The maximum number of concurrent shadows, including the requests that they wait for.
const SHADOWS_MAX: usize = 16;

#[derive(Debug)]
pub struct Rollouts {
    live: RwLock<Arc<[Arc<Live>]>>,
    began: Instant,
    /// Permits for shadows.
    shadows: Arc<Semaphore>,
}

/// A rollout in its current state.
#[derive(Debug)]
pub struct Live {
    pub record: Rollout,
    revision: u64,
    book: Arc<Book>,
}

/// This coordinator's figures of a rollout, over all its steps.
#[derive(Debug)]
struct Book {
    began: Instant,
    noted: Mutex<Noted>,
    /// The reason why no more users are sent to the new model, before the others have agreed.
    brake: OnceLock<String>,
}

#[derive(Debug)]
struct Noted {
    from: Window,
    to: Window,
    step: usize,
    step_requests: u64,
    shadows: Shadows,
    /// Requests without a first token.
    waiting: HashMap<u64, Waiting>,
    seats: u64,
    /// Reports of the other coordinators.
    others: Vec<Report>,
    told: Option<(Instant, Seen)>,
}

#[derive(Debug)]
struct Waiting {
    side: Side,
    since: Instant,
    open: Arc<AtomicBool>,
}

/// A request of a rollout, until it is counted: once, by the first outcome that is known.
#[derive(Debug)]
pub struct Seat {
    book: Arc<Book>,
    side: Side,
    number: u64,
    open: Arc<AtomicBool>,
}

/// A rollout for operators.
#[derive(Debug, Serialize)]
pub struct Status {
    #[serde(flatten)]
    pub record: Rollout,
    pub revision: u64,
    /// The share of users at `to`.
    pub share: f64,
    pub seen_from: Summary,
    pub seen_to: Summary,
    pub step_requests: u64,
    pub shadows: Shadows,
    /// The condition that it waits for.
    pub waits_for: String,
}

impl Default for Rollouts {
    fn default() -> Self {
        Self { live: RwLock::default(), began: Instant::now(), shadows: Arc::new(Semaphore::new(SHADOWS_MAX)) }
    }
}

impl Rollouts {
    fn live(&self) -> Arc<[Arc<Live>]> {
        Arc::clone(&self.live.read())
    }

    pub fn is_empty(&self) -> bool {
        self.live.read().is_empty()
    }

    /// The rollout that moves users away from this model.
    pub fn of(&self, model: &str) -> Option<Arc<Live>> {
        self.live().iter().find(|live| live.record.from == model).cloned()
    }

    /// Replaces all rollouts. `told` has the coordinators' reports, in which this one's name is `own`.
    pub fn set(&self, records: Vec<(Rollout, u64)>, told: &[(String, Report)], own: &str) {
        let before = self.live();
        let live = records.into_iter().map(|(record, revision)| {
            let known = before.iter().find(|live| live.record.id == record.id).map(|live| Arc::clone(&live.book));
            let book = known.unwrap_or_else(|| Arc::new(Book::new(self.began, &record)));
            let mut noted = book.noted.lock();
            if noted.step != record.step {
                (noted.step, noted.step_requests) = (record.step, 0);
            }
            let others = told.iter().filter(|(coordinator, told)| coordinator != own && told.id == record.id);
            noted.others = others.map(|(_, told)| told.clone()).collect();
            drop(noted);
            Arc::new(Live { record, revision, book })
        });
        *self.live.write() = live.collect();
    }

    /// Counts votes on a model's answers. Returns `false` if the model is in no rollout.
    pub fn vote(&self, model: &str, voter: Voter<'_>, up: u64, down: u64) -> bool {
        let mut counted = false;
        for live in self.live().iter().filter(|live| live.record.state.is_open()) {
            let now = self.began.elapsed();
            let mut noted = live.book.noted.lock();
            for (name, side) in [(&live.record.from, Side::From), (&live.record.to, Side::To)] {
                if name == model {
                    noted.side(side).now(now).votes.add(voter, up, down);
                    counted = true;
                }
            }
        }
        counted
    }

    /// Whether this process has just started: missing workers are then no fault of a model's.
    pub fn is_young(&self) -> bool {
        self.began.elapsed() < YOUNG
    }

    /// Takes a permit for a shadow; `None` if the maximum is reached.
    pub(super) fn admit_shadow(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.shadows).try_acquire_owned().ok()
    }

    pub fn status(&self) -> Vec<Status> {
        self.live().iter().map(|live| live.status(unix())).collect()
    }

    /// Background loop: judges and advances rollouts. Never returns.
    pub async fn tend(&self, registry: &dyn Registry) {
        let mut interval = time::interval(JUDGED_EVERY);
        interval.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let mut shown: Arc<[Arc<Live>]> = Arc::default();
        loop {
            interval.tick().await;
            let live = self.live();
            let gone = shown.iter().filter(|old| live.iter().all(|live| live.record.id != old.record.id));
            gone.for_each(|old| metrics::hide_rollout(&old.record));
            shown = Arc::clone(&live);
            if live.is_empty() {
                continue;
            }
            let view = registry.view();
            for live in live.iter().filter(|live| live.record.state.is_open()) {
                live.judge(registry, &view).await;
                live.tell(registry, &view).await;
            }
            for live in live.iter() {
                let Status { record, share, seen_from, seen_to, .. } = live.status(unix());
                metrics::show_rollout(&record, share, &[("from", seen_from), ("to", seen_to)]);
            }
            if view.part == "leader" {
                forget(registry, &live).await;
            }
        }
    }
}

/// Deletes the reports of rollouts that have ended.
async fn forget(registry: &dyn Registry, live: &[Arc<Live>]) {
    let is_open = |key: &str| live.iter().any(|live| live.record.state.is_open() && key.starts_with(&live.record.id));
    let old = registry.records(Some(SEEN_KIND), None).into_iter().find(|record| !is_open(&record.key));
    if let Some(RecordView { kind, key, revision, .. }) = old {
        let _ = time::timeout(TELLING_MAX, registry.delete(kind, key, Some(revision))).await;
    }
}

impl Live {
    /// The share of users that this gateway sends to the new model.
    fn share(&self) -> f64 {
        if self.record.state.is_open() && self.book.brake.get().is_some() { 0.0 } else { self.record.share() }
    }

    pub fn side(&self, user: &str) -> Side {
        if self.share() > 0.0 && self.record.takes(user) { Side::To } else { Side::From }
    }

    /// Takes a seat for a request to one of the models; `None` if the rollout is over.
    pub fn seat(&self, side: Side) -> Option<Seat> {
        if !self.record.state.is_open() {
            return None;
        }
        let mut noted = self.book.noted.lock();
        let (number, open) = (noted.seats, Arc::new(AtomicBool::new(true)));
        noted.seats += 1;
        noted.waiting.insert(number, Waiting { side, since: Instant::now(), open: Arc::clone(&open) });
        drop(noted);
        Some(Seat { book: Arc::clone(&self.book), side, number, open })
    }

    pub(super) fn note_shadow(&self, note: impl FnOnce(&mut Shadows)) {
        note(&mut self.book.noted.lock().shadows);
    }

    /// Adds up the figures of all coordinators.
    fn seen(&self, now: Duration) -> Seen {
        let mut noted = self.book.noted.lock();
        let mut seen = noted.own(self.book.began.elapsed());
        let late = Duration::from_secs(self.record.limits.window_s) + TOLD_LATE;
        let fresh = |told: &&Report| now.saturating_sub(Duration::from_millis(told.at_ms)) <= late;
        for told in noted.others.iter().filter(fresh) {
            let mut theirs = told.seen.clone();
            if told.step != self.record.step {
                theirs.step_requests = 0;
            }
            seen.merge(&theirs);
        }
        seen
    }

    fn status(&self, now: Duration) -> Status {
        let seen = self.seen(now);
        let (seen_from, seen_to) = seen.summaries();
        let waits_for = match (self.book.brake.get(), judge(&self.record, &seen, now)) {
            (Some(why), _) if self.record.state.is_open() => format!("the other coordinators, to roll back: {why}"),
            (_, Verdict::Hold(why)) => why,
            (_, Verdict::Advance) => "the next step".into(),
            (_, Verdict::RollBack(why)) => format!("rolling back: {why}"),
        };
        Status {
            record: self.record.clone(),
            revision: self.revision,
            share: self.share(),
            seen_from,
            seen_to,
            step_requests: seen.step_requests,
            shadows: seen.shadows,
            waits_for,
        }
    }

    async fn judge(&self, registry: &dyn Registry, view: &RegistryView) {
        self.book.count_overdue(Duration::from_secs(self.record.limits.overdue_s));
        let now = unix();
        let seen = self.seen(now);
        let next = match (self.book.brake.get(), judge(&self.record, &seen, now)) {
            (Some(why), _) => self.record.rolled_back(now, why),
            (None, Verdict::RollBack(why)) => {
                let why = self.book.brake.get_or_init(|| why);
                tracing::error!(from = self.record.from, to = self.record.to, why, "rollout taken back");
                metrics::count_rollback(&self.record);
                self.record.rolled_back(now, why)
            }
            (None, Verdict::Advance) if view.part == "leader" => {
                let baseline = (seen.from.requests >= self.record.limits.requests_min).then(|| seen.summaries().0);
                let next = self.record.advanced(now, baseline);
                tracing::info!(from = self.record.from, to = self.record.to, next.why, "rollout advanced");
                next
            }
            (None, Verdict::Advance | Verdict::Hold(_)) => return,
        };
        let (kind, key) = (KIND.to_owned(), self.record.from.clone());
        match registry.put(kind, key, json!(next), Some(self.revision)).await {
            // The record has changed in the meantime, and will be judged next time.
            Ok(_) | Err(ChangeError::Conflict(_)) => {}
            Err(error) => tracing::warn!(%error, rollout = self.record.from, "could not change a rollout's record; trying again"),
        }
    }

    /// Reports to the other coordinators, if there are any.
    async fn tell(&self, registry: &dyn Registry, view: &RegistryView) {
        if view.voters.len() < 2 {
            return;
        }
        let (seen, step) = {
            let mut noted = self.book.noted.lock();
            let seen = noted.own(self.book.began.elapsed());
            let again = Duration::from_secs(self.record.limits.window_s) / 2;
            let known = noted.told.as_ref().is_some_and(|(at, told)| {
                at.elapsed() < TOLD_EVERY || (*told == seen && (at.elapsed() < again || seen == Seen::default()))
            });
            if known || (noted.told.is_none() && seen == Seen::default()) {
                return;
            }
            noted.told = Some((Instant::now(), seen.clone()));
            (seen, noted.step)
        };
        let told = Report { id: self.record.id.clone(), step, at_ms: unix().as_millis() as u64, seen };
        let key = format!("{}@{}", told.id, view.coordinator);
        // If this report fails, the next one replaces it.
        let _ = time::timeout(TELLING_MAX, registry.put(SEEN_KIND.to_owned(), key, json!(told), None)).await;
    }
}

impl Book {
    fn new(began: Instant, record: &Rollout) -> Self {
        let window = || Window::new(Duration::from_secs(record.limits.window_s));
        let noted = Noted {
            from: window(),
            to: window(),
            step: record.step,
            step_requests: 0,
            shadows: Shadows::default(),
            waiting: HashMap::new(),
            seats: 0,
            others: Vec::new(),
            told: None,
        };
        Self { began, noted: Mutex::new(noted), brake: OnceLock::new() }
    }

    fn count(&self, side: Side, ended: &Ended) {
        let now = self.began.elapsed();
        let mut noted = self.noted.lock();
        noted.step_requests += u64::from(side == Side::To);
        noted.side(side).now(now).add(ended);
    }

    /// Counts requests as failed that have waited too long for their first token, whatever their outcome will be.
    fn count_overdue(&self, limit: Duration) {
        let mut overdue = Vec::new();
        self.noted.lock().waiting.retain(|_, waiting| {
            let late = waiting.since.elapsed() > limit;
            if late && waiting.open.swap(false, Ordering::Relaxed) {
                overdue.push(waiting.side);
            }
            !late
        });
        for side in overdue {
            self.count(side, &Ended { failed: true, ..Ended::default() });
        }
    }
}

impl Noted {
    fn side(&mut self, side: Side) -> &mut Window {
        match side {
            Side::From => &mut self.from,
            Side::To => &mut self.to,
        }
    }

    fn own(&mut self, now: Duration) -> Seen {
        let (from, to): (Counts, Counts) = (self.from.sum(now), self.to.sum(now));
        Seen { from, to, step_requests: self.step_requests, shadows: self.shadows }
    }
}

impl Seat {
    pub fn first_token(&self) {
        self.book.noted.lock().waiting.remove(&self.number);
    }

    /// Counts the end of the request. Only the first call counts.
    pub fn ended(&self, ended: &Ended) {
        if self.open.swap(false, Ordering::Relaxed) {
            self.book.count(self.side, ended);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.first_token();
    }
}

/// Reads the rollouts' records. Those that cannot be read are left out, with an error in the log.
pub fn read<'a>(records: impl Iterator<Item = (&'a str, &'a [u8], u64)>) -> Vec<(Rollout, u64)> {
    let read = |(key, value, revision): (&str, &[u8], u64)| match serde_json::from_slice::<Rollout>(value) {
        Ok(record) if record.check().is_ok() && record.from == key => Some((record, revision)),
        Ok(_) => {
            tracing::error!(key, "invalid record of a rollout; leaving it out");
            None
        }
        Err(error) => {
            tracing::error!(key, %error, "could not read the record of a rollout; leaving it out");
            None
        }
    };
    records.filter_map(read).collect()
}

/// Reads the reports, each with its coordinator.
pub fn read_told<'a>(records: impl Iterator<Item = (&'a str, &'a [u8])>) -> Vec<(String, Report)> {
    records.filter_map(|(key, value)| Some((key.split_once('@')?.1.to_owned(), serde_json::from_slice(value).ok()?))).collect()
}

impl State {
    /// The number for metrics.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Running => 1,
            Self::Paused => 2,
            Self::Done => 3,
            Self::RolledBack => 4,
            Self::Aborted => 5,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::record::tests::{at, rollout},
        *,
    };

    fn set(rollouts: &Rollouts, record: &Rollout, told: &[(String, Report)]) {
        rollouts.set(vec![(record.clone(), 7)], told, "me");
    }

    fn told(step: usize, at_ms: u64) -> Report {
        let mut seen = Seen { step_requests: 30, ..Seen::default() };
        (0..30).for_each(|_| seen.to.add(&Ended { kept: true, ..Ended::default() }));
        Report { id: "id".into(), step, at_ms, seen }
    }

    #[test]
    fn what_is_seen_outlives_steps_and_is_the_sum_of_all_coordinators() {
        let (rollouts, first) = (Rollouts::default(), rollout());
        set(&rollouts, &first, &[]);
        let live = rollouts.of("a").unwrap();
        let seat = live.seat(Side::To).unwrap();
        seat.ended(&Ended { failed: true, ..Ended::default() });
        seat.ended(&Ended::default());
        let now = at(1100);
        assert_eq!((live.seen(now).to.requests, live.seen(now).to.failed, live.seen(now).step_requests), (1, 1, 1), "counted once");
        let ms = |time: Duration| time.as_millis() as u64;
        let others = [("me".into(), told(0, ms(now))), ("other".into(), told(0, ms(now))), ("old".into(), told(0, ms(at(1000))))];
        set(&rollouts, &first, &others);
        let seen = rollouts.of("a").unwrap().seen(now);
        assert_eq!((seen.to.requests, seen.step_requests), (31, 31), "one's own is known, and what is old does not count");
        set(&rollouts, &first.advanced(now, None), &others);
        let seen = rollouts.of("a").unwrap().seen(now);
        assert_eq!((seen.to.requests, seen.step_requests), (31, 0), "a step begins with no requests");
    }

    #[test]
    fn a_request_that_hangs_has_failed() {
        let rollouts = Rollouts::default();
        set(&rollouts, &rollout(), &[]);
        let live = rollouts.of("a").unwrap();
        let (hangs, answered) = (live.seat(Side::To).unwrap(), live.seat(Side::To).unwrap());
        let left = live.seat(Side::From).unwrap();
        answered.first_token();
        drop(left);
        std::thread::sleep(Duration::from_millis(2));
        live.book.count_overdue(Duration::from_millis(1));
        live.book.count_overdue(Duration::from_millis(1));
        let seen = live.seen(at(1));
        assert_eq!((seen.to.requests, seen.to.failed, seen.from.requests), (1, 1, 0));
        hangs.ended(&Ended::default());
        assert_eq!(live.seen(at(1)).to.requests, 1, "it was counted");
        assert!(live.book.noted.lock().waiting.is_empty());
    }

    #[test]
    fn with_the_brake_on_everybody_is_back_at_once() {
        let rollouts = Rollouts::default();
        let mut all = rollout();
        while all.share() < 1.0 {
            all = all.advanced(at(2000), None);
        }
        set(&rollouts, &all, &[]);
        let live = rollouts.of("a").unwrap();
        assert_eq!(live.side("jane"), Side::To);
        live.book.brake.set("slow".into()).unwrap();
        assert_eq!(live.side("jane"), Side::From);
        assert!(rollouts.status()[0].waits_for.contains("slow"));
        set(&rollouts, &all.paused(at(2001)).unwrap(), &[]);
        assert_eq!(rollouts.of("a").unwrap().side("jane"), Side::From, "another revision changes nothing about it");
    }

    #[test]
    fn records_that_make_no_sense_are_left_out() {
        let good = serde_json::to_vec(&rollout()).unwrap();
        let mut wrong = rollout();
        wrong.steps.clear();
        let wrong = serde_json::to_vec(&wrong).unwrap();
        let records = [("a", &good[..], 3), ("b", &good[..], 4), ("a", &wrong[..], 5), ("a", &b"{}"[..], 6)];
        let revisions: Vec<_> = read(records.into_iter()).into_iter().map(|(_, revision)| revision).collect();
        assert_eq!(revisions, [3]);
    }
}

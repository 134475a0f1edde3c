//! Users' feedback on answers. Answers are kept in memory for a while, each with its question, so that a rating can refer to it; a rating
//! is stored in SQLite with both, without personal data.
//!
//! [`sent`]: opinions as events for elsewhere.
//!
//! An answer's owner has one opinion of it, under any user names. Tenants [share](crate::base::room) the room for both.

pub mod sent;

use crate::{
    base::{
        json::each_string,
        owner::{Erasing, Owner, Whose},
        room::Shares,
    },
    metrics,
};
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    fs::OpenOptions,
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_safety::pii::{find::Finder, redact::masked};

#[derive(Clone, Debug)]
pub struct FeedbackSettings {
    /// The database; without it, feedback ends with this process.
    pub file: Option<PathBuf>,
    /// The time for which answers are kept in memory.
    pub keep: Duration,
    /// The maximum size of these answers.
    pub bytes_max: u64,
    /// The finder of personal data, which is removed from stored texts.
    pub finder: Arc<Finder>,
}

impl FeedbackSettings {
    /// The database in messages.
    fn file_name(&self) -> String {
        self.file.as_deref().map_or("memory".into(), |file| file.display().to_string())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot make {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("could not store feedback in {file}: {source}")]
    Database { file: String, source: rusqlite::Error },
}

#[derive(Debug)]
pub struct Feedback {
    settings: FeedbackSettings,
    known: Mutex<Known>,
    kept: Mutex<Connection>,
    kept_max: u64,
}

/// An answer, with its question.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answered {
    pub owner: Owner,
    pub model: String,
    /// The question, as messages of a chat; empty if it was too long.
    pub question: Vec<Value>,
    pub answer: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rating {
    Up,
    Down,
}

/// The opinion of an answer's owner.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Opinion {
    /// The user that the owner names, for display only.
    pub user: String,
    pub rating: Option<Rating>,
    /// Whether the user asked for a new answer.
    pub regenerate: bool,
    pub comment: Option<String>,
}

/// The answers in memory.
#[derive(Debug, Default)]
struct Known {
    answers: HashMap<String, Answered>,
    /// The answers of each tenant, the oldest first.
    order: HashMap<String, VecDeque<(Instant, String, u64)>>,
    bytes: Shares<String>,
}

/// The maximum number of stored opinions.
const KEPT_MAX: u64 = 100_000;
/// The maximum size of a question, or of an answer.
const TEXT_BYTES_MAX: usize = 32 << 10;
/// The approximate size of an answer in memory besides its texts.
const OVERHEAD_BYTES: u64 = 512;
/// The number of opinions that are erased, or deleted because of their age, in one transaction.
const AT_A_TIME: u64 = 500;
const SCHEMA: &str = "
    PRAGMA journal_mode = WAL;
    CREATE TABLE IF NOT EXISTS opinions (
        owner TEXT NOT NULL, response TEXT NOT NULL, tenant TEXT NOT NULL, user TEXT NOT NULL, at INTEGER NOT NULL, model TEXT NOT NULL,
        rating TEXT, regenerate INTEGER NOT NULL, comment TEXT, question TEXT NOT NULL, answer TEXT NOT NULL,
        PRIMARY KEY (owner, response));
    CREATE INDEX IF NOT EXISTS opinions_by_age ON opinions (at);
    CREATE INDEX IF NOT EXISTS opinions_by_tenant ON opinions (tenant, at);
    CREATE INDEX IF NOT EXISTS opinions_by_response ON opinions (response);";
/// The migration from an earlier version, in which each user name had an opinion.
const TO_OPINIONS: &str = "
    BEGIN;
    INSERT OR IGNORE INTO opinions
        SELECT tenant || '/' || user, response, tenant, user, at, model, rating, regenerate, comment, question, answer FROM feedback;
    DROP TABLE feedback;
    COMMIT;";

impl Feedback {
    pub fn open(settings: FeedbackSettings) -> Result<Self, OpenError> {
        if let Some(path) = &settings.file {
            // SQLite gives its other files the same permissions.
            let made = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path);
            made.map_err(|source| OpenError::File { path: path.clone(), source })?;
        }
        let kept = open(settings.file.as_deref());
        let kept = kept.map_err(|source| OpenError::Database { file: settings.file_name(), source })?;
        Ok(Self { settings, known: Mutex::default(), kept: Mutex::new(kept), kept_max: KEPT_MAX })
    }

    /// Remembers an answer that starts.
    pub fn remember(&self, id: &str, answered: Answered) {
        self.known.lock().put(id, answered, Instant::now(), &self.settings);
    }

    /// Completes an answer that has ended, or a part of it: `answer` is the whole text so far.
    pub fn complete(&self, id: &str, answer: &str) {
        self.known.lock().complete(id, &answer[..answer.floor_char_boundary(TEXT_BYTES_MAX)], self.settings.bytes_max);
    }

    /// Returns an answer to this owner, while it is remembered.
    pub fn find(&self, owner: &Owner, id: &str) -> Option<Answered> {
        let mut known = self.known.lock();
        known.forget(Instant::now(), &self.settings);
        known.answers.get(id).filter(|answered| answered.owner == *owner).cloned()
    }

    /// Stores an opinion, replacing an earlier one of the answer's owner. Returns whether there was one. Waits for the disk.
    pub fn keep(&self, now: u64, id: &str, answered: &Answered, opinion: &Opinion) -> rusqlite::Result<bool> {
        let mask = |text: &str| masked(&self.settings.finder, text);
        let mut question = json!(answered.question);
        each_string(&mut question, &mut |text| *text = mask(text));
        let owner = &answered.owner;
        let mut kept = self.kept.lock();
        let work = kept.transaction()?;
        let earlier: Option<(Option<String>, bool)> = work
            .query_row("SELECT rating, regenerate FROM opinions WHERE owner = ?1 AND response = ?2", params![owner.0, id], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .optional()?;
        let rating = opinion.rating.map(Rating::name);
        work.execute(
            "INSERT OR REPLACE INTO opinions (owner, response, tenant, user, at, model, rating, regenerate, comment, question, answer)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
            params![
                owner.0,
                id,
                owner.tenant(),
                opinion.user,
                now,
                answered.model,
                rating,
                opinion.regenerate,
                opinion.comment.as_deref().map(mask),
                question.to_string(),
                mask(&answered.answer)
            ],
        )?;
        let evicted = make_room(&work, owner.tenant(), self.kept_max)?;
        work.commit()?;
        evicted.iter().for_each(|tenant| metrics::note_evicted("feedback", tenant, 1));
        let (before, wanted_another) = earlier.clone().unwrap_or_default();
        if let Some(rating) = rating.filter(|rating| before.as_deref() != Some(*rating)) {
            super::metrics::count_feedback(&answered.model, rating);
        }
        if opinion.regenerate && !wanted_another {
            super::metrics::count_feedback(&answered.model, "regenerate");
        }
        Ok(earlier.is_some())
    }

    /// Removes opinions and remembered answers of these owners, or counts them. Returns the number of each. Waits for the disk.
    pub fn erase(&self, whose: &Whose, erasing: Erasing) -> rusqlite::Result<(u64, u64)> {
        let answers = self.known.lock().erase(whose, erasing);
        let name = whose.name();
        let below = if whose.user.is_none() { [format!("{name}/"), format!("{name}0")] } else { Default::default() };
        let owners = params![name, below[0], below[1]];
        let of = "(owner = ?1 OR (owner >= ?2 AND owner < ?3))";
        if erasing == Erasing::Count {
            let count = format!("SELECT count(*) FROM opinions WHERE {of}");
            return Ok((self.kept.lock().query_row(&count, owners, |row| row.get(0))?, answers));
        }
        let delete = format!("DELETE FROM opinions WHERE rowid IN (SELECT rowid FROM opinions WHERE {of} LIMIT {AT_A_TIME})");
        let mut opinions = 0;
        loop {
            // Others come between.
            let kept = self.kept.lock();
            kept.pragma_update(None, "secure_delete", "ON")?;
            let some = kept.execute(&delete, owners)?;
            opinions += some as u64;
            if some == 0 {
                kept.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
                return Ok((opinions, answers));
            }
        }
    }

    /// Deletes opinions from before `before`. Returns their number. Waits for the disk.
    pub fn expire(&self, before: u64) -> rusqlite::Result<u64> {
        let delete =
            format!("DELETE FROM opinions WHERE rowid IN (SELECT rowid FROM opinions WHERE at < ?1 ORDER BY at LIMIT {AT_A_TIME})");
        let mut expired = 0;
        loop {
            // Others come between.
            match self.kept.lock().execute(&delete, [before])? {
                0 => return Ok(expired),
                some => expired += some as u64,
            }
        }
    }

    /// Hands over the opinions of these owners, until `each` returns `false`. Waits for the disk, and for `each`.
    pub fn each_of(&self, whose: &Whose, mut each: impl FnMut(Value) -> bool) -> rusqlite::Result<()> {
        let name = whose.name();
        let below = if whose.user.is_none() { [format!("{name}/"), format!("{name}0")] } else { Default::default() };
        let mut last = 0;
        loop {
            // A page at a time: others come between.
            let page = {
                let kept = self.kept.lock();
                let mut select = kept.prepare_cached(
                    "SELECT tenant, user, response, at, model, rating, regenerate, comment, question, answer, rowid FROM opinions
                     WHERE (owner = ?1 OR (owner >= ?2 AND owner < ?3)) AND rowid > ?4 ORDER BY rowid LIMIT 20",
                )?;
                let rows = select.query_map(params![name, below[0], below[1], last], |row| Ok((row.get::<_, i64>(10)?, shown(row)?)))?;
                rows.collect::<rusqlite::Result<Vec<_>>>()?
            };
            let Some((end, _)) = page.last() else { return Ok(()) };
            last = *end;
            if !page.into_iter().all(|(_, opinion)| each(opinion)) {
                return Ok(());
            }
        }
    }

    /// Lists opinions, the newest first. Waits for the disk.
    pub fn list(&self, rating: Option<Rating>, response: Option<&str>, limit: usize) -> rusqlite::Result<Vec<Value>> {
        let kept = self.kept.lock();
        let mut select = kept.prepare_cached(
            "SELECT tenant, user, response, at, model, rating, regenerate, comment, question, answer FROM opinions
             WHERE (?1 IS NULL OR rating = ?1) AND (?2 IS NULL OR response = ?2) ORDER BY at DESC, rowid DESC LIMIT ?3",
        )?;
        select.query_map(params![rating.map(Rating::name), response, limit as i64], shown)?.collect()
    }
}

fn open(file: Option<&Path>) -> rusqlite::Result<Connection> {
    let kept = match file {
        Some(file) => Connection::open(file)?,
        None => Connection::open_in_memory()?,
    };
    kept.busy_timeout(Duration::from_secs(5))?;
    kept.execute_batch(SCHEMA)?;
    let is_earlier = kept.prepare("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'feedback'")?.exists([])?;
    if is_earlier {
        kept.execute_batch(TO_OPINIONS)?;
    }
    Ok(kept)
}

/// Deletes the oldest opinions while there are too many: of `newcomer`, if it has more than its share, else of the tenant that has most.
/// Returns the tenants that lost one.
fn make_room(work: &Transaction<'_>, newcomer: &str, kept_max: u64) -> rusqlite::Result<Vec<String>> {
    let mut evicted = Vec::new();
    while work.query_row("SELECT count(*) FROM opinions", [], |row| row.get::<_, u64>(0))? > kept_max {
        let mut shares = Shares::default();
        let mut count = work.prepare_cached("SELECT tenant, count(*) FROM opinions GROUP BY tenant")?;
        let mut rows = count.query([])?;
        while let Some(row) = rows.next()? {
            shares.add(&row.get::<_, String>(0)?, row.get(1)?);
        }
        // The new one is already counted.
        let loser = shares.losers(kept_max, &newcomer.to_owned(), 0).into_iter().next().unwrap_or_else(|| newcomer.to_owned());
        work.execute(
            "DELETE FROM opinions WHERE rowid IN (SELECT rowid FROM opinions WHERE tenant = ?1 ORDER BY at, rowid LIMIT 1)",
            [&loser],
        )?;
        evicted.push(loser);
    }
    Ok(evicted)
}

impl Rating {
    fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

impl Known {
    fn put(&mut self, id: &str, answered: Answered, now: Instant, settings: &FeedbackSettings) {
        // The answer is still to come.
        let question: usize = answered.question.iter().map(|message| message.to_string().len()).sum();
        let bytes = OVERHEAD_BYTES + question as u64;
        let tenant = answered.owner.tenant().to_owned();
        self.forget(now, settings);
        self.make_room(&tenant, bytes, settings.bytes_max);
        self.bytes.add(&tenant, bytes);
        self.order.entry(tenant).or_default().push_back((now, id.to_owned(), bytes));
        self.answers.insert(id.to_owned(), answered);
    }

    fn complete(&mut self, id: &str, answer: &str, bytes_max: u64) {
        let Some(answered) = self.answers.get(id) else { return };
        let tenant = answered.owner.tenant().to_owned();
        // An answer of several rounds is completed after each of them.
        let gained = answer.len().saturating_sub(answered.answer.len()) as u64;
        self.make_room(&tenant, gained, bytes_max);
        // The answer may have been evicted itself. Most answers that end are among the newest.
        if let Some(answered) = self.answers.get_mut(id)
            && let Some((_, _, bytes)) =
                self.order.get_mut(&tenant).and_then(|order| order.iter_mut().rev().find(|(_, other, _)| other == id))
        {
            answered.answer = answer.to_owned();
            *bytes += gained;
            self.bytes.add(&tenant, gained);
        }
    }

    fn make_room(&mut self, tenant: &String, bytes: u64, bytes_max: u64) {
        while self.bytes.total() + bytes > bytes_max {
            let losers = self.bytes.losers(bytes_max, tenant, bytes);
            if !losers.iter().any(|loser| self.forget_oldest(loser)) {
                return;
            }
        }
    }

    /// Drops the answers of these owners, or counts them.
    fn erase(&mut self, whose: &Whose, erasing: Erasing) -> u64 {
        let Some(order) = self.order.get_mut(&whose.tenant) else { return 0 };
        let answers = &self.answers;
        let is_of = |id: &String| answers.get(id).is_some_and(|answered| whose.covers(&answered.owner.0));
        let gone: Vec<_> = order.iter().filter(|(_, id, _)| is_of(id)).map(|(_, id, bytes)| (id.clone(), *bytes)).collect();
        if erasing == Erasing::Remove {
            let ids: HashSet<&String> = gone.iter().map(|(id, _)| id).collect();
            order.retain(|(_, id, _)| !ids.contains(id));
            if order.is_empty() {
                self.order.remove(&whose.tenant);
            }
            for (id, bytes) in &gone {
                self.answers.remove(id);
                self.bytes.take(&whose.tenant, *bytes);
            }
        }
        gone.len() as u64
    }

    /// Drops the tenant's oldest answer. Returns `false` if it has none.
    fn forget_oldest(&mut self, tenant: &String) -> bool {
        let Some(order) = self.order.get_mut(tenant) else { return false };
        let Some((_, id, bytes)) = order.pop_front() else { return false };
        if order.is_empty() {
            self.order.remove(tenant);
        }
        self.bytes.take(tenant, bytes);
        self.answers.remove(&id);
        true
    }

    fn forget(&mut self, now: Instant, settings: &FeedbackSettings) {
        let old = |(at, ..): &&(Instant, String, u64)| now.saturating_duration_since(*at) > settings.keep;
        let counts = self.order.iter().map(|(tenant, order)| (tenant.clone(), order.iter().take_while(old).count()));
        for (tenant, count) in counts.filter(|(_, count)| *count > 0).collect::<Vec<_>>() {
            for _ in 0..count {
                self.forget_oldest(&tenant);
            }
        }
    }
}

/// Extracts the question from a body of any generating endpoint, as messages of a chat. Empty if the body has none in this form, or it is
/// too long.
pub fn asked(body: &Map<String, Value>) -> Vec<Value> {
    let user = |content: &Value| json!({"role": "user", "content": content});
    let first = |names: &[&str]| names.iter().filter_map(|name| body.get(*name)).find(|value| !value.is_null());
    let system = first(&["system", "instructions"]);
    let said = first(&["messages", "input", "prompt"]);
    let turns = match said {
        Some(text @ Value::String(_)) => vec![user(text)],
        Some(Value::Array(turns)) if turns.iter().all(|turn| turn.is_object() && !turn["role"].is_null()) => turns.clone(),
        _ => return Vec::new(),
    };
    let messages: Vec<Value> = system.map(|content| json!({"role": "system", "content": content})).into_iter().chain(turns).collect();
    if json!(messages).to_string().len() > TEXT_BYTES_MAX { Vec::new() } else { messages }
}

fn shown(row: &Row<'_>) -> rusqlite::Result<Value> {
    let text = |column: usize| row.get::<_, Option<String>>(column);
    Ok(json!({
        "tenant": text(0)?, "user": text(1)?, "response_id": text(2)?, "at": row.get::<_, u64>(3)?, "model": text(4)?, "rating": text(5)?,
        "regenerate": row.get::<_, bool>(6)?, "comment": text(7)?,
        "question": serde_json::from_str::<Value>(&text(8)?.unwrap_or_default()).unwrap_or_default(), "answer": text(9)?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use tidemill_safety::pii::Kind;

    pub(super) fn settings() -> FeedbackSettings {
        FeedbackSettings { file: None, keep: Duration::from_secs(60), bytes_max: 10_000, finder: Arc::new(Finder::new(&Kind::ALL)) }
    }

    pub(super) fn answered(owner: &str) -> Answered {
        let question = vec![json!({"role": "user", "content": "Who is jane@example.org?"})];
        Answered { owner: Owner(owner.into()), model: "tiny".into(), question, answer: String::new() }
    }

    #[test]
    fn an_answer_is_its_owners_and_known_for_a_while() {
        let feedback = Feedback::open(settings()).unwrap();
        let find = |owner: &str, id: &str| feedback.find(&Owner(owner.into()), id);
        feedback.remember("a", answered("acme/ann"));
        feedback.complete("a", "Nobody.");
        assert_eq!(find("acme/ann", "a").unwrap().answer, "Nobody.");
        assert!(["other", "acme", "acme/bob", ""].iter().all(|owner| find(owner, "a").is_none()));
        for n in 0..100 {
            feedback.remember(&n.to_string(), answered("acme/bob"));
            feedback.complete(&n.to_string(), &"x".repeat(300));
            assert!(feedback.known.lock().bytes.total() <= 10_000);
            feedback.known.lock().bytes.check_integrity();
        }
        assert!(find("acme/ann", "a").is_none() && find("acme/bob", "99").is_some());
        let mut known = feedback.known.lock();
        known.forget(Instant::now() + Duration::from_secs(61), &settings());
        assert_eq!((known.bytes.total(), known.answers.len(), known.order.len()), (0, 0, 0));
    }

    #[test]
    fn a_flood_drives_out_nothing_but_itself() {
        let feedback = Feedback { kept_max: 10, ..Feedback::open(settings()).unwrap() };
        let opinion = Opinion { rating: Some(Rating::Up), ..Opinion::default() };
        feedback.remember("mine", answered("acme/ann"));
        feedback.keep(0, "mine", &answered("acme/ann"), &opinion).unwrap();
        for n in 1..100 {
            let id = n.to_string();
            feedback.remember(&id, answered("flood"));
            feedback.complete(&id, &"x".repeat(300));
            feedback.keep(n, &id, &answered("flood"), &opinion).unwrap();
        }
        assert!(feedback.find(&Owner("acme/ann".into()), "mine").is_some());
        let listed = feedback.list(None, None, 100).unwrap();
        let tenants: Vec<_> = listed.iter().map(|row| row["tenant"].as_str().unwrap()).collect();
        assert_eq!(tenants, [vec!["flood"; 9], vec!["acme"]].concat());
        assert_eq!(listed[0]["response_id"], json!("99"));
    }

    #[test]
    fn what_an_earlier_version_kept_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("feedback.sqlite");
        let earlier = "
            CREATE TABLE feedback (
                tenant TEXT NOT NULL, user TEXT NOT NULL, response TEXT NOT NULL, at INTEGER NOT NULL, model TEXT NOT NULL, rating TEXT,
                regenerate INTEGER NOT NULL, comment TEXT, question TEXT NOT NULL, answer TEXT NOT NULL, PRIMARY KEY (tenant, user, response));
            INSERT INTO feedback VALUES ('acme', 'u', 'r', 1, 'tiny', 'up', 0, NULL, '[]', 'Yes.'), ('acme', 'v', 'r', 2, 'tiny', 'down', 1, 'no', '[]', 'Yes.');";
        Connection::open(&file).unwrap().execute_batch(earlier).unwrap();
        for _ in 0..2 {
            let feedback = Feedback::open(FeedbackSettings { file: Some(file.clone()), ..settings() }).unwrap();
            let listed = feedback.list(None, None, 10).unwrap();
            assert_eq!(listed.iter().map(|row| &row["user"]).collect::<Vec<_>>(), ["v", "u"]);
        }
    }

    #[test]
    fn an_owner_has_one_opinion_of_an_answer_and_people_are_not_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let settings = FeedbackSettings { file: Some(dir.path().join("feedback.sqlite")), ..settings() };
        let feedback = Feedback::open(settings.clone()).unwrap();
        let opinion = |user: &str, rating| Opinion { user: user.into(), rating: Some(rating), ..Opinion::default() };
        let by = |owner: &str| Answered { answer: "Ask jim@example.org.".into(), ..answered(owner) };
        assert!(!feedback.keep(1, "r", &by("acme/ann"), &opinion("u", Rating::Up)).unwrap());
        assert!(!feedback.keep(2, "r", &by("acme/bob"), &opinion("v", Rating::Up)).unwrap());
        let other = Opinion { comment: Some("+49 30 901820".into()), ..opinion("another name", Rating::Down) };
        assert!(feedback.keep(3, "r", &by("acme/ann"), &other).unwrap(), "another name of a user is not another vote");
        for entry in dir.path().read_dir().unwrap().map(Result::unwrap) {
            assert_eq!(entry.metadata().unwrap().mode() & 0o777, 0o600, "{}", entry.path().display());
        }
        drop(feedback);
        let feedback = Feedback::open(settings).unwrap();
        let listed = feedback.list(None, None, 10).unwrap();
        assert_eq!(
            listed.iter().map(|row| (&row["user"], &row["rating"])).collect::<Vec<_>>(),
            [(&json!("another name"), &json!("down")), (&json!("v"), &json!("up"))]
        );
        assert_eq!(listed[0]["question"], json!([{"role": "user", "content": "Who is [EMAIL]?"}]));
        assert_eq!((&listed[0]["answer"], &listed[0]["comment"]), (&json!("Ask [EMAIL]."), &json!("[PHONE]")));
        assert_eq!(feedback.list(Some(Rating::Up), Some("r"), 10).unwrap().len(), 1);
        assert!(feedback.list(None, Some("s"), 10).unwrap().is_empty());
    }

    #[test]
    fn every_protocol_asks_in_messages() {
        let of = |body: Value| json!(asked(body.as_object().unwrap()));
        let hello = json!([{"role": "user", "content": "Hello"}]);
        assert_eq!(of(json!({"messages": hello})), hello);
        assert_eq!(of(json!({"prompt": "Hello"})), hello);
        assert_eq!(
            of(json!({"input": "Hello", "instructions": "Be short."})),
            json!([
                {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}
            ])
        );
        assert_eq!(of(json!({"prompt": [1, 2]})), json!([]));
        assert_eq!(of(json!({"prompt": "x".repeat(40_000)})), json!([]));
        assert_eq!(of(json!({})), json!([]));
    }
}

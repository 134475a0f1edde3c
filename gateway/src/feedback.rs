//! What users think of answers. Answers are remembered in memory for a while, each with what was asked, so that a thumb can be about
//! something; a thumb is kept in SQLite with both, without what identifies people.

use metrics::counter;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tidemill_safety::pii::{find::Finder, redact::masked};

#[derive(Clone, Debug)]
pub struct FeedbackSettings {
    /// `None`: what users think ends with this process.
    pub file: Option<PathBuf>,
    /// How long answers are remembered,
    pub keep: Duration,
    /// and how many bytes of them.
    pub bytes_max: u64,
    /// Takes what identifies people out of what is kept.
    pub finder: Arc<Finder>,
}

#[derive(Debug, thiserror::Error)]
#[error("feedback cannot be kept in {file}: {source}")]
pub struct OpenError {
    file: String,
    source: rusqlite::Error,
}

#[derive(Debug)]
pub struct Feedback {
    settings: FeedbackSettings,
    known: Mutex<Known>,
    kept: Mutex<Connection>,
}

/// What a question was answered with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answered {
    pub tenant: Option<String>,
    pub model: String,
    /// As messages of a chat; empty where it was too long.
    pub question: Vec<Value>,
    pub answer: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rating {
    Up,
    Down,
}

/// What one user thinks of one answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Opinion {
    pub user: String,
    pub rating: Option<Rating>,
    /// The user wanted another answer.
    pub regenerate: bool,
    pub comment: Option<String>,
}

/// Answers that are remembered, the oldest first.
#[derive(Debug, Default)]
struct Known {
    answers: HashMap<String, Answered>,
    order: VecDeque<(Instant, String, u64)>,
    bytes: u64,
}

/// Opinions that are kept: over this, the oldest go.
const KEPT_MAX: u64 = 100_000;
/// Of a question, or of an answer.
const TEXT_BYTES_MAX: usize = 32 << 10;
/// What a remembered answer costs beside its texts, about.
const OVERHEAD_BYTES: u64 = 512;
const SCHEMA: &str = "
    PRAGMA journal_mode = WAL;
    CREATE TABLE IF NOT EXISTS feedback (
        tenant TEXT NOT NULL, user TEXT NOT NULL, response TEXT NOT NULL, at INTEGER NOT NULL, model TEXT NOT NULL, rating TEXT,
        regenerate INTEGER NOT NULL, comment TEXT, question TEXT NOT NULL, answer TEXT NOT NULL,
        PRIMARY KEY (tenant, user, response));
    CREATE INDEX IF NOT EXISTS feedback_by_age ON feedback (at);
    CREATE INDEX IF NOT EXISTS feedback_by_response ON feedback (response);";

impl Feedback {
    pub fn open(settings: FeedbackSettings) -> Result<Self, OpenError> {
        let failed =
            |source| OpenError { file: settings.file.as_deref().map_or("memory".into(), |file| file.display().to_string()), source };
        let open = |file: Option<&Path>| match file {
            Some(file) => Connection::open(file),
            None => Connection::open_in_memory(),
        };
        let kept = open(settings.file.as_deref()).map_err(failed)?;
        kept.busy_timeout(Duration::from_secs(5)).and_then(|()| kept.execute_batch(SCHEMA)).map_err(failed)?;
        Ok(Self { settings, known: Mutex::default(), kept: Mutex::new(kept) })
    }

    /// An answer begins.
    pub fn remember(&self, id: &str, answered: Answered) {
        self.known().put(id, answered, Instant::now(), &self.settings);
    }

    /// It has ended, or a part of it has: `answer` is all of it so far.
    pub fn complete(&self, id: &str, answer: &str) {
        self.known().complete(id, &answer[..answer.floor_char_boundary(TEXT_BYTES_MAX)]);
    }

    /// An answer to this tenant, while it is remembered.
    pub fn find(&self, tenant: Option<&str>, id: &str) -> Option<Answered> {
        let mut known = self.known();
        known.forget(Instant::now(), &self.settings);
        known.answers.get(id).filter(|answered| answered.tenant.as_deref() == tenant).cloned()
    }

    /// Keeps an opinion, in the place of an earlier one of this user. Returns whether there was one. Takes a disk's time.
    pub fn keep(&self, now: u64, id: &str, answered: &Answered, opinion: &Opinion) -> rusqlite::Result<bool> {
        let mask = |text: &str| masked(&self.settings.finder, text);
        let mut question = json!(answered.question);
        each_string(&mut question, &mut |text| *text = mask(text));
        let tenant = answered.tenant.as_deref().unwrap_or_default();
        let mut kept = self.kept();
        let work = kept.transaction()?;
        let key = params![tenant, opinion.user, id];
        let earlier: Option<(Option<String>, bool)> = work
            .query_row("SELECT rating, regenerate FROM feedback WHERE tenant = ?1 AND user = ?2 AND response = ?3", key, |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .optional()?;
        let rating = opinion.rating.map(Rating::name);
        work.execute(
            "INSERT OR REPLACE INTO feedback (tenant, user, response, at, model, rating, regenerate, comment, question, answer)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            params![
                tenant,
                opinion.user,
                id,
                now,
                answered.model,
                rating,
                opinion.regenerate,
                opinion.comment.as_deref().map(mask),
                question.to_string(),
                mask(&answered.answer)
            ],
        )?;
        work.execute(
            "DELETE FROM feedback WHERE rowid IN (SELECT rowid FROM feedback ORDER BY at DESC, rowid DESC LIMIT -1 OFFSET ?1)",
            [KEPT_MAX],
        )?;
        work.commit()?;
        let (before, wanted_another) = earlier.clone().unwrap_or_default();
        if let Some(rating) = rating.filter(|rating| before.as_deref() != Some(*rating)) {
            counter!("tidemill_feedback_total", "model" => answered.model.clone(), "rating" => rating).increment(1);
        }
        if opinion.regenerate && !wanted_another {
            counter!("tidemill_feedback_total", "model" => answered.model.clone(), "rating" => "regenerate").increment(1);
        }
        Ok(earlier.is_some())
    }

    /// The newest first. Takes a disk's time.
    pub fn list(&self, rating: Option<Rating>, response: Option<&str>, limit: usize) -> rusqlite::Result<Vec<Value>> {
        let kept = self.kept();
        let mut select = kept.prepare_cached(
            "SELECT tenant, user, response, at, model, rating, regenerate, comment, question, answer FROM feedback
             WHERE (?1 IS NULL OR rating = ?1) AND (?2 IS NULL OR response = ?2) ORDER BY at DESC, rowid DESC LIMIT ?3",
        )?;
        select.query_map(params![rating.map(Rating::name), response, limit as i64], shown)?.collect()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, Connection> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        // Its answer is still to come.
        let question: usize = answered.question.iter().map(|message| message.to_string().len()).sum();
        let bytes = OVERHEAD_BYTES + question as u64;
        self.bytes += bytes;
        self.order.push_back((now, id.to_owned(), bytes));
        self.answers.insert(id.to_owned(), answered);
        self.forget(now, settings);
    }

    fn complete(&mut self, id: &str, answer: &str) {
        // Most answers that end are among the newest.
        if let Some(answered) = self.answers.get_mut(id)
            && let Some((_, _, bytes)) = self.order.iter_mut().rev().find(|(_, other, _)| other == id)
        {
            // An answer of several rounds ends with each of them.
            let gained = answer.len().saturating_sub(answered.answer.len()) as u64;
            answered.answer = answer.to_owned();
            *bytes += gained;
            self.bytes += gained;
        }
    }

    fn forget(&mut self, now: Instant, settings: &FeedbackSettings) {
        while let Some((at, ..)) = self.order.front()
            && (self.bytes > settings.bytes_max || now.saturating_duration_since(*at) > settings.keep)
            && let Some((_, id, bytes)) = self.order.pop_front()
        {
            self.bytes -= bytes;
            self.answers.remove(&id);
        }
    }
}

/// What is asked in a request's body of any of the generating endpoints, as messages of a chat. Empty: nothing that could be said so, or
/// too much.
pub fn asked(body: &[u8]) -> Vec<Value> {
    let Ok(body) = serde_json::from_slice::<Value>(body) else { return Vec::new() };
    let user = |content: &Value| json!({"role": "user", "content": content});
    let system = ["system", "instructions"].iter().map(|name| &body[*name]).find(|value| !value.is_null());
    let said = [&body["messages"], &body["input"], &body["prompt"]].into_iter().find(|value| !value.is_null());
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

fn each_string(value: &mut Value, act: &mut impl FnMut(&mut String)) {
    match value {
        Value::String(text) => act(text),
        Value::Array(items) => items.iter_mut().for_each(|item| each_string(item, act)),
        Value::Object(fields) => fields.values_mut().for_each(|field| each_string(field, act)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_safety::pii::Kind;

    fn settings() -> FeedbackSettings {
        FeedbackSettings { file: None, keep: Duration::from_secs(60), bytes_max: 10_000, finder: Arc::new(Finder::new(&Kind::ALL)) }
    }

    fn answered(tenant: Option<&str>) -> Answered {
        let question = vec![json!({"role": "user", "content": "Who is jane@example.org?"})];
        Answered { tenant: tenant.map(str::to_owned), model: "tiny".into(), question, answer: String::new() }
    }

    #[test]
    fn an_answer_is_its_tenants_and_known_for_a_while() {
        let feedback = Feedback::open(settings()).unwrap();
        feedback.remember("a", answered(Some("acme")));
        feedback.complete("a", "Nobody.");
        assert_eq!(feedback.find(Some("acme"), "a").unwrap().answer, "Nobody.");
        assert!(feedback.find(Some("other"), "a").is_none() && feedback.find(None, "a").is_none());
        for n in 0..100 {
            feedback.remember(&n.to_string(), answered(None));
            feedback.complete(&n.to_string(), &"x".repeat(300));
            assert!(feedback.known().bytes <= 10_000 + 300);
        }
        assert!(feedback.find(Some("acme"), "a").is_none() && feedback.find(None, "99").is_some());
        let mut known = feedback.known();
        known.forget(Instant::now() + Duration::from_secs(61), &settings());
        assert_eq!((known.bytes, known.answers.len()), (0, 0));
    }

    #[test]
    fn a_user_has_one_opinion_of_an_answer_and_people_are_not_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let settings = FeedbackSettings { file: Some(dir.path().join("feedback.sqlite")), ..settings() };
        let feedback = Feedback::open(settings.clone()).unwrap();
        let opinion = |user: &str, rating| Opinion { user: user.into(), rating: Some(rating), ..Opinion::default() };
        let answered = Answered { answer: "Ask jim@example.org.".into(), ..answered(Some("acme")) };
        assert!(!feedback.keep(1, "r", &answered, &opinion("u", Rating::Up)).unwrap());
        assert!(!feedback.keep(2, "r", &answered, &opinion("v", Rating::Up)).unwrap());
        assert!(
            feedback.keep(3, "r", &answered, &Opinion { comment: Some("+49 30 901820".into()), ..opinion("u", Rating::Down) }).unwrap()
        );
        drop(feedback);
        let feedback = Feedback::open(settings).unwrap();
        let listed = feedback.list(None, None, 10).unwrap();
        assert_eq!(
            listed.iter().map(|row| (&row["user"], &row["rating"])).collect::<Vec<_>>(),
            [(&json!("u"), &json!("down")), (&json!("v"), &json!("up"))]
        );
        assert_eq!(listed[0]["question"], json!([{"role": "user", "content": "Who is [EMAIL]?"}]));
        assert_eq!((&listed[0]["answer"], &listed[0]["comment"]), (&json!("Ask [EMAIL]."), &json!("[PHONE]")));
        assert_eq!(feedback.list(Some(Rating::Up), Some("r"), 10).unwrap().len(), 1);
        assert!(feedback.list(None, Some("s"), 10).unwrap().is_empty());
    }

    #[test]
    fn every_protocol_asks_in_messages() {
        let of = |body: Value| json!(asked(body.to_string().as_bytes()));
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
        assert_eq!(asked(b"no json"), Vec::<Value>::new());
    }
}

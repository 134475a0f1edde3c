//! Opinions as events that are sent elsewhere. The database notes each opinion that is new or has changed until it has arrived, and no
//! longer than the opinion itself is there.

use super::{Feedback, OpenError, shown};
use rusqlite::params;
use std::sync::Arc;
use tidemill_tenancy::{
    journal::Position,
    sink::{Message, Source},
};

/// The notes, first of all opinions that are there. A change gets a new number.
const NOTES: &str = "
    BEGIN;
    CREATE TABLE unsent (
        number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, response TEXT NOT NULL, UNIQUE (owner, response));
    CREATE TRIGGER opinion_comes AFTER INSERT ON opinions BEGIN
        INSERT OR REPLACE INTO unsent (owner, response) VALUES (new.owner, new.response);
    END;
    CREATE TRIGGER opinion_goes AFTER DELETE ON opinions BEGIN
        DELETE FROM unsent WHERE owner = old.owner AND response = old.response;
    END;
    INSERT INTO unsent (owner, response) SELECT owner, response FROM opinions ORDER BY at, rowid;
    COMMIT;";
/// The number of opinions that are read at once.
const PAGE: i64 = 100;

/// The opinions that have not arrived yet.
#[derive(Debug)]
pub struct Opinions(Arc<Feedback>);

impl Opinions {
    /// Lets the database note opinions from now on, and all that are there.
    pub fn new(feedback: Arc<Feedback>) -> Result<Self, OpenError> {
        let noted = {
            let kept = feedback.kept.lock();
            let is_noting = kept.prepare("SELECT 1 FROM sqlite_schema WHERE name = 'unsent'").and_then(|mut select| select.exists([]));
            is_noting.and_then(|is_noting| if is_noting { Ok(()) } else { kept.execute_batch(NOTES) })
        };
        noted.map_err(|source| OpenError::Database { file: feedback.settings.file_name(), source })?;
        Ok(Self(feedback))
    }

    fn page(&self, after: u64) -> rusqlite::Result<Vec<(u64, Message)>> {
        let kept = self.0.kept.lock();
        let mut select = kept.prepare_cached(
            "SELECT tenant, user, response, at, model, rating, regenerate, comment, question, answer, number
             FROM unsent JOIN opinions USING (owner, response) WHERE number > ?1 ORDER BY number LIMIT ?2",
        )?;
        let rows = select.query_map(params![after, PAGE], |row| {
            let (number, response) = (row.get(10)?, row.get::<_, String>(2)?);
            let id = format!("feedback_{response}_{number}");
            Ok((number, Message { id, tenant: row.get(0)?, json: shown(row)?.to_string() }))
        })?;
        rows.collect()
    }
}

impl Source for Opinions {
    fn read(&self, after: Position, each: &mut dyn FnMut(Position, Message) -> bool) -> Result<(), String> {
        let mut position = after;
        loop {
            let page = self.page(position.number).map_err(|error| error.to_string())?;
            if page.is_empty() {
                return Ok(());
            }
            for (number, message) in page {
                position = Position { number, bytes: position.bytes + message.json.len() as u64 };
                if !each(position, message) {
                    return Ok(());
                }
            }
        }
    }

    fn end(&self) -> Result<Position, String> {
        let last = "SELECT ifnull(max(number), 0) FROM unsent";
        let number = self.0.kept.lock().query_row(last, [], |row| row.get(0)).map_err(|error| error.to_string())?;
        Ok(Position { number, bytes: 0 })
    }

    fn arrived(&self, through: Position) {
        if let Err(error) = self.0.kept.lock().execute("DELETE FROM unsent WHERE number <= ?1", [through.number]) {
            tracing::warn!(%error, "could not note that opinions were sent: their notes stay, and they are not sent again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::*, *};
    use crate::features::feedback::tests::{answered, settings};

    fn sent(opinions: &Opinions, after: Position) -> (Position, Vec<(String, String, Value)>) {
        let (mut end, mut found) = (after, Vec::new());
        let each = &mut |position, Message { id, tenant, json }: Message| {
            end = position;
            found.push((id, tenant, serde_json::from_str::<Value>(&json).unwrap()["comment"].clone()));
            true
        };
        opinions.read(after, each).unwrap();
        (end, found)
    }

    #[test]
    fn each_opinion_and_each_change_is_sent_once_and_none_that_is_gone() {
        let feedback = Arc::new(Feedback::open(settings()).unwrap());
        let keep = |at: u64, id: &str, owner: &str, comment: &str| {
            let opinion = Opinion { comment: Some(comment.into()), ..Opinion::default() };
            feedback.keep(at, id, &answered(owner), &opinion).unwrap();
        };
        keep(1, "resp_1", "acme/ann", "from before");
        let opinions = Opinions::new(Arc::clone(&feedback)).unwrap();
        keep(2, "resp_2", "other", "first");
        let (end, found) = sent(&opinions, Position::default());
        let tenants: Vec<_> = found.iter().map(|(_, tenant, comment)| (tenant.as_str(), comment.as_str().unwrap())).collect();
        assert_eq!(tenants, [("acme", "from before"), ("other", "first")]);
        // It was changed while it was sent, and so is sent again, under another id.
        keep(3, "resp_2", "other", "changed");
        opinions.arrived(end);
        let (end, again) = sent(&opinions, end);
        assert_eq!(again.iter().map(|(.., comment)| comment.clone()).collect::<Vec<_>>(), [json!("changed")]);
        assert!(again[0].0.starts_with("feedback_resp_2_") && again[0].0 != found[1].0, "{again:?}");
        keep(4, "resp_3", "acme/ann", "erased before it was sent");
        feedback.erase(&Whose { tenant: "acme".into(), user: None }, Erasing::Remove).unwrap();
        opinions.arrived(end);
        // As after a restart: the notes know what has arrived.
        let opinions = Opinions::new(feedback).unwrap();
        assert_eq!(sent(&opinions, Position::default()).1, []);
        assert_eq!(opinions.end().unwrap().number, 0);
    }
}

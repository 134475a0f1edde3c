//! A conversation's own fields, as stored and as shown.

use super::super::responses::request;
use crate::{
    base::stamp::new_id,
    context::summary::Summary,
    http::pages::parsed,
    requests::{
        error::ApiError,
        items::{ItemContent, recall},
    },
    serving::gateway::Gateway,
    store::{Item, Record, Totals},
};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The maximum length of a client's title, in characters.
const TITLE_CHARS_MAX: usize = 256;
/// The maximum length of a title made from a message's first words, in characters.
const FIRST_WORDS_CHARS_MAX: usize = 60;

/// The stored fields, in the order in which they are shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    id: String,
    object: String,
    created_at: u64,
    #[serde(default)]
    metadata: BTreeMap<String, String>,
    #[serde(default)]
    title: Option<String>,
    /// The model that answered last, or that is to answer.
    #[serde(default)]
    model: Option<String>,
    /// The system prompt.
    #[serde(default)]
    instructions: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    branched_from: Option<Value>,
}

/// The fields that a client sets; a missing one stays, `null` clears it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Changes {
    metadata: Option<BTreeMap<String, String>>,
    #[serde(deserialize_with = "given")]
    title: Option<Option<String>>,
    #[serde(deserialize_with = "given")]
    model: Option<Option<String>>,
    #[serde(deserialize_with = "given")]
    instructions: Option<Option<String>>,
}

fn given<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Option<String>>, D::Error> {
    Option::deserialize(field).map(Some)
}

impl Conversation {
    pub(crate) fn new(now: u64) -> Self {
        Self {
            id: new_id("conv_"),
            object: "conversation".into(),
            created_at: now,
            metadata: BTreeMap::new(),
            title: None,
            model: None,
            instructions: None,
            branched_from: None,
        }
    }

    pub(crate) fn read(record: &Record) -> Result<Self, ApiError> {
        let value = parsed(&record.id, &record.body)?;
        serde_json::from_value(value)
            .map_err(|error| ApiError::internal(format!("what is stored as `{}` is no conversation: {error}", record.id)))
    }

    /// Creates a branch with the same beginning. `at` is the last common item.
    pub(crate) fn branched(&self, at: Option<&str>, now: u64) -> Self {
        let branched_from = Some(json!({"id": self.id, "item": at}));
        Self { id: new_id("conv_"), created_at: now, branched_from, ..self.clone() }
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    pub(crate) fn instructions(&self) -> Option<&str> {
        self.instructions.as_deref()
    }

    pub(crate) fn body(&self) -> String {
        serde_json::to_string(self).expect("its keys are strings")
    }

    pub(crate) fn shown(&self, updated: u64, Totals { messages, tokens }: Totals, summary: Option<&Summary>) -> Value {
        let mut shown = json!(self);
        if let Some(summary) = summary {
            shown["summary"] = json!(summary);
        }
        shown["updated_at"] = updated.into();
        shown["messages"] = messages.into();
        shown["tokens"] = tokens.into();
        shown
    }

    pub(crate) fn change(&mut self, gateway: &Gateway, changes: Changes) -> Result<(), ApiError> {
        let Changes { metadata, title, model, instructions } = changes;
        if let Some(Some(title)) = &title {
            let chars = title.trim().chars().count();
            if !(1..=TITLE_CHARS_MAX).contains(&chars) {
                let message = format!("`title` must have 1 to {TITLE_CHARS_MAX} characters, and this one has {chars}");
                return Err(ApiError::invalid("title", message));
            }
        }
        if let Some(Some(model)) = &model {
            gateway.select(Some(model))?;
        }
        if let Some(Some(instructions)) = &instructions {
            gateway.check_text_length("instructions", instructions)?;
        }
        if let Some(metadata) = metadata {
            self.metadata = request::metadata(Some(metadata))?;
        }
        if let Some(title) = title {
            self.title = title.map(|title| title.trim().to_owned());
        }
        if let Some(model) = model {
            self.model = model;
        }
        if let Some(instructions) = instructions {
            self.instructions = instructions.filter(|text| !text.is_empty());
        }
        Ok(())
    }

    pub(crate) fn answered_by(&mut self, model: &str) {
        self.model = Some(model.to_owned());
    }

    pub(crate) fn instruct(&mut self, instructions: String) {
        self.instructions = Some(instructions);
    }

    /// Titles an untitled conversation by the first words of a user in `items`. Returns whether it did.
    pub(crate) fn take_title(&mut self, items: &[Item]) -> bool {
        let first_words = || {
            let mut said = items.iter().filter_map(|item| recall(item).ok());
            said.find_map(|(_, said)| match said {
                ItemContent::Message { role, text } if role == "user" => first_words(&text),
                _ => None,
            })
        };
        let missing = self.title.is_none();
        if missing {
            self.title = first_words();
        }
        missing && self.title.is_some()
    }
}

/// Returns as many whole words as fit, if any do.
fn first_words(text: &str) -> Option<String> {
    let mut title = String::new();
    let mut chars = 0;
    for word in text.split_whitespace() {
        let wanted = chars + usize::from(chars > 0) + word.chars().count();
        if wanted > FIRST_WORDS_CHARS_MAX {
            if chars == 0 {
                title = word.chars().take(FIRST_WORDS_CHARS_MAX).collect();
            }
            title.push('…');
            break;
        }
        if chars > 0 {
            title.push(' ');
        }
        title += word;
        chars = wanted;
    }
    (!title.is_empty()).then_some(title)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_is_a_messages_first_words() {
        assert_eq!(first_words("  What is\n\nthe tide? "), Some("What is the tide?".into()));
        assert_eq!(first_words(" \n "), None);
        let long = first_words(&"word ".repeat(40)).unwrap();
        assert_eq!((long.chars().count(), long.ends_with("word…")), (60, true));
        assert_eq!(first_words(&"潮".repeat(100)).unwrap().chars().count(), 61);
    }

    #[test]
    fn what_an_earlier_version_stored_is_read() {
        let body = r#"{"id":"conv_1","object":"conversation","created_at":7,"metadata":{"a":"b"}}"#;
        let record = Record {
            id: "conv_1".into(),
            body: body.into(),
            updated: 8,
            totals: Totals { messages: 2, tokens: 9 },
            summary: None,
            items: vec![],
        };
        let shown = Conversation::read(&record).unwrap().shown(record.updated, record.totals, None);
        assert_eq!((&shown["metadata"]["a"], &shown["title"], &shown["tokens"]), (&json!("b"), &Value::Null, &json!(9)));
    }
}

//! The stored data that a chat's body asks for: the conversation that it continues, and facts about its user. They are loaded first, since
//! no later part of a chat waits for the store, or for the encoder that reads its question.

use super::{
    context::{self, ContextField},
    conversations::turn::{Before, ConversationField, before},
    memories,
};
use crate::{
    base::memories::Facts,
    context::Strategy,
    requests::error::ApiError,
    serving::gateway::{Gateway, encoding::Unread},
};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The fields of a chat's body that name stored data.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Named {
    conversation: Option<ConversationField>,
    memory: Option<bool>,
    context: Option<ContextField>,
    /// The text of the user's newest message, if it is compared with old messages or facts.
    #[serde(skip)]
    question: Option<String>,
}

#[derive(Debug, Default)]
pub struct Stored {
    /// The conversation that the body names, if any.
    pub before: Option<Before>,
    /// The facts about the user, if the body asks for them.
    pub facts: Option<Facts>,
    /// The reason why the question was not read, if it should have been.
    pub unread: Option<Unread>,
}

impl Named {
    pub fn is_any(&self) -> bool {
        self.conversation.is_some() || self.memory == Some(true)
    }

    /// Takes what the user said last from the body, if it is compared with old messages or facts.
    pub fn ask(&mut self, fields: &Map<String, Value>) {
        let retrieves = self.conversation.is_some() && self.context.is_some_and(|context| context.retrieves());
        if retrieves || self.memory == Some(true) {
            self.question = newest(fields);
        }
    }
}

impl Stored {
    pub async fn look_up(gateway: &Gateway, Named { conversation, memory, context: wish, question }: Named) -> Result<Self, ApiError> {
        let retrieves = conversation.is_some() && wish.is_some_and(|wish| wish.retrieves());
        let before = match conversation {
            Some(conversation) => {
                let shortened = context::wanted(wish, gateway.context(), true)?.strategy != Strategy::None;
                Some(before(gateway, conversation, shortened).await?)
            }
            None => None,
        };
        let facts = if memory == Some(true) { Some(memories::facts(gateway).await?) } else { None };
        let chooses = facts.as_ref().is_some_and(|facts| !context::surely_fit(gateway, facts));
        let unread = match question.filter(|_| retrieves || chooses) {
            Some(question) => gateway.read_question(&question).await,
            None => None,
        };
        Ok(Self { before, facts, unread })
    }

    /// Counts the bytes of the history.
    pub fn bytes(&self) -> usize {
        self.before.as_ref().map_or(0, Before::bytes)
    }
}

/// Returns the text of the newest message of a user in a body, as the dialog will have it.
fn newest(fields: &Map<String, Value>) -> Option<String> {
    let message = fields.get("messages")?.as_array()?.iter().rfind(|message| message["role"] == "user")?;
    let text = |part: &Value| part.as_str().or_else(|| part["text"].as_str()).map(str::to_owned);
    match &message["content"] {
        Value::Array(parts) => Some(parts.iter().filter_map(text).collect::<Vec<_>>().join("\n")),
        content => text(content),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_question_is_what_a_user_said_last() {
        let of = |body: Value| newest(body.as_object().unwrap());
        let turns = json!([{"role": "user", "content": "Hello"}, {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            {"role": "assistant", "content": "?"}]);
        assert_eq!(of(json!({"messages": turns})).as_deref(), Some("a\nb"));
        for none in [json!({}), json!({"messages": 3}), json!({"messages": [3, {"role": "user"}]}), json!({"messages": [{"role": "tool"}]})]
        {
            assert_eq!(of(none.clone()), None, "{none}");
        }
    }
}

//! The stored data that a chat's body asks for: the conversation that it continues, and facts about its user. They are loaded first, since
//! no later part of a chat waits for the store.

use super::{
    conversations::turn::{Before, ConversationField, before},
    memories,
};
use crate::{base::memories::Facts, requests::error::ApiError, serving::gateway::Gateway};
use serde::Deserialize;

/// The fields of a chat's body that name stored data.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Named {
    conversation: Option<ConversationField>,
    memory: Option<bool>,
}

#[derive(Debug, Default)]
pub struct Stored {
    /// The conversation that the body names, if any.
    pub before: Option<Before>,
    /// The facts about the user, if the body asks for them.
    pub facts: Option<Facts>,
}

impl Named {
    pub fn is_any(&self) -> bool {
        self.conversation.is_some() || self.memory == Some(true)
    }
}

impl Stored {
    pub async fn look_up(gateway: &Gateway, Named { conversation, memory }: Named) -> Result<Self, ApiError> {
        let before = match conversation {
            Some(conversation) => Some(before(gateway, conversation).await?),
            None => None,
        };
        let facts = if memory == Some(true) { Some(memories::facts(gateway).await?) } else { None };
        Ok(Self { before, facts })
    }

    /// Counts the bytes of the history.
    pub fn bytes(&self) -> usize {
        self.before.as_ref().map_or(0, Before::bytes)
    }
}

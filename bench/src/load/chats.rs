//! Recorded chats, one JSON object per line: ShareGPT's `conversations` (`from`, `value`) or OpenAI's `messages` (`role`, `content`).

use anyhow::{Context, ensure};
use serde::Deserialize;
use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

/// A user's message, and the length of the recorded answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    pub user: String,
    pub answer_tokens: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Chat {
    pub turns: Vec<Turn>,
}

/// The characters per token of English text in most tokenizers. Only the limits of answers depend on it.
const CHARACTERS_PER_TOKEN: usize = 4;
/// The most chats that are read: a workload of this many repeats hardly any.
const CHATS_MAX: usize = 200_000;

#[derive(Deserialize)]
struct Line {
    #[serde(alias = "messages")]
    conversations: Vec<Message>,
}

#[derive(Deserialize)]
struct Message {
    #[serde(alias = "role")]
    from: String,
    #[serde(alias = "content")]
    value: String,
}

/// Reads the chats in which a user's message is answered. An error names the invalid line.
pub fn read(path: &Path) -> anyhow::Result<Vec<Chat>> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut chats = Vec::new();
    for (number, line) in (1..=CHATS_MAX).zip(BufReader::new(file).lines()) {
        let line = line.with_context(|| format!("{}: line {number} is not text", path.display()))?;
        let read: Line = serde_json::from_str(&line).with_context(|| format!("{}: line {number}", path.display()))?;
        let chat = Chat::of(&read.conversations);
        if !chat.turns.is_empty() {
            chats.push(chat);
        }
    }
    ensure!(!chats.is_empty(), "{} has no chat with an answer", path.display());
    Ok(chats)
}

impl Chat {
    fn of(messages: &[Message]) -> Chat {
        let is = |message: &Message, names: &[&str]| names.contains(&message.from.as_str());
        let answered =
            messages.windows(2).filter(|pair| is(&pair[0], &["human", "user"]) && is(&pair[1], &["gpt", "assistant", "chatgpt"]));
        let turn = |pair: &[Message]| Turn {
            user: pair[0].value.clone(),
            answer_tokens: u32::try_from(pair[1].value.chars().count().div_ceil(CHARACTERS_PER_TOKEN)).unwrap_or(u32::MAX).max(1),
        };
        Chat { turns: answered.map(turn).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read_and_a_wrong_line_is_named() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let sharegpt = r#"{"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Good morning."}, {"from": "human", "value": "And?"}]}"#;
        let openai = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]}"#;
        std::fs::write(&path, format!("{sharegpt}\n{openai}\n")).unwrap();
        let turn = |user: &str, answer_tokens| Chat { turns: vec![Turn { user: user.into(), answer_tokens }] };
        assert_eq!(read(&path).unwrap(), [turn("Hi", 4), turn("One", 1)], "what is not answered is left out");
        std::fs::write(&path, format!("{sharegpt}\n{{\"conversations\": 3}}\n")).unwrap();
        assert!(format!("{:#}", read(&path).unwrap_err()).contains("line 2"));
        std::fs::write(&path, "{\"conversations\": []}\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("no chat"));
    }
}

//! The tokens that end a sequence: those in `generation_config.json`, or else in `config.json`.

use crate::{error::ModelError, json::read_json};
use serde::Deserialize;
use std::path::Path;
use tidemill_proto::block::Token;

/// `eos_token_id` is an id, a list of them, or null.
#[derive(Deserialize, Clone, Debug)]
#[serde(untagged)]
pub(crate) enum TokenIds {
    One(i64),
    Many(Vec<i64>),
}

#[derive(Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<TokenIds>,
}

/// End-of-sequence ids, ascending, without ids outside the vocabulary, which can never be drawn.
pub(crate) fn eos_ids(dir: &Path, of_config: Option<TokenIds>, vocab: usize) -> Result<Vec<Token>, ModelError> {
    let path = dir.join("generation_config.json");
    let of_generation = if path.exists() { read_json::<GenerationConfig>(&path)?.eos_token_id } else { None };
    let ids = match of_generation.or(of_config) {
        None => Vec::new(),
        Some(TokenIds::One(id)) => vec![id],
        Some(TokenIds::Many(ids)) => ids,
    };
    let mut ids: Vec<Token> = ids.into_iter().filter_map(|id| Token::try_from(id).ok()).filter(|id| (*id as usize) < vocab).collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generation_config_wins_and_only_tokens_of_the_vocabulary_count() {
        let dir = tempfile::tempdir().unwrap();
        let of_config = || Some(TokenIds::One(7));
        assert_eq!(eos_ids(dir.path(), of_config(), 10).unwrap(), [7]);
        assert!(eos_ids(dir.path(), None, 10).unwrap().is_empty());
        let path = dir.path().join("generation_config.json");
        for (text, expected) in [
            (r#"{"eos_token_id": 3, "temperature": 0.6}"#, vec![3]),
            (r#"{"eos_token_id": [5, 2, 5, -1, 10]}"#, vec![2, 5]),
            (r#"{"eos_token_id": null}"#, vec![7]),
            ("{}", vec![7]),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(eos_ids(dir.path(), of_config(), 10).unwrap(), expected, "{text}");
        }
        std::fs::write(&path, r#"{"eos_token_id": "</s>"}"#).unwrap();
        assert!(eos_ids(dir.path(), None, 10).unwrap_err().to_string().contains("generation_config.json"));
    }
}

//! A byte-level BPE tokenizer exactly as large as a model's vocabulary: every token id that random weights draw has a text, and every text
//! has token ids.
//!
//! The first merges are learnt from this project's own text. Words made of learnt tokens fill the rest of the vocabulary.

use anyhow::{anyhow, ensure};
use serde_json::{Value, json};
use std::collections::HashSet;
use tokenizers::{
    AddedToken, Tokenizer,
    decoders::byte_level::ByteLevel,
    models::{
        TrainerWrapper,
        bpe::{BPE, BpeTrainer},
    },
};

/// The token that ends a document, and pads.
pub const END_OF_TEXT: u32 = 0;
/// The token that ends a message of a chat.
pub const END_OF_TURN: u32 = 2;

const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Training text for the merges: English prose, and some Rust.
const CORPUS: [&str; 5] = [
    include_str!("../../../LICENSE"),
    include_str!("../../../README.md"),
    include_str!("../../../docs/ARCHITECTURE.md"),
    include_str!("../../../model/tests/fixtures/corpus.txt"),
    include_str!("tokenizer.rs"),
];

/// The most merges to learn: a text this short yields no more.
const LEARNT_MAX: usize = 8192;

/// `tokenizer.json` with `vocab` tokens.
pub fn train(vocab: usize) -> anyhow::Result<String> {
    let failed = |e: tokenizers::Error| anyhow!("cannot train a tokenizer: {e}");
    let mut tokenizer = Tokenizer::new(BPE::default());
    let bytes = ByteLevel::new(false, true, true);
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes)).with_post_processor(Some(ByteLevel::new(false, false, true)));
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab.min(LEARNT_MAX))
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(SPECIAL.map(|token| AddedToken::from(token, true)).to_vec())
        .build();
    let mut trainer = TrainerWrapper::from(trainer);
    tokenizer.train(&mut trainer, CORPUS.iter()).map_err(failed)?;

    let mut json = serde_json::to_value(&tokenizer)?;
    fill(&mut json["model"], vocab)?;
    let text = json.to_string();
    // The file is read back as a server reads it.
    let size = Tokenizer::from_bytes(&text).map_err(failed)?.get_vocab_size(true);
    ensure!(size == vocab, "the tokenizer came out with {size} tokens instead of {vocab}");
    Ok(text)
}

/// Adds merges of learnt word beginnings with learnt word endings, until there are `vocab` tokens.
fn fill(model: &mut Value, vocab: usize) -> anyhow::Result<()> {
    let (Some(learnt), Some(merges)) = (model["vocab"].as_object().cloned(), model["merges"].as_array().cloned()) else {
        return Err(anyhow!("a BPE model has a vocabulary and merges"));
    };
    // Byte-level BPE writes a space as Ġ.
    let is_word = |token: &str| token.len() > 1 && token.chars().all(|c| c.is_ascii_lowercase());
    let mut by_id: Vec<(&String, Option<u64>)> = learnt.iter().map(|(token, id)| (token, id.as_u64())).collect();
    by_id.sort_by_key(|(_, id)| *id);
    let tokens = || by_id.iter().map(|(token, _)| token.as_str());
    let beginnings: Vec<&str> = tokens().filter(|token| token.strip_prefix('Ġ').is_some_and(is_word)).collect();
    let endings: Vec<&str> = tokens().filter(|token| is_word(token)).collect();

    let mut known: HashSet<String> = learnt.keys().cloned().collect();
    let mut added = Vec::new();
    let pairs = endings.iter().flat_map(|ending| beginnings.iter().map(move |beginning| (*beginning, *ending)));
    for (beginning, ending) in pairs.filter(|(beginning, ending)| beginning.len() + ending.len() <= WORD_BYTES_MAX) {
        if known.len() == vocab {
            break;
        }
        let word = format!("{beginning}{ending}");
        if known.insert(word.clone()) {
            added.push((word, json!([beginning, ending])));
        }
    }
    let (mut vocabulary, mut all_merges) = (learnt.clone(), merges);
    for (id, (word, merge)) in (learnt.len()..).zip(added) {
        vocabulary.insert(word, id.into());
        all_merges.push(merge);
    }
    model["vocab"] = vocabulary.into();
    model["merges"] = all_merges.into();
    Ok(())
}

/// `tokenizer_config.json`: ChatML, which many small open models use.
pub fn config(max_positions: u32) -> Value {
    let added: serde_json::Map<String, Value> = (0..).zip(SPECIAL).map(|(id, token): (u32, _)| (id.to_string(), special(token))).collect();
    json!({
        "added_tokens_decoder": added,
        "bos_token": SPECIAL[END_OF_TEXT as usize],
        "eos_token": SPECIAL[END_OF_TURN as usize],
        "pad_token": SPECIAL[END_OF_TEXT as usize],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": false,
        "model_max_length": max_positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
}

fn special(token: &str) -> Value {
    json!({"content": token, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false, "special": true})
}

const CHAT_TEMPLATE: &str = concat!(
    "{% for message in messages %}",
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}",
    "{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
);

const WORD_BYTES_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_every_id_and_loses_no_text() {
        let vocab = 151_936;
        let tokenizer = Tokenizer::from_bytes(train(vocab).unwrap()).unwrap();
        for text in ["The tide fills the pool, the wheel turns.", "fn main() {\n\t42\n}", "Grüße, 世界 🌊", " two  spaces "] {
            let encoded = tokenizer.encode(text, true).unwrap();
            assert_eq!(tokenizer.decode(encoded.get_ids(), false).unwrap(), text);
            assert!(encoded.get_ids().len() <= text.len());
        }
        for id in 0..vocab as u32 {
            assert!(!tokenizer.decode(&[id], false).unwrap().is_empty(), "{id}");
        }
        assert_eq!(tokenizer.token_to_id("<|endoftext|>"), Some(END_OF_TEXT));
        assert_eq!(tokenizer.token_to_id("<|im_end|>"), Some(END_OF_TURN));
        let chat = tokenizer.encode("<|im_start|>user\n", false).unwrap();
        assert_eq!(chat.get_ids()[0], 1, "special tokens are found in text");
    }

    #[test]
    fn training_is_repeatable() {
        assert_eq!(train(20_000).unwrap(), train(20_000).unwrap());
    }
}

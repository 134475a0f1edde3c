//! `tokenizer.json` and the files beside it: whatever their contents, reading them ends in a tokenizer or an error, and a tokenizer works
//! on any text and any token.

use super::tree;
use crate::{
    dice::Dice,
    mutate::{bytes, json, text},
    target::{Subject, Target},
};
use serde_json::Value;
use std::{fs, path::Path, time::Duration};
use tidemill_gateway::text::{TextModel, detokenizer::Detokenizer};
use tidemill_grammar::Vocabulary;

pub(crate) const TOKENIZERS: Target = Target {
    name: "tokenizers",
    about: "config.json, tokenizer.json, tokenizer_config.json and generation_config.json, as coordinators read them",
    open,
    cpu_max: Duration::from_secs(10),
    bytes_max: 512 << 20,
    short: 150,
};

const FILES: [&str; 4] = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"];

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let dir = tempfile::tempdir()?;
    let mut seeds: Vec<Vec<Value>> = Vec::new();
    for model in tree::models()? {
        let texts = FILES.map(|file| fs::read_to_string(model.join(file)));
        let trees = texts.into_iter().map(|text| Ok(serde_json::from_str(&text?)?)).collect::<anyhow::Result<Vec<Value>>>();
        seeds.extend(trees.ok());
    }
    anyhow::ensure!(!seeds.is_empty(), "no model directory has {FILES:?}");
    let keys: Vec<Vec<String>> =
        (0..FILES.len()).map(|file| json::keys(seeds.iter().map(|trees| without_words(&trees[file])).collect::<Vec<_>>().iter())).collect();
    Ok(Box::new(move |dice: &mut Dice| {
        let trees = dice.pick(&seeds);
        for (number, file) in FILES.iter().enumerate() {
            let mut tree = trees[number].clone();
            let contents = match dice.below(6) {
                0 | 1 => {
                    // Most of it is the vocabulary; the parts around it are mutated more often.
                    let part = *dice.pick(PARTS);
                    let place = tree.pointer_mut(part).filter(|place| !place.is_null() && !part.is_empty());
                    match place {
                        Some(place) => json::mutate(dice, place, &keys[number]),
                        None => json::mutate(dice, &mut tree, &keys[number]),
                    }
                    json::text(dice, &tree).into_bytes()
                }
                2 if number == 3 => {
                    let mut contents = tree.to_string().into_bytes();
                    bytes::mutate(dice, &mut contents);
                    contents
                }
                _ => tree.to_string().into_bytes(),
            };
            dice.show(file, &contents);
            fs::write(dir.path().join(file), contents).map_err(|error| error.to_string())?;
        }
        use_it(dice, dir.path());
        Ok(())
    }))
}

const PARTS: &[&str] =
    &["", "/model", "/added_tokens", "/normalizer", "/pre_tokenizer", "/post_processor", "/decoder", "/truncation", "/padding"];

/// A tokenizer without its vocabulary, whose keys have no meaning.
fn without_words(tree: &Value) -> Value {
    let mut tree = tree.clone();
    if let Some(model) = tree.get_mut("model").and_then(Value::as_object_mut) {
        model.insert("vocab".into(), Value::Null);
        model.insert("merges".into(), Value::Null);
    }
    tree
}

fn use_it(dice: &mut Dice, dir: &Path) {
    let Ok(model) = TextModel::load(dir) else { return };
    let tokenizer = &model.tokenizer;
    let sentence = text::mutate(dice, "Hello, wörld! <|end|> 12345 \n\n ", &["<s>", "</s>", "<|user|>", "▁", "Ġ"]);
    let ids = tokenizer.encode(&sentence, dice.one_in(2)).unwrap_or_default();
    let _ = tokenizer.decode(&ids, dice.one_in(2));
    let odd: Vec<u32> = (0..20).map(|_| dice.integer() as u32).chain(ids.iter().copied().take(20)).collect();
    let _ = tokenizer.decode(&odd, false);
    let mut detokenizer = Detokenizer::new(model.tokenizer.clone(), &ids, true);
    for &id in &odd {
        let _ = detokenizer.push(id);
        let _ = tokenizer.piece(id);
        let _ = tokenizer.token_bytes(id);
    }
    let _ = model.eos_tokens();
    let width = model.config.identity.vocab_size as usize;
    // A worker's rows of logits have as many entries as its model's weights have rows, which it has read.
    if width <= 1 << 18 {
        let _ = Vocabulary::load(&dir.join("tokenizer.json"), width);
    }
}

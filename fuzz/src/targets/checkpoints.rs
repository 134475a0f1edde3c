//! Weights and `config.json` as workers read them: whatever the contents, loading ends in a model or an error, and a loaded model computes.

use super::tree;
use crate::{
    dice::Dice,
    mutate::{bytes, json},
    target::{Subject, Target},
};
use serde_json::Value;
use std::{fs, path::Path, time::Duration};
use tidemill_model::{
    Chunk, EchoExecutor, Encoder, EncoderOptions, Executor, LoadOptions, LogitRows, Model, Quantization, echo::EchoOptions, encoder::Text,
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype},
    step::StateBlocks,
};

pub(crate) const CHECKPOINTS: Target = Target {
    name: "checkpoints",
    about: "config.json, safetensors files and their index, as workers read them",
    open,
    cpu_max: Duration::from_secs(20),
    bytes_max: 1 << 30,
    short: 150,
};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const GENERATION: &str = "generation_config.json";

/// A model's files, by their names.
type Files = Vec<(String, Vec<u8>)>;

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let mut seeds: Vec<Files> = Vec::new();
    for dir in tree::models()?.into_iter().chain(tree::encoders()?) {
        // Reading MiBs for each case would find nothing more.
        if fs::read_dir(&dir)?.filter_map(|entry| entry.ok()?.metadata().ok()).map(|file| file.len()).sum::<u64>() > 2 << 20 {
            continue;
        }
        let mut files = Files::new();
        for entry in fs::read_dir(&dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let is_part = name.starts_with("model") || [CONFIG, GENERATION].contains(&&*name);
            if is_part {
                files.push((name.clone(), fs::read(dir.join(&name))?));
            }
        }
        files.sort();
        seeds.push(files);
    }
    anyhow::ensure!(!seeds.is_empty(), "there is no small model");
    let trees = |name: &str| -> Vec<Value> {
        let of = |files: &Files| serde_json::from_slice(&files.iter().find(|(file, _)| file == name)?.1).ok();
        seeds.iter().filter_map(of).collect()
    };
    let keys = json::keys(&[trees(CONFIG), trees(INDEX)].concat());
    Ok(Box::new(move |dice: &mut Dice| {
        let files = dice.pick(&seeds);
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mutated = dice.below(files.len());
        for (number, (name, contents)) in files.iter().enumerate() {
            let changed = if number == mutated || (*name == CONFIG && dice.one_in(3)) { change(dice, name, contents, &keys) } else { None };
            fs::write(dir.path().join(name), changed.as_ref().unwrap_or(contents)).map_err(|error| error.to_string())?;
        }
        use_it(dice, dir.path());
        Ok(())
    }))
}

fn change(dice: &mut Dice, name: &str, contents: &[u8], keys: &[String]) -> Option<Vec<u8>> {
    let is_json = name.ends_with(".json");
    if dice.one_in(5) {
        let mut contents = contents.to_vec();
        // Only the header is parsed; in the tensors, any bytes are numbers.
        let mut head = contents.drain(..contents.len().min(4000)).collect();
        bytes::mutate(dice, &mut head);
        dice.show(name, &head);
        return Some([head, contents].concat());
    }
    if is_json {
        let mut tree = serde_json::from_slice(contents).ok()?;
        json::mutate(dice, &mut tree, keys);
        let text = json::text(dice, &tree);
        dice.show(name, text.as_bytes());
        return Some(text.into_bytes());
    }
    let length = u64::from_le_bytes(*contents.first_chunk()?) as usize;
    let (header, tensors) = contents.get(8..)?.split_at_checked(length)?;
    let mut tree: Value = serde_json::from_slice(header).ok()?;
    json::mutate(dice, &mut tree, HEADER_KEYS.map(str::to_owned).as_slice());
    let header = json::text(dice, &tree);
    dice.show(name, header.as_bytes());
    let length = if dice.one_in(10) { dice.integer() as u64 } else { header.len() as u64 };
    let mut tensors = tensors.to_vec();
    if dice.one_in(4) {
        tensors.truncate(dice.below(tensors.len() + 1));
    }
    Some([&length.to_le_bytes(), header.as_bytes(), &tensors].concat())
}

const HEADER_KEYS: [&str; 6] = ["__metadata__", "dtype", "shape", "data_offsets", "model.norm.weight", "lm_head.weight"];

fn use_it(dice: &mut Dice, dir: &Path) {
    let echo = EchoOptions { block_bytes: *dice.pick(&[1, 4096, 65_536]), step: Default::default() };
    if let Ok(echo) = EchoExecutor::load(dir, &echo) {
        let _ = (echo.layout(), echo.vocab());
    }
    if encode(dice, dir) {
        return;
    }
    let kv_dtype = *dice.pick(&KvDtype::ALL);
    let quantize = dice.one_in(2).then(|| *dice.pick(&Quantization::ALL));
    let Ok(mut model) = Model::load(dir, &LoadOptions { kv_dtype, quantize, threads: 1, isa: None }, &mut |_, _| ()) else { return };
    let (vocab, context) = (model.config().vocab(), model.config().context_tokens());
    let length = (1 + dice.below(2 * BLOCK_TOKENS)).min(context);
    let tokens: Vec<u32> = (0..length).map(|_| dice.below(vocab) as u32).collect();
    let blocks: Vec<u32> = (0..length.div_ceil(BLOCK_TOKENS) as u32).collect();
    let state: Vec<u32> = (blocks.len()..blocks.len() + model.state_blocks()).map(|block| block as u32).collect();
    let mut kv = model.new_kv(blocks.len() + state.len());
    let state = StateBlocks::in_place(0, &state);
    let logits = model.forward(&[Chunk { tokens: &tokens, start: 0, blocks: &blocks, state, logits: LogitRows::Last }], &mut kv);
    let _ = logits.row(0).len();
}

/// Encodes a text if it is an encoder, and returns whether it is.
fn encode(dice: &mut Dice, dir: &Path) -> bool {
    let quantize = dice.one_in(2).then(|| *dice.pick(&Quantization::ALL));
    let loaded = Encoder::load(dir, &EncoderOptions { quantize, threads: 1, isa: None }, &mut |_, _| ());
    let Ok(Some(mut encoder)) = loaded else { return false };
    let length = (1 + dice.below(2 * BLOCK_TOKENS)).min(encoder.context_tokens());
    let tokens: Vec<u32> = (0..length).map(|_| dice.below(encoder.vocab()) as u32).collect();
    let blocks: Vec<u32> = (0..length.div_ceil(BLOCK_TOKENS) as u32).collect();
    let mut kv = encoder.new_kv(blocks.len());
    let row = encoder.encode(&[Text { tokens: &tokens, blocks: &blocks, second: dice.below(length + 1) }], &mut kv);
    let _ = row.len();
    true
}

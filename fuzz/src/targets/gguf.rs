//! GGUF files: whatever their contents, they are unpacked or refused, and an unpacked one is a model directory or is refused as one.

use super::tree;
use crate::{
    dice::Dice,
    mutate::bytes,
    target::{Subject, Target},
};
use std::{fs, time::Duration};
use tidemill_gateway::text::TextModel;
use tidemill_gguf::{directory, file::Gguf};
use tidemill_model::{LoadOptions, Model};
use tidemill_proto::block::KvDtype;

pub(crate) const GGUF: Target = Target {
    name: "gguf",
    about: "GGUF files, unpacked into directories, and those read",
    open,
    cpu_max: Duration::from_secs(20),
    // The files have up to 200 kB, and nothing is made of them that is a multiple of what they claim.
    bytes_max: 256 << 20,
    short: 150,
};

/// The bytes of the metadata and the tensors' table; in the rest, any bytes are numbers.
const HEADER: usize = 20_000;

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let dir = tree::path("gguf/tests/fixtures");
    let mut files = ["blocks.gguf", "llama3.gguf", "pieces.gguf"].map(|name| dir.join(name)).to_vec();
    for family in fs::read_dir(dir.join("families"))? {
        files.extend(Some(family?.path()).filter(|path| path.extension().is_some_and(|extension| extension == "gguf")));
    }
    files.sort();
    let seeds = files.iter().map(fs::read).collect::<Result<Vec<_>, _>>()?;
    Ok(Box::new(move |dice: &mut Dice| {
        let mut contents = dice.pick(&seeds).clone();
        if dice.one_in(2) {
            claim(dice, &mut contents);
        } else {
            // The place of the keys, of the tokens, or of the tensors.
            let from = dice.below(contents.len().min(HEADER));
            let mut part: Vec<u8> = contents.drain(from..(from + 400).min(contents.len())).collect();
            bytes::mutate(dice, &mut part);
            dice.show("part", &part);
            contents.splice(from..from, part);
        }
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let (path, unpacked) = (dir.path().join("model.gguf"), dir.path().join("unpacked"));
        fs::write(&path, contents).map_err(|error| error.to_string())?;
        let Ok(file) = Gguf::open(&path) else { return Ok(()) };
        if directory::write(&file, &unpacked, &|_, _| ()).is_ok() {
            let _ = TextModel::load(&unpacked);
            let options = LoadOptions { kv_dtype: KvDtype::F32, quantize: None, threads: 1, isa: None };
            let _ = Model::load(&unpacked, &options, &mut |_, _| ());
        }
        Ok(())
    }))
}

/// Changes numbers of a file whose form stays valid: settings, and the sizes and places of tensors.
fn claim(dice: &mut Dice, contents: &mut [u8]) {
    for _ in 0..1 + dice.few(4) {
        let word = *dice.pick(CLAIMS);
        let places: Vec<usize> = contents[..contents.len().min(HEADER)]
            .windows(word.len())
            .enumerate()
            .filter_map(|(at, window)| (window == word.as_bytes()).then_some(at + word.len()))
            .collect();
        let Some(&at) = places.get(dice.below(places.len().max(1))) else { continue };
        // After a setting's name come its kind and its value; after a tensor's, its number of dimensions, those, its kind and its place.
        let at = at + if word.ends_with("weight") { 4 * dice.below(8) } else { 4 };
        let number = if dice.one_in(3) { dice.below(300) as u32 } else { dice.integer() as u32 };
        if let Some(place) = contents.get_mut(at..at + 4) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        dice.show(word, &number.to_le_bytes());
    }
}

const CLAIMS: &[&str] = &[
    ".block_count",
    ".context_length",
    ".embedding_length",
    ".feed_forward_length",
    ".head_count",
    ".head_count_kv",
    ".key_length",
    ".dimension_count",
    ".expert_count",
    ".expert_used_count",
    ".expert_feed_forward_length",
    ".expert_shared_feed_forward_length",
    ".sliding_window",
    ".freq_base",
    ".original_context_length",
    ".nextn_predict_layers",
    "general.alignment",
    "token_embd.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_norm.weight",
    "ffn_down.weight",
    "ffn_gate_exps.weight",
    "ffn_down_exps.weight",
    "output_norm.weight",
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "bos_token_id",
    "eos_token_id",
    "unknown_token_id",
    "split.count",
    "split.no",
];

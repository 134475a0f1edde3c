//! A draft model beside the model: its settings, its loading, and the check that both have one vocabulary.

use crate::{flags::EngineSettings, load::EngineError};
use serde::Deserialize;
use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};
use tidemill_model::{CpuExecutor, Executor, LoadOptions, Model, Quantization, Runner, read_json_of};
use tidemill_net::{
    config::{ConfigError, invalid, parse_bytes, within_memory},
    process::Progress,
};
use tidemill_proto::{
    block::{KvDtype, Token},
    files::TOKENIZER_BYTES_MAX,
};

/// The settings of a draft model.
#[derive(Clone, Debug)]
pub struct DraftSettings {
    pub model: PathBuf,
    /// The arithmetic of projections; that of the stored weights if `None`.
    pub quantize: Option<Quantization>,
    /// Memory for its own KV blocks.
    pub kv_memory_bytes: u64,
}

/// The default memory for KV blocks: some 20,000 tokens of a model of half a billion weights.
const KV_BYTES_DEFAULT: u64 = 256 << 20;

impl DraftSettings {
    /// Checks the keys `draft_…` of a role's section.
    pub fn check(model: PathBuf, quantize: Option<&str>, kv_memory: Option<&str>) -> Result<Self, ConfigError> {
        let quantize = quantize.unwrap_or("none");
        let quantize = Quantization::of_name(quantize)
            .ok_or_else(|| invalid("draft_quantize", quantize, "is not one of none, int8, int4, dequantize"))?;
        let bytes = |text| parse_bytes(text).map_err(|reason| invalid("draft_kv_memory", text, reason));
        let kv_memory_bytes = kv_memory.map(bytes).transpose()?.unwrap_or(KV_BYTES_DEFAULT);
        Ok(Self { model, quantize, kv_memory_bytes })
    }
}

/// A loaded draft model with its device memory.
pub struct LoadedDraft {
    pub runner: Runner,
    pub blocks: u32,
    /// The most tokens of a step.
    pub step_tokens: usize,
}

/// Loads a draft model for the one of `engine`, which is loaded and has `vocab` tokens. It computes with as many threads.
pub fn load_draft(draft: &DraftSettings, engine: &EngineSettings, step_tokens: usize, vocab: usize) -> Result<LoadedDraft, EngineError> {
    if engine.echo.is_some() {
        return Err(unfit(draft, "is given, and an echo computes no model that it could guess for".into()).into());
    }
    check_vocabularies(&engine.model, draft)?;
    let isa = engine.isa.as_ref().map(|name| name.parse().map_err(|_| invalid("isa", name, "is not an instruction set"))).transpose()?;
    let options = LoadOptions { kv_dtype: KvDtype::Bf16, quantize: draft.quantize, threads: engine.threads, isa };
    let mut progress = Progress::new("loading the draft model's weights:");
    let model = Model::load(&draft.model, &options, &mut |done, total| progress.update(done, total))?;
    let block_bytes = model.kv_shape().block_bytes() as u64;
    let blocks = within_memory("draft_kv_memory", draft.kv_memory_bytes)? / block_bytes;
    let Ok(blocks @ 1..) = u32::try_from(blocks) else {
        let reason = format!("must hold from 1 to 2^32 blocks of {block_bytes} bytes");
        return Err(invalid("draft_kv_memory", draft.kv_memory_bytes, reason).into());
    };
    let runner = CpuExecutor::new(model, blocks as usize);
    if runner.state_blocks() > 0 {
        return Err(unfit(draft, "has recurrent layers, whose state cannot take a wrong guess back: choose another model".into()).into());
    }
    // Without tables of tokens, only their numbers can be compared.
    let is_known = tokens(&engine.model)?.is_some() && tokens(&draft.model)?.is_some();
    if !is_known && runner.vocab() != vocab {
        let reason = format!("has {} tokens in its vocabulary, and the model has {vocab}: choose one of the same family", runner.vocab());
        return Err(unfit(draft, reason).into());
    }
    tracing::info!(model = %draft.model.display(), blocks, "a draft model guesses");
    Ok(LoadedDraft { runner: Box::new(runner), blocks, step_tokens })
}

fn unfit(draft: &DraftSettings, reason: String) -> ConfigError {
    invalid("draft_model", draft.model.display(), reason)
}

/// Compares the tables of tokens, if both models have one.
fn check_vocabularies(model: &Path, draft: &DraftSettings) -> Result<(), EngineError> {
    let (Some(expected), Some(found)) = (tokens(model)?, tokens(&draft.model)?) else { return Ok(()) };
    let differs = |id: &&Token| expected.get(*id) != found.get(*id);
    let Some(id) = expected.keys().chain(found.keys()).find(differs) else { return Ok(()) };
    let name = |token: Option<&String>| token.map_or_else(|| "nothing".to_owned(), |token| format!("{token:?}"));
    let reason = format!(
        "has another vocabulary than the model: its token {id} is {}, and there it is {}; choose one of the same family",
        name(found.get(id)),
        name(expected.get(id))
    );
    Err(unfit(draft, reason).into())
}

/// The part of a `tokenizer.json` that defines the ids.
#[derive(Deserialize)]
struct Tokenizer {
    model: Table,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Table {
    vocab: Vocab,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Vocab {
    Ids(HashMap<String, Token>),
    /// Tokens in the order of ids, with scores.
    Pieces(Vec<(String, f64)>),
}

#[derive(Deserialize)]
struct Added {
    id: Token,
    content: String,
}

/// The tokens of the model in `dir`; `None` if it has no table of them.
fn tokens(dir: &Path) -> Result<Option<BTreeMap<Token, String>>, EngineError> {
    let path = dir.join("tokenizer.json");
    if !path.exists() {
        return Ok(None);
    }
    let Tokenizer { model, added_tokens } = read_json_of(&path, TOKENIZER_BYTES_MAX)?;
    let mut tokens: BTreeMap<Token, String> = match model.vocab {
        Vocab::Ids(ids) => ids.into_iter().map(|(token, id)| (id, token)).collect(),
        Vocab::Pieces(pieces) => (0..).zip(pieces).map(|(id, (piece, _))| (id, piece)).collect(),
    };
    tokens.extend(added_tokens.into_iter().map(|added| (added.id, added.content)));
    Ok(Some(tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::EngineFlags;

    fn load(model: &str, draft: &str) -> Result<LoadedDraft, String> {
        let fixture = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(name);
        let flags = EngineFlags { model: Some(fixture(model)), threads: Some(1), ..EngineFlags::default() };
        let draft = DraftSettings { model: fixture(draft), quantize: Some(Quantization::Int8), kv_memory_bytes: 1 << 20 };
        load_draft(&draft, &flags.check().unwrap(), 64, 512).map_err(|error| error.to_string())
    }

    #[test]
    fn a_draft_model_has_the_vocabulary_of_the_model() {
        assert!(load("qwen3", "mixtral").unwrap().blocks > 10);
        let error = |model: &str, draft: &str| load(model, draft).map(|_| ()).unwrap_err();
        let other = error("qwen3", "prose");
        assert!(other.contains("draft_model") && other.contains("another vocabulary") && other.contains("its token"), "{other}");
        let missing = error("qwen3", "no-such-model");
        assert!(missing.contains("no-such-model"), "{missing}");
    }

    #[test]
    fn a_draft_model_keeps_no_state() {
        let error = load("lfm2", "lfm2").map(|_| ()).unwrap_err();
        assert!(error.contains("recurrent layers"), "{error}");
    }
}

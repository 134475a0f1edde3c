//! From a worker's `[engine]` settings to a loaded model and its device memory: the same for every role that computes.

use crate::{Isa, KvMemory, LoadOptions, Model, ModelError, Quantization};
use tidemill_proto::{
    config::{ConfigError, invalid},
    engine::EngineSettings,
    message::EngineInfo,
    process::Progress,
};

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// Loads the model, logging its progress, and sets up its KV memory. The info is what the worker registers with.
pub fn load_engine(settings: &EngineSettings) -> Result<(Model, KvMemory, EngineInfo), EngineError> {
    let isa = match &settings.isa {
        None => None,
        Some(name) => Some(name.parse::<Isa>().map_err(|reason| invalid("isa", name, reason.to_string()))?),
    };
    let options = LoadOptions {
        kv_dtype: settings.kv_dtype,
        quantize: settings.quantize_int8.then_some(Quantization::Int8),
        threads: settings.threads,
        isa,
    };
    let mut progress = Progress::new("loading weights:");
    let model = Model::load(&settings.model, &options, &mut |done, total| progress.update(done, total))?;
    let block_bytes = model.kv_shape().block_bytes();
    let blocks = settings.device_blocks(block_bytes)?;
    let kv = model.new_kv(blocks);
    let info = EngineInfo {
        layout: model.layout(),
        block_bytes: block_bytes as u64,
        device_blocks: blocks as u32,
        context_tokens: model.config().context_tokens() as u32,
    };
    Ok((model, kv, info))
}

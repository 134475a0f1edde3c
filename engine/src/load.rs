//! From a worker's `[engine]` settings to a loaded model with its device memory.

use crate::{
    flags::{DeviceChoice, EngineSettings},
    stages::{StagesError, head::Met},
    states::StateRule,
};
use std::{io::ErrorKind, path::Path};
use tidemill_model::{
    CpuExecutor, CudaError, CudaExecutor, EchoExecutor, Encoder, EncoderExecutor, EncoderOptions, Executor, ExecutorError, Isa,
    LoadOptions, Model, ModelError, Quantization, RankedExecutor, RankedModel, Runner, StageModel,
    cuda::{self, CudaOptions, KvBytes},
    echo::EchoOptions,
    read_json,
};
use tidemill_net::{
    config::{ConfigError, invalid},
    process::Progress,
};
use tidemill_proto::{
    files::{TOKENIZER_BYTES_MAX, read_at_most},
    message::{EngineInfo, IdentityKeys, ModelIdentity},
    stage::{Hello, Stage},
};
use tokio::sync::oneshot;

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Device(#[from] ExecutorError),
    #[error(transparent)]
    Stages(#[from] StagesError),
    #[error("the thread that computes for the head has ended: {0}")]
    StageThread(String),
}

/// A loaded model with its device memory.
pub struct LoadedEngine {
    pub runner: Runner,
    /// The data that the worker registers with.
    pub info: EngineInfo,
    /// The most tokens of a step, at least one for each sequence.
    pub step_tokens: usize,
    /// Blocks of the device's memory, including those for states.
    pub device_blocks: u32,
    pub states: StateRule,
    /// Resolves with the failure of another stage, if the model's layers are in several.
    pub lost: Option<oneshot::Receiver<ExecutorError>>,
}

/// Meets the other stages of a worker: from the head's greeting and the number of blocks for which it has room.
pub type Meet<'a> = &'a dyn Fn(&Hello, usize) -> Result<Met, StagesError>;

/// The default tokens of a step.
const CPU_STEP_TOKENS: usize = 256;
/// The default tokens of a step of an encoder.
const ENCODER_STEP_TOKENS: usize = 1024;
const CUDA_STEP_TOKENS: usize = 8192;
const ECHO_STEP_TOKENS: usize = 8192;

/// Loads the model, logging its progress, and sets up its device memory. A step draws tokens for up to `sequences_max` sequences; 0 if it
/// never draws any. `work_max` is that of [`EngineInfo`]. `meet` is called only if the settings name other stages.
pub fn load_engine(settings: &EngineSettings, sequences_max: usize, work_max: usize, meet: Meet<'_>) -> Result<LoadedEngine, EngineError> {
    let identity = identity(&settings.model)?;
    let LoadedRunner { runner, blocks, step_tokens, lost } = load_runner(settings, sequences_max, meet)?;
    let states = StateRule::new(runner.state_blocks(), settings.state_every);
    let of_tokens = blocks.saturating_sub(states.of_job());
    if states.blocks > 0 && of_tokens == 0 {
        let (blocks, needed, bytes) = (blocks as u64, states.of_job() as u64, runner.kv_shape().block_bytes() as u64);
        let reason = format!("holds {blocks} blocks, and the states of one sequence take {needed}: give it more than {}", needed * bytes);
        return Err(invalid("kv_memory", blocks * bytes, reason).into());
    }
    if states.blocks > 0 {
        tracing::info!(blocks = states.blocks, every = states.every, "states of recurrent layers are kept, in blocks");
    }
    let info = EngineInfo {
        model: identity,
        layout: runner.layout(),
        block_bytes: runner.kv_shape().block_bytes() as u64,
        device_blocks: of_tokens as u32,
        state_blocks: states.blocks as u32,
        context_tokens: runner.context_tokens() as u32,
        work_max: work_max.try_into().unwrap_or(u32::MAX),
    };
    Ok(LoadedEngine { runner, info, step_tokens, device_blocks: blocks as u32, states, lost })
}

fn identity(dir: &Path) -> Result<ModelIdentity, ModelError> {
    let path = dir.join("tokenizer.json");
    let tokenizer_digest = match read_at_most(&path, TOKENIZER_BYTES_MAX) {
        Ok(bytes) => Some(ModelIdentity::digest(&bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(source) => return Err(ModelError::Io { path, source }),
    };
    let path = dir.join("config.json");
    let (identity, _) = read_json::<IdentityKeys>(&path)?.identity().map_err(|problem| ModelError::Config { path, problem })?;
    Ok(ModelIdentity { tokenizer_digest, ..identity })
}

/// A model with its device memory.
struct LoadedRunner {
    runner: Runner,
    blocks: usize,
    step_tokens: usize,
    lost: Option<oneshot::Receiver<ExecutorError>>,
}

fn load_runner(settings: &EngineSettings, sequences_max: usize, meet: Meet<'_>) -> Result<LoadedRunner, EngineError> {
    if let Some(options) = &settings.echo {
        return load_echo(settings, options, sequences_max);
    }
    match settings.device {
        DeviceChoice::Cpu => load_on_cpu(settings, sequences_max, meet),
        DeviceChoice::Cuda => Ok(load_on_cuda(settings, sequences_max)?),
        DeviceChoice::Auto => match load_on_cuda(settings, sequences_max) {
            Err(reason) if is_no_gpu_for_it(&reason) => {
                tracing::info!(%reason, "the model computes on the CPU");
                load_on_cpu(settings, sequences_max, meet)
            }
            outcome => Ok(outcome?),
        },
    }
}

/// Whether the CPU takes over, as no GPU can run this model with these settings.
fn is_no_gpu_for_it(error: &ModelError) -> bool {
    match error {
        ModelError::NotOnDevice { .. } => true,
        ModelError::Cuda(error) => {
            error.is_absence()
                || matches!(
                    error,
                    CudaError::NoLibrary { .. }
                        | CudaError::TooOld { .. }
                        | CudaError::NoPeerAccess { .. }
                        | CudaError::UnlikeDevices { .. }
                )
        }
        _ => false,
    }
}

/// Loads the layers of a later stage.
pub(crate) fn load_stage(settings: &EngineSettings, stage: Stage) -> Result<StageModel, EngineError> {
    let mut progress = Progress::new("loading weights:");
    let model = RankedModel::load_stage(&settings.model, &load_options(settings)?, settings.tensor_parallel, stage, &mut |done, total| {
        progress.update(done, total)
    })?;
    Ok(StageModel::new(model))
}

fn isa(settings: &EngineSettings) -> Result<Option<Isa>, ConfigError> {
    let named = |name: &String| name.parse::<Isa>().map_err(|reason| invalid("isa", name, reason.to_string()));
    settings.isa.as_ref().map(named).transpose()
}

fn load_options(settings: &EngineSettings) -> Result<LoadOptions, ConfigError> {
    Ok(LoadOptions { kv_dtype: settings.kv_dtype, quantize: settings.quantize, threads: settings.threads, isa: isa(settings)? })
}

fn load_on_cpu(settings: &EngineSettings, sequences_max: usize, meet: Meet<'_>) -> Result<LoadedRunner, EngineError> {
    let mut progress = Progress::new("loading weights:");
    let mut progress = |done, total| progress.update(done, total);
    let options = EncoderOptions { quantize: settings.quantize, threads: settings.threads, isa: isa(settings)? };
    let ranks = settings.tensor_parallel;
    if let Some(encoder) = Encoder::load(&settings.model, &options, &mut progress)? {
        if ranks > 1 {
            return Err(invalid("tensor_parallel", ranks, "is not for models that read a text as a whole: leave it out").into());
        }
        if let Some(first) = settings.stages.first() {
            return Err(invalid("stages", first, "are not for models that read a text as a whole: leave them out").into());
        }
        let blocks = settings.cpu_blocks(encoder.kv_shape().block_bytes())?;
        // A text goes into one step, regardless of its length.
        let step_tokens = settings.step_tokens.unwrap_or(ENCODER_STEP_TOKENS).max(encoder.context_tokens());
        return Ok(LoadedRunner { runner: Box::new(EncoderExecutor::new(encoder, blocks)), blocks, step_tokens, lost: None });
    }
    let options = load_options(settings)?;
    let mut lost = None;
    let (runner, blocks, dequantizes_4_bits): (Runner, _, _) = if !settings.stages.is_empty() {
        let stage = Stage { index: 0, count: settings.stages.len() as u32 + 1 };
        let model = load_stage(settings, stage)?;
        let (blocks, dequantizes) = (settings.cpu_blocks(model.block_memory())?, model.dequantizes_4_bits());
        let met = meet(&model.hello(stage), blocks)?;
        tracing::info!(stages = stage.count, ranks, blocks = met.blocks, "the model is split over stages");
        lost = Some(met.lost);
        (Box::new(model.into_head(met.blocks, met.later)), met.blocks, dequantizes)
    } else if ranks > 1 {
        let model = RankedModel::load(&settings.model, &options, ranks, &mut progress)?;
        tracing::info!(ranks, threads = settings.threads / ranks, "the model is split over ranks, each with these threads");
        let (blocks, dequantizes) = (settings.cpu_blocks(model.block_memory())?, model.dequantizes_4_bits());
        (Box::new(RankedExecutor::new(model, blocks)), blocks, dequantizes)
    } else {
        let model = Model::load(&settings.model, &options, &mut progress)?;
        let (blocks, dequantizes) = (settings.cpu_blocks(model.kv_shape().block_bytes())?, model.dequantizes_4_bits());
        (Box::new(CpuExecutor::new(model, blocks)), blocks, dequantizes)
    };
    if dequantizes_4_bits {
        tracing::info!("weights in 4 bits are dequantized: they take at least four times the memory");
    }
    let step_tokens = settings.step_tokens.unwrap_or(CPU_STEP_TOKENS).max(sequences_max);
    Ok(LoadedRunner { runner, blocks, step_tokens, lost })
}

fn load_echo(settings: &EngineSettings, options: &EchoOptions, sequences_max: usize) -> Result<LoadedRunner, EngineError> {
    let echo = EchoExecutor::load(&settings.model, options)?;
    let blocks = settings.cpu_blocks(echo.kv_shape().block_bytes())?;
    let step_tokens = settings.step_tokens.unwrap_or(ECHO_STEP_TOKENS).max(sequences_max);
    tracing::info!(blocks, "no model computes here: tokens are a hash of the ids");
    Ok(LoadedRunner { runner: Box::new(echo.with_blocks(blocks)), blocks, step_tokens, lost: None })
}

fn load_on_cuda(settings: &EngineSettings, sequences_max: usize) -> Result<LoadedRunner, ModelError> {
    let unfit = |problem: &str| Err(ModelError::NotOnDevice { problem: problem.to_owned() });
    if let Some(quantize @ (Quantization::Int8 | Quantization::Int4)) = settings.quantize {
        return unfit(&format!("projections in integers (--quantize {}) are the CPU's", quantize.name()));
    }
    if !settings.stages.is_empty() {
        return unfit("a model in stages (--stages) is the CPU's");
    }
    let libraries = cuda::libraries()?;
    tracing::info!(driver = %libraries.driver, nvrtc = %libraries.nvrtc, cublaslt = %libraries.cublaslt, "CUDA's libraries");
    let step_tokens = settings.step_tokens.unwrap_or(CUDA_STEP_TOKENS).max(sequences_max);
    let ranks = settings.tensor_parallel;
    // The setting is of all ranks together, as on CPUs.
    let of_rank = |bytes| KvBytes::Exactly(bytes / ranks as u64);
    let kv = settings.kv_memory_bytes.map_or(KvBytes::UpToShare(settings.device_share), of_rank);
    let (kernel_cache, kv_dtype) = (settings.kernel_cache.clone(), settings.kv_dtype);
    let options = CudaOptions { kernel_cache, step_tokens, sequences_max, kv, kv_dtype, ranks };
    let mut progress = Progress::new("loading weights:");
    let cuda = CudaExecutor::load(&settings.model, &options, &mut |done, total| progress.update(done, total))?;
    let blocks = cuda.blocks();
    tracing::info!(device = cuda.device_name(), devices = ranks, blocks, "the model computes on a GPU or several");
    if let Some(reason) = cuda.fp8_lacks() {
        tracing::warn!(reason, "weights in FP8 are dequantized to bf16: they take twice the memory, and products are slower");
    }
    Ok(LoadedRunner { runner: Box::new(cuda), blocks, step_tokens, lost: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::EngineFlags;
    use tidemill_kernels::cuda::Device;

    fn load(device: &str) -> Result<LoadedEngine, EngineError> {
        load_split("fixtures/llama3", device, 1)
    }

    fn load_split(model: &str, device: &str, ranks: usize) -> Result<LoadedEngine, EngineError> {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests").join(model);
        let (device, tensor_parallel) = (Some(device.into()), Some(ranks));
        let flags = EngineFlags { model: Some(model), device, threads: Some(ranks), tensor_parallel, ..EngineFlags::default() };
        load_engine(&flags.check().unwrap(), 300, 1200, &|_, _| Err(StagesError::Told))
    }

    #[test]
    fn a_split_model_has_the_same_blocks() {
        let (whole, split) = (load("cpu").unwrap(), load_split("fixtures/llama3", "auto", 2).unwrap());
        assert_eq!((split.info.layout, split.info.block_bytes), (whole.info.layout, whole.info.block_bytes));
        assert_eq!(split.device_blocks, whole.device_blocks);
        for (model, device, ranks, words) in
            [("fixtures/llama3", "cpu", 3, "4 query heads share 2 KV heads"), ("encoders/bert-mean", "cpu", 2, "`tensor_parallel`")]
        {
            let Err(error) = load_split(model, device, ranks) else { panic!("{model} on {device} is not refused") };
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn without_a_gpu_auto_computes_on_the_cpu_and_cuda_says_what_is_missing() {
        let engine = load("cpu").unwrap();
        assert_eq!(engine.runner.device_name(), "CPU");
        assert_eq!(engine.step_tokens, 300, "a token of each sequence");
        if Device::count() == 0 {
            assert_eq!(load("auto").unwrap().info.layout, engine.info.layout);
            for error in [load("cuda"), load_split("fixtures/llama3", "cuda", 2)].into_iter().map(Result::err) {
                assert!(error.as_ref().is_some_and(|error| error.to_string().contains("CUDA driver")), "{error:?}");
            }
        }
    }
}

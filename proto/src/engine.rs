//! What every worker that holds a model is told alike: the model, its device memory, its threads, its way to the pool.

use crate::{
    block::KvDtype,
    config::{ConfigError, invalid, parse_bytes, required},
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Section `[engine]` of a worker's config file, and its flags.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineFlags {
    /// Hugging Face model directory
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// How projections compute: none (in f32, with weights as stored) or int8 (weights and activations in 8-bit integers)
    #[arg(long)]
    pub quantize: Option<String>,
    /// How K and V are stored: auto (as the weights), f32, f16 or bf16
    #[arg(long)]
    pub kv_dtype: Option<String>,
    /// Device memory for KV blocks, such as 512MiB
    #[arg(long)]
    pub kv_memory: Option<String>,
    /// Threads that compute (default: all cores)
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction set: auto, avx512bf16, avx512, avx2 or portable. All give the same bits
    #[arg(long)]
    pub isa: Option<String>,
    /// How blocks travel: auto (shared memory where the pool node is on this host, see --host) or quic
    #[arg(long)]
    pub transport: Option<String>,
    /// Most tokens computed in one step
    #[arg(long)]
    pub step_tokens: Option<usize>,
}

/// The same, checked.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    pub model: PathBuf,
    /// Projections compute in 8-bit integers.
    pub quantize_int8: bool,
    /// `None`: as the weights.
    pub kv_dtype: Option<KvDtype>,
    pub kv_memory_bytes: u64,
    pub threads: usize,
    /// `None`: the best that this CPU has.
    pub isa: Option<String>,
    pub force_quic: bool,
    pub step_tokens: usize,
}

impl EngineFlags {
    pub fn check(self) -> Result<EngineSettings, ConfigError> {
        let quantize_int8 = match self.quantize.as_deref() {
            None | Some("none") => false,
            Some("int8") => true,
            Some(other) => return Err(invalid("quantize", other, "is not one of none, int8")),
        };
        let kv_dtype = match self.kv_dtype.as_deref() {
            None | Some("auto") => None,
            Some("f32") => Some(KvDtype::F32),
            Some("f16") => Some(KvDtype::F16),
            Some("bf16") => Some(KvDtype::Bf16),
            Some(other) => return Err(invalid("kv_dtype", other, "is not one of auto, f32, f16, bf16")),
        };
        let kv_memory = self.kv_memory.unwrap_or_else(|| "1GiB".into());
        let kv_memory_bytes = parse_bytes(&kv_memory).map_err(|reason| invalid("kv_memory", &kv_memory, reason))?;
        let force_quic = match self.transport.as_deref() {
            None | Some("auto") => false,
            Some("quic") => true,
            Some(other) => return Err(invalid("transport", other, "is not one of auto, quic")),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.unwrap_or(cores);
        if !(1..=1024).contains(&threads) {
            return Err(invalid("threads", threads, "must be from 1 to 1024"));
        }
        let step_tokens = self.step_tokens.unwrap_or(256);
        if !(1..=65_536).contains(&step_tokens) {
            return Err(invalid("step_tokens", step_tokens, "must be from 1 to 65536"));
        }
        let isa = self.isa.filter(|isa| isa != "auto");
        Ok(EngineSettings {
            model: required("model", self.model)?,
            quantize_int8,
            kv_dtype,
            kv_memory_bytes,
            threads,
            isa,
            force_quic,
            step_tokens,
        })
    }
}

impl EngineSettings {
    /// KV blocks that the device memory holds.
    pub fn device_blocks(&self, block_bytes: usize) -> Result<usize, ConfigError> {
        let blocks = self.kv_memory_bytes / block_bytes as u64;
        match usize::try_from(blocks) {
            Ok(n) if n >= 2 && n <= u32::MAX as usize => Ok(n),
            _ => Err(invalid("kv_memory", self.kv_memory_bytes, format!("must hold from 2 to 2^32 blocks of {block_bytes} bytes"))),
        }
    }
}

//! Settings of every worker that holds a model: the model, its device memory, its threads, its way to the pool.

use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tidemill_kvpool::client::{DeviceNames, TransportChoice};
use tidemill_model::{
    Quantization,
    echo::{EchoOptions, StepTime},
};
use tidemill_net::{
    config::{ConfigError, invalid, parse_bytes, required, within_memory},
    cores::Cores,
    worker::{WorkerError, WorkerFlags, WorkerSettings},
};
use tidemill_proto::{block::KvDtype, stage::Stage};

/// All settings of a worker, checked. `role` has those of its role's own section.
#[derive(Debug)]
pub struct Settings<R> {
    pub worker: WorkerSettings,
    pub engine: EngineSettings,
    pub role: R,
}

impl<R> Settings<R> {
    /// Checks all sections. `name` is the role's, and the default name of the worker.
    pub fn check(
        name: &str,
        worker: WorkerFlags,
        engine: EngineFlags,
        role: impl FnOnce(&EngineSettings) -> Result<R, ConfigError>,
    ) -> Result<Self, WorkerError> {
        let engine = engine.check()?;
        let worker = if engine.stage.is_some() { worker.check_unregistered(name) } else { worker.check(name) }?;
        let role = role(&engine)?;
        Ok(Self { worker, engine, role })
    }
}

/// Section `[engine]` of a worker's config file, and its flags.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[command(next_help_heading = "[engine]")]
pub struct EngineFlags {
    /// Hugging Face directory of the model [default: none, required]
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Compute engine: model; or echo, which reads no weights, and whose tokens and KV are a hash of the ids, to measure everything around a
    /// model. All engines of a cluster must be one [default: model]
    #[arg(long)]
    pub engine: Option<String>,
    /// Time of each step of an echo, in milliseconds [default: 0]
    #[arg(long)]
    pub step_ms: Option<f64>,
    /// Time of each prompt token in a step of an echo, in milliseconds [default: 0]
    #[arg(long)]
    pub prompt_token_ms: Option<f64>,
    /// Time of each sequence that decodes in a step of an echo, in milliseconds [default: 0]
    #[arg(long)]
    pub row_ms: Option<f64>,
    /// Size of an echo's KV block, in bytes [default: 4096]
    #[arg(long)]
    pub block_bytes: Option<usize>,
    /// Device of the model: cpu, cuda, or auto, which takes a GPU that can run the model where there is one [default: auto]
    #[arg(long)]
    pub device: Option<String>,
    /// Arithmetic of projections: none (as weights are stored: bf16 in products of bf16, 4 bits with activations in 8, others in f32), int8
    /// (weights and activations in 8-bit integers), int4 (weights in 4 bits) or dequantize (a checkpoint's 4 bits as numbers of 16). int8
    /// and int4 on CPUs only [default: none]
    #[arg(long)]
    pub quantize: Option<String>,
    /// Storage of K and V: bf16, int8 (half the memory: a scale for each position and head), or on CPUs f16 or f32 [default: bf16]
    #[arg(long)]
    pub kv_dtype: Option<String>,
    /// Device memory for KV blocks, such as 512MiB [default: 1GiB on a CPU, what `device_share` leaves on a GPU]
    #[arg(long)]
    pub kv_memory: Option<String>,
    /// Share of a GPU's memory that this worker takes in all, where `kv_memory` is not given [default: 0.9]
    #[arg(long)]
    pub device_share: Option<f32>,
    /// Directory for compiled GPU kernels, and for which algorithms of cuBLASLt were the fastest on this GPU [default:
    /// .cache/tidemill/kernels in the home directory]
    #[arg(long)]
    pub kernel_cache: Option<PathBuf>,
    /// Cores that this process stays on, such as 0-1,4 [default: any]
    #[arg(long)]
    pub cores: Option<String>,
    /// Threads that compute [default: one for each core]
    #[arg(long)]
    pub threads: Option<usize>,
    /// Tensor-parallel ranks that the model is split over, each with weights and KV heads of its own: the machine's first GPUs, or groups of a
    /// CPU's threads, such as one for each memory node. On CPUs, any number gives the same bytes [default: 1]
    #[arg(long)]
    pub tensor_parallel: Option<usize>,
    /// Addresses (UDP) of the processes that hold the model's later layers, in order, separated by commas: this one is then the head of a
    /// worker in stages, with the first layers. On CPUs [default: none, all layers are here]
    #[arg(long, value_delimiter = ',', value_name = "ADDR,…")]
    pub stages: Option<Vec<SocketAddr>>,
    /// Place of this process among the stages of a worker, such as 2/3 for the second of three: it holds these layers, and computes for the head
    /// that reaches it at `bind` [default: none, this is a worker or its head]
    #[arg(long, value_name = "N/OF")]
    pub stage: Option<String>,
    /// Most seconds that a head waits until all stages have loaded their layers, and for each answer of a stage [default: 600]
    #[arg(long)]
    pub stage_wait_s: Option<u64>,
    /// Instruction set: auto, amx, avx512bf16, avx512, avx2, neon or portable. All give the same bits, except that amx goes with amx only
    /// [default: auto]
    #[arg(long)]
    pub isa: Option<String>,
    /// Transport of blocks: auto (shared memory with pool nodes on this host, else RDMA where both have a device, else QUIC), or shm, rdma or
    /// quic, with QUIC where that does not work [default: auto]
    #[arg(long)]
    pub transport: Option<String>,
    /// RDMA devices that blocks may travel over: all, none, or names such as mlx5_0,mlx5_1 [default: all]
    #[arg(long)]
    pub rdma_devices: Option<String>,
    /// Most tokens computed in one step [default: 256 on a CPU, 8192 on a GPU]
    #[arg(long)]
    pub step_tokens: Option<usize>,
    /// Blocks of a sequence from one kept state to the next, for a model with recurrent layers: a prefix can be used again up to such an end,
    /// the prompt's or an answer's. Fewer blocks spare computing and take more memory [default: 32, or so many that states take at most a
    /// fifth of the blocks]
    #[arg(long)]
    pub state_every: Option<usize>,
}

/// The device that a model computes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceChoice {
    /// A GPU if there is one that can run the model, else the CPU.
    Auto,
    Cpu,
    Cuda,
}

/// Section `[engine]`, checked. `None` leaves the choice to the device.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    pub model: PathBuf,
    /// The options of an echo in place of a model, if it is one.
    pub echo: Option<EchoOptions>,
    pub device: DeviceChoice,
    /// The arithmetic of projections; that of the stored weights if `None`.
    pub quantize: Option<Quantization>,
    pub kv_dtype: KvDtype,
    pub kv_memory_bytes: Option<u64>,
    pub device_share: f32,
    pub kernel_cache: PathBuf,
    /// The cores of the process; any if `None`.
    pub cores: Option<Cores>,
    /// The number of threads, at most one for each of `cores`.
    pub threads: usize,
    /// The ranks that the model is split over, each with at least one of the threads; 1: not split.
    pub tensor_parallel: usize,
    /// The addresses of the later stages, if this is the head of a worker in stages.
    pub stages: Vec<SocketAddr>,
    /// The place of this process, if it is a later stage.
    pub stage: Option<Stage>,
    /// The most time until all stages take part, and for each answer of a stage.
    pub stage_wait: Duration,
    /// The instruction set; if `None`, the best that this CPU has.
    pub isa: Option<String>,
    pub transport: TransportChoice,
    pub rdma_devices: DeviceNames,
    pub step_tokens: Option<usize>,
    /// The interval of kept states, in blocks.
    pub state_every: Option<usize>,
}

impl EngineFlags {
    pub fn check(self) -> Result<EngineSettings, ConfigError> {
        let echo = self.echo()?;
        let device = match self.device.as_deref() {
            None | Some("auto") => DeviceChoice::Auto,
            Some("cpu") => DeviceChoice::Cpu,
            Some("cuda") => DeviceChoice::Cuda,
            Some(other) => return Err(invalid("device", other, "is not one of auto, cpu, cuda")),
        };
        let quantize = self.quantize.as_deref().unwrap_or("none");
        let quantize =
            Quantization::of_name(quantize).ok_or_else(|| invalid("quantize", quantize, "is not one of none, int8, int4, dequantize"))?;
        let kv_dtype = match self.kv_dtype.as_deref() {
            None => KvDtype::Bf16,
            Some(name) => {
                let dtype = KvDtype::ALL.into_iter().find(|dtype| dtype.name() == name);
                dtype.ok_or_else(|| invalid("kv_dtype", name, "is not one of bf16, f16, f32, int8"))?
            }
        };
        let bytes = |text: &String| parse_bytes(text).map_err(|reason| invalid("kv_memory", text, reason));
        let kv_memory_bytes = self.kv_memory.as_ref().map(bytes).transpose()?;
        let device_share = self.device_share.unwrap_or(0.9);
        if !(device_share > 0.0 && device_share <= 1.0) {
            return Err(invalid("device_share", device_share, "must be above 0 and at most 1"));
        }
        let transport = self.transport.as_deref().unwrap_or("auto");
        let transport = TransportChoice::ALL
            .into_iter()
            .find(|choice| choice.name() == transport)
            .ok_or_else(|| invalid("transport", transport, "is not one of auto, shm, rdma, quic"))?;
        let rdma_devices = match &self.rdma_devices {
            Some(names) => names.parse().map_err(|reason: &str| invalid("rdma_devices", names, reason))?,
            None => DeviceNames::All,
        };
        let cores = match &self.cores {
            None => None,
            Some(list) => Some(list.parse::<Cores>().map_err(|reason| invalid("cores", list, reason))?),
        };
        let threads = self.threads.unwrap_or_else(|| match &cores {
            Some(cores) => cores.len(),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        });
        if !(1..=1024).contains(&threads) {
            return Err(invalid("threads", threads, "must be from 1 to 1024"));
        }
        if let Some(cores) = cores.as_ref().filter(|cores| cores.len() < threads) {
            return Err(invalid("threads", threads, format!("are more than the cores {cores}")));
        }
        let tensor_parallel = self.tensor_parallel.unwrap_or(1);
        if tensor_parallel == 0 || (tensor_parallel > threads && device != DeviceChoice::Cuda) {
            let reason = format!(
                "must be from 1 to the number of threads, {threads}: each rank needs one, and a core for it (or a GPU, with `--device cuda`)"
            );
            return Err(invalid("tensor_parallel", tensor_parallel, reason));
        }
        if tensor_parallel > 1 && echo.is_some() {
            return Err(invalid("tensor_parallel", tensor_parallel, "is not for `--engine echo`, which has nothing to split"));
        }
        let stages = self.stages.clone().unwrap_or_default();
        let stage = self.stage(device, echo.is_some())?;
        let stage_wait_s = self.stage_wait_s.unwrap_or(STAGE_WAIT_S);
        if !(1..=STAGE_WAIT_S_MAX).contains(&stage_wait_s) {
            return Err(invalid("stage_wait_s", stage_wait_s, format!("must be from 1 to {STAGE_WAIT_S_MAX}")));
        }
        if let Some(step_tokens) = self.step_tokens.filter(|tokens| !(1..=STEP_TOKENS_MAX).contains(tokens)) {
            return Err(invalid("step_tokens", step_tokens, format!("must be from 1 to {STEP_TOKENS_MAX}")));
        }
        if let Some(every) = self.state_every.filter(|every| !(1..=STATE_EVERY_MAX).contains(every)) {
            return Err(invalid("state_every", every, format!("must be from 1 to {STATE_EVERY_MAX} blocks")));
        }
        let isa = self.isa.filter(|isa| isa != "auto");
        Ok(EngineSettings {
            model: required(Some("engine"), "model", self.model)?,
            echo,
            device,
            quantize,
            kv_dtype,
            kv_memory_bytes,
            cores,
            device_share,
            kernel_cache: self.kernel_cache.unwrap_or_else(kernel_cache_default),
            threads,
            tensor_parallel,
            stages,
            stage,
            stage_wait: Duration::from_secs(stage_wait_s),
            isa,
            transport,
            rdma_devices,
            state_every: self.state_every,
            step_tokens: self.step_tokens,
        })
    }
}

impl EngineFlags {
    /// The place of this process, if it is a later stage. Checks what goes with stages, at a head too.
    fn stage(&self, device: DeviceChoice, is_echo: bool) -> Result<Option<Stage>, ConfigError> {
        let later = self.stages.as_ref().map_or(0, Vec::len);
        let (key, value) = match &self.stage {
            Some(stage) => ("stage", stage.clone()),
            None if later > 0 => ("stages", later.to_string()),
            None => return Ok(None),
        };
        let refuse = |reason: &str| Err(invalid(key, &value, reason));
        if is_echo {
            return refuse("is not for `--engine echo`, which has no layers");
        }
        if device == DeviceChoice::Cuda {
            return refuse("is for CPUs: leave `device` out");
        }
        if later >= STAGES_MAX {
            return refuse("are too many");
        }
        let Some(text) = &self.stage else { return Ok(None) };
        if later > 0 {
            return refuse("is a later stage, and `stages` is the head's");
        }
        let stage: Stage = text.parse().map_err(|reason: String| invalid("stage", text, reason))?;
        match stage.is_first() {
            true => refuse("is the head's place, which is a worker with `stages`"),
            false => Ok(Some(stage)),
        }
    }

    fn echo(&self) -> Result<Option<EchoOptions>, ConfigError> {
        let times = [("step_ms", self.step_ms), ("prompt_token_ms", self.prompt_token_ms), ("row_ms", self.row_ms)];
        match self.engine.as_deref() {
            Some("echo") => {}
            None | Some("model") => {
                let given = times.into_iter().find(|(_, ms)| ms.is_some()).map(|(key, _)| key);
                return match given.or(self.block_bytes.map(|_| "block_bytes")) {
                    Some(key) => Err(invalid(key, "given", "is for `--engine echo` only: a model takes the time and the bytes it takes")),
                    None => Ok(None),
                };
            }
            Some(other) => return Err(invalid("engine", other, "is not one of model, echo")),
        }
        let block_bytes = self.block_bytes.unwrap_or(ECHO_BLOCK_BYTES);
        if !(1..=ECHO_BLOCK_BYTES_MAX).contains(&block_bytes) {
            return Err(invalid("block_bytes", block_bytes, format!("must be from 1 to {ECHO_BLOCK_BYTES_MAX}")));
        }
        let [base, prompt_token, row] = times.map(|(key, ms)| match ms.unwrap_or(0.0) {
            ms if (0.0..=ECHO_MS_MAX).contains(&ms) => Ok(Duration::from_secs_f64(ms / 1e3)),
            ms => Err(invalid(key, ms, format!("must be from 0 to {ECHO_MS_MAX}"))),
        });
        Ok(Some(EchoOptions { block_bytes, step: StepTime { base: base?, prompt_token: prompt_token?, row: row? } }))
    }
}

/// Bytes of an echo's KV block: few, so that bytes cost little beside everything else.
const ECHO_BLOCK_BYTES: usize = 4096;
const ECHO_BLOCK_BYTES_MAX: usize = 64 << 20;
const ECHO_MS_MAX: f64 = 10_000.0;

/// The largest interval of kept states in blocks, longer than any context.
const STATE_EVERY_MAX: usize = 1 << 20;
/// The most tokens of one step: a GPU's kernels have no more thread blocks in two of a grid's three directions.
pub const STEP_TOKENS_MAX: usize = 65_535;
/// The default of `stage_wait_s`: time to load the layers of a large model from a slow disk.
const STAGE_WAIT_S: u64 = 600;
const STAGE_WAIT_S_MAX: u64 = 86_400;
/// The most stages of a worker. No model has more layers.
const STAGES_MAX: usize = 1 << 12;
/// The default KV memory on a CPU.
const KV_BYTES_DEFAULT: u64 = 1 << 30;
/// The default KV memory of an echo.
const ECHO_KV_BYTES_DEFAULT: u64 = 128 << 20;

fn kernel_cache_default() -> PathBuf {
    std::env::home_dir().unwrap_or_else(std::env::temp_dir).join(".cache/tidemill/kernels")
}

impl EngineSettings {
    /// KV blocks that a CPU's memory holds.
    pub fn cpu_blocks(&self, block_bytes: usize) -> Result<usize, ConfigError> {
        let bytes = within_memory(
            "kv_memory",
            self.kv_memory_bytes.unwrap_or(if self.echo.is_some() { ECHO_KV_BYTES_DEFAULT } else { KV_BYTES_DEFAULT }),
        )?;
        match usize::try_from(bytes / block_bytes as u64) {
            Ok(n) if n >= 2 && n <= u32::MAX as usize => Ok(n),
            _ => Err(invalid("kv_memory", bytes, format!("must hold from 2 to 2^32 blocks of {block_bytes} bytes"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> EngineFlags {
        EngineFlags { model: Some("model".into()), ..EngineFlags::default() }
    }

    #[test]
    fn k_and_v_are_bf16_unless_told_otherwise() {
        assert_eq!(flags().check().unwrap().kv_dtype, KvDtype::Bf16);
        for dtype in KvDtype::ALL {
            let flags = EngineFlags { kv_dtype: Some(dtype.name().into()), ..flags() };
            assert_eq!(flags.check().unwrap().kv_dtype, dtype);
        }
        let error = EngineFlags { kv_dtype: Some("int4".into()), ..flags() }.check().unwrap_err().to_string();
        assert!(error.contains("`kv_dtype` = int4") && error.contains("bf16, f16, f32, int8"), "{error}");
    }

    #[test]
    fn an_echo_takes_the_time_it_is_told_and_a_model_is_told_none() {
        let echo = EngineFlags { engine: Some("echo".into()), step_ms: Some(2.5), block_bytes: Some(1 << 20), ..flags() };
        let options = echo.clone().check().unwrap().echo.unwrap();
        assert_eq!((options.block_bytes, options.step.base, options.step.row), (1 << 20, Duration::from_micros(2500), Duration::ZERO));
        assert_eq!(flags().check().unwrap().echo, None);
        for (wrong, word) in [
            (EngineFlags { engine: Some("mock".into()), ..flags() }, "model, echo"),
            (EngineFlags { row_ms: Some(1.0), ..flags() }, "row_ms"),
            (EngineFlags { block_bytes: Some(1), ..flags() }, "block_bytes"),
            (EngineFlags { step_ms: Some(f64::NAN), ..echo.clone() }, "step_ms"),
            (EngineFlags { block_bytes: Some(0), ..echo }, "block_bytes"),
        ] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn each_rank_has_a_thread() {
        let with = |ranks, threads| EngineFlags { tensor_parallel: Some(ranks), threads: Some(threads), ..flags() };
        assert_eq!(flags().check().unwrap().tensor_parallel, 1);
        assert_eq!(with(4, 4).check().unwrap().tensor_parallel, 4);
        let echo = EngineFlags { engine: Some("echo".into()), ..with(2, 2) };
        let on_gpus = EngineFlags { device: Some("cuda".into()), ..with(8, 2) };
        assert_eq!(on_gpus.check().unwrap().tensor_parallel, 8, "a rank is a GPU there");
        for (wrong, words) in [(with(3, 2), "number of threads, 2"), (with(0, 2), "from 1 to"), (echo, "nothing to split")] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.contains("`tensor_parallel`") && error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_process_is_a_head_or_a_later_stage() {
        let addr = SocketAddr::from(([127, 0, 0, 1], 7));
        let head = EngineFlags { stages: Some(vec![addr; 2]), ..flags() };
        let later = EngineFlags { stage: Some("2/3".into()), ..flags() };
        assert_eq!(head.clone().check().unwrap().stages.len(), 2);
        assert_eq!(later.clone().check().unwrap().stage, Some(Stage { index: 1, count: 3 }));
        for (wrong, words) in [
            (EngineFlags { stage: Some("2".into()), ..flags() }, "write 2/3"),
            (EngineFlags { stage: Some("1/3".into()), ..flags() }, "the head's place"),
            (EngineFlags { stage: later.stage.clone(), ..head.clone() }, "`stages` is the head's"),
            (EngineFlags { device: Some("cuda".into()), ..head.clone() }, "for CPUs"),
            (EngineFlags { engine: Some("echo".into()), ..later.clone() }, "no layers"),
            (EngineFlags { stages: Some(vec![addr; 1 << 12]), ..flags() }, "too many"),
            (EngineFlags { stage_wait_s: Some(0), ..head }, "`stage_wait_s`"),
        ] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn there_is_a_thread_for_each_core_and_no_more() {
        let with = |cores: &str, threads| EngineFlags { cores: Some(cores.into()), threads, ..flags() }.check();
        let settings = with("0-1,4", None).unwrap();
        assert_eq!((settings.threads, settings.cores.unwrap().to_string()), (3, "0-1,4".into()));
        assert_eq!(with("0-1,4", Some(2)).unwrap().threads, 2);
        for (cores, threads, words) in
            [("0-1", Some(3), ["threads", "more than the cores 0-1"]), ("1-0", None, ["cores", "`1-0` ends before it begins"])]
        {
            let error = with(cores, threads).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}

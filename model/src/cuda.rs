//! The model on NVIDIA GPUs: on one, or on several of a machine, each with its part of the weights and of every KV block. One thread drives
//! them all.
//!
//! Weights are bf16 regardless of the checkpoint's type, except those in FP8 that the device multiplies as they are. KV is bf16, or 8-bit
//! integers with a scale for each position and head; sums are f32. A step has two parts: sequences that draw the next token from one token
//! (`decode`: a recorded graph), and all others (`prefill`). Each part waits for its results; meanwhile the host only accepts blocks, which
//! cross the bus on streams of their own (`blocks`).
//!
//! - `lacks`: the features that the kernels lack; `shape`: the model's sizes, padded for the kernels, and a device's part of them; `weights`:
//!   the checkpoint on a device
//! - `layers`: a batch through the layers on all devices; `rank`: a device's part of it; `experts`: layers of experts
//! - `decode`, `prefill`: the two kinds of batches; `inputs`: the numbers that the host sends along; `sampling`: from logits to tokens
//! - `blocks`: KV blocks to and from the device; `outgoing`: pinned memory for those that leave
//! - `checks`: whole models and sampling against the CPU

pub(crate) mod blocks;
pub mod checks;
mod decode;
mod experts;
mod inputs;
mod lacks;
mod layers;
mod outgoing;
mod prefill;
mod rank;
mod sampling;
mod shape;
mod weights;

pub use blocks::{DeviceCopy, PendingBlocks, Pinner};
pub use outgoing::PinnedBlock;
pub use tidemill_kernels::cuda::{Libraries, libraries, pinned::Pinned};

use crate::{
    checkpoint::Checkpoint,
    config::ModelConfig,
    error::ModelError,
    executor::{BlockBytes, DeviceCopies, Executor, ExecutorError},
    fingerprint::fingerprint,
    quantization::Scheme,
    tensors::Tensors,
};
use blocks::BlockCopies;
use decode::Decode;
use layers::Layers;
use prefill::Prefill;
use rank::{Rank, Room};
use sampling::{LogitRow, Sampling};
use shape::{DeviceShape, RankShape};
use std::{
    mem::ManuallyDrop,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};
use tidemill_kernels::{
    KvLayout,
    cuda::{CudaError, Device, DeviceKv, Gemm, Kernels, graph::StepShape, kv::blocks_that_fit, peers::Peers, transfer::SlotPart},
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, KvShape, LayoutFingerprint},
    sampling::Sampling as DrawSettings,
    step::{Draw, Segment, SegmentResult, StateBlocks, Wanted},
};
use weights::{DeviceWeights, Fp8Products};

/// The arithmetic's number in the layout fingerprint. It changes whenever the same weights and tokens would give KV bytes that differ by
/// more than batching already changes their rounding.
const ARITHMETIC: u8 = 128;
/// The number with products in FP8, which also depend on the device.
const ARITHMETIC_FP8: u8 = 129;
/// The number with FP8 products only for projections without a bias, which also depends on the library.
const ARITHMETIC_FP8_WITHOUT_BIAS: u8 = 130;

#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Folder for compiled kernels.
    pub kernel_cache: PathBuf,
    /// Most tokens per step.
    pub step_tokens: usize,
    /// Most sequences that one step draws tokens for.
    pub sequences_max: usize,
    /// Memory of each device.
    pub kv: KvBytes,
    /// bf16 or int8.
    pub kv_dtype: KvDtype,
    /// The number of devices that share the model, from the first on.
    pub ranks: usize,
}

/// Device memory for KV blocks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum KvBytes {
    Exactly(u64),
    /// The part of this share of the device's memory that is left beside this process's other allocations.
    UpToShare(f32),
}

/// A model on one or several GPUs.
pub struct CudaExecutor {
    /// Dropped unless one of several devices has failed.
    on: ManuallyDrop<OnDevices>,
    has_failed: bool,
}

/// The devices, and all that is on them.
struct OnDevices {
    config: Arc<ModelConfig>,
    layout: LayoutFingerprint,
    step_tokens: usize,
    /// By device, as the layers are.
    kv: Vec<DeviceKv>,
    layers: Layers,
    decode: Decode,
    prefill: Prefill,
    sampling: Sampling,
    copies: BlockCopies,
    devices: Vec<Device>,
    /// The reason why some or all weights are not in FP8 here, although the checkpoint's are.
    fp8_lacks: Option<String>,
}

impl CudaExecutor {
    /// Loads a Hugging Face directory onto the first devices, and prepares everything that steps need. `progress` gets (bytes on the devices,
    /// bytes in all, estimated if there are several).
    pub fn load(dir: &Path, options: &CudaOptions, progress: &mut dyn FnMut(u64, u64)) -> Result<Self, ModelError> {
        let config = ModelConfig::load(dir)?;
        let shape = DeviceShape::of(&config, options.kv_dtype)?;
        let shapes = RankShape::all(&config, shape, options.ranks)?;
        // Missing libraries are reported before the weights are loaded.
        if let found @ 1.. = Device::count()
            && found < options.ranks
        {
            return Err(CudaError::NoDevice { ordinal: found, found }.into());
        }
        let devices = (0..options.ranks).map(|ordinal| Device::open(ordinal, &options.kernel_cache)).collect::<Result<Vec<_>, _>>()?;
        let peers = Peers::connect(&devices)?;
        let operations = devices.iter().map(|device| Ok((Kernels::load(device, shape.kernel_heads(), shape.scoring)?, Gemm::new(device)?)));
        let operations = operations.collect::<Result<Vec<_>, CudaError>>()?;
        peers.verify(&devices, &operations.iter().map(|(kernels, _)| kernels).collect::<Vec<_>>())?;

        let mut checkpoint = Checkpoint::open(dir)?;
        let tensors = Tensors::take(&mut checkpoint, &config)?;
        let (_, gemm) = operations.first().expect("at least one device");
        let fp8 = Fp8Products::of(&config, shape, gemm.fp8_rows());
        let fp8_lacks = (config.quantization.as_ref().and_then(Scheme::fp8).is_some() && !gemm.fp8_rows().multiply(true))
            .then(|| gemm.fp8_rows().to_string());
        let (digest, weights) = thread::scope(|scope| {
            let digest = scope.spawn(|| checkpoint.digest(&mut |_, _| {}));
            let weights = load_parts(&devices, &tensors, &config, &shapes, fp8, progress);
            (digest.join().expect("hashing does not panic"), weights)
        });
        checkpoint.release();
        let (digest, weights) = (digest?, weights?);

        let sequences_max = options.sequences_max.max(1);
        let logit_rows = StepShape::holding(sequences_max, 1).rows;
        let room = Room { rows: options.step_tokens.max(logit_rows), logits: logit_rows };
        let config = Arc::new(config);
        let ranks = devices.iter().zip(&shapes).zip(weights).zip(operations);
        let ranks =
            ranks.map(|(((device, shape), weights), (kernels, gemm))| Rank::new(device, &config, *shape, weights, kernels, gemm, room));
        let mut layers = Layers::new(shape, ranks.collect::<Result<_, _>>()?, peers);
        let arithmetic = match fp8 {
            Some(products) if layers.has_fp8() && products.with_bias => ARITHMETIC_FP8,
            Some(_) if layers.has_fp8() => ARITHMETIC_FP8_WITHOUT_BIAS,
            _ => ARITHMETIC,
        };
        let own = shapes[0].own;
        let mut decode = Decode::new(&devices, &layers, own, sequences_max, config.context_tokens)?;
        let mut sampling = Sampling::new(&devices[0], shape, decode.rows_max())?;
        layers.warm(room.rows, room.logits, &mut sampling.logits)?;
        let prefill = Prefill::new(&devices, options.step_tokens)?;
        let blocks = devices.iter().map(|device| device_blocks(device, &own.kv_layout(), options.kv)).collect::<Result<Vec<_>, _>>()?;
        let blocks = blocks.into_iter().min().expect("at least one device");
        let mut kv = devices.iter().map(|device| DeviceKv::new(device, own.kv_layout(), blocks)).collect::<Result<Vec<_>, _>>()?;
        let parts: Vec<SlotPart> = shapes.iter().map(|part| SlotPart::of(&shape.kv_layout(), part.kv_heads())).collect();
        let copies = BlockCopies::new(&devices, &kv, &parts, shape.kv_layout().block_bytes())?;
        if options.sequences_max > 0 {
            decode.record(&mut layers, &mut kv, &mut sampling)?;
        }
        let layout = LayoutFingerprint::new(&fingerprint(&digest, &config, arithmetic), &shape.kv_shape());
        let step_tokens = options.step_tokens;
        let on = OnDevices { config, layout, step_tokens, kv, layers, decode, prefill, sampling, copies, devices, fp8_lacks };
        let mut executor = Self { on: ManuallyDrop::new(on), has_failed: false };
        executor.try_on(|on| on.warm_up(options.sequences_max > 0))?;
        executor.on.layers.keep_choices();
        Ok(executor)
    }

    /// Whether some products are in FP8.
    pub(crate) fn multiplies_fp8(&self) -> bool {
        self.on.layers.has_fp8()
    }

    /// The reason why some or all FP8 weights of the checkpoint were dequantized: a feature that this device or its library lacks.
    pub fn fp8_lacks(&self) -> Option<&str> {
        self.on.fp8_lacks.as_deref()
    }

    /// KV blocks, of which each device has its part.
    pub fn blocks(&self) -> usize {
        self.on.blocks()
    }
}

impl OnDevices {
    fn blocks(&self) -> usize {
        self.kv[0].blocks()
    }

    fn compute(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, CudaError> {
        self.assert_contract(segments);
        self.copies.settle(&self.layers, &mut self.kv, segments.iter().flat_map(|segment| segment.blocks.iter().copied()))?;
        self.copies.let_overwrite(&self.layers, segments.iter().flat_map(written))?;
        let mut results: Vec<SegmentResult> = segments.iter().map(|_| SegmentResult::default()).collect();
        let (decoding, others): (Vec<usize>, Vec<usize>) = (0..segments.len()).partition(|&i| is_decoding(&segments[i]));
        for batch in decoding.chunks(self.decode.rows_max()) {
            let rows: Vec<LogitRow> = batch.iter().map(|&segment| LogitRow { segment, index: 0 }).collect();
            self.decode.step(&self.devices[0], &self.layers, &mut self.sampling, segments, &rows, &mut results)?;
        }
        if !others.is_empty() {
            let Self { devices, layers, kv, sampling, prefill, .. } = self;
            prefill.step(devices, layers, kv, sampling, segments, &others, &mut results)?;
        }
        self.devices.iter().try_for_each(|device| device.context().check_err())?;
        Ok(results)
    }

    /// Runs the largest prefill, and then ten decode steps if there will be any, so that no request pays for the first run. No block is in
    /// use yet.
    fn warm_up(&mut self, decodes: bool) -> Result<(), CudaError> {
        let blocks: Vec<u32> = (0..self.blocks().min(self.step_tokens.div_ceil(BLOCK_TOKENS) + 1) as u32).collect();
        let room = (blocks.len() * BLOCK_TOKENS).min(self.config.context_tokens);
        let prompt = vec![0; self.step_tokens.min(room.saturating_sub(WARM_UP_STEPS)).max(1)];
        self.compute(&[Segment { tokens: &prompt, start: 0, blocks: &blocks, state: StateBlocks::default(), wanted: Wanted::Nothing }])?;
        let (sampling, history) = (DrawSettings::default(), Default::default());
        for start in (prompt.len()..room).take(if decodes { WARM_UP_STEPS } else { 0 }) {
            let draw = Draw { sampling: &sampling, history: &history, index: 0, banned: &[], allowed: None };
            self.compute(&[Segment { tokens: &[0], start, blocks: &blocks, state: StateBlocks::default(), wanted: Wanted::Token(draw) }])?;
        }
        Ok(())
    }

    fn assert_contract(&self, segments: &[Segment<'_>]) {
        let context = self.config.context_tokens();
        for Segment { tokens, start, blocks, .. } in segments {
            let end = start + tokens.len();
            assert!(!tokens.is_empty(), "a segment has at least one token");
            assert!(tokens.iter().all(|&token| (token as usize) < self.config.vocab), "tokens of the vocabulary");
            assert!(end <= context, "position {end} is beyond the context of {context}");
            assert!(blocks.len() * BLOCK_TOKENS >= end, "the block table ends before the segment");
            assert!(blocks.iter().all(|&block| (block as usize) < self.blocks()), "blocks that there are");
        }
    }
}

impl Executor for CudaExecutor {
    fn device_name(&self) -> &str {
        &self.on.devices[0].properties().name
    }

    fn vocab(&self) -> usize {
        self.on.config.vocab()
    }

    fn context_tokens(&self) -> usize {
        self.on.config.context_tokens()
    }

    fn kv_shape(&self) -> KvShape {
        self.on.layers.shape.kv_shape()
    }

    fn layout(&self) -> LayoutFingerprint {
        self.on.layout
    }

    fn step(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, ExecutorError> {
        Ok(self.try_on(|on| on.compute(segments))?)
    }

    fn write_block(&mut self, block: u32, fill: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, ExecutorError> {
        Ok(self.try_on(|on| on.copies.write(&on.layers, &mut on.kv, block, fill))?)
    }

    fn device_copies(&mut self) -> Option<&mut dyn DeviceCopies> {
        Some(self)
    }

    fn read_blocks(&mut self, blocks: &[u32]) -> Result<BlockBytes, ExecutorError> {
        let read = self.try_on(|on| {
            // Some blocks may still be on their way to the device.
            on.copies.settle(&on.layers, &mut on.kv, blocks.iter().copied())?;
            on.copies.read(&on.layers, &on.kv, &on.devices[0], blocks)
        });
        Ok(BlockBytes::Pending(read?))
    }
}

impl DeviceCopies for CudaExecutor {
    fn reserve_reads(&mut self, blocks: usize) -> Result<(), ExecutorError> {
        Ok(self.try_on(|on| on.copies.reserve_reads(&on.devices[0], blocks))?)
    }

    fn pinner(&self) -> Pinner {
        Pinner::new(&self.on.devices[0])
    }

    unsafe fn copy_block(&mut self, block: u32, from: u64) -> Result<DeviceCopy, ExecutorError> {
        // SAFETY: as the caller promises.
        Ok(self.try_on(|on| unsafe { on.copies.copy(&on.layers, &mut on.kv, block, from) })?)
    }
}

impl CudaExecutor {
    /// Does something on the devices, and remembers a failure.
    fn try_on<T>(&mut self, act: impl FnOnce(&mut OnDevices) -> Result<T, CudaError>) -> Result<T, CudaError> {
        let outcome = act(&mut self.on);
        self.has_failed |= outcome.is_err();
        outcome
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        // Freeing memory waits for its device, which may wait for a failed one for ever. The memory is freed when the process ends.
        if self.has_failed && self.on.devices.len() > 1 {
            return;
        }
        // SAFETY: dropped here only, and not used any more.
        unsafe { ManuallyDrop::drop(&mut self.on) };
    }
}

impl Drop for OnDevices {
    fn drop(&mut self) {
        // Blocks may still be in flight, on streams of their own, to memory that is freed here. A device that failed copies nothing.
        self.devices.iter().for_each(|device| drop(device.synchronize()));
    }
}

const WARM_UP_STEPS: usize = 10;

fn is_decoding(segment: &Segment<'_>) -> bool {
    segment.tokens.len() == 1 && matches!(segment.wanted, Wanted::Token(_))
}

/// The blocks that a step writes to for a segment.
fn written(segment: &Segment<'_>) -> impl Iterator<Item = u32> {
    let end = segment.start + segment.tokens.len();
    segment.blocks[segment.start / BLOCK_TOKENS..end.div_ceil(BLOCK_TOKENS)].iter().copied()
}

/// Loads the weights of each device, one after the other.
fn load_parts(
    devices: &[Device],
    tensors: &Tensors,
    config: &ModelConfig,
    shapes: &[RankShape],
    fp8: Option<Fp8Products>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<DeviceWeights>, CudaError> {
    let count = shapes.len() as u64;
    let mut done_before = 0;
    let mut weights = Vec::with_capacity(shapes.len());
    for (device, &shape) in devices.iter().zip(shapes) {
        let mut of_device = 0;
        let mut progress = |done, total| {
            of_device = done;
            // The parts that come are about as large as this one; the first is the largest.
            progress(done_before + done, done_before + total * (count - shape.rank as u64));
        };
        weights.push(DeviceWeights::load(device, tensors, config, shape, fp8, &mut progress)?);
        done_before += of_device;
    }
    Ok(weights)
}

fn device_blocks(device: &Device, layout: &KvLayout, bytes: KvBytes) -> Result<usize, ModelError> {
    let (free, total) = device.memory()?;
    let blocks = match bytes {
        KvBytes::Exactly(bytes) => blocks_that_fit(layout, usize::try_from(bytes).unwrap_or(usize::MAX), 0),
        KvBytes::UpToShare(share) => {
            // Free memory alone is no guide: other processes may be loading onto the device at this moment.
            let ours = ((f64::from(share) * total as f64) as usize).saturating_sub(device.allocated_bytes());
            blocks_that_fit(layout, ours.min(free), UNSEEN_BYTES)
        }
    };
    if blocks < BLOCKS_MIN {
        let (block_bytes, taken) = (layout.block_bytes(), device.allocated_bytes());
        return Err(ModelError::NoRoom { blocks, block_bytes, free, taken });
    }
    Ok(blocks)
}

/// Memory that the driver takes: its context, kernels, graphs and copy buffers.
const UNSEEN_BYTES: usize = 1 << 30;
/// The fewest blocks with which anything can be computed.
const BLOCKS_MIN: usize = 2;

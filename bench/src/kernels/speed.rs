//! Each operation at the shapes of Llama-3.1-8B, as a fraction of the limit that binds it. Inputs rotate where they would fit into
//! the cache.

use super::{
    check_blocks::HostMemory,
    does_not_fit,
    gpu::Gpu,
    limits::Limits,
    report::{Report, Speed},
};
use cudarc::driver::CudaSlice;
use tidemill_kernels::{
    Dtype, KvLayout,
    cuda::{
        CudaError, DeviceKv,
        attention::{DecodeScratch, Queries, Tile, prefill_tiles},
        elementwise::{Norm, Rope, RowPlaces},
        gemm::{Factors, Product},
        kv::Placed,
        sampling::SampleRequest,
        transfer::Transfer,
    },
};

pub const HIDDEN: usize = 4096;
pub const HEADS: usize = 32;
pub const KV_HEADS: usize = 8;
pub const HEAD_DIM: usize = 128;
pub const INTERMEDIATE: usize = 14_336;
pub const VOCAB: usize = 128_256;
pub const QKV: usize = (HEADS + 2 * KV_HEADS) * HEAD_DIM;

const REPETITIONS: usize = 20;
/// Several times the cache.
const BYTES_TO_ROTATE: usize = 512 << 20;

pub fn all(gpu: &mut Gpu, limits: &Limits, report: &mut Report) -> anyhow::Result<()> {
    let mut attempt = |what: String, outcome: Result<Speed, anyhow::Error>| match outcome {
        Ok(speed) => {
            report.speeds.push(speed);
            Ok(())
        }
        Err(error) if does_not_fit(&error) => {
            report.skipped.push(format!("{what}: {error}"));
            Ok(())
        }
        Err(error) => Err(error),
    };
    for (batch, context) in [(1, 4096), (16, 4096), (64, 4096), (64, 16_384), (256, 2048)] {
        attempt(format!("decode attention, {batch} × {context}"), attention_decode(gpu, limits, batch, context).map_err(Into::into))?;
    }
    for (cached, rows) in [(0, 8192), (0, 2048), (6144, 2048), (30_720, 2048)] {
        attempt(format!("prefill attention, {rows}"), attention_prefill(gpu, limits, cached, rows).map_err(Into::into))?;
    }
    for (inner, columns) in [(HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN), (HIDDEN, VOCAB)] {
        for rows in [1, 16, 64, 256, 8192] {
            if (rows, columns) != (8192, VOCAB) {
                attempt(format!("product of {rows} rows"), multiply(gpu, limits, rows, inner, columns).map_err(Into::into))?;
            }
        }
    }
    attempt("norm".to_owned(), rms_norm(gpu, limits).map_err(Into::into))?;
    attempt("rope and KV write".to_owned(), rope_kv_write(gpu, limits).map_err(Into::into))?;
    attempt("swiglu".to_owned(), swiglu(gpu, limits).map_err(Into::into))?;
    for (way, temperature, top_p) in [("greedy", 0.0, 1.0), ("plain", 1.0, 1.0), ("top_p", 1.0, 0.9)] {
        attempt("sampling".to_owned(), sample(gpu, limits, way, temperature, top_p).map_err(Into::into))?;
    }
    attempt("fetch".to_owned(), transfer(gpu, limits, true))?;
    attempt("publish".to_owned(), transfer(gpu, limits, false))
}

/// A speed that moving bytes binds.
fn by_bytes(op: &'static str, case: String, ms: f64, bytes: usize, limits: &Limits) -> Speed {
    let rate = bytes as f64 / ms * 1e3;
    Speed { op, case, ms, rate: rate / 1e9, unit: "GB/s", of_limit: rate / limits.memory_bytes_per_s }
}

/// A speed that arithmetic binds.
fn by_flop(op: &'static str, case: String, ms: f64, flop: f64, limits: &Limits) -> Speed {
    let rate = flop / ms * 1e3;
    Speed { op, case, ms, rate: rate / 1e12, unit: "TFLOP/s", of_limit: rate / limits.multiply_flop_per_s }
}

/// Paged memory full of random numbers, and one table for each of `sequences`, of consecutive blocks in reversed order.
pub struct Sequences {
    pub kv: DeviceKv,
    pub tables: CudaSlice<u32>,
    pub table_stride: usize,
}

impl Sequences {
    pub fn new(gpu: &mut Gpu, layers: usize, sequences: usize, positions: usize) -> Result<Self, CudaError> {
        const SLOTS: usize = 8;
        let layout = KvLayout { layers, kv_heads: KV_HEADS, head_dim: HEAD_DIM, dtype: Dtype::Bf16 };
        let table_stride = positions.div_ceil(16);
        let blocks = sequences * table_stride;
        let mut kv = DeviceKv::new(&gpu.device, layout, blocks)?;
        let slots = gpu.random(SLOTS * layout.block_bytes() / 2, 1.0)?;
        let placed: Vec<Placed> = (0..blocks)
            .map(|i| Placed { block: i as u32, slot: gpu.address(&slots) + (i % SLOTS * layout.block_bytes()) as u64 })
            .collect();
        // SAFETY: the slots are live memory of that many blocks, read by this stream alone until the device rests.
        unsafe { gpu.kernels(HEAD_DIM)?.kv_scatter(&gpu.stream, &mut kv, &placed, 0..layers) }?;
        gpu.device.synchronize()?;
        let tables = gpu.upload(&(0..blocks as u32).rev().collect::<Vec<_>>())?;
        Ok(Self { kv, tables, table_stride })
    }
}

fn attention_decode(gpu: &mut Gpu, limits: &Limits, batch: usize, context: usize) -> Result<Speed, CudaError> {
    let bytes = batch * context * 2 * KV_HEADS * HEAD_DIM * 2;
    let layers = BYTES_TO_ROTATE.div_ceil(bytes);
    let Sequences { mut kv, tables, table_stride } = Sequences::new(gpu, layers, batch, context)?;
    let q = gpu.random(batch * QKV, 1.0)?;
    let positions = gpu.upload(&vec![context as u32 - 1; batch])?;
    let mut scratch = DecodeScratch::new(&gpu.device, batch, HEADS, HEAD_DIM, context)?;
    let mut out = gpu.device.alloc(batch * HEADS * HEAD_DIM)?;
    let kernels = gpu.kernels(HEAD_DIM)?;
    let ms = gpu.time(REPETITIONS, |gpu, i| {
        kernels.attention_decode(
            &gpu.stream,
            &mut out.as_view_mut(),
            &Queries { q: &q.as_view(), stride: QKV, heads: HEADS, window: None },
            &kv.layer(i % layers, &tables.as_view(), table_stride),
            &positions.as_view(),
            context,
            &mut scratch,
        )
    })?;
    Ok(by_bytes("attention_decode", format!("{batch} × {context}"), ms, bytes, limits))
}

/// Operations of causal attention: each of `rows` sees what was cached, the rows before, and itself.
pub fn attention_flop(cached: usize, rows: usize) -> f64 {
    let pairs = rows as f64 * (cached as f64 + (rows as f64 + 1.0) / 2.0);
    4.0 * (HEADS * HEAD_DIM) as f64 * pairs
}

fn attention_prefill(gpu: &mut Gpu, limits: &Limits, cached: usize, rows: usize) -> Result<Speed, CudaError> {
    let Sequences { mut kv, tables, table_stride } = Sequences::new(gpu, 1, 1, cached + rows)?;
    let q = gpu.random(rows * QKV, 1.0)?;
    let tile = Tile { sequence: 0, row: 0, position: cached as u32, rows: rows as u32 };
    let tiles = gpu.upload(&prefill_tiles(HEAD_DIM, &[tile]))?;
    let mut out = gpu.device.alloc(rows * HEADS * HEAD_DIM)?;
    let kernels = gpu.kernels(HEAD_DIM)?;
    let ms = gpu.time(REPETITIONS, |gpu, _| {
        kernels.attention_prefill(
            &gpu.stream,
            &mut out.as_view_mut(),
            &Queries { q: &q.as_view(), stride: QKV, heads: HEADS, window: None },
            &kv.layer(0, &tables.as_view(), table_stride),
            &tiles.as_view(),
            rows,
        )
    })?;
    Ok(by_flop("attention_prefill", format!("{rows} behind {cached}"), ms, attention_flop(cached, rows), limits))
}

fn multiply(gpu: &mut Gpu, limits: &Limits, rows: usize, inner: usize, columns: usize) -> Result<Speed, CudaError> {
    let copies = BYTES_TO_ROTATE.div_ceil(2 * inner * columns);
    let (x, weights) = (gpu.random(rows * inner, 1.0)?, gpu.random(copies * columns * inner, 1.0)?);
    let mut y = gpu.device.alloc::<u16>(rows * columns)?;
    let ms = gpu.time(REPETITIONS, |gpu, i| {
        let first = i % copies * columns * inner;
        let factors = Factors::Bf16 { x: &x.as_view(), weight: &weights.slice(first..first + columns * inner) };
        let stream = gpu.stream.clone();
        gpu.gemm.multiply(&stream, Product::Bf16(&mut y.as_view_mut()), factors, None, inner)
    })?;
    let (flop, bytes) = (2.0 * (rows * inner * columns) as f64, 2 * (rows * inner + columns * inner + rows * columns));
    let case = format!("{rows} × {inner} × {columns}");
    let is_by_flop = flop / limits.multiply_flop_per_s > bytes as f64 / limits.memory_bytes_per_s;
    Ok(if is_by_flop { by_flop("multiply", case, ms, flop, limits) } else { by_bytes("multiply", case, ms, bytes, limits) })
}

/// Rows of a prefill batch.
const ROWS: usize = 8192;

fn rms_norm(gpu: &mut Gpu, limits: &Limits) -> Result<Speed, CudaError> {
    let numbers = gpu.f32s(HIDDEN, 1.0);
    let weight = gpu.upload(&numbers)?;
    let (delta, mut residual) = (gpu.random(ROWS * HIDDEN, 1e-3)?, gpu.device.alloc::<f32>(ROWS * HIDDEN)?);
    let mut out = gpu.device.alloc(ROWS * HIDDEN)?;
    let kernels = gpu.kernels(HEAD_DIM)?;
    let ms = gpu.time(REPETITIONS, |gpu, _| {
        let norm = Norm { delta: Some(&delta.as_view()), weight: &weight.as_view(), epsilon: 1e-5, rows: None };
        kernels.rms_norm(&gpu.stream, &mut out.as_view_mut(), &mut residual.as_view_mut(), &norm)
    })?;
    // Residual read and written, delta read, result written.
    Ok(by_bytes("rms_norm", format!("{ROWS} × {HIDDEN}"), ms, ROWS * HIDDEN * (4 + 4 + 2 + 2), limits))
}

fn rope_kv_write(gpu: &mut Gpu, limits: &Limits) -> Result<Speed, CudaError> {
    let Sequences { mut kv, tables, table_stride } = Sequences::new(gpu, 1, 1, ROWS)?;
    let angles = gpu.f32s(ROWS * HEAD_DIM / 2, 1.0);
    let (cos, sin) = (gpu.upload(&angles)?, gpu.upload(&angles)?);
    let (sequences, positions) = (gpu.device.alloc::<u32>(ROWS)?, gpu.upload(&(0..ROWS as u32).collect::<Vec<_>>())?);
    let mut qkv = gpu.random(ROWS * QKV, 1.0)?;
    let kernels = gpu.kernels(HEAD_DIM)?;
    let ms = gpu.time(REPETITIONS, |gpu, _| {
        kernels.rope_kv_write(
            &gpu.stream,
            &mut qkv.as_view_mut(),
            HEADS,
            &mut kv.layer(0, &tables.as_view(), table_stride),
            &RowPlaces { sequences: &sequences.as_view(), positions: &positions.as_view() },
            &Rope { cos: &cos.as_view(), sin: &sin.as_view(), norms: None, epsilon: 0.0 },
        )
    })?;
    Ok(by_bytes("rope_kv_write", format!("{ROWS} rows"), ms, ROWS * (2 * QKV * 2 + HEAD_DIM * 4), limits))
}

fn swiglu(gpu: &mut Gpu, limits: &Limits) -> Result<Speed, CudaError> {
    let gate_up = gpu.random(ROWS * 2 * INTERMEDIATE, 3.0)?;
    let mut out = gpu.device.alloc(ROWS * INTERMEDIATE)?;
    let kernels = gpu.kernels(HEAD_DIM)?;
    let ms = gpu.time(REPETITIONS, |gpu, _| kernels.swiglu(&gpu.stream, &mut out.as_view_mut(), &gate_up.as_view(), INTERMEDIATE))?;
    Ok(by_bytes("swiglu", format!("{ROWS} × {INTERMEDIATE}"), ms, ROWS * INTERMEDIATE * 3 * 2, limits))
}

fn sample(gpu: &mut Gpu, limits: &Limits, way: &str, temperature: f32, top_p: f32) -> Result<Speed, CudaError> {
    const BATCH: usize = 256;
    let row = gpu.f32s(VOCAB, 12.0);
    let logits = gpu.upload(&row.repeat(BATCH))?;
    let request = |index| SampleRequest { seed: 1, index, temperature, top_p, min_p: 0.0, top_k: 0 };
    let requests = gpu.upload(&(0..BATCH as u64).map(request).collect::<Vec<_>>())?;
    let mut tokens = gpu.device.alloc(BATCH)?;
    let kernels = gpu.kernels(HEAD_DIM)?;
    let ms = gpu.time(REPETITIONS, |gpu, _| {
        kernels.sample(&gpu.stream, &mut tokens.as_view_mut(), &logits.as_view(), &requests.as_view(), VOCAB)
    })?;
    Ok(by_bytes("sample", format!("{BATCH} × {VOCAB}, {way}"), ms, BATCH * VOCAB * 4, limits))
}

fn transfer(gpu: &mut Gpu, limits: &Limits, fetch: bool) -> anyhow::Result<Speed> {
    const BLOCKS: usize = 512;
    const AT_ONCE: usize = 32;
    let Sequences { mut kv, .. } = Sequences::new(gpu, 32, 1, BLOCKS * 16)?;
    let block_bytes = kv.layout().block_bytes();
    let host = HostMemory::new(gpu, BLOCKS * block_bytes)?;
    let placed: Vec<Placed> = (0..BLOCKS).map(|i| Placed { block: i as u32, slot: host.address(i * block_bytes) }).collect();
    let mut transfer = Transfer::new(&gpu.device, &kv, AT_ONCE)?;
    let kernels = gpu.kernels(HEAD_DIM)?;
    let ms = gpu.time(5, |gpu, _| {
        let ready = gpu.stream.record_event(None)?;
        // SAFETY: pinned memory of a slot for each block, alive and left alone until the device rests, which `time` waits for.
        let done = unsafe {
            if fetch { transfer.fetch(&kernels, &mut kv, &placed)? } else { transfer.publish(&kernels, &kv, &placed, 0..32, &ready)? }
        };
        // The time is taken on the model's stream.
        Ok(gpu.stream.wait(&done)?)
    })?;
    let (op, limit) = if fetch { ("fetch", limits.from_host_bytes_per_s) } else { ("publish", limits.to_host_bytes_per_s) };
    let rate = (BLOCKS * block_bytes) as f64 / ms * 1e3;
    Ok(Speed { op, case: format!("{BLOCKS} blocks of 2 MiB"), ms, rate: rate / 1e9, unit: "GB/s", of_limit: rate / limit })
}

//! Each operation at a model's shapes. Inputs rotate if they would fit the device's cache.

use super::{Sizes, ceilings::Bus, gpu::Gpu};
use crate::kernels::{
    Bench,
    limits::{Ceilings, Work},
    ops::numbers,
    report::Row,
};
use cudarc::driver::CudaSlice;
use tidemill_kernels::{
    BLOCK_POSITIONS,
    cuda::{
        CudaError, DeviceKv,
        attention::{DecodeScratch, Queries, Tile, prefill_tiles},
        checks::blocks::HostMemory,
        elementwise::{Norm, Rope, RowPlaces},
        gemm::{Operands, Output},
        kv::BlockSlot,
        sampling::SampleRequest,
        transfer::{SlotPart, Transfer},
    },
};

/// The bytes of rotating inputs, several times the cache.
const BYTES_TO_ROTATE: usize = 512 << 20;
/// The rows of a prefill batch.
const ROWS: usize = 8192;
/// The sequences of a decode step that sample.
const SAMPLED: usize = 256;
/// The blocks that cross the bus.
const BLOCKS: usize = 512;

pub(super) fn measure(bench: &mut Bench<Gpu>, label: &str, sizes: &Sizes, bus: &Bus) -> anyhow::Result<()> {
    attentions(bench, label, sizes)?;
    products(bench, label, sizes)?;
    rows(bench, label, sizes)?;
    transfers(bench, label, sizes, bus)
}

impl Bench<Gpu> {
    /// Adds a row in the unit of the resource that bounds `work`, if it is wanted; `seconds` measures it.
    fn row(
        &mut self,
        name: &str,
        shape: String,
        work: Work,
        seconds: impl FnOnce(&mut Gpu) -> Result<f64, CudaError>,
    ) -> anyhow::Result<()> {
        let ceilings = self.ceilings;
        self.row_under(&ceilings, name, shape, work, seconds)
    }

    fn row_under(
        &mut self,
        ceilings: &Ceilings,
        name: &str,
        shape: String,
        work: Work,
        seconds: impl FnOnce(&mut Gpu) -> Result<f64, CudaError>,
    ) -> anyhow::Result<()> {
        if !self.wants(name, &shape) {
            return Ok(());
        }
        self.begins(name, &shape);
        let row = seconds(&mut self.machine).map(|seconds| Row::of_work(name, shape.clone(), seconds, &work, ceilings));
        self.keep(name, &shape, row)
    }
}

/// Paged memory full of random numbers, and a table per sequence of consecutive blocks in reversed order.
pub(super) struct Sequences {
    pub kv: DeviceKv,
    pub tables: CudaSlice<u32>,
    pub table_stride: usize,
}

impl Sequences {
    pub(super) fn new(gpu: &mut Gpu, sizes: &Sizes, layers: usize, sequences: usize, positions: usize) -> Result<Self, CudaError> {
        const SLOTS: usize = 8;
        let layout = sizes.kv_layout(layers);
        let table_stride = positions.div_ceil(BLOCK_POSITIONS);
        let blocks = sequences * table_stride;
        let mut kv = DeviceKv::new(&gpu.device, layout, blocks)?;
        let slots = gpu.random(SLOTS * layout.block_bytes() / 2, 1.0)?;
        let placed: Vec<BlockSlot> = (0..blocks)
            .map(|i| BlockSlot { block: i as u32, slot: gpu.address(&slots) + (i % SLOTS * layout.block_bytes()) as u64 })
            .collect();
        // SAFETY: the slots are live memory of that many blocks, read by this stream alone until the device rests.
        unsafe { gpu.kernels(sizes.head_dim)?.kv_scatter(&gpu.stream, &mut kv, &placed, 0..layers) }?;
        gpu.device.synchronize()?;
        let tables = gpu.upload(&(0..blocks as u32).rev().collect::<Vec<_>>())?;
        Ok(Self { kv, tables, table_stride })
    }
}

/// Decode steps of several sequences; prefill chunks, cold and after a cached prefix.
fn attentions(bench: &mut Bench<Gpu>, label: &str, sizes: &Sizes) -> anyhow::Result<()> {
    let work = |attended: f64, sequences: usize, context: usize| Work {
        bf16_flops: 4.0 * sizes.q() as f64 * attended,
        bytes: (sequences * context * sizes.kv_layout(1).block_bytes() / BLOCK_POSITIONS) as f64,
        ..Work::default()
    };
    for (batch, context) in [(1, 4096), (16, 4096), (64, 4096), (64, 16_384), (256, 2048)] {
        let work = work((batch * context) as f64, batch, context);
        let layers = BYTES_TO_ROTATE.div_ceil(work.bytes as usize);
        bench.row("attention decode bf16", format!("{label} {batch} × 1 of {context}"), work, |gpu| {
            attention_decode(gpu, sizes, layers, batch, context)
        })?;
    }
    let (batch, context, longest) = LONG_ROW;
    let one_long = work((batch * context + longest) as f64, 1, batch * context + longest);
    bench.row("attention decode bf16", format!("{label} {batch} × 1 of {context} and 1 of {longest}"), one_long, |gpu| {
        attention_decode_beside_long_row(gpu, sizes)
    })?;
    for (cached, rows) in [(0, ROWS), (0, 2048), (6144, 2048), (30_720, 2048)] {
        let context = cached + rows;
        let work = work((cached + 1..=context).sum::<usize>() as f64, 1, context);
        bench.row("attention prefill bf16", format!("{label} 1 × {rows} of {context}"), work, |gpu| {
            attention_prefill(gpu, sizes, cached, rows)
        })?;
    }
    Ok(())
}

fn attention_decode(gpu: &mut Gpu, sizes: &Sizes, layers: usize, batch: usize, context: usize) -> Result<f64, CudaError> {
    let Sequences { mut kv, tables, table_stride } = Sequences::new(gpu, sizes, layers, batch, context)?;
    let q = gpu.random(batch * sizes.qkv(), 1.0)?;
    let positions = gpu.upload(&vec![context as u32 - 1; batch])?;
    let mut scratch = DecodeScratch::new(&gpu.device, batch, sizes.heads, sizes.head_dim, context)?;
    let mut out = gpu.device.alloc(batch * sizes.q())?;
    let kernels = gpu.kernels(sizes.head_dim)?;
    gpu.seconds(|gpu, i| {
        kernels.attention_decode(
            &gpu.stream,
            &mut out.as_view_mut(),
            &Queries::plain(&q.as_view(), sizes.qkv(), sizes.heads, sizes.head_dim),
            &kv.layer(i % layers, &tables.as_view(), table_stride),
            &positions.as_view(),
            context,
            &mut scratch,
        )
    })
}

/// The number of rows with one context, that context, and the context of one more row.
const LONG_ROW: (usize, usize, usize) = (63, 4096, 131_072);

/// Measures rows beside a long one, whose blocks they share; the blocks are many times larger than a cache.
fn attention_decode_beside_long_row(gpu: &mut Gpu, sizes: &Sizes) -> Result<f64, CudaError> {
    let (batch, context, longest) = LONG_ROW;
    let Sequences { mut kv, table_stride, .. } = Sequences::new(gpu, sizes, 1, 1, longest)?;
    let short = context / BLOCK_POSITIONS;
    let table_of = |row: usize| (0..table_stride).map(move |i| if i < short { ((row * short + i) % table_stride) as u32 } else { 0 });
    let tables: Vec<u32> = (0..table_stride as u32).rev().chain((0..batch).flat_map(table_of)).collect();
    let tables = gpu.upload(&tables)?;
    let q = gpu.random((batch + 1) * sizes.qkv(), 1.0)?;
    let positions: Vec<u32> = std::iter::once(longest as u32 - 1).chain(std::iter::repeat_n(context as u32 - 1, batch)).collect();
    let positions = gpu.upload(&positions)?;
    let mut scratch = DecodeScratch::new(&gpu.device, batch + 1, sizes.heads, sizes.head_dim, longest)?;
    let mut out = gpu.device.alloc((batch + 1) * sizes.q())?;
    let kernels = gpu.kernels(sizes.head_dim)?;
    gpu.seconds(|gpu, _| {
        kernels.attention_decode(
            &gpu.stream,
            &mut out.as_view_mut(),
            &Queries::plain(&q.as_view(), sizes.qkv(), sizes.heads, sizes.head_dim),
            &kv.layer(0, &tables.as_view(), table_stride),
            &positions.as_view(),
            longest,
            &mut scratch,
        )
    })
}

fn attention_prefill(gpu: &mut Gpu, sizes: &Sizes, cached: usize, rows: usize) -> Result<f64, CudaError> {
    let Sequences { mut kv, tables, table_stride } = Sequences::new(gpu, sizes, 1, 1, cached + rows)?;
    let q = gpu.random(rows * sizes.qkv(), 1.0)?;
    let tile = Tile { sequence: 0, row: 0, position: cached as u32, rows: rows as u32 };
    let tiles = gpu.upload(&prefill_tiles(sizes.head_dim, &[tile]))?;
    let mut out = gpu.device.alloc(rows * sizes.q())?;
    let kernels = gpu.kernels(sizes.head_dim)?;
    gpu.seconds(|gpu, _| {
        kernels.attention_prefill(
            &gpu.stream,
            &mut out.as_view_mut(),
            &Queries::plain(&q.as_view(), sizes.qkv(), sizes.heads, sizes.head_dim),
            &kv.layer(0, &tables.as_view(), table_stride),
            &tiles.as_view(),
            rows,
        )
    })
}

/// `y = x wᵀ` for each matrix, with the numbers of rows of decode steps and prefill chunks. Unlike on a CPU, activations count: with
/// thousands of rows, no cache holds them.
fn products(bench: &mut Bench<Gpu>, label: &str, sizes: &Sizes) -> anyhow::Result<()> {
    let Sizes { vocab, hidden, intermediate, .. } = *sizes;
    let matrices = [
        ("qkv", sizes.qkv(), hidden),
        ("out", hidden, sizes.q()),
        ("gate and up", 2 * intermediate, hidden),
        ("down", hidden, intermediate),
        ("head", vocab, hidden),
    ];
    for (matrix, n, k) in matrices {
        for m in [1, 16, 64, 256, ROWS] {
            // Prefill has no head.
            if matrix == "head" && m == ROWS {
                continue;
            }
            let bytes = 2 * (m * k + n * k + m * n);
            let work = Work { bf16_flops: 2.0 * (m * n * k) as f64, bytes: bytes as f64, ..Work::default() };
            bench.row("matmul bf16", format!("{label} {matrix} m={m} n={n} k={k}"), work, |gpu| multiply(gpu, m, n, k))?;
        }
    }
    Ok(())
}

fn multiply(gpu: &mut Gpu, m: usize, n: usize, k: usize) -> Result<f64, CudaError> {
    let copies = BYTES_TO_ROTATE.div_ceil(2 * n * k);
    let (x, weights) = (gpu.random(m * k, 1.0)?, gpu.random(copies * n * k, 1.0)?);
    let mut y = gpu.device.alloc::<u16>(m * n)?;
    gpu.seconds(|gpu, i| {
        let first = i % copies * n * k;
        let operands = Operands::Bf16 { x: &x.as_view(), weight: &weights.slice(first..first + n * k) };
        let stream = gpu.stream.clone();
        gpu.gemm.multiply(&stream, Output::Bf16(&mut y.as_view_mut()), operands, None, k)
    })
}

/// Operations with little work per number, which are limited by moving their operands.
fn rows(bench: &mut Bench<Gpu>, label: &str, sizes: &Sizes) -> anyhow::Result<()> {
    let Sizes { vocab, hidden, intermediate, heads, head_dim, .. } = *sizes;
    let moved = |bytes: usize| Work { bytes: bytes as f64, ..Work::default() };
    // The residual is read and written, the delta read, and the result written.
    let norm = moved(ROWS * hidden * (4 + 4 + 2 + 2));
    bench.row("norm", format!("{label} {ROWS} × {hidden}"), norm, |gpu| rms_norm(gpu, sizes))?;
    let rope = moved(ROWS * (2 * sizes.qkv() * 2 + head_dim * 4));
    bench.row("rope and KV write", format!("{label} {ROWS} × {heads} × {head_dim}"), rope, |gpu| rope_kv_write(gpu, sizes))?;
    let silu = moved(ROWS * intermediate * 3 * 2);
    bench.row("silu", format!("{label} {ROWS} × {intermediate}"), silu, |gpu| swiglu(gpu, sizes))?;
    for (name, temperature, top_p) in [("sampling greedy", 0.0, 1.0), ("sampling plain", 1.0, 1.0), ("sampling top_p", 1.0, 0.9)] {
        let request = SampleRequest { seed: 1, index: 0, temperature, top_p, min_p: 0.0, top_k: 0 };
        let work = moved(SAMPLED * vocab * 4);
        bench.row(name, format!("{label} {SAMPLED} × {vocab}"), work, |gpu| sample(gpu, sizes, request))?;
    }
    Ok(())
}

fn rms_norm(gpu: &mut Gpu, sizes: &Sizes) -> Result<f64, CudaError> {
    let hidden = sizes.hidden;
    let weight = gpu.upload(&vec![1.0f32; hidden])?;
    let (delta, mut residual) = (gpu.random(ROWS * hidden, 1e-3)?, gpu.device.alloc::<f32>(ROWS * hidden)?);
    let mut out = gpu.device.alloc(ROWS * hidden)?;
    let kernels = gpu.kernels(sizes.head_dim)?;
    gpu.seconds(|gpu, _| {
        let norm = Norm { delta: Some(&delta.as_view()), weight: &weight.as_view(), epsilon: 1e-5, rows: None };
        kernels.rms_norm(&gpu.stream, &mut out.as_view_mut(), &mut residual.as_view_mut(), &norm)
    })
}

fn rope_kv_write(gpu: &mut Gpu, sizes: &Sizes) -> Result<f64, CudaError> {
    let Sequences { mut kv, tables, table_stride } = Sequences::new(gpu, sizes, 1, 1, ROWS)?;
    let angles = numbers(ROWS * sizes.head_dim / 2);
    let (cos, sin) = (gpu.upload(&angles)?, gpu.upload(&angles)?);
    let (sequences, positions) = (gpu.device.alloc::<u32>(ROWS)?, gpu.upload(&(0..ROWS as u32).collect::<Vec<_>>())?);
    let mut qkv = gpu.random(ROWS * sizes.qkv(), 1.0)?;
    let kernels = gpu.kernels(sizes.head_dim)?;
    gpu.seconds(|gpu, _| {
        kernels.rope_kv_write(
            &gpu.stream,
            &mut qkv.as_view_mut(),
            sizes.heads,
            &mut kv.layer(0, &tables.as_view(), table_stride),
            &RowPlaces { sequences: &sequences.as_view(), positions: &positions.as_view() },
            &Rope { angles: Some((&cos.as_view(), &sin.as_view())), ..Rope::default() },
        )
    })
}

fn swiglu(gpu: &mut Gpu, sizes: &Sizes) -> Result<f64, CudaError> {
    let gate_up = gpu.random(ROWS * 2 * sizes.intermediate, 3.0)?;
    let mut out = gpu.device.alloc(ROWS * sizes.intermediate)?;
    let kernels = gpu.kernels(sizes.head_dim)?;
    gpu.seconds(|gpu, _| kernels.swiglu(&gpu.stream, &mut out.as_view_mut(), &gate_up.as_view(), sizes.intermediate))
}

/// Measures sampling; each sequence draws with a different random number.
fn sample(gpu: &mut Gpu, sizes: &Sizes, request: SampleRequest) -> Result<f64, CudaError> {
    let row: Vec<f32> = numbers(sizes.vocab).into_iter().map(|x| 12.0 * x).collect();
    let logits = gpu.upload(&row.repeat(SAMPLED))?;
    let requests: Vec<_> = (0..SAMPLED as u64).map(|index| SampleRequest { index, ..request }).collect();
    let (requests, mut tokens) = (gpu.upload(&requests)?, gpu.device.alloc(SAMPLED)?);
    let kernels = gpu.kernels(sizes.head_dim)?;
    gpu.seconds(|gpu, _| kernels.sample(&gpu.stream, &mut tokens.as_view_mut(), &logits.as_view(), &requests.as_view(), sizes.vocab))
}

/// Blocks from and to the host's memory, limited by the bus.
fn transfers(bench: &mut Bench<Gpu>, label: &str, sizes: &Sizes, bus: &Bus) -> anyhow::Result<()> {
    let block_bytes = sizes.kv_layout(sizes.layers).block_bytes();
    let work = Work { bytes: (BLOCKS * block_bytes) as f64, ..Work::default() };
    for (name, bytes, fetch) in [("fetch", bus.from_host, true), ("publish", bus.to_host, false)] {
        let ceilings = Ceilings { bytes, ..bench.ceilings };
        let shape = format!("{label} {BLOCKS} blocks of {block_bytes} B");
        bench.row_under(&ceilings, name, shape, work, |gpu| transfer(gpu, sizes, fetch))?;
    }
    Ok(())
}

fn transfer(gpu: &mut Gpu, sizes: &Sizes, fetch: bool) -> Result<f64, CudaError> {
    const AT_ONCE: usize = 32;
    let layers = sizes.layers;
    let Sequences { mut kv, .. } = Sequences::new(gpu, sizes, layers, 1, BLOCKS * BLOCK_POSITIONS)?;
    let block_bytes = kv.layout().block_bytes();
    let host = HostMemory::new(gpu, BLOCKS * block_bytes)?;
    let placed: Vec<BlockSlot> = (0..BLOCKS).map(|i| BlockSlot { block: i as u32, slot: host.address(i * block_bytes) }).collect();
    let mut transfer = Transfer::new(&gpu.device, &kv, SlotPart::whole(kv.layout()), AT_ONCE)?;
    let kernels = gpu.kernels(sizes.head_dim)?;
    let seconds = gpu.eager_seconds(|gpu, _| {
        let ready = gpu.stream.record_event(None)?;
        // SAFETY: pinned memory of a slot per block, alive and left alone until `eager_seconds` has waited for the
        // device.
        let done = unsafe {
            if fetch {
                transfer.fetch(&kernels, &mut kv, &placed)?
            } else {
                transfer.publish(&kernels, &kv, &placed, 0..layers, &ready)?.done
            }
        };
        // The time is taken on the model's stream.
        Ok(gpu.stream.wait(&done)?)
    })?;
    Ok(seconds)
}

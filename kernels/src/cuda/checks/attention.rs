//! Attention over paged K and V: every head ratio, odd lengths, windows, soft caps and sinks; and the check that a row's bits depend on the
//! row alone.

use super::{Checks, Extent, TestGpu, rows::BF16, widened};
use crate::{
    KvLayout, KvStorage,
    cuda::{
        Bf16, CudaError, DeviceKv, NO_POSITION,
        attention::{DecodeScratch, Queries, Tile, prefill_tiles},
        compile::{Heads, Scoring},
        kv::BlockSlot,
    },
    kv::Part,
};
use cudarc::driver::{CudaSlice, CudaView};
use half::bf16;
use rand::{Rng, seq::SliceRandom};
use rayon::prelude::*;

const LAYERS: usize = 2;
const LAYER: usize = 1;

pub fn all(gpu: &mut TestGpu, checks: &mut Checks, extent: Extent) -> Result<(), CudaError> {
    let (bf16, int8) = (Heads::bf16, |dim| Heads { dim, kv: KvStorage::Int8 });
    let mut cases: Vec<(Heads, usize, usize, Option<usize>)> = vec![(bf16(128), 2, 4, None), (bf16(64), 2, 2, Some(100))];
    cases.extend([(int8(128), 2, 4, None), (int8(64), 2, 7, Some(100)), (bf16(80), 2, 3, Some(700))]);
    if extent == Extent::All {
        for group in 1..=8 {
            cases.extend([(bf16(128), 1 + group % 3, group, None), (bf16(64), 1 + group % 2, group, Some(100))]);
        }
        for head_dim in [16, 32, 80, 96, 112, 256] {
            cases.extend([None, Some(1), Some(700)].map(|window| (bf16(head_dim), 2, 3, window)));
        }
        // More heads than one operand holds.
        cases.extend([(bf16(128), 1, 16, None), (bf16(64), 2, 12, Some(33))]);
        cases.extend([(int8(16), 2, 3, None), (int8(80), 1, 2, Some(700)), (int8(96), 2, 3, None), (int8(128), 1, 16, Some(1))]);
        cases.push((int8(256), 1, 3, None));
    }
    for (of, kv_heads, group, window) in cases {
        checks.case(gpu, "attention", case(of, kv_heads, group, window.into()), |gpu, checks| {
            both(gpu, checks, of, kv_heads, group, Form::from(window))
        })?;
    }
    for (of, kv_heads, group, window, scoring) in scored(extent) {
        let form = Form { window, scoring };
        checks.case(gpu, "attention", case(of, kv_heads, group, form), |gpu, checks| both(gpu, checks, of, kv_heads, group, form))?;
    }
    // There are more parts than thread blocks, a few of a long row among many of short ones.
    let mut lens: Vec<usize> = (0..70).map(|_| gpu.rng.random_range(20..280)).collect();
    lens[40] = 5000;
    decode(gpu, checks, bf16(64), 2, 2, Form::from(None), &lens)?;
    decode(gpu, checks, int8(128), 1, 12, Form::from(Some(300)), &lens)
}

/// Heads, KV heads, query heads of each, window, and the form of scoring.
type Scored = (Heads, usize, usize, Option<usize>, Scoring);

/// The heads of Gemma 2 and of GPT-OSS, and others.
fn scored(extent: Extent) -> Vec<Scored> {
    use Scoring::{Capped, Sinks};
    let (bf16, int8) = (Heads::bf16, |dim| Heads { dim, kv: KvStorage::Int8 });
    let mut cases = vec![(bf16(128), 2, 2, None, Capped), (bf16(64), 1, 8, Some(100), Sinks), (int8(256), 1, 2, Some(100), Capped)];
    if extent == Extent::All {
        cases.extend([(bf16(256), 2, 2, None, Capped), (int8(128), 2, 3, None, Capped), (bf16(64), 2, 3, Some(1), Capped)]);
        cases.extend([(int8(64), 2, 8, None, Sinks), (bf16(128), 1, 16, None, Sinks), (bf16(32), 2, 3, Some(1), Sinks)]);
        cases.extend([(bf16(256), 1, 3, Some(700), Sinks), (bf16(32), 1, 5, Some(700), Capped)]);
    }
    cases
}

/// Everything but its shape that decides the output of a row's attention.
#[derive(Clone, Copy)]
pub struct Form {
    pub window: Option<usize>,
    pub scoring: Scoring,
}

impl From<Option<usize>> for Form {
    fn from(window: Option<usize>) -> Self {
        Self { window, scoring: Scoring::Plain }
    }
}

impl Form {
    /// The cap; most scores here are beyond it.
    fn cap(self) -> Option<f32> {
        (self.scoring == Scoring::Capped).then_some(1.5)
    }

    /// Logits of sinks: small ones, some that outweigh many positions, and one that outweighs all.
    fn sinks(self, heads: usize) -> Option<Vec<f32>> {
        (self.scoring == Scoring::Sinks).then(|| (0..heads).map(|head| if head == 1 { 200.0 } else { head as f32 % 9.0 - 2.0 }).collect())
    }

    /// The sinks in the kernels' form.
    fn sinks_on(self, gpu: &TestGpu, heads: usize) -> Result<Option<CudaSlice<f32>>, CudaError> {
        let in_powers = |sinks: Vec<f32>| sinks.iter().map(|sink| sink * std::f32::consts::LOG2_E).collect::<Vec<_>>();
        self.sinks(heads).map(|sinks| gpu.upload(&in_powers(sinks))).transpose()
    }
}

/// The factor of queries that makes softmax sharp, with scores of a few units.
const SHARP: f32 = 3.0;

/// The parameters of queries before there are any.
struct Attending<'a> {
    stride: usize,
    heads: usize,
    form: Form,
    sinks: Option<&'a CudaView<'a, f32>>,
}

impl Attending<'_> {
    fn with<'a>(&'a self, q: &'a CudaView<'a, Bf16>, head_dim: usize) -> Queries<'a> {
        let Self { stride, heads, form, sinks } = *self;
        Queries { window: form.window, cap: form.cap(), sinks, ..Queries::plain(q, stride, heads, head_dim) }
    }
}

/// Decode and prefill at one shape: `kv_heads` times `group` query heads.
pub fn both(gpu: &mut TestGpu, checks: &mut Checks, of: Heads, kv_heads: usize, group: usize, form: Form) -> Result<(), CudaError> {
    let lens = [1, 16, 33, 256, 257, 2048, 2049, gpu.rng.random_range(34..900)];
    decode(gpu, checks, of, kv_heads, group, form, &lens)?;
    prefill(gpu, checks, of, kv_heads, group, form)
}

/// A position's K or V of a head as stored: a scale, if there is one, and the numbers' bytes; and the numbers that these represent.
fn stored(numbers: &[Bf16], kv: KvStorage) -> (Option<f32>, Vec<u8>, Vec<f64>) {
    let exact = widened(numbers);
    if kv != KvStorage::Int8 {
        return (None, numbers.iter().flat_map(|x| x.to_le_bytes()).collect(), exact);
    }
    let scale = exact.iter().fold(0.0f64, |largest, x| largest.max(x.abs())) as f32 / 127.0;
    let integers: Vec<i8> = exact.iter().map(|x| (x / f64::from(scale)).round_ties_even().clamp(-127.0, 127.0) as i8).collect();
    let stand_for = integers.iter().map(|&x| f64::from(x) * f64::from(scale)).collect();
    (Some(scale), integers.iter().map(|x| x.cast_unsigned()).collect(), stand_for)
}

/// Sequences in paged memory that is NaN everywhere else (in 8 bits: with scales that are NaN).
struct Paged {
    head_dim: usize,
    kv_heads: usize,
    kv: DeviceKv,
    tables: CudaSlice<u32>,
    table_stride: usize,
    /// `[sequence][position, kv_heads, head_dim]`
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
}

impl Paged {
    fn new(gpu: &mut TestGpu, heads: Heads, kv_heads: usize, lens: &[usize]) -> Result<Self, CudaError> {
        let head_dim = heads.dim;
        let layout = KvLayout { layers: LAYERS, kv_heads, head_dim, dtype: heads.kv, latent: None };
        let table_stride = lens.iter().max().expect("a sequence").div_ceil(16) + 1;
        let blocks: usize = lens.iter().map(|len| len.div_ceil(16)).sum::<usize>() + 1;
        let mut ids: Vec<u32> = (0..blocks as u32).collect();
        ids.shuffle(&mut gpu.rng);
        let mut ids = ids.into_iter();
        let mut slots = vec![0xffu8; blocks * layout.block_bytes()];
        let mut tables = vec![0u32; lens.len() * table_stride];
        let (mut all_k, mut all_v) = (Vec::new(), Vec::new());
        for (sequence, &len) in lens.iter().enumerate() {
            let of = [gpu.bf16s(len * kv_heads * head_dim, SHARP), gpu.bf16s(len * kv_heads * head_dim, 1.0)];
            let mut stand_for = of.each_ref().map(|numbers| vec![0.0; numbers.len()]);
            for first in (0..len).step_by(16) {
                let block = ids.next().expect("a block");
                tables[sequence * table_stride + first / 16] = block;
                let slot = &mut slots[block as usize * layout.block_bytes()..][..layout.block_bytes()];
                for (part, position, head) in
                    (0..2).flat_map(|part| (first..len.min(first + 16)).flat_map(move |p| (0..kv_heads).map(move |head| (part, p, head))))
                {
                    let at = (position * kv_heads + head) * head_dim;
                    let (scale, bytes, numbers) = stored(&of[part][at..at + head_dim], heads.kv);
                    stand_for[part][at..at + head_dim].copy_from_slice(&numbers);
                    let part = [Part::K, Part::V][part];
                    if let Some(scale) = scale {
                        slot[layout.scales(LAYER, part, head)][(position - first) * 4..][..4].copy_from_slice(&scale.to_le_bytes());
                    }
                    slot[layout.numbers(LAYER, part, head)][(position - first) * bytes.len()..][..bytes.len()].copy_from_slice(&bytes);
                }
            }
            let [k, v] = stand_for;
            all_k.push(k);
            all_v.push(v);
        }
        let mut kv = DeviceKv::new(&gpu.device, layout, blocks)?;
        let (slots, tables) = (gpu.upload(&slots)?, gpu.upload(&tables)?);
        let placed: Vec<BlockSlot> =
            (0..blocks).map(|i| BlockSlot { block: i as u32, slot: gpu.address(&slots) + (i * layout.block_bytes()) as u64 }).collect();
        // SAFETY: the slots are live memory of that many blocks, used by this stream alone until the device rests.
        unsafe { gpu.kernels_of(heads)?.kv_scatter(&gpu.stream, &mut kv, &placed, 0..LAYERS) }?;
        gpu.device.synchronize()?;
        Ok(Self { head_dim, kv_heads, kv, tables, table_stride, k: all_k, v: all_v })
    }

    /// A query's output: `q` is `[heads, head_dim]`.
    fn attended(&self, q: &[f64], sequence: usize, position: usize, form: Form) -> Vec<f64> {
        let d = self.head_dim;
        let group = q.len() / d / self.kv_heads;
        let (cap, sinks) = (form.cap().map(f64::from), form.sinks(q.len() / d));
        let seen = form.window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1;
        let row = |of: &[f64], p: usize, head: usize| of[(p * self.kv_heads + head / group) * d..][..d].to_vec();
        let mut out = Vec::new();
        for (head, q) in q.chunks(d).enumerate() {
            let dot = |k: Vec<f64>| k.iter().zip(q).map(|(k, q)| k * q).sum::<f64>() / (d as f64).sqrt();
            let capped = |score: f64| cap.map_or(score, |cap| cap * (score / cap).tanh());
            let scores: Vec<f64> = seen.clone().map(|p| capped(dot(row(&self.k[sequence], p, head)))).collect();
            let sink = sinks.as_ref().map(|sinks| f64::from(sinks[head]));
            let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
            let mut sums = vec![0.0; d];
            for (p, score) in seen.clone().zip(&scores) {
                let weight = (score - max).exp() / total;
                sums.iter_mut().zip(row(&self.v[sequence], p, head)).for_each(|(sum, v)| *sum += weight * v);
            }
            out.extend(sums);
        }
        out
    }

    /// Outputs for rows of `q`, which begin every `stride` numbers.
    fn reference(&self, q: &[Bf16], stride: usize, heads: usize, places: &[(usize, u32)], form: Form) -> Vec<f64> {
        let width = heads * self.head_dim;
        let rows: Vec<Vec<f64>> = places
            .par_iter()
            .enumerate()
            .map(|(row, &(sequence, position))| match position {
                NO_POSITION => vec![0.0; width],
                _ => self.attended(&widened(&q[row * stride..row * stride + width]), sequence, position as usize, form),
            })
            .collect();
        rows.concat()
    }
}

fn case(of: Heads, kv_heads: usize, group: usize, form: Form) -> String {
    let window = form.window.map_or(String::new(), |w| format!(", window {w}"));
    let beside = match form.scoring {
        Scoring::Plain => "",
        Scoring::Capped => ", a soft cap",
        Scoring::Sinks => ", sinks",
    };
    let kv = if of.kv == KvStorage::Int8 { ", K and V in 8 bits" } else { "" };
    format!("head_dim {}, {kv_heads} × {group} heads{window}{beside}{kv}", of.dim)
}

fn decode(
    gpu: &mut TestGpu,
    checks: &mut Checks,
    of: Heads,
    kv_heads: usize,
    group: usize,
    form: Form,
    lens: &[usize],
) -> Result<(), CudaError> {
    let (d, heads) = (of.dim, kv_heads * group);
    let len_max = *lens.iter().max().expect("a row");
    let case = format!("{}, {} rows", case(of, kv_heads, group, form), lens.len());
    let mut paged = Paged::new(gpu, of, kv_heads, lens)?;
    let mut places: Vec<(usize, u32)> = lens.iter().enumerate().map(|(i, len)| (i, *len as u32 - 1)).collect();
    places.last_mut().expect("rows").1 -= 17;
    // The fourth row is padding.
    places[3].1 = NO_POSITION;
    let (rows, width, stride) = (places.len(), heads * d, (heads + 2 * kv_heads) * d);
    let q = gpu.bf16s(rows * stride, 1.0);
    let kernels = gpu.kernels_for(of, form.scoring)?;
    let sinks = form.sinks_on(gpu, heads)?;
    let sinks = sinks.as_ref().map(CudaSlice::as_view);
    let attending = Attending { stride, heads, form, sinks: sinks.as_ref() };
    let (on_q, positions) = (gpu.upload(&q)?, gpu.upload(&places.iter().map(|p| p.1).collect::<Vec<_>>())?);
    let mut scratch = DecodeScratch::new(&gpu.device, rows, heads, d, 2 * len_max)?;
    let mut out = gpu.poisoned(rows * width)?;
    let tables = paged.tables.clone();
    let reference = paged.reference(&q, stride, heads, &places, form);
    let q_view = on_q.as_view();
    kernels.attention_decode(
        &gpu.stream,
        &mut out.as_view_mut(),
        &attending.with(&q_view, d),
        &paged.kv.layer(LAYER, &tables.as_view(), paged.table_stride),
        &positions.as_view(),
        len_max,
        &mut scratch,
    )?;
    let together = gpu.download(&out)?;
    checks.near("attention_decode", case.clone(), &widened(&together), &reference, WEIGHTED);

    // Each row alone, and with a different number of parts at a time.
    let mut alone = Vec::new();
    for row in 0..rows {
        let mut out = gpu.poisoned(width)?;
        let q_view = on_q.slice(row * stride..);
        kernels.attention_decode(
            &gpu.stream,
            &mut out.as_view_mut(),
            &attending.with(&q_view, d),
            &paged.kv.layer(LAYER, &tables.slice(row * paged.table_stride..(row + 1) * paged.table_stride), paged.table_stride),
            &positions.slice(row..row + 1),
            2 * len_max,
            &mut scratch,
        )?;
        alone.extend(gpu.download(&out)?);
    }
    checks.same("attention_decode bits of a row alone", case, &alone, &together, 0.0);
    Ok(())
}

fn prefill(gpu: &mut TestGpu, checks: &mut Checks, of: Heads, kv_heads: usize, group: usize, form: Form) -> Result<(), CudaError> {
    let (d, heads) = (of.dim, kv_heads * group);
    // The spans are cold, after a cached prefix, a single row, and less than a block.
    let spans = [(0, 300), (37, 200), (500, 1), (3, 9)];
    let lens: Vec<usize> = spans.iter().map(|(start, rows)| start + rows).collect();
    let mut paged = Paged::new(gpu, of, kv_heads, &lens)?;
    let places: Vec<(usize, u32)> =
        spans.iter().enumerate().flat_map(|(i, &(start, rows))| (start..start + rows).map(move |p| (i, p as u32))).collect();
    let (rows, width, stride) = (places.len(), heads * d, (heads + 2 * kv_heads) * d);
    let q = gpu.bf16s(rows * stride, 1.0);
    let on_q = gpu.upload(&q)?;
    let sinks = form.sinks_on(gpu, heads)?;
    let sinks = sinks.as_ref().map(CudaSlice::as_view);
    let attending = Attending { stride, heads, form, sinks: sinks.as_ref() };
    let reference = paged.reference(&q, stride, heads, &places, form);
    let mut first = 0;
    let whole: Vec<Tile> = spans
        .iter()
        .enumerate()
        .map(|(i, &(start, rows))| {
            let tile = Tile { sequence: i as u32, row: first, position: start as u32, rows: rows as u32 };
            first += rows as u32;
            tile
        })
        .collect();
    // The same rows in chunks.
    let cut: Vec<Tile> = whole
        .iter()
        .flat_map(|t| (0..t.rows).step_by(77).map(|i| Tile { row: t.row + i, position: t.position + i, rows: (t.rows - i).min(77), ..*t }))
        .collect();
    let run = |gpu: &mut TestGpu, paged: &mut Paged, spans: &[Tile]| {
        let tiles = gpu.upload(&prefill_tiles(d, spans))?;
        let mut out = gpu.poisoned(rows * width)?;
        let tables = paged.tables.clone();
        gpu.kernels_for(of, form.scoring)?.attention_prefill(
            &gpu.stream,
            &mut out.as_view_mut(),
            &attending.with(&on_q.as_view(), d),
            &paged.kv.layer(LAYER, &tables.as_view(), paged.table_stride),
            &tiles.as_view(),
            rows,
        )?;
        gpu.download(&out)
    };
    let out = run(gpu, &mut paged, &whole)?;
    checks.near("attention_prefill", case(of, kv_heads, group, form), &widened(&out), &reference, WEIGHTED);
    let chunked = run(gpu, &mut paged, &cut)?;
    checks.same("attention_prefill bits in chunks", case(of, kv_heads, group, form), &chunked, &out, 0.0);
    Ok(())
}

/// The error with weights of V that are also rounded to bf16.
const WEIGHTED: f64 = 2.0 * BF16;

const _: () = assert!(size_of::<Bf16>() == size_of::<bf16>());

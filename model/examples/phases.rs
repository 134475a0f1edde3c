//! Each phase of a model, over what this machine could do: `phases MODEL_DIR [THREADS] [PHASE...]`, where a phase is `p512`
//! (prefill of 512 tokens) or `d8x512` (decode step, batch of 8 with 512 tokens of context each).
//!
//! The ceilings are measured in the same run: f32 fused multiply-adds from registers, and reading memory. Products of bf16 may exceed
//! the first, as `vdpbf16ps` does up to twice as many.

use std::{hint::black_box, path::Path, time::Instant};
use tidemill_model::{Chunk, LoadOptions, LogitRows, Model};
use tidemill_proto::block::BLOCK_TOKENS;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let dir = args.first().expect("a model directory");
    let threads = args.get(1).map_or(2, |n| n.parse().expect("threads"));
    let phases: Vec<&str> = match args.get(2..) {
        Some(phases) if !phases.is_empty() => phases.iter().map(String::as_str).collect(),
        _ => vec!["p512", "p2048", "d1x512", "d8x512", "d16x512", "d32x512"],
    };
    let (flops, bytes) = (peak_flops(threads), read_bandwidth(threads));
    println!("{threads} threads: {:.0} GFLOP/s of f32 FMA, {:.1} GB/s read", flops / 1e9, bytes / 1e9);
    let start = Instant::now();
    let options = LoadOptions { kv_dtype: None, quantize: None, threads, isa: None };
    let mut model = Model::load(Path::new(dir), &options, &mut |_, _| {}).expect("a model");
    println!("loaded in {:.2} s", start.elapsed().as_secs_f64());
    let shape = Shape::read(Path::new(dir));
    for phase in phases {
        let (seconds, tokens, work) = match phase.strip_prefix('p') {
            Some(tokens) => {
                let tokens = tokens.parse().expect("tokens");
                (prefill(&mut model, tokens), tokens, shape.prefill(tokens))
            }
            None => {
                let (batch, context) = phase.strip_prefix('d').and_then(|p| p.split_once('x')).expect("p512 or d8x512");
                let (batch, context) = (batch.parse().expect("batch"), context.parse().expect("context"));
                (decode(&mut model, batch, context), batch, shape.decode(batch, context))
            }
        };
        let limit = (work.flops / flops).max(work.bytes / bytes);
        println!(
            "{phase:10} {:9.2} ms {:9.1} tok/s {:6.0} GFLOP/s {:5.1} GB/s {:5.1} % of the limit",
            seconds * 1e3,
            tokens as f64 / seconds,
            work.flops / seconds / 1e9,
            work.bytes / seconds / 1e9,
            100.0 * limit / seconds
        );
    }
}

/// Seconds of the fastest of some prefills, without logits.
fn prefill(model: &mut Model, tokens: usize) -> f64 {
    let blocks: Vec<u32> = (0..tokens.div_ceil(BLOCK_TOKENS) as u32).collect();
    let mut kv = model.new_kv(blocks.len());
    let ids: Vec<u32> = (0..tokens as u32).map(|i| 100 + i % 1000).collect();
    fastest(4.0, || {
        model.forward(&[Chunk { tokens: &ids, start: 0, blocks: &blocks, logits: LogitRows::None }], &mut kv);
    })
}

/// Seconds of the fastest of some steps.
fn decode(model: &mut Model, batch: usize, context: usize) -> f64 {
    let per_sequence = (context + 1).div_ceil(BLOCK_TOKENS);
    let tables: Vec<Vec<u32>> = (0..batch).map(|i| ((i * per_sequence) as u32..((i + 1) * per_sequence) as u32).collect()).collect();
    let mut kv = model.new_kv(batch * per_sequence);
    for id in 0..(batch * per_sequence) as u32 {
        // Small numbers in any dtype.
        kv.block_mut(id).iter_mut().enumerate().for_each(|(i, b)| *b = if i % 2 == 1 { 0x3c } else { i as u8 });
    }
    let chunks: Vec<Chunk<'_>> =
        tables.iter().map(|blocks| Chunk { tokens: &[7], start: context, blocks, logits: LogitRows::Last }).collect();
    fastest(2.0, || {
        model.forward(&chunks, &mut kv);
    })
}

/// Seconds of the fastest call, of as many as `seconds` hold, and at least two.
fn fastest(seconds: f64, mut call: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::MAX;
    let mut calls = 0;
    while calls < 3 || begin.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        call();
        best = best.min(start.elapsed().as_secs_f64());
        calls += 1;
    }
    best
}

/// The dimensions of `config.json` that decide how much work there is.
struct Shape {
    layers: f64,
    /// Weights of all layers, of the head, and of one layer's keys and values.
    layer_weights: f64,
    head_weights: f64,
    kv_weights: f64,
    /// Query heads times their size, and KV heads times theirs.
    q: f64,
    kv: f64,
}

struct Work {
    flops: f64,
    bytes: f64,
}

impl Shape {
    fn read(dir: &Path) -> Shape {
        let text = std::fs::read_to_string(dir.join("config.json")).expect("config.json");
        let config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let number = |key: &str| config[key].as_f64();
        let need = |key: &str| number(key).unwrap_or_else(|| panic!("{key}"));
        let (hidden, inner, layers) = (need("hidden_size"), need("intermediate_size"), need("num_hidden_layers"));
        let head_dim = number("head_dim").unwrap_or(hidden / need("num_attention_heads"));
        let (q, kv) = (need("num_attention_heads") * head_dim, need("num_key_value_heads") * head_dim);
        let layer_weights = layers * hidden * (2.0 * q + 2.0 * kv + 3.0 * inner);
        Shape { layers, layer_weights, head_weights: hidden * need("vocab_size"), kv_weights: hidden * 2.0 * kv, q, kv }
    }

    /// All rows through all layers but the last, of which only keys and values are needed.
    fn prefill(&self, tokens: usize) -> Work {
        let (rows, layers) = (tokens as f64, self.layers - 1.0);
        let weights = self.layer_weights * layers / self.layers + self.kv_weights;
        let attention = 2.0 * layers * self.q * rows * (rows + 1.0);
        Work { flops: 2.0 * rows * weights + attention, bytes: 2.0 * weights }
    }

    fn decode(&self, batch: usize, context: usize) -> Work {
        let (rows, positions) = (batch as f64, (context + 1) as f64);
        let weights = self.layer_weights + self.head_weights;
        let attention = 4.0 * self.layers * self.q * positions;
        Work { flops: rows * (2.0 * weights + attention), bytes: 2.0 * (weights + rows * 2.0 * self.layers * self.kv * positions) }
    }
}

fn on_threads(threads: usize, work: impl Fn(usize) -> f64 + Sync) -> f64 {
    let mut best = 0.0f64;
    for _ in 0..5 {
        let rates = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..threads)
                .map(|i| {
                    scope.spawn({
                        let work = &work;
                        move || work(i)
                    })
                })
                .collect();
            handles.into_iter().map(|handle| handle.join().expect("no panic")).sum::<f64>()
        });
        best = best.max(rates);
    }
    best
}

/// f32 operations per second of fused multiply-adds between registers.
fn peak_flops(threads: usize) -> f64 {
    on_threads(threads, |_| {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: just detected.
            return unsafe { fma512() };
        }
        f64::NAN
    })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fma512() -> f64 {
    use std::arch::x86_64::*;
    let mut sums = [_mm512_set1_ps(0.0); 16];
    let (a, b) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(1.0)));
    let rounds = 4_000_000;
    let start = Instant::now();
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    black_box(sums);
    (rounds * 16 * 32) as f64 / seconds
}

/// Bytes per second read, each thread its own part of memory.
fn read_bandwidth(threads: usize) -> f64 {
    let parts: Vec<Vec<u64>> = (0..threads).map(|i| vec![i as u64 + 1; 32 << 20]).collect();
    on_threads(threads, |i| {
        let start = Instant::now();
        let sum = parts[i].chunks_exact(64).fold([0u64; 64], |mut sums, x| {
            sums.iter_mut().zip(x).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
            sums
        });
        black_box(sum);
        (parts[i].len() * 8) as f64 / start.elapsed().as_secs_f64()
    })
}

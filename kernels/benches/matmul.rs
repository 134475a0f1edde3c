//! Matrix products over what this machine could do: `cargo bench -p tidemill-kernels --bench matmul -- [THREADS]`.
//!
//! Ceilings and products take turns, and each figure is the best of several, because a shared machine changes its pace.

use std::{hint::black_box, time::Instant};
use tidemill_kernels::{
    Cpu, Dtype, Matrix, Tiles, Weights,
    matmul::{Output, Product, matmul},
};

fn main() {
    let threads = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(2);
    let cpu = Cpu::new(None, threads).expect("threads");
    // Of a 135M model, and of one of 1B.
    for (n, k) in [(1536, 576), (2048, 2048), (8192, 2048), (2048, 8192)] {
        if std::env::var("K").is_ok_and(|v| v != k.to_string()) {
            continue;
        }
        // Several copies: weights come from memory, as they do in a model.
        let copies = (256 << 20) / (n * k * 2);
        let bytes: Vec<u8> = (0..n * k * 2).map(|i| if i % 2 == 1 { 0x3c } else { i as u8 }).collect();
        let weights: Vec<Weights> = (0..copies).map(|_| Weights::new(&cpu, Matrix::new(&bytes, Dtype::Bf16, n, k), None)).collect();
        for m in [1, 4, 8, 12, 16, 24, 32, 64, 512] {
            let mut x = Tiles::for_weights(Dtype::Bf16);
            x.copy_from(&cpu, &vec![0.5; m * k], k);
            let mut y = vec![0.0; m * n];
            let (mut best, mut flops, mut bandwidth) = (0.0f64, 0.0f64, 0.0f64);
            let calls = copies.min((20e9 / (m * n * k) as f64) as usize).max(1);
            for _ in 0..5 {
                flops = flops.max(peak_flops(threads));
                bandwidth = bandwidth.max(read_bandwidth(&cpu, &weights));
                let start = Instant::now();
                for weights in &weights[..calls] {
                    matmul(&cpu, &x, [Product { weights, to: Output::Set(&mut y) }]);
                }
                best = best.max(calls as f64 / start.elapsed().as_secs_f64());
            }
            black_box(&y);
            let (gflops, gbytes) = (best * 2.0 * (m * n * k) as f64, best * (2 * n * k) as f64);
            println!(
                "n {n:5} k {k:5} m {m:4}: {:6.1} GFLOP/s of {:4.0}, {:5.1} GB/s of {:4.1}: {:5.1} % of the limit",
                gflops / 1e9,
                flops / 1e9,
                gbytes / 1e9,
                bandwidth / 1e9,
                100.0 * (gflops / flops).max(gbytes / bandwidth)
            );
        }
    }
}

fn peak_flops(threads: usize) -> f64 {
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(fma)).collect();
        handles.into_iter().map(|handle| handle.join().expect("no panic")).sum()
    })
}

/// f32 operations per second of fused multiply-adds between registers.
fn fma() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: just detected.
        return unsafe { fma512() };
    }
    f64::NAN
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fma512() -> f64 {
    use std::arch::x86_64::*;
    let mut sums = [_mm512_set1_ps(0.0); 16];
    let (a, b) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(1.0)));
    let rounds = 500_000;
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

/// Bytes per second of reading the weights' own memory.
fn read_bandwidth(cpu: &Cpu, weights: &[Weights]) -> f64 {
    let start = Instant::now();
    let parts = 4 * cpu.threads();
    let bytes: usize = weights.iter().map(|weights| weights.as_bytes().len()).sum();
    for weights in weights {
        cpu.for_each(parts, |i| {
            let all = weights.as_bytes();
            let (words, _) = all[i * all.len() / parts..(i + 1) * all.len() / parts].as_chunks::<512>();
            let sum = words.iter().fold([0u64; 64], |mut sums, x| {
                sums.iter_mut().zip(x.as_chunks().0).for_each(|(sum, x)| *sum = sum.wrapping_add(u64::from_ne_bytes(*x)));
                sums
            });
            black_box(sum);
        });
    }
    bytes as f64 / start.elapsed().as_secs_f64()
}

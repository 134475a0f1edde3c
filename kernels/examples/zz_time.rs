use std::time::Instant;
use tidemill_kernels::*;
fn time(mut f: impl FnMut()) -> f64 {
    f();
    let mut best = f64::MAX;
    for _ in 0..7 { let t = Instant::now(); f(); best = best.min(t.elapsed().as_secs_f64()); }
    best
}
fn main() {
    for (isa, threads) in [(Isa::Avx512, 1), (Isa::Avx512, 2), (Isa::Avx2, 1)] {
        let cpu = Cpu::new(Some(isa), threads).unwrap();
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            for (m, n, k) in [(1, 8192, 2048), (4, 8192, 2048), (16, 2048, 2048), (64, 8192, 2048), (256, 2048, 8192), (64, 576, 576)] {
                let w = vec![0u8; n * k * dtype.bytes()];
                let x = vec![0.5f32; m * k];
                let mut y = vec![0.0f32; m * n];
                let t = time(|| matmul::matmul(&cpu, &x, Matrix::new(&w, dtype, n, k), &mut y));
                println!("{isa} {threads} {dtype:?} {m}x{n}x{k}: {:.1} GFLOP/s {:.1} GB/s", 2.0 * (m * n * k) as f64 / t / 1e9, w.len() as f64 / t / 1e9);
            }
        }
        for (rows, start, heads, kvh, d, layers) in [(1, 2000, 32, 8, 64, 1), (512, 1536, 32, 8, 64, 1), (7, 1990, 4, 2, 16, 1), (7, 1990, 6, 2, 24, 1)] {
            let layout = KvLayout { layers, kv_heads: kvh, head_dim: d, dtype: Dtype::Bf16 };
            let kv = KvMemory::new(layout, 128);
            let blocks: Vec<u32> = (0..128).collect();
            let q = vec![0.1f32; rows * heads * d];
            let mut out = q.clone();
            let t = time(|| attention::attention(&cpu, &kv, 0, &[Span { blocks: &blocks, start, rows }], &q, heads, None, &mut out));
            println!("{isa} {threads} attention {rows} rows at {start}, {heads}/{kvh}x{d}: {:.3} ms, {:.1} GFLOP/s", t * 1e3, 4.0 * (rows * (start + rows / 2) * heads * d) as f64 / t / 1e9);
        }
    }
}

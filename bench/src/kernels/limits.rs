//! What the device can do at most: every fraction in the report is of these, measured in the same run.

use super::{
    check_blocks::HostMemory,
    gpu::Gpu,
    report::{Measured, Report},
};
use cudarc::driver::sys::cuMemcpyAsync;
use tidemill_kernels::cuda::{
    CudaError,
    gemm::{Factors, Product},
};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of a large copy within the device, bytes read and bytes written.
    pub memory_bytes_per_s: f64,
    /// Of a large product of random bf16 numbers.
    pub multiply_flop_per_s: f64,
    /// Of a large copy from pinned memory of the host.
    pub from_host_bytes_per_s: f64,
    /// And back.
    pub to_host_bytes_per_s: f64,
}

impl Limits {
    /// Seconds that something takes at least.
    pub fn bound_s(&self, flop: f64, bytes: f64) -> f64 {
        (flop / self.multiply_flop_per_s).max(bytes / self.memory_bytes_per_s)
    }
}

const REPETITIONS: usize = 20;

pub fn measure(gpu: &mut Gpu, report: &mut Report) -> anyhow::Result<Limits> {
    let (from_host, to_host) = bus(gpu)?;
    let limits = Limits {
        memory_bytes_per_s: copy(gpu)?,
        multiply_flop_per_s: multiply(gpu)?,
        from_host_bytes_per_s: from_host,
        to_host_bytes_per_s: to_host,
    };
    report.limits = vec![
        Measured { what: "memory (device copy, read + write)", value: limits.memory_bytes_per_s / 1e9, unit: "GB/s" },
        Measured { what: "bf16 product (8192³)", value: limits.multiply_flop_per_s / 1e12, unit: "TFLOP/s" },
        Measured { what: "pinned host to device", value: from_host / 1e9, unit: "GB/s" },
        Measured { what: "device to pinned host", value: to_host / 1e9, unit: "GB/s" },
    ];
    Ok(limits)
}

fn copy(gpu: &mut Gpu) -> Result<f64, CudaError> {
    let numbers = (4usize << 30).min(gpu.device.memory()?.0 / 4) / 2;
    let from = gpu.random(numbers, 1.0)?;
    let mut to = gpu.device.alloc::<u16>(numbers)?;
    let ms = gpu.time(REPETITIONS, |gpu, _| Ok(gpu.stream.memcpy_dtod(&from, &mut to)?))?;
    Ok(2.0 * (2 * numbers) as f64 / ms * 1e3)
}

fn multiply(gpu: &mut Gpu) -> Result<f64, CudaError> {
    const N: usize = 8192;
    let (x, weight) = (gpu.random(N * N, 1.0)?, gpu.random(N * N, 1.0)?);
    let mut y = gpu.device.alloc::<u16>(N * N)?;
    let ms = gpu.time(REPETITIONS, |gpu, _| {
        let factors = Factors::Bf16 { x: &x.as_view(), weight: &weight.as_view() };
        let stream = gpu.stream.clone();
        gpu.gemm.multiply(&stream, Product::Bf16(&mut y.as_view_mut()), factors, None, N)
    })?;
    Ok(2.0 * (N as f64).powi(3) / ms * 1e3)
}

fn bus(gpu: &mut Gpu) -> anyhow::Result<(f64, f64)> {
    const BYTES: usize = 1 << 30;
    let host = HostMemory::new(gpu, BYTES)?;
    let device = gpu.device.alloc::<u8>(BYTES)?;
    let (host_address, device_address) = (host.address(0), gpu.address(&device));
    let mut rate = |to, from| -> Result<f64, CudaError> {
        let ms = gpu.time(REPETITIONS, |gpu, _| {
            // SAFETY: both are live memory of this size, used by this stream alone until the device rests, which `time` waits for.
            Ok(unsafe { cuMemcpyAsync(to, from, BYTES, gpu.stream.cu_stream()) }.result()?)
        })?;
        Ok(BYTES as f64 / ms * 1e3)
    };
    let rates = (rate(device_address, host_address)?, rate(host_address, device_address)?);
    drop((host, device));
    Ok(rates)
}

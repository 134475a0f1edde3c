//! The best performance of a device: a large product of bf16 numbers, and large copies in its memory and across the bus.

use super::gpu::Gpu;
use crate::kernels::{limits::Ceilings, report::Row};
use cudarc::driver::sys::cuMemcpyAsync;
use tidemill_kernels::cuda::{
    CudaError,
    checks::blocks::HostMemory,
    gemm::{Operands, Output},
};

/// Bytes per second between the device and pinned memory of the host.
#[derive(Clone, Copy, Debug)]
pub struct Bus {
    pub from_host: f64,
    pub to_host: f64,
}

pub fn measure(gpu: &mut Gpu) -> anyhow::Result<(Ceilings, Bus)> {
    let bus = bus(gpu)?;
    let flops = multiply(gpu)?;
    // No CUDA operation here multiplies 8-bit integers.
    Ok((Ceilings { f32_flops: flops, bf16_flops: flops, int8_ops: f64::INFINITY, bytes: copy(gpu)? }, bus))
}

pub fn rows(ceilings: &Ceilings, bus: &Bus) -> [Row; 4] {
    let row = |name, shape: String, per_second: f64, unit| Row::without_limit(name, shape, per_second / 1e9, unit);
    [
        row("ceiling bf16 multiply-add", format!("{SIDE} × {SIDE} × {SIDE}"), ceilings.bf16_flops, "GFLOP/s"),
        row("ceiling memory copy", "read and written".to_owned(), ceilings.bytes, "GB/s"),
        row("ceiling bus", "from pinned memory".to_owned(), bus.from_host, "GB/s"),
        row("ceiling bus", "to pinned memory".to_owned(), bus.to_host, "GB/s"),
    ]
}

const COPY_BYTES_MAX: usize = 4 << 30;

fn copy(gpu: &mut Gpu) -> Result<f64, CudaError> {
    let numbers = COPY_BYTES_MAX.min(gpu.device.memory()?.0 / 4) / 2;
    let from = gpu.random(numbers, 1.0)?;
    let mut to = gpu.device.alloc::<u16>(numbers)?;
    let seconds = gpu.eager_seconds(|gpu, _| Ok(gpu.stream.memcpy_dtod(&from, &mut to)?))?;
    Ok(2.0 * (2 * numbers) as f64 / seconds)
}

/// The side of the multiplied matrices.
const SIDE: usize = 8192;

fn multiply(gpu: &mut Gpu) -> Result<f64, CudaError> {
    let (x, weight) = (gpu.random(SIDE * SIDE, 1.0)?, gpu.random(SIDE * SIDE, 1.0)?);
    let mut y = gpu.device.alloc::<u16>(SIDE * SIDE)?;
    let seconds = gpu.eager_seconds(|gpu, _| {
        let operands = Operands::Bf16 { x: &x.as_view(), weight: &weight.as_view() };
        let stream = gpu.stream.clone();
        gpu.gemm.multiply(&stream, Output::Bf16(&mut y.as_view_mut()), operands, None, SIDE)
    })?;
    Ok(2.0 * (SIDE as f64).powi(3) / seconds)
}

fn bus(gpu: &mut Gpu) -> anyhow::Result<Bus> {
    const BYTES: usize = 1 << 30;
    let host = HostMemory::new(gpu, BYTES)?;
    let device = gpu.device.alloc::<u8>(BYTES)?;
    let (host_address, device_address) = (host.address(0), gpu.address(&device));
    let mut rate = |to, from| -> Result<f64, CudaError> {
        let seconds = gpu.eager_seconds(|gpu, _| {
            // SAFETY: both are live memory of this size, used by this stream alone until `eager_seconds` has waited for
            // the device.
            Ok(unsafe { cuMemcpyAsync(to, from, BYTES, gpu.stream.cu_stream()) }.result()?)
        })?;
        Ok(BYTES as f64 / seconds)
    };
    let bus = Bus { from_host: rate(device_address, host_address)?, to_host: rate(host_address, device_address)? };
    drop((host, device));
    Ok(bus)
}

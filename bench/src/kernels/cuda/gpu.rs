//! A device under test: random numbers on it, results off it, time.

use crate::kernels::ops::numbers;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, DeviceRepr, ValidAsZeroBits, sys::CUevent_flags};
use half::bf16;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use std::{collections::HashMap, path::Path, rc::Rc, sync::Arc};
use tidemill_kernels::cuda::{Bf16, CudaError, Device, Gemm, Kernels};

pub struct Gpu {
    pub device: Device,
    pub stream: Arc<CudaStream>,
    pub gemm: Gemm,
    /// Of the checks' inputs.
    pub rng: SmallRng,
    /// Replays them.
    pub seed: u64,
    /// How often a measurement runs.
    runs: usize,
    by_head_dim: HashMap<usize, Rc<Kernels>>,
}

/// What outputs hold before a kernel writes them: no number.
const POISON: u8 = 0xff;

impl Gpu {
    /// The first device, with compiled kernels kept in `cache`. `quick`: each measurement runs once.
    pub fn open(cache: &Path, seed: u64, quick: bool) -> Result<Self, CudaError> {
        let device = Device::open(0, cache)?;
        let (stream, gemm) = (device.stream().clone(), Gemm::new(&device)?);
        let runs = if quick { 1 } else { RUNS };
        Ok(Self { device, stream, gemm, rng: SmallRng::seed_from_u64(seed), seed, runs, by_head_dim: HashMap::new() })
    }

    pub fn kernels(&mut self, head_dim: usize) -> Result<Rc<Kernels>, CudaError> {
        if let Some(kernels) = self.by_head_dim.get(&head_dim) {
            return Ok(kernels.clone());
        }
        let kernels = Rc::new(Kernels::load(&self.device, head_dim)?);
        self.by_head_dim.insert(head_dim, kernels.clone());
        Ok(kernels)
    }

    /// Numbers in [-scale, scale), other ones with every seed.
    pub fn f32s(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| scale * self.rng.random_range(-1.0..1.0)).collect()
    }

    /// The same, rounded.
    pub fn bf16s(&mut self, count: usize, scale: f32) -> Vec<Bf16> {
        self.f32s(count, scale).into_iter().map(|x| bf16::from_f32(x).to_bits()).collect()
    }

    pub fn upload<T: DeviceRepr>(&self, numbers: &[T]) -> Result<CudaSlice<T>, CudaError> {
        self.device.upload(numbers)
    }

    /// Memory that holds no number.
    pub fn poisoned<T: DeviceRepr + ValidAsZeroBits>(&self, count: usize) -> Result<CudaSlice<T>, CudaError> {
        let memory = self.device.alloc::<T>(count)?;
        if count > 0 {
            // SAFETY: all bytes of memory that was just allocated, and which nothing else uses yet.
            unsafe {
                cudarc::driver::result::memset_d8_async(self.address(&memory), POISON, count * size_of::<T>(), self.stream.cu_stream())
            }?;
        }
        self.device.synchronize()?;
        Ok(memory)
    }

    /// Numbers in [-scale, scale) to measure with, more than the host could make in time: one stretch of them, many times over.
    pub fn random(&self, count: usize, scale: f32) -> Result<CudaSlice<Bf16>, CudaError> {
        let stretch: Vec<Bf16> = numbers(count.min(STRETCH)).into_iter().map(|x| bf16::from_f32(scale * x).to_bits()).collect();
        let stretch = self.upload(&stretch)?;
        let mut memory = self.device.alloc(count)?;
        for start in (0..count).step_by(STRETCH) {
            let end = (start + STRETCH).min(count);
            self.stream.memcpy_dtod(&stretch.slice(..end - start), &mut memory.slice_mut(start..end))?;
        }
        self.device.synchronize()?;
        Ok(memory)
    }

    /// What is there once the device has come to rest.
    pub fn download<T: DeviceRepr + Default + Clone>(&self, memory: &CudaSlice<T>) -> Result<Vec<T>, CudaError> {
        let numbers = self.stream.clone_dtoh(memory)?;
        self.device.synchronize()?;
        Ok(numbers)
    }

    pub fn address<T>(&self, memory: &CudaSlice<T>) -> u64 {
        memory.device_ptr(&self.stream).0
    }

    /// The fastest of several runs of `work(run)` on the model's stream, after a few that don't count.
    pub fn best_seconds(&mut self, mut work: impl FnMut(&mut Self, usize) -> Result<(), CudaError>) -> Result<f64, CudaError> {
        for i in 0..WARM_UPS {
            work(self, i)?;
        }
        let mark = |stream: &CudaStream| stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let mut marks: Vec<(CudaEvent, CudaEvent)> = Vec::new();
        for i in 0..self.runs {
            let start = mark(&self.stream)?;
            work(self, WARM_UPS + i)?;
            marks.push((start, mark(&self.stream)?));
        }
        self.device.synchronize()?;
        marks.iter().try_fold(f64::INFINITY, |best, (start, end)| Ok(best.min(f64::from(start.elapsed_ms(end)?) / 1e3)))
    }
}

/// Numbers that are made on the host.
const STRETCH: usize = 16 << 20;
const WARM_UPS: usize = 3;
const RUNS: usize = 20;

/// The numbers that bits stand for.
pub fn widened(bits: &[Bf16]) -> Vec<f64> {
    bits.iter().map(|&x| f64::from(bf16::from_bits(x).to_f32())).collect()
}

/// f32 to f64.
pub fn doubles(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|&x| f64::from(x)).collect()
}

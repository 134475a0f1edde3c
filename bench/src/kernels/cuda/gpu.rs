//! The device that is measured: random operands at the sizes of models, and times.

use crate::kernels::ops::numbers;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, sys::CUevent_flags};
use half::bf16;
use std::{
    ops::{Deref, DerefMut},
    path::Path,
};
use tidemill_kernels::cuda::{Bf16, CudaError, checks::TestGpu};

/// A [`TestGpu`] with a clock.
pub struct Gpu {
    gpu: TestGpu,
    /// How often a measurement runs.
    runs: usize,
}

impl Gpu {
    /// The first device, with compiled kernels kept in `cache`. `quick`: each measurement runs once.
    pub fn open(cache: &Path, seed: u64, quick: bool) -> Result<Self, CudaError> {
        Ok(Self { gpu: TestGpu::open(cache, seed)?, runs: if quick { 1 } else { RUNS } })
    }

    /// Numbers in [-scale, scale) to measure with, too many to make on the host in time: a stretch of them, repeated.
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

    /// The fastest of several runs of `work(run)` on the model's stream, after a few warm-ups.
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

/// Numbers made on the host.
const STRETCH: usize = 16 << 20;
const WARM_UPS: usize = 3;
const RUNS: usize = 20;

impl Deref for Gpu {
    type Target = TestGpu;

    fn deref(&self) -> &TestGpu {
        &self.gpu
    }
}

impl DerefMut for Gpu {
    fn deref_mut(&mut self) -> &mut TestGpu {
        &mut self.gpu
    }
}

//! The measured device: random operands at the sizes of models, and times.

use crate::kernels::ops::numbers;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, sys::CUevent_flags};
use half::bf16;
use std::{
    ops::{Deref, DerefMut},
    path::Path,
};
use tidemill_kernels::cuda::{
    Bf16, CudaError,
    checks::TestGpu,
    graph::{StepGraphs, StepShape},
};

/// A [`TestGpu`] with a clock.
pub struct Gpu {
    gpu: TestGpu,
    /// The number of runs of a measurement.
    runs: usize,
    /// The number of runs in one graph.
    at_once: usize,
}

impl Gpu {
    /// Opens the first device, with compiled kernels kept in `cache`. `quick`: each measurement runs once.
    pub fn open(cache: &Path, seed: u64, quick: bool) -> Result<Self, CudaError> {
        let (runs, at_once) = if quick { (1, 1) } else { (RUNS, AT_ONCE) };
        Ok(Self { gpu: TestGpu::open(cache, seed)?, runs, at_once })
    }

    /// Numbers in [-scale, scale) to measure with: a stretch of random ones, repeated, as it would take too long to draw all on the host.
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

    /// The median time of `work(run)` on the model's stream. Runs are recorded as one graph and replayed, so that a launch's time in the
    /// driver does not count: small kernels take less than that.
    pub fn seconds(&mut self, mut work: impl FnMut(&mut Self, usize) -> Result<(), CudaError>) -> Result<f64, CudaError> {
        // Before that, modules are loaded, and algorithms chosen.
        for i in 0..WARM_UPS {
            work(self, i)?;
        }
        self.device.synchronize()?;
        let (at_once, stream) = (self.at_once, self.stream.clone());
        let shape = StepShape::holding(1, 1);
        let mut graphs = StepGraphs::new(stream);
        graphs.record::<CudaError>(shape, |_| (0..at_once).try_for_each(|i| work(self, WARM_UPS + i)))?;
        Ok(self.eager_seconds(|_, _| graphs.launch(shape))? / at_once as f64)
    }

    /// The median time if `work` is long, or cannot be recorded: each run is launched by itself.
    pub fn eager_seconds(&mut self, mut work: impl FnMut(&mut Self, usize) -> Result<(), CudaError>) -> Result<f64, CudaError> {
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
        let mut seconds = Vec::new();
        for (start, end) in &marks {
            seconds.push(f64::from(start.elapsed_ms(end)?) / 1e3);
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }
}

/// The count of numbers drawn on the host.
const STRETCH: usize = 16 << 20;
pub(super) const WARM_UPS: usize = 3;
pub(super) const RUNS: usize = 11;
const AT_ONCE: usize = 20;

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

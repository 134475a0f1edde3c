//! A device under test: random numbers onto it, results off it.

use crate::cuda::{
    Bf16, CudaError, Device, Gemm, Kernels,
    compile::{Heads, Scoring},
    launch::address,
};
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use half::bf16;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use std::{collections::HashMap, path::Path, rc::Rc, sync::Arc};

pub struct TestGpu {
    pub device: Device,
    pub stream: Arc<CudaStream>,
    pub gemm: Gemm,
    /// The generator of the checks' inputs.
    pub rng: SmallRng,
    /// The seed, which reproduces them.
    pub seed: u64,
    loaded: HashMap<(Heads, Scoring), Rc<Kernels>>,
}

/// The byte that fills outputs before a kernel writes them: as numbers, these bits are NaN.
const POISON: u8 = 0xff;

impl TestGpu {
    /// Opens the first device, with compiled kernels kept in `cache`.
    pub fn open(cache: &Path, seed: u64) -> Result<Self, CudaError> {
        let device = Device::open(0, cache)?;
        let (stream, gemm) = (device.stream().clone(), Gemm::new(&device)?);
        Ok(Self { device, stream, gemm, rng: SmallRng::seed_from_u64(seed), seed, loaded: HashMap::new() })
    }

    /// Opens this machine's GPU for a test, with fresh random inputs. Prints a message and returns `None` if there is no GPU or no CUDA
    /// library; other errors panic.
    pub fn for_test(cache: &Path) -> Option<Self> {
        match Self::open(cache, rand::random()) {
            Ok(gpu) => Some(gpu),
            Err(error) if error.is_absence() || matches!(error, CudaError::NoLibrary { .. }) => {
                eprintln!("SKIPPED, there is no GPU to check: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// The kernels for K and V in bf16.
    pub fn kernels(&mut self, head_dim: usize) -> Result<Rc<Kernels>, CudaError> {
        self.kernels_of(Heads::bf16(head_dim))
    }

    pub fn kernels_of(&mut self, heads: Heads) -> Result<Rc<Kernels>, CudaError> {
        self.kernels_for(heads, Scoring::Plain)
    }

    pub fn kernels_for(&mut self, heads: Heads, scoring: Scoring) -> Result<Rc<Kernels>, CudaError> {
        if let Some(kernels) = self.loaded.get(&(heads, scoring)) {
            return Ok(kernels.clone());
        }
        let kernels = Rc::new(Kernels::load(&self.device, heads, scoring)?);
        self.loaded.insert((heads, scoring), kernels.clone());
        Ok(kernels)
    }

    /// Random numbers in [-scale, scale).
    pub fn f32s(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| scale * self.rng.random_range(-1.0..1.0)).collect()
    }

    /// Random numbers in [-scale, scale), rounded to bf16.
    pub fn bf16s(&mut self, count: usize, scale: f32) -> Vec<Bf16> {
        self.f32s(count, scale).into_iter().map(|x| bf16::from_f32(x).to_bits()).collect()
    }

    pub fn upload<T: DeviceRepr>(&self, numbers: &[T]) -> Result<CudaSlice<T>, CudaError> {
        self.device.upload(numbers)
    }

    /// Memory that holds no valid number.
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

    /// The contents once the device is idle.
    pub fn download<T: DeviceRepr + Default + Clone>(&self, memory: &CudaSlice<T>) -> Result<Vec<T>, CudaError> {
        let numbers = self.stream.clone_dtoh(memory)?;
        self.device.synchronize()?;
        Ok(numbers)
    }

    pub fn address<T>(&self, memory: &CudaSlice<T>) -> u64 {
        address(memory)
    }
}

/// The numbers that these bits represent.
pub fn widened(bits: &[Bf16]) -> Vec<f64> {
    bits.iter().map(|&x| f64::from(bf16::from_bits(x).to_f32())).collect()
}

/// f32 to f64.
pub fn doubles(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|&x| f64::from(x)).collect()
}

//! Errors of a device, with their remedies.

use super::libraries::Version;
use cudarc::{
    cublaslt::result::CublasError,
    driver::{DriverError, sys::CUresult},
    nvrtc::result::NvrtcError,
};
use std::{io, path::PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error("this machine has no CUDA driver (libcuda): run on the CPU, or install an NVIDIA driver of version 580 or later")]
    NoDriver,
    #[error("the CUDA driver finds no device {ordinal} ({found} in all): run on the CPU, or make one visible (CUDA_VISIBLE_DEVICES)")]
    NoDevice { ordinal: usize, found: usize },
    #[error("{name} is not found: install CUDA 13's, or name its folder in LD_LIBRARY_PATH")]
    NoLibrary { name: &'static str },
    #[error(
        "the CUDA driver, which knows CUDA {driver}, cannot load what NVRTC {nvrtc} compiles: install a newer driver, or put CUDA {}'s libraries \
         before others in LD_LIBRARY_PATH", driver.major
    )]
    NvrtcTooNew { nvrtc: Version, driver: Version },
    #[error(
        "device {reader} cannot read the memory of device {other}, as tensor-parallel ranks must: choose devices that are linked \
         (CUDA_VISIBLE_DEVICES; `nvidia-smi topo -p2p r`), or one device"
    )]
    NoPeerAccess { reader: usize, other: usize },
    #[error(
        "device {reader} reads other bytes from the memory of device {other} than are there: an IOMMU or the access control of PCIe (ACS) may be \
         in the way; turn these off, or use one device"
    )]
    WrongPeerBytes { reader: usize, other: usize },
    #[error(
        "device {other} is a {its} and the first one is a {first}: tensor-parallel ranks are on devices of one kind, as they must compute the \
         same bits (CUDA_VISIBLE_DEVICES)"
    )]
    UnlikeDevices { first: String, other: usize, its: String },
    #[error("device {name} is sm_{major}{minor}: sm_80 (A100) or later is needed")]
    TooOld { name: String, major: u32, minor: u32 },
    #[error("the device's memory is used up ({bytes} bytes asked for): give this worker fewer KV blocks, or a smaller batch")]
    OutOfMemory { bytes: usize },
    #[error(
        "{bytes} bytes of host memory cannot be pinned: {source} (do `ulimit -l`, the container (IPC_LOCK) and the machine's free memory allow as much?)"
    )]
    Pin { bytes: usize, source: DriverError },
    /// The state of the device is unknown after this error: nothing computed since may be used.
    #[error("the CUDA device failed: {0}; drain this worker and start it again")]
    Device(DriverError),
    /// The state of the device is unknown after this error.
    #[error("the CUDA device has not ended {what} within {seconds} s; drain this worker and start it again")]
    Stuck { what: &'static str, seconds: u64 },
    /// The state of the device is unknown after this error, as its results cannot be right.
    #[error("the CUDA device computed what cannot be, {what}; drain this worker and start it again")]
    Nonsense { what: String },
    #[error("{file} does not compile for {arch}: {source}\n{log}")]
    Compile { file: &'static str, arch: String, source: NvrtcError, log: String },
    #[error("NVRTC failed: {0}")]
    Nvrtc(#[from] NvrtcError),
    #[error("cuBLASLt cannot multiply [{rows}, {inner}] by [{columns}, {inner}]ᵀ, {step}: {source}")]
    Multiply { rows: usize, inner: usize, columns: usize, step: &'static str, source: CublasError },
    #[error("cuBLASLt failed: {0}")]
    Cublas(#[from] CublasError),
    #[error("cannot keep compiled kernels in {path}: {source}; name a folder that can be written")]
    Cache { path: PathBuf, source: io::Error },
}

impl From<DriverError> for CudaError {
    fn from(error: DriverError) -> Self {
        match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::OutOfMemory { bytes: 0 },
            _ => CudaError::Device(error),
        }
    }
}

impl CudaError {
    /// The error of a failed allocation of `bytes`.
    pub(crate) fn of_allocation(error: DriverError, bytes: usize) -> Self {
        match CudaError::from(error) {
            CudaError::OutOfMemory { .. } => CudaError::OutOfMemory { bytes },
            other => other,
        }
    }

    /// Whether there is no GPU to run on, so that `--device auto` chooses the CPU.
    pub fn is_absence(&self) -> bool {
        matches!(self, CudaError::NoDriver | CudaError::NoDevice { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_used_up_is_told_from_a_device_that_failed() {
        let of = |code| CudaError::of_allocation(DriverError(code), 7);
        assert!(matches!(of(CUresult::CUDA_ERROR_OUT_OF_MEMORY), CudaError::OutOfMemory { bytes: 7 }));
        assert!(matches!(of(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS), CudaError::Device(_)));
        assert!(CudaError::NoDriver.is_absence() && !of(CUresult::CUDA_ERROR_OUT_OF_MEMORY).is_absence());
    }
}

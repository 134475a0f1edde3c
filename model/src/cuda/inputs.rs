//! Numbers that the host sends along with a batch.

use cudarc::driver::{CudaSlice, DeviceRepr, ValidAsZeroBits};
use tidemill_kernels::cuda::{CudaError, Device, host::HostBuffer};

/// Inputs of a batch, in memory that grows to fit the largest one.
pub(super) struct Inputs<T> {
    host: HostBuffer<T>,
    pub(super) device: CudaSlice<T>,
}

impl<T: DeviceRepr + ValidAsZeroBits + Copy> Inputs<T> {
    pub(super) fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        Ok(Self { host: HostBuffer::new(device, len)?, device: device.alloc(len)? })
    }

    pub(super) fn send(&mut self, device: &Device, values: &[T]) -> Result<(), CudaError> {
        if values.len() > self.host.len() {
            *self = Self::new(device, values.len().next_power_of_two())?;
        }
        self.host.numbers()?[..values.len()].copy_from_slice(values);
        self.host.send(device.stream(), &mut self.device.slice_mut(..values.len()))
    }
}

//! Uploading matrices, row by row through two pinned buffers: while one crosses the bus, the other is filled.

use super::{CudaError, device::Device, host::HostBuffer};
use cudarc::driver::{CudaSlice, DeviceRepr, ValidAsZeroBits};

pub struct Uploads<'a, T> {
    device: &'a Device,
    buffers: [HostBuffer<T>; 2],
}

/// Numbers of a buffer. Larger buffers are not faster.
const BUFFER_NUMBERS: usize = 16 << 20;

impl<'a, T: DeviceRepr + ValidAsZeroBits> Uploads<'a, T> {
    pub fn new(device: &'a Device) -> Result<Self, CudaError> {
        Ok(Self { device, buffers: [HostBuffer::new(device, BUFFER_NUMBERS)?, HostBuffer::new(device, BUFFER_NUMBERS)?] })
    }

    /// Uploads a matrix `[rows, columns]`; `write(i, row)` must write every number of row `i`. The matrix is complete
    /// when the model's stream has passed this.
    pub fn matrix(&mut self, rows: usize, columns: usize, mut write: impl FnMut(usize, &mut [T])) -> Result<CudaSlice<T>, CudaError> {
        assert!((1..=BUFFER_NUMBERS).contains(&columns), "rows of up to {BUFFER_NUMBERS} numbers");
        let mut matrix = self.device.alloc(rows * columns)?;
        let rows_at_once = BUFFER_NUMBERS / columns;
        for first in (0..rows).step_by(rows_at_once) {
            let count = rows_at_once.min(rows - first);
            let [buffer, _] = &mut self.buffers;
            let numbers = buffer.numbers()?;
            for (i, row) in numbers.chunks_exact_mut(columns).take(count).enumerate() {
                write(first + i, row);
            }
            buffer.send(self.device.stream(), &mut matrix.slice_mut(first * columns..(first + count) * columns))?;
            self.buffers.swap(0, 1);
        }
        Ok(matrix)
    }
}

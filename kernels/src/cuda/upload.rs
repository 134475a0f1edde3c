//! Uploading matrices, row by row through two pinned buffers: while one crosses the bus, threads fill the other. A single thread copies at
//! a tenth of the rate of the bus, and at less if it waits for a disk.

use super::{CudaError, device::Device, host::HostBuffer};
use cudarc::driver::{CudaSlice, DeviceRepr, ValidAsZeroBits};
use std::{num::NonZero, thread};

pub struct Uploads<'a, T> {
    device: &'a Device,
    buffers: [HostBuffer<T>; 2],
}

/// Numbers per buffer. Larger buffers are not faster.
const BUFFER_NUMBERS: usize = 16 << 20;
const THREADS_MAX: usize = 8;
/// The fewest numbers that are worth a thread.
const NUMBERS_OF_A_THREAD: usize = 1 << 18;

impl<'a, T: DeviceRepr + ValidAsZeroBits> Uploads<'a, T> {
    pub fn new(device: &'a Device) -> Result<Self, CudaError> {
        Ok(Self { device, buffers: [HostBuffer::new(device, BUFFER_NUMBERS)?, HostBuffer::new(device, BUFFER_NUMBERS)?] })
    }

    /// Uploads a matrix `[rows, columns]`; `write(i, row)` must write every number of row `i`, on any thread. The matrix is complete when
    /// the model's stream has reached this point.
    pub fn matrix(&mut self, rows: usize, columns: usize, write: impl Fn(usize, &mut [T]) + Sync) -> Result<CudaSlice<T>, CudaError>
    where
        T: Send,
    {
        assert!((1..=BUFFER_NUMBERS).contains(&columns), "rows of up to {BUFFER_NUMBERS} numbers");
        // SAFETY: every number is written below, on the stream that allocates it.
        let mut matrix = unsafe { self.device.alloc_unwritten(rows * columns) }?;
        let rows_at_once = BUFFER_NUMBERS / columns;
        for first in (0..rows).step_by(rows_at_once) {
            let count = rows_at_once.min(rows - first);
            let [buffer, _] = &mut self.buffers;
            fill(&mut buffer.numbers()?[..count * columns], columns, |i, row| write(first + i, row));
            buffer.send(self.device.stream(), &mut matrix.slice_mut(first * columns..(first + count) * columns))?;
            self.buffers.swap(0, 1);
        }
        Ok(matrix)
    }
}

/// Writes rows of `columns` numbers, on a few threads if there are many.
fn fill<T: Send>(numbers: &mut [T], columns: usize, write: impl Fn(usize, &mut [T]) + Sync) {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = (numbers.len() / NUMBERS_OF_A_THREAD).clamp(1, THREADS_MAX.min(cores));
    let rows_of_thread = (numbers.len() / columns).div_ceil(threads);
    let write_rows = |part: usize, numbers: &mut [T]| {
        for (i, row) in numbers.chunks_exact_mut(columns).enumerate() {
            write(part * rows_of_thread + i, row);
        }
    };
    let write_rows = &write_rows;
    let mut parts = numbers.chunks_mut(rows_of_thread * columns).enumerate();
    let own = parts.next();
    thread::scope(|scope| {
        for (part, numbers) in parts {
            scope.spawn(move || write_rows(part, numbers));
        }
        if let Some((part, numbers)) = own {
            write_rows(part, numbers);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_written_once_by_whichever_thread() {
        for (rows, columns) in [(1, 8), (3, NUMBERS_OF_A_THREAD), (1000, 4099), (7, 1 << 19), (65, 1 << 16)] {
            let mut numbers = vec![0u32; rows * columns];
            fill(&mut numbers, columns, |i, row| row.iter_mut().for_each(|x| *x += i as u32 + 1));
            assert!(numbers.chunks(columns).enumerate().all(|(i, row)| row.iter().all(|&x| x == i as u32 + 1)), "{rows} × {columns}");
        }
    }
}

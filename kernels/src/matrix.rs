//! A matrix as a file stores it, and looking up rows of it.

use crate::{
    cpu::Cpu,
    dtype::{Dtype, Element, store_part, with_element},
    simd::{Kernel, Simd},
};

/// A borrowed row-major matrix `[rows, cols]`, in the bytes of a file as like as not. Needs no alignment.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    bytes: &'a [u8],
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl<'a> Matrix<'a> {
    pub fn new(bytes: &'a [u8], dtype: Dtype, rows: usize, cols: usize) -> Self {
        assert_eq!(bytes.len(), rows * cols * dtype.bytes(), "matrix bytes");
        Self { bytes, dtype, rows, cols }
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of row `i`.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'a [u8] {
        let width = self.cols * self.dtype.bytes();
        &self.bytes[i * width..(i + 1) * width]
    }
}

/// `y[i] = table[ids[i]]`: `y` is `[ids.len(), table.cols]`. Every id must be a row of the table.
pub fn lookup(cpu: &Cpu, table: Matrix<'_>, ids: &[u32], y: &mut [f32]) {
    assert_eq!(y.len(), ids.len() * table.cols, "y is [ids, cols]");
    for (&id, row) in ids.iter().zip(y.chunks_exact_mut(table.cols)) {
        assert!((id as usize) < table.rows, "id {id} is not one of {} rows", table.rows);
        cpu.isa().dispatch(Widen { from: table.row(id as usize), dtype: table.dtype, to: row });
    }
}

/// Stored numbers to f32.
struct Widen<'a> {
    from: &'a [u8],
    dtype: Dtype,
    to: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        with_element!(self.dtype, E => {
            let (from, from_rest) = E::chunks(self.from);
            let (to, to_rest) = self.to.as_chunks_mut();
            for (from, to) in from.iter().zip(to) {
                simd.store(E::load(simd, from), to);
            }
            if !to_rest.is_empty() {
                store_part(simd, E::load_part(simd, from_rest), to_rest);
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        dtype::{decode, encode},
        testing::{cpus, numbers},
    };

    #[test]
    fn lookup_widens_rows() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let bytes = encode(dtype, &numbers(5 * 19, 7));
            let exact = decode(dtype, &bytes);
            for cpu in cpus() {
                let mut y = vec![0.0; 3 * 19];
                lookup(&cpu, Matrix::new(&bytes, dtype, 5, 19), &[4, 0, 4], &mut y);
                assert_eq!(y, [&exact[76..], &exact[..19], &exact[76..]].concat());
            }
        }
    }
}

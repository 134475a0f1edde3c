//! A row-major matrix as stored in a file.

use crate::dtype::Dtype;

/// A borrowed row-major matrix `[rows, cols]`, often the bytes of a mapped file. Needs no alignment.
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

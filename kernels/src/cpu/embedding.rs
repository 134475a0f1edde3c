//! Row look-up in an embedding table.

use crate::{
    cpu::{
        Cpu,
        element::{Element, store_part, with_element},
        simd::{Kernel, Simd},
    },
    dtype::Dtype,
    matrix::Matrix,
};

/// `y[i] = table[ids[i]]`: `y` is `[ids.len(), cols]`. Every id must be a row of the table.
pub fn lookup(cpu: &Cpu, table: Matrix<'_>, ids: &[u32], y: &mut [f32]) {
    assert_eq!(y.len(), ids.len() * table.cols(), "y is [ids, cols]");
    for (&id, row) in ids.iter().zip(y.chunks_exact_mut(table.cols())) {
        assert!((id as usize) < table.rows(), "id {id} is not one of {} rows", table.rows());
        cpu.isa().dispatch(Widen { from: table.row(id as usize), dtype: table.dtype(), to: row });
    }
}

/// Widens stored numbers to f32.
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
        cpu::testing::{cpus, numbers},
        dtype::{decode, encode},
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

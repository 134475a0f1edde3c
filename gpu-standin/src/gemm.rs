//! Matrix products as cuBLASLt defines them: `D = scale A^op B + bias`, column-major, with f32 sums.

use crate::{
    exec::tensor::{narrow, widen},
    fault::{Fault, Kind},
    memory::Memory,
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Numbers {
    F32,
    Bf16,
    E4m3,
}

impl Numbers {
    pub(crate) fn of(code: i32) -> Option<Self> {
        Some(match code {
            0 => Self::F32,
            14 => Self::Bf16,
            28 => Self::E4m3,
            _ => return None,
        })
    }

    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) numbers: Numbers,
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    /// The distance of columns, in numbers.
    pub(crate) stride: u64,
}

impl Matrix {
    fn bytes(&self) -> u64 {
        if self.columns == 0 { 0 } else { ((self.columns - 1) * self.stride + self.rows) * self.numbers.bytes() }
    }
}

/// Factors of the result.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scale {
    None,
    /// The address of one number for all.
    One(u64),
    /// The address of one number per column of the factor.
    Columns(u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub(crate) a: (u64, Matrix),
    pub(crate) b: (u64, Matrix),
    pub(crate) d: (u64, Matrix),
    pub(crate) a_scale: Scale,
    pub(crate) b_scale: Scale,
    pub(crate) bias: Option<u64>,
    pub(crate) workspace: (u64, u64),
}

impl Product {
    /// Computes the product, with A transposed and B not.
    pub(crate) fn run(&self, memory: &mut Memory) -> Result<(), Fault> {
        let (a, b, d) = (self.a.1, self.b.1, self.d.1);
        let inner = a.rows as usize;
        let (x, y) = (self.read(memory, self.a)?, self.read(memory, self.b)?);
        let a_scale = self.scales(memory, self.a_scale, a.columns)?;
        let b_scale = self.scales(memory, self.b_scale, b.columns)?;
        let bias = match self.bias {
            Some(address) => {
                let bytes = memory.read(address, d.rows * 2, true, "a product reads a bias,")?;
                Some(bytes.chunks_exact(2).map(|b| widen(u32::from(u16::from_le_bytes([b[0], b[1]])))).collect::<Vec<f32>>())
            }
            None => None,
        };
        let mut out = vec![0u8; (d.rows * d.numbers.bytes()) as usize];
        // Products may use their whole workspace.
        memory.write(self.workspace.0, self.workspace.1.min(4096), "a product uses its workspace,")?.fill(0xee);
        for column in 0..d.columns as usize {
            let right = &y[column * inner..(column + 1) * inner];
            for row in 0..d.rows as usize {
                let left = &x[row * inner..(row + 1) * inner];
                let mut value = dot(left, right) * a_scale[row % a_scale.len()] * b_scale[column % b_scale.len()];
                if let Some(bias) = &bias {
                    value += bias[row];
                }
                match d.numbers {
                    Numbers::F32 => out[row * 4..row * 4 + 4].copy_from_slice(&value.to_le_bytes()),
                    _ => out[row * 2..row * 2 + 2].copy_from_slice(&(narrow(value) as u16).to_le_bytes()),
                }
            }
            let at = self.d.0 + column as u64 * d.stride * d.numbers.bytes();
            memory.write(at, out.len() as u64, "a product writes")?.copy_from_slice(&out);
        }
        Ok(())
    }

    /// A factor's numbers, column by column.
    fn read(&self, memory: &mut Memory, (address, matrix): (u64, Matrix)) -> Result<Vec<f32>, Fault> {
        if !address.is_multiple_of(16) || !(matrix.stride * matrix.numbers.bytes()).is_multiple_of(16) {
            let what = format!("a factor at {address:#x}, with columns every {} bytes", matrix.stride * matrix.numbers.bytes());
            return Err(Fault::new(Kind::Alignment, what));
        }
        let bytes = memory.read(address, matrix.bytes(), true, "a product reads")?;
        let size = matrix.numbers.bytes() as usize;
        let column = |i: u64| &bytes[(i * matrix.stride) as usize * size..][..matrix.rows as usize * size];
        let number = |b: &[u8]| match matrix.numbers {
            Numbers::F32 => f32::from_le_bytes(b.try_into().expect("four bytes")),
            Numbers::Bf16 => widen(u32::from(u16::from_le_bytes([b[0], b[1]]))),
            Numbers::E4m3 => e4m3(b[0]),
        };
        Ok((0..matrix.columns).flat_map(|i| column(i).chunks_exact(size).map(number)).collect())
    }

    fn scales(&self, memory: &mut Memory, scale: Scale, columns: u64) -> Result<Vec<f32>, Fault> {
        let (address, count) = match scale {
            Scale::None => return Ok(vec![1.0]),
            Scale::One(address) => (address, 1),
            Scale::Columns(address) => (address, columns),
        };
        let bytes = memory.read(address, count * 4, true, "a product reads scales,")?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect())
    }
}

/// The sum of products in sixteen chains, which the compiler turns into vectors.
fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (mut xs, mut ys) = (x.chunks_exact(16), y.chunks_exact(16));
    for (x, y) in (&mut xs).zip(&mut ys) {
        for i in 0..16 {
            sums[i] += x[i] * y[i];
        }
    }
    let rest: f32 = xs.remainder().iter().zip(ys.remainder()).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + rest
}

/// The number that an e4m3 byte represents (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).
fn e4m3(byte: u8) -> f32 {
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa * 2f32.powi(-6),
        _ => sign * (1.0 + mantissa) * 2f32.powi(exponent - 7),
    }
}

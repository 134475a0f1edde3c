//! Products of FP8 factors with a scale for each row. Hopper supports them with cuBLASLt from 12.9 on, whose manual leaves open whether a
//! bias may be added. So support is found out at start, by small products whose results are known exactly.

use super::{Gemm, Operands, Output, Scales};
use crate::cuda::{
    CudaError,
    compile::Arch,
    device::{Bf16, Device},
};
use cudarc::{cublaslt::sys, driver::CudaSlice};
use half::bf16;
use std::fmt;

/// The products with [`Scales::Rows`] that a device and its cuBLASLt support.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fp8Rows {
    None { why: String },
    WithoutBias { why: String },
    Full,
}

impl Fp8Rows {
    /// Tries small products. Returns an error only if the device fails.
    pub(super) fn find_out(gemm: &mut Gemm, device: &Device) -> Result<Self, CudaError> {
        let arch = device.properties().arch;
        if arch != Arch::SM_90A {
            return Ok(Self::None { why: format!("{arch} has no such products, sm_90 has") });
        }
        // SAFETY: the library is loaded; the function has no requirements.
        let version = unsafe { sys::cublasLtGetVersion() };
        if version < VERSION_MIN {
            return Ok(Self::None { why: format!("cuBLASLt is of version {version}, and has them from {VERSION_MIN} on") });
        }
        let mut probe = Probe::new(device)?;
        Ok(match probe.run(gemm, device, false)? {
            Err(why) => Self::None { why },
            Ok(()) => match probe.run(gemm, device, true)? {
                Err(why) => Self::WithoutBias { why },
                Ok(()) => Self::Full,
            },
        })
    }

    /// Whether there are such products, with a bias if `with_bias`.
    pub fn multiply(&self, with_bias: bool) -> bool {
        match self {
            Self::None { .. } => false,
            Self::WithoutBias { .. } => !with_bias,
            Self::Full => true,
        }
    }
}

impl fmt::Display for Fp8Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None { why } => write!(f, "FP8 with a scale for each row is not multiplied: {why}"),
            Self::WithoutBias { why } => write!(f, "FP8 with a scale for each row is multiplied, without a bias: {why}"),
            Self::Full => write!(f, "FP8 with a scale for each row is multiplied"),
        }
    }
}

/// The first version of cuBLASLt with a scale for each row, 12.9.0.
const VERSION_MIN: usize = 120_900;
/// The rows of the products tried: one row as in decode, and numbers that are powers of two and not.
const ROWS: [usize; 3] = [1, 16, 133];
const INNER: usize = 512;
const COLUMNS: usize = 512;
const ONE: u8 = 0x38;
const BIAS: f32 = 4.0;

/// Factors that are all 1, with scales that are powers of two, so that sums are exact in bf16, also with the bias.
struct Probe {
    x: CudaSlice<u8>,
    weight: CudaSlice<u8>,
    x_scales: CudaSlice<f32>,
    weight_scales: CudaSlice<f32>,
    bias: CudaSlice<Bf16>,
    y: CudaSlice<Bf16>,
}

fn x_scale(row: usize) -> f32 {
    [1.0, 0.5, 0.25, 0.125][row % 4]
}

fn weight_scale(column: usize) -> f32 {
    [1.0, 0.5, 0.25][column % 3]
}

impl Probe {
    fn new(device: &Device) -> Result<Self, CudaError> {
        let rows_max = ROWS.into_iter().max().expect("there are some");
        Ok(Self {
            x: device.upload(&vec![ONE; rows_max * INNER])?,
            weight: device.upload(&vec![ONE; COLUMNS * INNER])?,
            x_scales: device.upload(&(0..rows_max).map(x_scale).collect::<Vec<_>>())?,
            weight_scales: device.upload(&(0..COLUMNS).map(weight_scale).collect::<Vec<_>>())?,
            bias: device.upload(&vec![bf16::from_f32(BIAS).to_bits(); COLUMNS])?,
            y: device.alloc(rows_max * COLUMNS)?,
        })
    }

    /// Runs a product. The inner error gives the reason why there are no such products.
    fn run(&mut self, gemm: &mut Gemm, device: &Device, with_bias: bool) -> Result<Result<(), String>, CudaError> {
        for rows in ROWS {
            if let Err(why) = self.multiply(gemm, device, rows, with_bias)? {
                return Ok(Err(why));
            }
        }
        Ok(Ok(()))
    }

    fn multiply(&mut self, gemm: &mut Gemm, device: &Device, rows: usize, with_bias: bool) -> Result<Result<(), String>, CudaError> {
        let (x, weight, bias) = (self.x.slice(..rows * INNER), self.weight.as_view(), self.bias.as_view());
        let scales = Scales::Rows { x: &self.x_scales.slice(..rows), weight: &self.weight_scales.as_view() };
        let operands = Operands::Fp8 { x: &x, weight: &weight, scales };
        let output = Output::Bf16(&mut self.y.slice_mut(..rows * COLUMNS));
        match gemm.multiply(device.stream(), output, operands, with_bias.then_some(&bias), INNER) {
            Ok(()) => {}
            Err(error @ CudaError::Multiply { .. }) => return Ok(Err(error.to_string())),
            Err(error) => return Err(error),
        }
        let y: Vec<Bf16> = device.stream().clone_dtoh(&self.y.slice(..rows * COLUMNS))?;
        device.synchronize()?;
        let expected = |i: usize| INNER as f32 * x_scale(i / COLUMNS) * weight_scale(i % COLUMNS) + if with_bias { BIAS } else { 0.0 };
        let wrong = y.iter().enumerate().find(|&(i, &y)| bf16::from_bits(y).to_f32() != expected(i));
        Ok(match wrong {
            None => Ok(()),
            Some((i, &y)) => Err(format!(
                "a product of {rows} rows gave {} at row {}, column {} and not {}",
                bf16::from_bits(y),
                i / COLUMNS,
                i % COLUMNS,
                expected(i)
            )),
        })
    }
}

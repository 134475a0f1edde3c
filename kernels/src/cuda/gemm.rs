//! Matrix products, by cuBLASLt.
//!
//! `y = x weightᵀ`, with x `[rows, inner]`, weight `[columns, inner]` as checkpoints store it, and y `[rows, columns]`.
//! cuBLASLt is column-major, so it computes `yᵀ = weight xᵀ` of an `[inner, columns]` and an `[inner, rows]` matrix:
//! transposed times plain, the one form in which it also multiplies FP8. The algorithm depends on the number of rows,
//! and so do the last bits of a row. Partial sums stay in f32 until the last one.
//!
//! - `fp8`: what a device and its library make of FP8 with a scale for each row, found out by products at start

mod fp8;

pub use fp8::Fp8Rows;

use super::{
    CudaError,
    device::{Bf16, Device},
    launch::address,
};
use cudarc::{
    cublaslt::{result, result::CublasError, sys},
    driver::{CudaSlice, CudaStream, CudaView, CudaViewMut},
};
use std::{collections::HashMap, ffi::c_void, ptr};

/// The factors. x is `[rows, inner]`, weight `[columns, inner]`; inner is a multiple of 8, of 16 for FP8.
#[derive(Clone, Copy)]
pub enum Operands<'a> {
    Bf16 {
        x: &'a CudaView<'a, Bf16>,
        weight: &'a CudaView<'a, Bf16>,
    },
    /// e4m3 numbers (sm_89 and later) and their scales.
    Fp8 {
        x: &'a CudaView<'a, u8>,
        weight: &'a CudaView<'a, u8>,
        scales: Scales<'a>,
    },
}

/// Scales of FP8 numbers.
#[derive(Clone, Copy)]
pub enum Scales<'a> {
    /// One for all of x, one for all of the weight.
    Tensor { x: &'a CudaView<'a, f32>, weight: &'a CudaView<'a, f32> },
    /// One for each row of x, and for each row of the weight (an output channel), as far as [`Gemm::fp8_rows`] allows.
    Rows { x: &'a CudaView<'a, f32>, weight: &'a CudaView<'a, f32> },
}

/// Where the product goes, `[rows, columns]`; columns is a multiple of 8.
pub enum Output<'a, 'b> {
    Bf16(&'a mut CudaViewMut<'b, Bf16>),
    F32(&'a mut CudaViewMut<'b, f32>),
}

/// The key of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Problem {
    rows: usize,
    inner: usize,
    columns: usize,
    operands: Numbers,
    product: sys::cudaDataType_t,
    bias: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Numbers {
    Bf16,
    Fp8ByTensor,
    Fp8ByRow,
}

/// cuBLASLt, and its plans so far. For one stream: products share a workspace.
pub struct Gemm {
    handle: Handle,
    workspace: CudaSlice<u8>,
    plans: HashMap<Problem, Plan>,
    fp8_rows: Fp8Rows,
}

/// The size that cuBLAS itself takes on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

impl Gemm {
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        // SAFETY: looks for the library and loads it.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoLibrary { name: "libcublasLt" });
        }
        device.context().bind_to_thread()?;
        let (handle, workspace) = (Handle(result::create_handle()?), device.alloc(WORKSPACE_BYTES)?);
        let mut gemm = Self { handle, workspace, plans: HashMap::new(), fp8_rows: Fp8Rows::Full };
        gemm.fp8_rows = Fp8Rows::find_out(&mut gemm, device)?;
        Ok(gemm)
    }

    /// Products of FP8 with [`Scales::Rows`] that there are.
    pub fn fp8_rows(&self) -> &Fp8Rows {
        &self.fp8_rows
    }

    /// `y = x weightᵀ + bias`. A bias, `[columns]`, needs a bf16 product.
    pub fn multiply(
        &mut self,
        stream: &CudaStream,
        y: Output<'_, '_>,
        operands: Operands<'_>,
        bias: Option<&CudaView<'_, Bf16>>,
        inner: usize,
    ) -> Result<(), CudaError> {
        let (x_len, weight_len, numbers) = match operands {
            Operands::Bf16 { x, weight } => (x.len(), weight.len(), Numbers::Bf16),
            Operands::Fp8 { x, weight, scales: Scales::Tensor { .. } } => (x.len(), weight.len(), Numbers::Fp8ByTensor),
            Operands::Fp8 { x, weight, scales: Scales::Rows { .. } } => (x.len(), weight.len(), Numbers::Fp8ByRow),
        };
        assert!(inner > 0 && x_len.is_multiple_of(inner) && weight_len.is_multiple_of(inner), "rows of {inner} numbers");
        assert!(inner.is_multiple_of(if numbers == Numbers::Bf16 { 8 } else { 16 }), "rows begin at multiples of 16 bytes");
        let (rows, columns) = (x_len / inner, weight_len / inner);
        let (y, y_len, product) = match y {
            Output::Bf16(y) => (address(y), y.len(), sys::cudaDataType_t::CUDA_R_16BF),
            Output::F32(y) => (address(y), y.len(), sys::cudaDataType_t::CUDA_R_32F),
        };
        assert!(y_len == rows * columns && columns.is_multiple_of(8), "y is [rows, columns]");
        assert!(bias.is_none_or(|bias| bias.len() == columns && product == sys::cudaDataType_t::CUDA_R_16BF), "bias is bf16 [columns]");
        if rows == 0 {
            return Ok(());
        }

        let (x, weight, scales) = match operands {
            Operands::Bf16 { x, weight } => (address(x), address(weight), None),
            Operands::Fp8 { x, weight, scales } => {
                let (Scales::Tensor { x: x_scale, weight: weight_scale } | Scales::Rows { x: x_scale, weight: weight_scale }) = scales;
                let expected = if numbers == Numbers::Fp8ByRow { (rows, columns) } else { (1, 1) };
                assert_eq!((x_scale.len(), weight_scale.len()), expected, "scales of x, and of the weight");
                (address(x), address(weight), Some((address(weight_scale), address(x_scale))))
            }
        };
        let beside = Beside { scales, bias: bias.map(address) };
        let problem = Problem { rows, inner, columns, operands: numbers, product, bias: bias.is_some() };
        let failed = |(step, source)| CudaError::Multiply { rows, inner, columns, step, source };
        stream.context().bind_to_thread()?;
        if !self.plans.contains_key(&problem) {
            let plan = Plan::new(&self.handle, &problem, &beside).map_err(failed)?;
            self.plans.insert(problem, plan);
        }
        let plan = &self.plans[&problem];
        plan.description.point_to(&beside).map_err(|source| failed(("describing it", source)))?;
        // SAFETY: the shapes, asserted above, are those of the plan; only this stream uses the workspace.
        unsafe {
            result::matmul(
                self.handle.0,
                plan.description.0,
                (&raw const ONE).cast(),
                (&raw const ZERO).cast(),
                weight as *const c_void,
                plan.weight.0,
                x as *const c_void,
                plan.x.0,
                y as *const c_void,
                plan.y.0,
                y as *mut c_void,
                plan.y.0,
                &plan.algorithm,
                address(&self.workspace) as *mut c_void,
                WORKSPACE_BYTES,
                stream.cu_stream().cast(),
            )
        }
        .map_err(|source| failed(("running it", source)))
    }
}

static ONE: f32 = 1.0;
static ZERO: f32 = 0.0;

/// Addresses of what a description points to: scales of the weight and of x, and the bias.
struct Beside {
    scales: Option<(u64, u64)>,
    bias: Option<u64>,
}

/// A product's description and algorithm. The addresses in it are those of the last call.
struct Plan {
    description: Description,
    weight: Layout,
    x: Layout,
    y: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    /// `beside`: addresses of the first call, without which the library may find no algorithm. An error says in which step.
    fn new(handle: &Handle, problem: &Problem, beside: &Beside) -> Result<Self, (&'static str, CublasError)> {
        let (description, [weight, x, y]) = describe(problem, beside).map_err(|source| ("describing it", source))?;
        let preference = Preference::new().map_err(|source| ("stating preferences", source))?;
        // SAFETY: all of these are alive.
        let found = unsafe { result::get_matmul_algo_heuristic(handle.0, description.0, weight.0, x.0, y.0, y.0, preference.0) };
        let algorithm = found.map_err(|source| ("choosing an algorithm", source))?.algo;
        Ok(Self { description, weight, x, y, algorithm })
    }
}

/// The product, and the layouts of weight, x and y.
fn describe(problem: &Problem, beside: &Beside) -> Result<(Description, [Layout; 3]), CublasError> {
    use sys::{cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulMatrixScale_t as Scale, cudaDataType_t as Type};
    let Problem { rows, inner, columns, operands, product, bias } = *problem;
    let description =
        Description(result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F)?);
    description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
    if bias {
        description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
    }
    if operands == Numbers::Fp8ByRow {
        let scale = Scale::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &scale)?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &scale)?;
    }
    description.point_to(beside)?;
    let factor = if operands == Numbers::Bf16 { Type::CUDA_R_16BF } else { Type::CUDA_R_8F_E4M3 };
    let layouts = [Layout::new(factor, inner, columns)?, Layout::new(factor, inner, rows)?, Layout::new(product, columns, rows)?];
    Ok((description, layouts))
}

/// `CUBLAS_OP_T`, from another header.
const TRANSPOSED: i32 = 1;

struct Handle(sys::cublasLtHandle_t);
struct Description(sys::cublasLtMatmulDesc_t);
struct Layout(sys::cublasLtMatrixLayout_t);
struct Preference(sys::cublasLtMatmulPreference_t);

impl Description {
    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CublasError> {
        // SAFETY: the description is alive; the value has the attribute's type, and the call copies it.
        unsafe { result::set_matmul_desc_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>()) }
    }

    fn point_to(&self, beside: &Beside) -> Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if let Some((weight, x)) = beside.scales {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &weight)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x)?;
        }
        beside.bias.map_or(Ok(()), |bias| self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias))
    }
}

impl Layout {
    /// Columns of `rows` numbers, one after the other.
    fn new(numbers: sys::cudaDataType_t, rows: usize, columns: usize) -> Result<Self, CublasError> {
        Ok(Self(result::create_matrix_layout(numbers, rows as u64, columns as u64, rows as i64)?))
    }
}

impl Preference {
    /// All of the workspace, and partial sums in f32: by default they may be rounded to the product's bf16 on the way.
    fn new() -> Result<Self, CublasError> {
        use sys::{cublasLtMatmulPreferenceAttributes_t as Attribute, cublasLtReductionScheme_t as Scheme};
        let preference = Self(result::create_matmul_pref()?);
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
        let schemes = Scheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes)?;
        Ok(preference)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<(), CublasError> {
        // SAFETY: the preference is alive; the value has the attribute's type, and the call copies it.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>()) }
    }
}

macro_rules! destroyed_by {
    ($type:ty, $destroy:path) => {
        impl Drop for $type {
            fn drop(&mut self) {
                // SAFETY: created with this value, and destroyed only here. A failure leaves nothing to do.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}

destroyed_by!(Handle, result::destroy_handle);
destroyed_by!(Description, result::destroy_matmul_desc);
destroyed_by!(Layout, result::destroy_matrix_layout);
destroyed_by!(Preference, result::destroy_matmul_pref);

// SAFETY: any thread may use cuBLASLt's objects, one at a time: `Gemm` is used by exclusive reference.
unsafe impl Send for Gemm {}

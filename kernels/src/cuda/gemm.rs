//! Matrix products, by cuBLASLt.
//!
//! `y = x weightᵀ`, with x `[rows, inner]`, weight `[columns, inner]` as checkpoints store it, and y `[rows, columns]`.
//! cuBLASLt is column-major, so it computes `yᵀ = weight xᵀ` of an `[inner, columns]` and an `[inner, rows]` matrix:
//! transposed times plain, the one form in which it also multiplies FP8. The algorithm depends on the number of rows,
//! and so do the last bits of a row. Partial sums stay in f32 until the last one.
//!
//! - `choice`: the fastest of the algorithms that cuBLASLt proposes
//! - `fp8`: support for FP8 with a scale for each row in a device and its library, found by products at start

mod choice;
mod fp8;

pub use fp8::Fp8Rows;

use super::{
    CudaError,
    device::{Bf16, Device},
    launch::address,
};
use choice::Choices;
use cudarc::{
    cublaslt::{result, result::CublasError, sys},
    driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, sys::CUstreamCaptureStatus},
};
use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    mem::MaybeUninit,
    ptr,
};

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

/// The destination of the product, `[rows, columns]`; columns is a multiple of 8.
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

/// cuBLASLt, and its plans so far. Use it with one stream, as products share a workspace.
pub struct Gemm {
    handle: Handle,
    workspace: CudaSlice<u8>,
    plans: HashMap<Problem, Plan>,
    choices: Choices,
    fp8_rows: Fp8Rows,
}

/// The number of rows that a product of `rows` rows is computed with: a few more, so that there are few such numbers, for each of which the
/// library's algorithms are chosen and loaded before the first request.
pub fn product_rows(rows: usize) -> usize {
    match rows {
        0..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        65..=256 => rows.next_multiple_of(32),
        257..=1024 => rows.next_multiple_of(64),
        _ => rows.next_multiple_of(128),
    }
}

/// The number of algorithms that the library is asked for.
const PROPOSED_MAX: usize = 8;

/// The size of the workspace, which is that of cuBLAS itself on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

impl Gemm {
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        // SAFETY: looks for the library and loads it.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoLibrary { name: "libcublasLt" });
        }
        device.context().bind_to_thread()?;
        // SAFETY: the library is loaded; the function has no requirements.
        let choices = Choices::open(device, unsafe { sys::cublasLtGetVersion() });
        let (handle, workspace) = (Handle(result::create_handle()?), device.alloc(WORKSPACE_BYTES)?);
        let mut gemm = Self { handle, workspace, plans: HashMap::new(), choices, fp8_rows: Fp8Rows::Full };
        gemm.fp8_rows = Fp8Rows::find_out(&mut gemm, device)?;
        Ok(gemm)
    }

    /// The support for FP8 products with [`Scales::Rows`].
    pub fn fp8_rows(&self) -> &Fp8Rows {
        &self.fp8_rows
    }

    /// Writes the chosen algorithms to disk for the next process. Call it after all kinds of products have been computed.
    pub fn keep_choices(&mut self) {
        // Memory for measuring is freed in the context that is current.
        let bound = self.workspace.context().bind_to_thread();
        self.workspace.context().record_err(bound);
        self.choices.keep();
    }

    /// `y = x weightᵀ + bias`. A bias, `[columns]`, needs a bf16 product. The first product of its kind takes longer: algorithms are
    /// measured, except while the stream is recorded.
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
        let Self { handle, workspace, plans, choices, .. } = self;
        let launch = |plan: &Plan, algorithm: &sys::cublasLtMatmulAlgo_t| {
            // SAFETY: the shapes, asserted above, are those of the plan; only this stream uses the workspace.
            let launched = unsafe {
                result::matmul(
                    handle.0,
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
                    algorithm,
                    address(workspace) as *mut c_void,
                    WORKSPACE_BYTES,
                    stream.cu_stream().cast(),
                )
            };
            launched.map_err(|source| failed(("running it", source)))
        };
        let plan = match plans.entry(problem) {
            Entry::Occupied(plan) => plan.into_mut(),
            Entry::Vacant(place) => {
                let mut plan = Plan::new(&problem, &beside).map_err(failed)?;
                let is_recorded = stream.capture_status()? != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
                match choices.known(&problem).filter(|algorithm| plan.takes(handle, algorithm)) {
                    Some(algorithm) => plan.algorithm = algorithm,
                    None => {
                        let proposed = plan.propose(handle).map_err(failed)?;
                        plan.algorithm = match &proposed[..] {
                            [only] => *only,
                            [first, ..] if is_recorded => *first,
                            _ => choices.measure(stream, &problem, &proposed, |algorithm| launch(&plan, algorithm))?,
                        };
                    }
                }
                place.insert(plan)
            }
        };
        plan.description.point_to(&beside).map_err(|source| failed(("describing it", source)))?;
        launch(plan, &plan.algorithm)
    }
}

static ONE: f32 = 1.0;
static ZERO: f32 = 0.0;

/// The addresses that a description points to: scales of the weight and of x, and the bias.
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
    /// Creates a plan. `beside`: the addresses of the first call, without which the library may find no algorithm. An error names the
    /// failed step.
    fn new(problem: &Problem, beside: &Beside) -> Result<Self, (&'static str, CublasError)> {
        let (description, [weight, x, y]) = describe(problem, beside).map_err(|source| ("describing it", source))?;
        Ok(Self { description, weight, x, y, algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] } })
    }

    /// The library's algorithms for this product, in the order of its expectations; at least one.
    fn propose(&self, handle: &Handle) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, (&'static str, CublasError)> {
        let preference = Preference::new().map_err(|source| ("stating preferences", source))?;
        let mut proposed = [const { MaybeUninit::uninit() }; PROPOSED_MAX];
        let mut count = 0;
        // SAFETY: all of these are alive, and there is room for as many results.
        let outcome = unsafe {
            let (description, [weight, x, y]) = (self.description.0, [self.weight.0, self.x.0, self.y.0]);
            let results = proposed.as_mut_ptr().cast();
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                description,
                weight,
                x,
                y,
                y,
                preference.0,
                PROPOSED_MAX as i32,
                results,
                &mut count,
            )
        };
        outcome.result().map_err(|source| (CHOOSING, source))?;
        let count = (count.max(0) as usize).min(PROPOSED_MAX);
        // SAFETY: the library has written this many.
        let results =
            proposed[..count].iter().map(|result: &MaybeUninit<sys::cublasLtMatmulHeuristicResult_t>| unsafe { result.assume_init() });
        let usable: Vec<_> = results.filter(|result| result.state.result().is_ok()).map(|result| result.algo).collect();
        if usable.is_empty() {
            return Err((CHOOSING, CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)));
        }
        Ok(usable)
    }

    /// Whether an algorithm that was chosen earlier can compute this product in the present workspace.
    fn takes(&self, handle: &Handle, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        let mut result = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit();
        // SAFETY: all of these are alive, and there is room for the result.
        let outcome = unsafe {
            let (description, [weight, x, y]) = (self.description.0, [self.weight.0, self.x.0, self.y.0]);
            sys::cublasLtMatmulAlgoCheck(handle.0, description, weight, x, y, y, algorithm, result.as_mut_ptr())
        };
        // SAFETY: if the check succeeds, the library has written the result.
        outcome.result().is_ok() && unsafe { result.assume_init() }.workspaceSize <= WORKSPACE_BYTES
    }
}

const CHOOSING: &str = "choosing an algorithm";

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

/// `CUBLAS_OP_T`, which is defined in another header.
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
    /// A layout of columns of `rows` numbers, one after the other.
    fn new(numbers: sys::cudaDataType_t, rows: usize, columns: usize) -> Result<Self, CublasError> {
        Ok(Self(result::create_matrix_layout(numbers, rows as u64, columns as u64, rows as i64)?))
    }
}

impl Preference {
    /// Allows the whole workspace, and requires partial sums in f32: by default they may be rounded to the product's bf16 on the way.
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

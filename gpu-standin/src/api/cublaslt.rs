//! Matrix products (`libcublasLt`): transposed times plain, with a bias, and scales of FP8 factors.

use super::driver::call;
use crate::{
    device::Work,
    gemm::{Matrix, Numbers, Product, Scale},
    options::options,
};
use std::{
    ffi::{c_int, c_void},
    sync::Mutex,
};

type Status = u32;
const OK: Status = 0;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const NOT_SUPPORTED: Status = 15;

const SCALES_BY_ROW_SINCE: usize = 120_900;

/// Bytes of an algorithm, which holds the problem that it was chosen for.
const ALGORITHM_BYTES: usize = 64;
/// Bytes of a result: an algorithm with its description.
const RESULT_BYTES: usize = ALGORITHM_BYTES + 32;
/// The number of algorithms for each product. They differ only by their number, which lies above the flags.
const ALGORITHMS: c_int = 2;
const NUMBER_AT: usize = 6;
const NUMBER_SHIFT: u32 = 8;

#[derive(Default, Clone, Debug)]
struct Description {
    transposed_a: bool,
    bias: bool,
    bias_at: u64,
    scales_at: [u64; 2],
    scale_modes: [i32; 2],
}

fn boxed<T>(to: *mut *mut c_void, value: T) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { *to = Box::into_raw(Box::new(value)).cast() };
    OK
}

fn unbox<T>(handle: *mut c_void) -> Status {
    // SAFETY: made by `boxed` with this type, and destroyed once.
    drop(unsafe { Box::from_raw(handle.cast::<T>()) });
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtCreate(to: *mut *mut c_void) -> Status {
    boxed(to, 0u8)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    options().cublaslt
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtDestroy(handle: *mut c_void) -> Status {
    unbox::<u8>(handle)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulDescCreate(to: *mut *mut c_void, compute: c_int, scale: c_int) -> Status {
    // Sums and factors have 32 bits.
    if (compute, scale) == (68, 0) { boxed(to, Mutex::new(Description::default())) } else { NOT_SUPPORTED }
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulDescDestroy(handle: *mut c_void) -> Status {
    unbox::<Mutex<Description>>(handle)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescSetAttribute(handle: *mut c_void, attribute: c_int, value: *const c_void, size: usize) -> Status {
    // SAFETY: made in `cublasLtMatmulDescCreate`.
    let mut description = unsafe { &*handle.cast::<Mutex<Description>>() }.lock().expect("not poisoned");
    let int = || {
        // SAFETY: the caller's value, of this size.
        (size == 4).then(|| unsafe { value.cast::<i32>().read_unaligned() })
    };
    let address = || {
        // SAFETY: as above.
        (size == 8).then(|| unsafe { value.cast::<u64>().read_unaligned() })
    };
    match (attribute, int(), address()) {
        (3, Some(op), _) => description.transposed_a = op == 1,
        (7, Some(epilogue), _) if epilogue == 1 || epilogue == 4 => description.bias = epilogue == 4,
        (8, _, Some(at)) => description.bias_at = at,
        (17 | 18, _, Some(at)) => description.scales_at[attribute as usize - 17] = at,
        // Earlier versions do not support a scale for each row.
        (31 | 32, Some(3), _) if options().cublaslt < SCALES_BY_ROW_SINCE => return INVALID_VALUE,
        (31 | 32, Some(mode), _) if mode == 0 || mode == 3 => description.scale_modes[attribute as usize - 31] = mode,
        _ => {
            eprintln!("gpu-standin: the product's attribute {attribute} of {size} bytes is not implemented");
            return NOT_SUPPORTED;
        }
    }
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixLayoutCreate(to: *mut *mut c_void, numbers: c_int, rows: u64, columns: u64, stride: i64) -> Status {
    let Some(numbers) = Numbers::of(numbers) else { return NOT_SUPPORTED };
    if stride < rows as i64 {
        return INVALID_VALUE;
    }
    boxed(to, Matrix { numbers, rows, columns, stride: stride as u64 })
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixLayoutDestroy(handle: *mut c_void) -> Status {
    unbox::<Matrix>(handle)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceCreate(to: *mut *mut c_void) -> Status {
    boxed(to, 0u64)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceDestroy(handle: *mut c_void) -> Status {
    unbox::<u64>(handle)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceSetAttribute(_handle: *mut c_void, attribute: c_int, _value: *const c_void, size: usize) -> Status {
    // Bytes of workspace, and the permitted partial sums, which are not used here.
    if [(1, 8), (3, 4)].contains(&(attribute, size)) { OK } else { NOT_SUPPORTED }
}

/// The problem that an algorithm was chosen for.
fn problem(description: &Description, matrices: [&Matrix; 4]) -> Option<[u64; 8]> {
    let [a, b, c, d] = matrices;
    let fp8 = a.numbers == Numbers::E4m3;
    let (arch, by_row) = (options().arch, description.scale_modes[0] == 3);
    let refused = match options().refuse.as_deref() {
        Some("rows") => by_row,
        Some("rows+bias") => by_row && description.bias,
        _ => false,
    };
    let fits = description.transposed_a
        && a.rows == b.rows
        && a.columns == d.rows
        && b.columns == d.columns
        && (c.rows, c.columns, c.numbers) == (d.rows, d.columns, d.numbers)
        && a.numbers == b.numbers
        && a.numbers != Numbers::F32
        && d.numbers != Numbers::E4m3
        && (!fp8 || arch >= (8, 9))
        && (!by_row || arch == (9, 0))
        && !refused
        // The library may look at the address when it chooses an algorithm.
        && (!description.bias || description.bias_at != 0)
        // The manual requires this for FP8, and for the speed of other types.
        && [a, b].iter().all(|m| (m.stride * m.numbers.bytes()).is_multiple_of(16))
        && (d.stride * d.numbers.bytes()).is_multiple_of(16);
    fits.then(|| {
        let flags = u64::from(fp8) | u64::from(description.bias) << 1 | u64::from(by_row) << 2 | d.numbers.bytes() << 3;
        [0x7155, a.rows, a.columns, b.columns, d.rows, d.columns, flags, a.stride]
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *mut c_void,
    description: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    _preference: *mut c_void,
    wanted: c_int,
    results: *mut c_void,
    found: *mut c_int,
) -> Status {
    // SAFETY: handles made by this library; the caller has room for as many results as it wants.
    unsafe {
        let description = (*description.cast::<Mutex<Description>>()).lock().expect("not poisoned");
        let matrices = [a, b, c, d].map(|m| &*m.cast::<Matrix>());
        if description.scale_modes[0] == 3 && description.scales_at.contains(&0) {
            // The library also refuses this.
            return INVALID_VALUE;
        }
        let Some(problem) = problem(&description, matrices) else {
            eprintln!("gpu-standin: no algorithm for {description:?} of {matrices:?}");
            *found = 0;
            return NOT_SUPPORTED;
        };
        let count = wanted.clamp(0, ALGORITHMS);
        for i in 0..count {
            let mut algorithm = problem;
            algorithm[NUMBER_AT] |= (i as u64) << NUMBER_SHIFT;
            write_result(results.cast::<u8>().add(i as usize * RESULT_BYTES), algorithm);
        }
        *found = count;
    }
    OK
}

/// # Safety
/// There is room for a result.
unsafe fn write_result(to: *mut u8, algorithm: [u64; 8]) {
    // SAFETY: the caller's memory.
    unsafe {
        to.write_bytes(0, RESULT_BYTES);
        to.cast::<[u64; 8]>().write_unaligned(algorithm);
        // The workspace's size follows the algorithm.
        to.add(ALGORITHM_BYTES).cast::<u64>().write_unaligned(4096);
    }
}

/// Whether an algorithm was chosen for this product.
fn suits(chosen: [u64; 8], problem: Option<[u64; 8]>) -> bool {
    let mut plain = chosen;
    plain[NUMBER_AT] &= (1 << NUMBER_SHIFT) - 1;
    problem == Some(plain) && chosen[NUMBER_AT] >> NUMBER_SHIFT < ALGORITHMS as u64
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoCheck(
    _handle: *mut c_void,
    description: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    algorithm: *const c_void,
    result: *mut c_void,
) -> Status {
    // SAFETY: handles made by this library, an algorithm, and room for a result.
    unsafe {
        let description = (*description.cast::<Mutex<Description>>()).lock().expect("not poisoned");
        let chosen = algorithm.cast::<[u64; 8]>().read_unaligned();
        if !suits(chosen, problem(&description, [a, b, c, d].map(|m| &*m.cast::<Matrix>()))) {
            return NOT_SUPPORTED;
        }
        write_result(result.cast(), chosen);
    }
    OK
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "cuBLASLt's")]
unsafe extern "C" fn cublasLtMatmul(
    _handle: *mut c_void,
    description: *mut c_void,
    alpha: *const f32,
    a: u64,
    a_layout: *mut c_void,
    b: u64,
    b_layout: *mut c_void,
    beta: *const f32,
    _c: u64,
    c_layout: *mut c_void,
    d: u64,
    d_layout: *mut c_void,
    algorithm: *const c_void,
    workspace: u64,
    workspace_bytes: usize,
    stream: u64,
) -> Status {
    // SAFETY: handles made by this library, and the caller's numbers.
    let (description, matrices, scale, chosen) = unsafe {
        let description = (*description.cast::<Mutex<Description>>()).lock().expect("not poisoned").clone();
        let matrices = [a_layout, b_layout, c_layout, d_layout].map(|m| *m.cast::<Matrix>());
        (description, matrices, (*alpha, *beta), algorithm.cast::<[u64; 8]>().read_unaligned())
    };
    if scale != (1.0, 0.0) || !suits(chosen, problem(&description, [&matrices[0], &matrices[1], &matrices[2], &matrices[3]])) {
        eprintln!("gpu-standin: a product with an algorithm for another one, or with factors: {description:?} of {matrices:?}");
        return INVALID_VALUE;
    }
    let scale = |i: usize| match (description.scales_at[i], description.scale_modes[i]) {
        (0, _) => Scale::None,
        (at, 3) => Scale::Columns(at),
        (at, _) => Scale::One(at),
    };
    let product = Product {
        a: (a, matrices[0]),
        b: (b, matrices[1]),
        d: (d, matrices[3]),
        a_scale: scale(0),
        b_scale: scale(1),
        bias: description.bias.then_some(description.bias_at),
        workspace: (workspace, workspace_bytes as u64),
    };
    match call("cublasLtMatmul", |device| device.push(stream, Work::Multiply(Box::new(product))).map(|()| 0)) {
        0 => OK,
        _ => EXECUTION_FAILED,
    }
}

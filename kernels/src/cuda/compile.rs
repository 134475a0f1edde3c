//! CUDA C++ to machine code, by NVRTC. Needs no GPU, so any machine can check that the kernels compile.

use super::CudaError;
use crate::{dtype::Dtype, kv::KvStorage};
use cudarc::nvrtc::{result, sys};
use std::{
    ffi::{CString, c_char},
    fmt, ptr,
};

/// A file of kernels.
#[derive(Debug)]
pub struct Source {
    pub file: &'static str,
    pub text: &'static str,
    /// Whether it is compiled separately for each kind of [`Heads`].
    pub by_heads: bool,
    /// Names and values that are defined for the compilation; for attention, those of its [`Scoring`].
    pub defines: &'static [&'static str],
}

impl Source {
    /// Whether it supports this device and head size, a multiple of 16 up to 256.
    pub fn suits(&self, arch: Arch, head_dim: usize) -> bool {
        self.file != ATTENTION_PREFILL_HOPPER.file || arch == Arch::SM_90A && [64, 128].contains(&head_dim)
    }
}

macro_rules! source {
    ($file:literal, by_heads: $by_heads:literal) => {
        Source { file: $file, text: include_str!(concat!("../../cu/", $file)), by_heads: $by_heads, defines: &[] }
    };
}

const fn capped(source: Source) -> Source {
    Source { defines: &["SCORE_CAP=1"], ..source }
}

const fn with_sinks(source: Source) -> Source {
    Source { defines: &["SINKS=1"], ..source }
}

pub static ACTIVATION: Source = source!("activation.cu", by_heads: false);
pub static ATTENTION_DECODE: Source = source!("attention_decode.cu", by_heads: true);
pub static ATTENTION_DECODE_CAPPED: Source = capped(source!("attention_decode.cu", by_heads: true));
pub static ATTENTION_DECODE_SINKS: Source = with_sinks(source!("attention_decode.cu", by_heads: true));
pub static ATTENTION_PREFILL: Source = source!("attention_prefill.cu", by_heads: true);
pub static ATTENTION_PREFILL_CAPPED: Source = capped(source!("attention_prefill.cu", by_heads: true));
pub static ATTENTION_PREFILL_SINKS: Source = with_sinks(source!("attention_prefill.cu", by_heads: true));
pub static ATTENTION_PREFILL_HOPPER: Source = source!("attention_prefill_hopper.cu", by_heads: true);
pub static ATTENTION_PREFILL_HOPPER_CAPPED: Source = capped(source!("attention_prefill_hopper.cu", by_heads: true));
pub static ATTENTION_PREFILL_HOPPER_SINKS: Source = with_sinks(source!("attention_prefill_hopper.cu", by_heads: true));
pub static EMBEDDING: Source = source!("embedding.cu", by_heads: false);
pub static EXPERTS: Source = source!("experts.cu", by_heads: false);
pub static EXPERTS_MULTIPLY: Source = source!("experts_multiply.cu", by_heads: false);
pub static GATHER: Source = source!("gather.cu", by_heads: false);
pub static KV_COPY: Source = source!("kv_copy.cu", by_heads: false);
pub static NORM: Source = source!("norm.cu", by_heads: false);
pub static PENALTIES: Source = source!("penalties.cu", by_heads: false);
pub static QUANTIZE_FP8: Source = source!("quantize_fp8.cu", by_heads: false);
pub static RMS_NORM: Source = source!("rms_norm.cu", by_heads: false);
pub static ROPE_KV_WRITE: Source = source!("rope_kv_write.cu", by_heads: true);
pub static SAMPLE: Source = source!("sample.cu", by_heads: false);
pub static SWIGLU: Source = source!("swiglu.cu", by_heads: false);

pub static SOURCES: [&Source; 22] = [
    &ACTIVATION,
    &ATTENTION_DECODE,
    &ATTENTION_DECODE_CAPPED,
    &ATTENTION_DECODE_SINKS,
    &ATTENTION_PREFILL,
    &ATTENTION_PREFILL_CAPPED,
    &ATTENTION_PREFILL_SINKS,
    &ATTENTION_PREFILL_HOPPER,
    &ATTENTION_PREFILL_HOPPER_CAPPED,
    &ATTENTION_PREFILL_HOPPER_SINKS,
    &EMBEDDING,
    &EXPERTS,
    &EXPERTS_MULTIPLY,
    &GATHER,
    &KV_COPY,
    &NORM,
    &PENALTIES,
    &QUANTIZE_FP8,
    &RMS_NORM,
    &ROPE_KV_WRITE,
    &SAMPLE,
    &SWIGLU,
];

/// The header that all sources include.
pub(crate) const COMMON: &str = include_str!("../../cu/common.cuh");

/// The additions to attention's softmax of scaled scores, which its kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scoring {
    Plain,
    /// A soft cap of scores.
    Capped,
    /// A logit of each query head that joins the sum of its softmax.
    Sinks,
}

impl Scoring {
    /// The variant of `plain`, a source of attention, for this scoring.
    pub(super) fn of(self, plain: &'static Source) -> &'static Source {
        let defines = match self {
            Self::Plain => ATTENTION_DECODE.defines,
            Self::Capped => ATTENTION_DECODE_CAPPED.defines,
            Self::Sinks => ATTENTION_DECODE_SINKS.defines,
        };
        let found = SOURCES.into_iter().find(|source| source.file == plain.file && source.defines == defines);
        found.expect("attention's sources are there for every scoring")
    }
}

/// Heads of K and V.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Heads {
    /// The dimension of a head, a multiple of 16, up to 256.
    pub dim: usize,
    /// The storage, bf16 or 8-bit integers.
    pub kv: KvStorage,
}

impl Heads {
    pub fn bf16(dim: usize) -> Self {
        Self { dim, kv: KvStorage::Float(Dtype::Bf16) }
    }

    /// Panics if there are no kernels for these heads.
    pub(super) fn assert_supported(self) {
        assert!(self.dim.is_multiple_of(16) && (16..=256).contains(&self.dim), "heads of a multiple of 16 numbers, up to 256");
        assert!(matches!(self.kv, KvStorage::Float(Dtype::Bf16) | KvStorage::Int8), "K and V on the device are bf16 or int8");
    }
}

/// The device to compile for, by compute capability.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arch {
    pub major: u32,
    pub minor: u32,
}

impl Arch {
    pub const SM_80: Arch = Arch { major: 8, minor: 0 };
    pub const SM_90A: Arch = Arch { major: 9, minor: 0 };
}

impl fmt::Display for Arch {
    /// Hopper gets its architecture-specific instructions (`a`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}{}", self.major, self.minor, if *self == Arch::SM_90A { "a" } else { "" })
    }
}

/// Machine code for one device.
#[derive(Debug)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    /// The assembler's report on every kernel: registers, shared memory, spills.
    pub log: String,
}

/// NVRTC's version, which decides its output.
pub fn version() -> Result<(i32, i32), CudaError> {
    assert_present()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there, and both pointers are to live integers.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result()?;
    Ok((major, minor))
}

fn assert_present() -> Result<(), CudaError> {
    // SAFETY: looks for the library and loads it; NVRTC's initializer has no requirements.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(CudaError::NoLibrary { name: "libnvrtc" }) }
}

/// Compiler options. `heads` matters only for sources that are `by_heads`.
pub(crate) fn options(source: &Source, arch: Arch, heads: Heads) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".to_owned(),
        "--device-as-default-execution-space".to_owned(),
        // Adds the assembler's report to the log.
        "--ptxas-options=-v".to_owned(),
    ];
    options.extend(source.defines.iter().map(|define| format!("-D{define}")));
    if source.by_heads {
        options.push(format!("-DHEAD_DIM={}", heads.dim));
        options.push(format!("-DKV_INT8={}", u8::from(heads.kv == KvStorage::Int8)));
    }
    options
}

pub fn compile(source: &Source, arch: Arch, heads: Heads) -> Result<Compiled, CudaError> {
    assert_present()?;
    let program = Program::new(source)?;
    let options = options(source, arch, heads);
    let outcome = unsafe {
        // SAFETY: the program is alive.
        result::compile_program(program.0, &options)
    };
    let log = program.log()?;
    match outcome {
        Ok(()) => Ok(Compiled { cubin: program.cubin()?, log }),
        Err(error) => Err(CudaError::Compile { file: source.file, arch: arch.to_string(), source: error, log }),
    }
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &Source) -> Result<Self, CudaError> {
        let c_string = |text: &str| CString::new(text).expect("sources and their names have no zero bytes");
        let (text, name) = (c_string(source.text), c_string(source.file));
        let (common, common_name) = (c_string(COMMON), c_string("common.cuh"));
        let mut program = ptr::null_mut();
        // SAFETY: all strings outlive the call, which copies them; there is one header and one name for it.
        unsafe {
            let (headers, names) = ([common.as_ptr()], [common_name.as_ptr()]);
            sys::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), 1, headers.as_ptr(), names.as_ptr()).result()?;
        }
        Ok(Self(program))
    }

    fn log(&self) -> Result<String, CudaError> {
        // SAFETY: the program is alive.
        let log = unsafe { result::get_program_log(self.0) }?;
        let bytes: Vec<u8> = log.iter().map(|c| c.to_ne_bytes()[0]).take_while(|c| *c != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, CudaError> {
        let mut size = 0;
        // SAFETY: the program is alive and compiled; the buffer has the queried size.
        unsafe {
            sys::nvrtcGetCUBINSize(self.0, &mut size).result()?;
            let mut cubin = vec![0u8; size];
            sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast::<c_char>()).result()?;
            Ok(cubin)
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `new`, and destroyed only here. A failure leaves nothing to do.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

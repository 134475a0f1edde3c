//! Matrix products.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod amx;
pub mod float;
pub mod int8;
pub(crate) mod micro_kernel;
pub(crate) mod panel;
pub(crate) mod prefetch;
pub(crate) mod scratch;
pub(crate) mod tiling;

//! The functions that the CUDA backend calls, under the names that it looks for. Others are missing: `cudarc` names
//! them when it does not find them.

mod cublaslt;
mod driver;
mod nvrtc;

//! The CUDA kernels through the real compiler, which needs no GPU.

mod nvrtc;
mod sass;

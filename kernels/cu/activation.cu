// Activations of feed-forward layers other than those of swiglu.cu: `out = f(gate) * up`, or `f(x)` without a gate.
//
//   SILU: x sigmoid(x). GELU: x Phi(x), of the normal distribution (Hendrycks & Gimpel, 2016). GELU_TANH: the same with their
//   approximation by tanh, which is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
//
// from: bf16 [rows, 2, width], gates first; without a gate [rows, width]. out: bf16 [rows, width]; width is a multiple of 8. Eight
// numbers per thread, grid (width / 8 over the block, rows).
#include "common.cuh"

// The numbers of functions in elementwise.rs; any other number is SILU.
constexpr u32 GELU = 1, GELU_TANH = 2;

__device__ inline float activated(float x, u32 function) {
    // The tail of Phi is small, and keeps its precision in erfc.
    if (function == GELU) return 0.5f * x * erfcf(-0.70710678f * x);
    const float inner = function == GELU_TANH ? 1.5957691f * (x + 0.044715f * x * x * x) : x;
    return x / (1.0f + __expf(-inner));
}

extern "C" __global__ void activate(bf16* __restrict__ out, const bf16* __restrict__ from, u32 width, u32 function, u32 is_gated) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width / 8) return;
    const u64 row = blockIdx.y;
    const uint4* numbers = reinterpret_cast<const uint4*>(from + row * width * (is_gated ? 2 : 1));
    float x[8];
    unpack8(numbers[i], x);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = activated(x[j], function);
    if (is_gated) {
        float up[8];
        unpack8(numbers[width / 8 + i], up);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] *= up[j];
    }
    reinterpret_cast<uint4*>(out + row * width)[i] = pack8(x);
}

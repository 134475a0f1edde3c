// `out = gate * sigmoid(gate) * up` (Shazeer, 2020).
//
// gate_up: bf16 [rows, 2, width], out: bf16 [rows, width]; width is a multiple of 8. Eight numbers per thread, grid
// (width / 8 over the block, rows).
#include "common.cuh"

extern "C" __global__ void swiglu(bf16* __restrict__ out, const bf16* __restrict__ gate_up, u32 width) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width / 8) return;
    const u64 row = blockIdx.y;
    const uint4* from = reinterpret_cast<const uint4*>(gate_up + row * 2 * width);
    float gate[8], up[8];
    unpack8(from[i], gate);
    unpack8(from[width / 8 + i], up);
#pragma unroll
    for (int j = 0; j < 8; j++) gate[j] = gate[j] / (1.0f + __expf(-gate[j])) * up[j];
    reinterpret_cast<uint4*>(out + row * width)[i] = pack8(gate);
}

// Rows of an embedding table, widened: `out[row] = factor * table[tokens[row]]`.
//
// out: f32 [rows, width], table: bf16 [vocab, width], tokens: u32 [rows], each below the vocabulary.
// width is a multiple of 8. One block per row.
#include "common.cuh"

extern "C" __global__ void embedding(float* __restrict__ out, const bf16* __restrict__ table, const u32* __restrict__ tokens, u32 width,
                                     float factor) {
    const u64 row = blockIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(table + u64(tokens[row]) * width);
    float4* to = reinterpret_cast<float4*>(out + row * width);
    for (u32 i = threadIdx.x; i < width / 8; i += blockDim.x) {
        float x[8];
        unpack8(from[i], x);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] *= factor;
        to[2 * i] = make_float4(x[0], x[1], x[2], x[3]);
        to[2 * i + 1] = make_float4(x[4], x[5], x[6], x[7]);
    }
}

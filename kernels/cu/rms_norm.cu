// Adds a layer's output to the residual stream and norms it for the next layer, in one pass (Zhang & Sennrich, 2019):
//
//   residual[r] += delta[r];  out[i] = weight * residual[r] / sqrt(mean(residual[r]^2) + epsilon), r = rows[i]
//
// out: bf16 [grid, width], residual: f32 [.., width], delta: bf16 [.., width] or null, weight: f32 [width], rows: u32
// [grid], the rows to take, or null for all. width is a multiple of 8. One block per row, whose numbers stay in shared
// memory (dynamic, 4 width bytes) between the two uses. The residual is f32: it sums up dozens of layers.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) rms_norm(bf16* __restrict__ out, float* __restrict__ residual, const bf16* __restrict__ delta,
                                                           const float* __restrict__ weight, const u32* __restrict__ rows, u32 width,
                                                           float epsilon) {
    extern __shared__ float4 numbers[];
    const u64 row = rows ? rows[blockIdx.x] : blockIdx.x;
    float4* x = reinterpret_cast<float4*>(residual + row * width);
    const uint2* d = delta ? reinterpret_cast<const uint2*>(delta + row * width) : nullptr;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width / 4; i += blockDim.x) {
        float4 v = x[i];
        if (d) {
            const uint2 pairs = d[i];
            v = make_float4(v.x + low_f32(pairs.x), v.y + high_f32(pairs.x), v.z + low_f32(pairs.y), v.w + high_f32(pairs.y));
            x[i] = v;
        }
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        numbers[i] = v;
    }
    const float scale = rsqrtf(block_sum(squares) / float(width) + epsilon);
    uint2* y = reinterpret_cast<uint2*>(out + u64(blockIdx.x) * width);
    for (u32 i = threadIdx.x; i < width / 4; i += blockDim.x) {
        const float4 v = numbers[i];
        const float4 w = reinterpret_cast<const float4*>(weight)[i];
        y[i] = make_uint2(pack(w.x * (v.x * scale), w.y * (v.y * scale)), pack(w.z * (v.z * scale), w.w * (v.w * scale)));
    }
}

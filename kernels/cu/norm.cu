// Adds the output of a layer's part to the residual stream, and norms the rows for the next part, in all forms that rms_norm.cu
// does not have; and computes the factors of norms over all heads of a row.
#include "common.cuh"

constexpr u32 THREADS = 256;

__device__ inline float4 widened(uint2 pairs) { return make_float4(low_f32(pairs.x), high_f32(pairs.x), low_f32(pairs.y), high_f32(pairs.y)); }
__device__ inline float sum(float4 x) { return x.x + x.y + x.z + x.w; }
__device__ inline float squares(float4 x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }
__device__ inline float4 times(float4 x, float4 y) { return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w); }
__device__ inline float4 times(float4 x, float y) { return make_float4(x.x * y, x.y * y, x.z * y, x.w * y); }
__device__ inline float4 plus(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }
__device__ inline float4 minus(float4 x, float y) { return make_float4(x.x - y, x.y - y, x.z - y, x.w - y); }
__device__ inline uint2 rounded(float4 x) { return make_uint2(pack(x.x, x.y), pack(x.z, x.w)); }

// With r = rows[i], and mean() and root() over the width:
//
//   added = delta[r] + beside[r];  with `after`: added = after * added / root(mean(added^2) + epsilon)
//   residual[r] += factor * added
//   x = residual[r];  if `is_centered`: x -= mean(x)
//   out[i] = weight * x / root(mean(x^2) + epsilon) + bias;  without `weight`: out[i] = residual[r]
//
// out: bf16 [grid, width], residual: f32 [.., width], delta: bf16 [.., width] or null, where nothing is added. Each of these may be
// null: beside (bf16 [.., width]), after, weight, bias (f32 [width]), and rows (u32 [grid]), which then are all. width is a multiple
// of 8. One block per row, whose numbers stay in shared memory (dynamic, 4 width bytes): each thread uses those that it wrote.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_and_norm(bf16* __restrict__ out, float* __restrict__ residual, const bf16* __restrict__ delta, const bf16* __restrict__ beside,
                 const float* __restrict__ after, const float* __restrict__ weight, const float* __restrict__ bias, const u32* __restrict__ rows,
                 u32 width, u32 is_centered, float factor, float epsilon) {
    extern __shared__ float4 numbers[];
    const u64 row = rows ? rows[blockIdx.x] : blockIdx.x;
    const u32 vectors = width / 4;
    float4* x = reinterpret_cast<float4*>(residual + row * width);

    float scale = factor;
    if (delta) {
        const uint2* d = reinterpret_cast<const uint2*>(delta + row * width);
        const uint2* b = beside ? reinterpret_cast<const uint2*>(beside + row * width) : nullptr;
        float of_squares = 0.0f;
        for (u32 i = threadIdx.x; i < vectors; i += THREADS) {
            float4 v = widened(d[i]);
            if (b) v = plus(v, widened(b[i]));
            of_squares += squares(v);
            numbers[i] = v;
        }
        if (after) scale *= rsqrtf(block_sum(of_squares) / float(width) + epsilon);
    }

    float of_numbers = 0.0f, of_squares = 0.0f;
    for (u32 i = threadIdx.x; i < vectors; i += THREADS) {
        float4 v = x[i];
        if (delta) {
            float4 added = times(numbers[i], scale);
            if (after) added = times(added, reinterpret_cast<const float4*>(after)[i]);
            v = plus(v, added);
            x[i] = v;
        }
        of_numbers += sum(v);
        of_squares += squares(v);
        numbers[i] = v;
    }
    uint2* y = reinterpret_cast<uint2*>(out + u64(blockIdx.x) * width);
    if (!weight) {
        for (u32 i = threadIdx.x; i < vectors; i += THREADS) y[i] = rounded(numbers[i]);
        return;
    }

    float mean = 0.0f;
    if (is_centered) {
        mean = block_sum(of_numbers) / float(width);
        of_squares = 0.0f;
        for (u32 i = threadIdx.x; i < vectors; i += THREADS) of_squares += squares(minus(numbers[i], mean));
    }
    const float to_one = rsqrtf(block_sum(of_squares) / float(width) + epsilon);
    for (u32 i = threadIdx.x; i < vectors; i += THREADS) {
        float4 v = times(times(minus(numbers[i], mean), to_one), reinterpret_cast<const float4*>(weight)[i]);
        if (bias) v = plus(v, reinterpret_cast<const float4*>(bias)[i]);
        y[i] = rounded(v);
    }
}

// The factors that norm a row's queries, and its keys, over all heads: 1 / root(squares / numbers + epsilon).
//
// out: f32 [rows, 2]. qkv: bf16 [rows, q_width + 2 k_width], queries first, then keys; both widths are multiples of 8. q_numbers,
// k_numbers: the numbers of them that count, as the others are zeros. Grid (rows, 2).
extern "C" __global__ void __launch_bounds__(THREADS)
    qk_scales(float* __restrict__ out, const bf16* __restrict__ qkv, u32 q_width, u32 k_width, float q_numbers, float k_numbers, float epsilon) {
    const bool is_key = blockIdx.y == 1;
    const uint4* from = reinterpret_cast<const uint4*>(qkv + u64(blockIdx.x) * (q_width + 2 * k_width) + (is_key ? q_width : 0));
    float of_squares = 0.0f;
    for (u32 i = threadIdx.x; i < (is_key ? k_width : q_width) / 8; i += THREADS) {
        float x[8];
        unpack8(from[i], x);
#pragma unroll
        for (int j = 0; j < 8; j++) of_squares += x[j] * x[j];
    }
    of_squares = block_sum(of_squares);
    if (threadIdx.x == 0) out[2 * blockIdx.x + blockIdx.y] = rsqrtf(of_squares / (is_key ? k_numbers : q_numbers) + epsilon);
}

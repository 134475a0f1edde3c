// Quantizes activations to FP8 (e4m3: 4 bits of exponent, 3 of mantissa, largest 448; Micikevicius et al., 2022), for
// cuBLASLt.
//
// x: bf16 [rows, width], out: e4m3 [rows, width], so that x = scale * out; width is a multiple of 8. One block per row.
#include "common.cuh"

constexpr float LARGEST = 448.0f;

// Rounds to nearest, ties to even; saturates at the largest number. NaN stays NaN.
__device__ inline u8 to_e4m3(float x) {
    if (isnan(x)) return 0x7f;
    const u32 sign = (__float_as_uint(x) >> 24) & 0x80;
    const float magnitude = fminf(fabsf(x), LARGEST);
    if (magnitude < 0x1p-6f) {
        // Multiples of 2^-9: adding 2^14 leaves them, rounded, in the low bits of the mantissa.
        return sign | (__float_as_uint(magnitude + 0x1p14f) & 0xff);
    }
    const u32 bits = __float_as_uint(magnitude);
    const u32 rounded = bits + 0x7ffff + ((bits >> 20) & 1);
    // Exponents are biased by 7 instead of 127.
    return sign | ((rounded >> 20) - (120 << 3));
}

__device__ inline uint2 quantize8(uint4 from, float inverse) {
    float x[8];
    unpack8(from, x);
    u32 words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) words[i / 4] |= u32(to_e4m3(x[i] * inverse)) << (8 * (i % 4));
    return make_uint2(words[0], words[1]);
}

// Quantizes with one scale per row, from its largest number or largest_max, whichever is smaller. scales: f32 [rows].
extern "C" __global__ void quantize_fp8_rows(u8* __restrict__ out, float* __restrict__ scales, const bf16* __restrict__ x, u32 width,
                                             float largest_max) {
    const u64 row = blockIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(x + row * width);
    float largest = 0.0f;
    for (u32 i = threadIdx.x; i < width / 8; i += blockDim.x) {
        float numbers[8];
        unpack8(from[i], numbers);
#pragma unroll
        for (int j = 0; j < 8; j++) largest = fmaxf(largest, fabsf(numbers[j]));
    }
    largest = fminf(block_max(largest), largest_max);
    // A row of zeros stays zero under any scale.
    const float scale = largest > 0.0f ? largest / LARGEST : 1.0f;
    if (threadIdx.x == 0) scales[row] = scale;
    uint2* to = reinterpret_cast<uint2*>(out + row * width);
    for (u32 i = threadIdx.x; i < width / 8; i += blockDim.x) to[i] = quantize8(from[i], 1.0f / scale);
}

// Quantizes with one given scale for all rows.
extern "C" __global__ void quantize_fp8_tensor(u8* __restrict__ out, const float* __restrict__ scale, const bf16* __restrict__ x, u32 width) {
    const u64 row = blockIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(x + row * width);
    uint2* to = reinterpret_cast<uint2*>(out + row * width);
    const float inverse = 1.0f / *scale;
    for (u32 i = threadIdx.x; i < width / 8; i += blockDim.x) to[i] = quantize8(from[i], inverse);
}

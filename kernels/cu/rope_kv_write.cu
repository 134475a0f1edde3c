// Everything between the QKV product and attention: norms of queries and keys (if the model has them), rotary embedding,
// growing queries, and writing K and V into their blocks.
//
// qkv: bf16 [rows, heads + 2 kv_heads, HEAD_DIM], queries first; queries are changed in place.
// kv: one layer of the paged memory, as common.cuh says.
// tables: u32 [sequences, table_stride], the blocks of each sequence from position 0 on.
// sequences, positions: u32 [rows]; nothing is done for rows at NO_POSITION.
// cos, sin: f32 [positions, HEAD_DIM / 2], pairs (i, i + HEAD_DIM / 2) as in Hugging Face checkpoints (Su et al., 2021); or null,
// if nothing rotates.
// q_norm, k_norm: the weights of norms, or null: f32 [HEAD_DIM], of each head separately; with scales (f32 [rows, 2], the factors of a
// row's queries and keys, from qk_scales) [heads, HEAD_DIM] and [kv_heads, HEAD_DIM].
// growth: f32 [positions], factors of queries, or null.
// One warp per row and head; grid (rows, heads + 2 kv_heads over 8), 256 threads. HEAD_DIM: a multiple of 4, up to 256.
#include "common.cuh"

constexpr u32 HALF = HEAD_DIM / 2;
constexpr u32 WARPS = 8;
// Pairs of neighbours that each lane rotates.
constexpr u32 STEPS = (HALF + 63) / 64;

// Rotates a head by its position's angles. x[0] and x[1] are the numbers 2 i and 2 i + 1 of the first and second half.
__device__ inline void turn(float (&x)[STEPS][4], const float* cos, const float* sin, u32 lane) {
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        const u32 i = step * 64 + lane * 2;
        if (i >= HALF) break;
        const float2 c = *reinterpret_cast<const float2*>(cos + i);
        const float2 s = *reinterpret_cast<const float2*>(sin + i);
        const float a0 = x[step][0], a1 = x[step][1], b0 = x[step][2], b1 = x[step][3];
        x[step][0] = a0 * c.x - b0 * s.x;
        x[step][1] = a1 * c.y - b1 * s.y;
        x[step][2] = b0 * c.x + a0 * s.x;
        x[step][3] = b1 * c.y + a1 * s.y;
    }
}

// The factor that norms a single head.
__device__ inline float scale_of(const float (&x)[STEPS][4], float epsilon) {
    float squares = 0.0f;
#pragma unroll
    for (u32 step = 0; step < STEPS; step++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) squares += x[step][i] * x[step][i];
    return rsqrtf(warp_sum(squares) / float(HEAD_DIM) + epsilon);
}

__device__ inline void norm(float (&x)[STEPS][4], const float* weight, float scale, u32 lane) {
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        const u32 i = step * 64 + lane * 2;
        if (i >= HALF) break;
        x[step][0] = weight[i] * (x[step][0] * scale);
        x[step][1] = weight[i + 1] * (x[step][1] * scale);
        x[step][2] = weight[HALF + i] * (x[step][2] * scale);
        x[step][3] = weight[HALF + i + 1] * (x[step][3] * scale);
    }
}

// Writes a position of a head as bf16.
__device__ inline void write(bf16* to, const float (&x)[STEPS][4], u32 lane) {
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        const u32 i = step * 64 + lane * 2;
        if (i >= HALF) break;
        *reinterpret_cast<u32*>(to + i) = pack(x[step][0], x[step][1]);
        *reinterpret_cast<u32*>(to + HALF + i) = pack(x[step][2], x[step][3]);
    }
}

__device__ inline unsigned short integers(float a, float b) { return (__float2int_rn(a) & 0xff) | (__float2int_rn(b) & 0xff) << 8; }

// Writes the same as 8-bit integers with their scale, identical to those that the CPU would compute from these numbers
// (kernels/src/cpu/kv.rs).
__device__ inline void write_int8(u8* to, float* scale, const float (&x)[STEPS][4], u32 lane) {
    float largest = 0.0f;
#pragma unroll
    for (u32 step = 0; step < STEPS; step++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(x[step][i]));
    largest = warp_max(largest);
    // Smaller numbers have no useful inverse.
    const bool nothing = largest < 1e-30f;
    const float factor = nothing ? 0.0f : 127.0f / largest;
    if (lane == 0) *scale = nothing ? 0.0f : largest / 127.0f;
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        const u32 i = step * 64 + lane * 2;
        if (i >= HALF) break;
        *reinterpret_cast<unsigned short*>(to + i) = integers(x[step][0] * factor, x[step][1] * factor);
        *reinterpret_cast<unsigned short*>(to + HALF + i) = integers(x[step][2] * factor, x[step][3] * factor);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    rope_kv_write(bf16* __restrict__ qkv, u8* __restrict__ kv, const u32* __restrict__ tables, const u32* __restrict__ sequences,
                  const u32* __restrict__ positions, const float* __restrict__ cos, const float* __restrict__ sin,
                  const float* __restrict__ q_norm, const float* __restrict__ k_norm, const float* __restrict__ scales,
                  const float* __restrict__ growth, float epsilon, u32 heads, u32 kv_heads, u32 table_stride) {
    const u32 row = blockIdx.x, lane = threadIdx.x % 32;
    const u32 head = blockIdx.y * WARPS + threadIdx.x / 32;
    const u32 position = positions[row];
    if (head >= heads + 2 * kv_heads || position == NO_POSITION) return;
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;

    bf16* from = qkv + (u64(row) * (heads + 2 * kv_heads) + head) * HEAD_DIM;
    float x[STEPS][4] = {};
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        const u32 i = step * 64 + lane * 2;
        if (i >= HALF) break;
        const u32 a = *reinterpret_cast<const u32*>(from + i), b = *reinterpret_cast<const u32*>(from + HALF + i);
        x[step][0] = low_f32(a);
        x[step][1] = high_f32(a);
        x[step][2] = low_f32(b);
        x[step][3] = high_f32(b);
    }
    if (!is_value) {
        const float* weight = is_query ? q_norm : k_norm;
        if (weight && scales) {
            norm(x, weight + (is_query ? head : head - heads) * HEAD_DIM, scales[2 * row + !is_query], lane);
        } else if (weight) {
            norm(x, weight, scale_of(x, epsilon), lane);
        }
        if (cos) turn(x, cos + u64(position) * HALF, sin + u64(position) * HALF, lane);
    }
    if (is_query && growth) {
        const float factor = growth[position];
#pragma unroll
        for (u32 step = 0; step < STEPS; step++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) x[step][i] *= factor;
    }

    if (is_query) {
        write(from, x, lane);
        return;
    }
    const u64 block = tables[u64(sequences[row]) * table_stride + position / BLOCK];
    // The block's K heads come first, then V heads.
    u8* to = kv + (block * 2 * kv_heads + head - heads) * KV_HEAD_BYTES;
    const u32 slot = position % BLOCK;
    if constexpr (KV_INT8) {
        write_int8(to + KV_SCALES_BYTES + slot * HEAD_DIM, reinterpret_cast<float*>(to) + slot, x, lane);
    } else {
        write(reinterpret_cast<bf16*>(to) + slot * HEAD_DIM, x, lane);
    }
}

// Shared by all kernels: bf16 in registers, the tensor-core and copy instructions, reductions.
//
// No header of the CUDA toolkit is included anywhere: a machine with NVRTC and a driver can compile this.
#pragma once

typedef unsigned short bf16;  // the bits
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Positions in a KV block; `BLOCK_POSITIONS` in kv.rs.
constexpr u32 BLOCK = 16;
// The position of a padding row: nothing is read or written for it.
constexpr u32 NO_POSITION = 0xffffffffu;
constexpr u32 ALL_LANES = 0xffffffffu;

#define NEG_INFINITY __int_as_float(0xff800000)

// --- bf16: two of them in a register, the first in the low half.

__device__ inline float to_f32(bf16 x) { return __uint_as_float(u32(x) << 16); }
__device__ inline float low_f32(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_f32(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline void unpack8(uint4 from, float* to) {
    const u32 pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = low_f32(pairs[i]);
        to[2 * i + 1] = high_f32(pairs[i]);
    }
}

__device__ inline uint4 pack8(const float* from) {
    return make_uint4(pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7]));
}

// --- Arithmetic.

// 2^x, within 2 ulp; 0 for minus infinity.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, within 1 ulp; 0 for infinity.
__device__ inline float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cap tanh(x / cap), for factor = 2 log2(e) / cap: tanh(u) is 1 - 2 / (1 + e^2u). Its error is that of numbers near the cap, for
// small x as well.
__device__ inline float soft_cap(float x, float factor, float cap) { return cap - 2.0f * cap * reciprocal_approx(1.0f + exp2_approx(x * factor)); }

// c += a b of one warp: a is 16x16, b 16x8, c 16x8. With g = lane / 4 and t = lane % 4, a lane holds
// a: rows g and g+8 at columns 2t.., then both at columns 2t+8..; b: rows 2t.. then 2t+8.. of column g;
// c: columns 2t and 2t+1 of row g, then of row g+8.
__device__ inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8x8 matrix of bf16 whose row g a lane holds at columns 2t and 2t+1.
__device__ inline u32 transpose8x8(u32 pair) {
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// --- Shared memory.

__device__ inline u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// Four 8x8 matrices; lane i names row i % 8 of matrix i / 8.
__device__ inline void load_matrices(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Loads the same matrices, transposed on the way.
__device__ inline void load_matrices_transposed(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Copies 16 bytes from global to shared memory asynchronously; writes zeros, and reads nothing, unless `present`.
__device__ inline void copy16_async(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(present ? 16 : 0) : "memory");
}

__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` groups of this thread's copies are in flight.
template <int PENDING>
__device__ inline void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// --- K and V in memory, where HEAD_DIM is defined: blocks of [K or V, kv_heads], and for each head
//
//   KV_INT8 0: bf16 [16, HEAD_DIM].
//   KV_INT8 1: f32 [16], a scale for each position, then 8-bit integers [16, HEAD_DIM]. A number is its scale times its
//     integer; the largest of a position has 127.
#ifdef HEAD_DIM

constexpr u32 KV_SCALES_BYTES = KV_INT8 ? BLOCK * 4 : 0;
constexpr u32 KV_NUMBER_BYTES = KV_INT8 ? 1 : 2;
constexpr u32 KV_HEAD_BYTES = KV_SCALES_BYTES + BLOCK * HEAD_DIM * KV_NUMBER_BYTES;

// The two 8-bit integers in the low bytes of the halves, in bf16. The sum of 128 + (x & 0x7f) and -128 - (x & 0x80) is x,
// and the bits of both are those of x beside constants.
__device__ inline u32 integers_to_bf16(u32 integers) {
    const u32 above = (integers & 0x007f007f) | 0x43004300, below = (integers & 0x00800080) | 0xc300c300, ones = 0x3f803f80;
    u32 pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(above), "r"(ones), "r"(below));
    return pair;
}

// Four 8-bit integers, in bf16.
__device__ inline uint2 integers4_to_bf16(u32 integers) {
    return make_uint2(integers_to_bf16(__byte_perm(integers, 0, 0x4140)), integers_to_bf16(__byte_perm(integers, 0, 0x4342)));
}

__device__ inline u32 times(u32 pair, float factor) { return pack(low_f32(pair) * factor, high_f32(pair) * factor); }

// Copies eight numbers of a position of a head's K or V to shared memory, in bf16, from number `at` on; writes zeros, and
// reads nothing, unless `present`. bf16 arrives asynchronously; 8-bit integers on return, rounded once they are scaled.
__device__ inline void copy8_of_kv(void* to, const u8* head, u32 position, u32 at, bool present) {
    const u8* from = head + KV_SCALES_BYTES + (position * HEAD_DIM + at) * KV_NUMBER_BYTES;
    if constexpr (KV_INT8) {
        uint2 integers = {};
        float scale = 0.0f;
        if (present) {
            integers = *reinterpret_cast<const uint2*>(from);
            scale = reinterpret_cast<const float*>(head)[position];
        }
        const uint2 low = integers4_to_bf16(integers.x), high = integers4_to_bf16(integers.y);
        *reinterpret_cast<uint4*>(to) = make_uint4(times(low.x, scale), times(low.y, scale), times(high.x, scale), times(high.y, scale));
    } else {
        copy16_async(to, from, present);
    }
}

// --- Scores, in attention kernels. These are compiled for models that use only the softmax of scaled scores, and with
//
//   SCORE_CAP 1: for scores with a soft cap. scale_log2 is then 2 log2(e) / cap times the scores' scale, and cap_log2 is log2(e) cap.
//   SINKS 1: for a logit of each query head that joins the sum of its softmax, once, and has no value. sinks: f32 [heads], times
//     log2(e).
#ifndef SCORE_CAP
#define SCORE_CAP 0
#endif
#ifndef SINKS
#define SINKS 0
#endif

// Caps scores, if they have a cap. This precedes the mask.
template <u32 N>
__device__ inline void cap_scores(float (&scores)[N], float scale_log2, float cap_log2) {
    if constexpr (SCORE_CAP) {
#pragma unroll
        for (u32 i = 0; i < N; i++) scores[i] = soft_cap(scores[i], scale_log2, cap_log2);
    }
}

// The scale that scores still need after `cap_scores`.
__device__ inline float scale_left(float scale_log2) { return SCORE_CAP ? 1.0f : scale_log2; }

// A head's complete sum of exponentials, in units of 2^max.
__device__ inline float with_sink(float sum, float max, const float* sinks, u32 head) {
    if constexpr (SINKS) sum += exp2_approx(sinks[head] - max);
    return sum;
}

#endif

// --- Reductions, each in one fixed order.

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Reduces over all threads of the block, which has whole warps; every thread gets the result.
template <typename Reduce>
__device__ inline float block_reduce(float x, float neutral, Reduce reduce) {
    __shared__ float of_warps[32];
    const u32 lane = threadIdx.x % 32;
    x = reduce(x);
    __syncthreads();
    if (lane == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    return reduce(lane < blockDim.x / 32 ? of_warps[lane] : neutral);
}

__device__ inline float block_sum(float x) {
    return block_reduce(x, 0.0f, [](float x) { return warp_sum(x); });
}

__device__ inline float block_max(float x) {
    return block_reduce(x, NEG_INFINITY, [](float x) { return warp_max(x); });
}

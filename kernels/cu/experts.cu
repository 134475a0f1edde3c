// Layers of experts, except for their products (Shazeer et al., 2017): the choice of experts for each row, the rows in the order of their
// experts, and the weighted sum of the experts' outputs for a row.
//
// All results of routing stay on the device, and all grids depend on the number of rows alone, so that a step can
// be recorded as a graph.
//
//   router_logits   residual, f32 products               -> logits
//   experts_route   logits                               -> experts and weights, `chosen` of each row
//   experts_sort    experts                              -> offsets, rows by expert, slots
//   (experts_multiply.cu: gate and up, then down)        -> outputs by slot
//   experts_combine outputs, weights, the shared expert  -> the layer's output, for the residual stream
//
// An entry is a row's choice of one expert, number row * chosen + i. A row's experts are in ascending order. A slot is an
// entry's place in the order of experts, and of rows within an expert.
#include "common.cuh"

// The expert of a padding row's entries.
constexpr u32 NO_EXPERT = 0xffffffffu;
constexpr float LOG2_E = 1.44269504f;

// --- The router's products.

// Numbers of a row that are in shared memory at once.
constexpr u32 CHUNK = 512;

// logits[r][e] = norm(residual[r]) . weight[e], all in f32: rounding to bf16 would change the choice. A warp computes
// EXPERTS outputs of ROWS rows; each sum has one order, regardless of these numbers.
template <u32 WARPS, u32 ROWS, u32 EXPERTS>
__device__ inline void multiply_router(float* logits, const float* residual, const float* norm, const float* weight, u32 rows, u32 width,
                                       u32 outputs, float epsilon) {
    __shared__ float4 x[ROWS][CHUNK / 4];
    __shared__ float scales[ROWS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first_row = blockIdx.y * ROWS, first = (blockIdx.x * WARPS + warp) * EXPERTS;
    for (u32 r = warp; r < ROWS; r += WARPS) {
        float squares = 0.0f;
        if (first_row + r < rows) {
            const float4* from = reinterpret_cast<const float4*>(residual + u64(first_row + r) * width);
            for (u32 i = lane; i < width / 4; i += 32) {
                const float4 v = from[i];
                squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
            }
        }
        squares = warp_sum(squares);
        if (lane == 0) scales[r] = rsqrtf(squares / float(width) + epsilon);
    }
    float sums[EXPERTS][ROWS] = {};
    for (u32 start = 0; start < width; start += CHUNK) {
        const u32 vectors = min(CHUNK, width - start) / 4;
        // The scales have arrived, and no thread still reads the previous chunk.
        __syncthreads();
        for (u32 i = threadIdx.x; i < ROWS * (CHUNK / 4); i += WARPS * 32) {
            const u32 r = i / (CHUNK / 4), at = i % (CHUNK / 4);
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first_row + r < rows && at < vectors) {
                const float4 from = reinterpret_cast<const float4*>(residual + u64(first_row + r) * width + start)[at];
                const float4 w = reinterpret_cast<const float4*>(norm + start)[at];
                const float scale = scales[r];
                v = make_float4(w.x * (from.x * scale), w.y * (from.y * scale), w.z * (from.z * scale), w.w * (from.w * scale));
            }
            x[r][at] = v;
        }
        __syncthreads();
        for (u32 at = lane; at < vectors; at += 32) {
            float4 w[EXPERTS];
#pragma unroll
            for (u32 e = 0; e < EXPERTS; e++) {
                const bool present = first + e < outputs;
                w[e] = present ? reinterpret_cast<const float4*>(weight + u64(first + e) * width + start)[at]
                               : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                const float4 v = x[r][at];
#pragma unroll
                for (u32 e = 0; e < EXPERTS; e++) {
                    float sum = sums[e][r];
                    sum = fmaf(w[e].x, v.x, sum);
                    sum = fmaf(w[e].y, v.y, sum);
                    sum = fmaf(w[e].z, v.z, sum);
                    sums[e][r] = fmaf(w[e].w, v.w, sum);
                }
            }
        }
    }
#pragma unroll
    for (u32 e = 0; e < EXPERTS; e++)
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            const float sum = warp_sum(sums[e][r]);
            if (lane == 0 && first + e < outputs && first_row + r < rows) logits[u64(first_row + r) * outputs + first + e] = sum;
        }
}

// residual: f32 [rows, width], norm: f32 [width], weight: f32 [outputs, width], logits: f32 [rows, outputs]; width is a
// multiple of 8. Grid (outputs by 4, rows by 4), 128 threads: enough blocks for the few rows of a decode step.
extern "C" __global__ void __launch_bounds__(128) router_logits_of_few(float* __restrict__ logits, const float* __restrict__ residual,
                                                                       const float* __restrict__ norm, const float* __restrict__ weight,
                                                                       u32 rows, u32 width, u32 outputs, float epsilon) {
    multiply_router<4, 4, 1>(logits, residual, norm, weight, rows, width, outputs, epsilon);
}

// The same bits. Grid (outputs by 32, rows by 16), 256 threads: each number read is used more often.
extern "C" __global__ void __launch_bounds__(256, 1) router_logits_of_many(float* __restrict__ logits, const float* __restrict__ residual,
                                                                        const float* __restrict__ norm, const float* __restrict__ weight,
                                                                        u32 rows, u32 width, u32 outputs, float epsilon) {
    multiply_router<8, 16, 4>(logits, residual, norm, weight, rows, width, outputs, epsilon);
}

// --- The choice.

constexpr u32 SOFTMAX = 0, SIGMOID = 1, CHOSEN_SOFTMAX = 2;
constexpr u32 ROUTE_WARPS = 4;
constexpr u32 EXPERTS_MAX = 1024;

__device__ inline bool is_nan(float x) { return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u; }

// e^x; 0 for NaN.
__device__ inline float power(float x) { return is_nan(x) ? 0.0f : exp2_approx(LOG2_E * x); }

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + power(-x)); }

// Larger for larger numbers, and never 0. NaN comes last.
__device__ inline u32 key_of(float rank) {
    // Zeros are equal.
    const u32 bits = __float_as_uint(rank + 0.0f);
    if (is_nan(rank)) return 1;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float rank_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Larger for larger keys, and for lower indices among equal ones.
__device__ inline u64 entry_of(u32 key, u32 index) { return u64(key) << 32 | (0xffffffffu - index); }

// The index of the largest of the lanes' entries; every lane gets it.
__device__ inline u32 best_of_warp(u64 best) {
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, step));
    return 0xffffffffu - u32(best);
}

// Excludes all experts but those of the best groups: those with the largest sums of their two best ranks, the lower among equals.
__device__ inline void keep_best_groups(u32* keys, u32 experts, u32 groups, u32 groups_chosen, u32 lane) {
    const u32 size = experts / groups;
    u32 key = 0;
    if (lane < groups) {
        float best = NEG_INFINITY, second = NEG_INFINITY;
        for (u32 i = 0; i < size; i++) {
            const float rank = rank_of(keys[lane * size + i]);
            if (rank > best) {
                second = best;
                best = rank;
            } else if (rank > second) {
                second = rank;
            }
        }
        key = key_of(best + second);
    }
    u32 kept = 0;
    for (u32 i = 0; i < groups_chosen; i++) {
        const u32 group = best_of_warp(entry_of(key, lane));
        if (lane == group) key = 0;
        kept |= 1u << group;
    }
    __syncwarp();
    for (u32 e = lane; e < experts; e += 32)
        if (!(kept >> (e / size) & 1)) keys[e] = 0;
    __syncwarp();
}

// The arithmetic is that of `model/src/cpu/router.rs`. A warp for each row. logits: f32 [rows, stride], of which the first
// `experts` are the experts'. correction: f32 [experts], added to scores for the choice alone, or null. groups: the number of groups of
// consecutive experts, all of the same size, up to 32; 1 for none. positions: u32 [rows], or null; rows at NO_POSITION get no experts.
// out: chosen_experts: u32 and weights: f32, [rows, chosen], a row's experts ascending. experts up to EXPERTS_MAX, chosen
// up to 32. Grid (rows by ROUTE_WARPS), 128 threads.
extern "C" __global__ void __launch_bounds__(ROUTE_WARPS * 32)
    experts_route(u32* __restrict__ chosen_experts, float* __restrict__ weights, const float* __restrict__ logits,
                  const float* __restrict__ correction, const u32* __restrict__ positions, u32 rows, u32 stride, u32 experts, u32 chosen,
                  u32 scoring, u32 groups, u32 groups_chosen, u32 is_normalized, float factor) {
    __shared__ float all_scores[ROUTE_WARPS][EXPERTS_MAX];
    __shared__ u32 all_keys[ROUTE_WARPS][EXPERTS_MAX];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * ROUTE_WARPS + warp;
    if (row >= rows) return;
    const u64 out = u64(row) * chosen;
    if (positions && positions[row] == NO_POSITION) {
        if (lane < chosen) {
            chosen_experts[out + lane] = NO_EXPERT;
            weights[out + lane] = 0.0f;
        }
        return;
    }
    const float* of_row = logits + u64(row) * stride;
    float* scores = all_scores[warp];
    u32* keys = all_keys[warp];
    float total = 1.0f;
    if (scoring == SOFTMAX) {
        float largest = NEG_INFINITY;
        for (u32 e = lane; e < experts; e += 32) largest = fmaxf(largest, of_row[e]);
        largest = warp_max(largest);
        float sum = 0.0f;
        for (u32 e = lane; e < experts; e += 32) {
            const float score = power(of_row[e] - largest);
            scores[e] = score;
            sum += score;
        }
        total = warp_sum(sum);
    } else {
        for (u32 e = lane; e < experts; e += 32) scores[e] = scoring == SIGMOID ? sigmoid(of_row[e]) : of_row[e];
    }
    for (u32 e = lane; e < experts; e += 32) keys[e] = key_of(correction ? scores[e] / total + correction[e] : scores[e]);
    __syncwarp();
    if (groups > 1) keep_best_groups(keys, experts, groups, groups_chosen, lane);

    // Lane i has choice i.
    u32 expert = NO_EXPERT;
    float weight = 0.0f;
    for (u32 i = 0; i < chosen; i++) {
        u64 best = 0;
        for (u32 e = lane; e < experts; e += 32) best = max(best, entry_of(keys[e], e));
        const u32 taken = best_of_warp(best);
        if (lane == taken % 32) keys[taken] = 0;
        if (lane == i) {
            expert = taken;
            weight = scores[taken] / total;
        }
        __syncwarp();
    }
    if (scoring == CHOSEN_SOFTMAX) {
        // The first choice has the largest logit.
        const float largest = __shfl_sync(ALL_LANES, weight, 0);
        const float score = power(weight - largest);
        float sum = 0.0f;
        for (u32 i = 0; i < chosen; i++) sum += __shfl_sync(ALL_LANES, score, i);
        weight = score / sum;
    }
    if (is_normalized) {
        float sum = 0.0f;
        for (u32 i = 0; i < chosen; i++) sum += __shfl_sync(ALL_LANES, weight, i);
        // Scores that are all 0 stay 0.
        weight /= fmaxf(sum, 1.17549435e-38f);
    }
    weight *= factor;
    u32 place = 0;
    for (u32 i = 0; i < chosen; i++) place += __shfl_sync(ALL_LANES, expert, i) < expert;
    if (lane < chosen) {
        chosen_experts[out + place] = expert;
        weights[out + place] = weight;
    }
}

// --- The order by expert.

// A block for each expert, which computes its results from the entries alone, so that blocks do not wait for each other: the number of
// entries with lower experts, and its own entries, in order. entries: u32 [count], an expert or NO_EXPERT each.
// offsets: u32 [experts + 1], the first slot of each expert; rows_by_slot: u32 [count]; slots: u32 [count], of entries with an
// expert. Whole warps, up to 32.
extern "C" __global__ void __launch_bounds__(1024) experts_sort(u32* __restrict__ offsets, u32* __restrict__ rows_by_slot,
                                                                u32* __restrict__ slots, const u32* __restrict__ entries, u32 count,
                                                                u32 chosen) {
    __shared__ u32 own_of_warps[32], lower_of_warps[32];
    const u32 expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const u32 each = (count + blockDim.x - 1) / blockDim.x;
    const u32 first = min(threadIdx.x * each, count), end = min(first + each, count);
    u32 own = 0, lower = 0;
    for (u32 i = first; i < end; i++) {
        own += entries[i] == expert;
        lower += entries[i] < expert;
    }
    // The entries of this thread and of those before it in the warp.
    u32 upto = own;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 before = __shfl_up_sync(ALL_LANES, upto, step);
        if (lane >= step) upto += before;
    }
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) lower += __shfl_xor_sync(ALL_LANES, lower, step);
    if (lane == 31) {
        own_of_warps[warp] = upto;
        lower_of_warps[warp] = lower;
    }
    __syncthreads();
    u32 start = 0, before = 0, all = 0;
    for (u32 i = 0; i < warps; i++) {
        start += lower_of_warps[i];
        before += i < warp ? own_of_warps[i] : 0;
        all += own_of_warps[i];
    }
    if (threadIdx.x == 0) {
        offsets[expert] = start;
        if (expert + 1 == gridDim.x) offsets[expert + 1] = start + all;
    }
    u32 slot = start + before + upto - own;
    for (u32 i = first; i < end; i++) {
        if (entries[i] != expert) continue;
        rows_by_slot[slot] = i / chosen;
        slots[i] = slot;
        slot++;
    }
}

// --- The sum.

// out[r] = sum of weights[r][i] * outputs[slots[r][i]], in ascending order of i, and then the shared expert's output, if there
// is one, times the sigmoid of its logit, which is the last of the row's `stride` ones if `is_gated`. Zeros for a padding row.
// out, shared: bf16 [rows, width], outputs: bf16 [slots, width]; width is a multiple of 8. Grid (width / 8 over the block,
// rows).
extern "C" __global__ void experts_combine(bf16* __restrict__ out, const bf16* __restrict__ outputs, const u32* __restrict__ experts,
                                           const float* __restrict__ weights, const u32* __restrict__ slots,
                                           const bf16* __restrict__ shared, const float* __restrict__ logits, u32 width, u32 chosen,
                                           u32 stride, u32 is_gated) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width / 8) return;
    const u64 row = blockIdx.y;
    float sums[8] = {};
    if (experts[row * chosen] != NO_EXPERT) {
        for (u32 choice = 0; choice < chosen; choice++) {
            const float weight = weights[row * chosen + choice];
            float numbers[8];
            unpack8(reinterpret_cast<const uint4*>(outputs + u64(slots[row * chosen + choice]) * width)[i], numbers);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] = fmaf(weight, numbers[j], sums[j]);
        }
        if (shared) {
            const float weight = is_gated ? sigmoid(logits[row * stride + stride - 1]) : 1.0f;
            float numbers[8];
            unpack8(reinterpret_cast<const uint4*>(shared + row * width)[i], numbers);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] = fmaf(weight, numbers[j], sums[j]);
        }
    }
    reinterpret_cast<uint4*>(out + row * width)[i] = pack8(sums);
}

// Split-KV decode attention: one new row per sequence over paged K and V, cut along the sequence so that few long
// sequences also keep the device busy (Dao et al., "Flash-Decoding", 2023). The query heads that share a KV head are
// packed into one tensor-core operand.
//
// A part has 256 positions if the row sees up to 16,384, else 512: it depends on the row alone, and so do the row's bits.
// The parts of all rows are one list, which blocks of threads share out: a long row makes it longer by its own parts only.
// Each warp of a block takes every fourth KV block of a part, and loads its K and V straight into registers, in the
// tensor cores' order. The trick: a product's inner dimension may be permuted freely, as long as both operands are:
//
//   scores (positions x heads) = K (positions x HEAD_DIM) Q^T: a lane loads 8 neighbouring numbers of a row of K at once
//     and uses them as two steps' operands; Q is laid out alike.
//   out (HEAD_DIM x heads) = V^T (HEAD_DIM x positions) P^T: a lane loads 8 neighbouring numbers of rows 2t and 2t+1 of V
//     and pairs them up; again it is free which number of V is which row of the operand. The first product leaves P as
//     positions x heads, and lanes transpose it.
//
// 8-bit integers become bf16 on the way into registers, which is exact. K's scales multiply the scores, V's the weights.
//
// q: bf16, row r at q + r q_stride, [heads, HEAD_DIM]. kv: one layer, as common.cuh says.
// tables: u32 [rows, table_stride]. positions: u32 [rows], of the row itself, whose K and V are already written; a row
// at NO_POSITION gets zeros. window: positions seen, including the row's own; 2^31 for all. scale_log2: log2(e) /
// sqrt(HEAD_DIM). cap_log2, sinks: as common.cuh says.
// out: bf16 [rows, heads, HEAD_DIM]. A row with several parts writes them to part_out: f32 [rows, heads, parts_max,
// HEAD_DIM] and part_state: (maximum, sum) [rows, heads, parts_max], for attention_combine.
// Grid (any number of parts at a time, kv_heads * ceil(group / 8)), 128 threads. HEAD_DIM is a multiple of 16, up to 256.
#include "common.cuh"

constexpr u32 WARPS = 4;
constexpr u32 THREADS = WARPS * 32;
// Query heads per operand.
constexpr u32 HEADS = 8;
constexpr u32 SHORT_PART = 256, LONG_PART = 512, LONG_FROM = 16384;

// Numbers that a lane loads at once, and that its group of lanes loads: 4 lanes for a row of K, 8 for V.
constexpr u32 K_VEC = HEAD_DIM % 32 == 0 ? 8 : 4;
constexpr u32 K_CHUNK = 4 * K_VEC;
constexpr u32 K_LOADS = HEAD_DIM / K_CHUNK;
constexpr u32 V_VEC = HEAD_DIM % 64 == 0 ? 8 : HEAD_DIM % 32 == 0 ? 4 : 2;
constexpr u32 V_CHUNK = 8 * V_VEC;
constexpr u32 V_LOADS = HEAD_DIM / V_CHUNK;
// Operand tiles of 16 rows in V^T.
constexpr u32 V_TILES = HEAD_DIM / 16;

// Loads `PAIRS` pairs of bf16 in one access that bypasses the first-level cache: they are read only once.
template <u32 PAIRS>
__device__ inline void load(u32 (&to)[PAIRS], const bf16* from) {
    if constexpr (PAIRS == 4) {
        const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from));
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if constexpr (PAIRS == 2) {
        const uint2 x = __ldcs(reinterpret_cast<const uint2*>(from));
        to[0] = x.x, to[1] = x.y;
    } else {
        to[0] = __ldcs(reinterpret_cast<const u32*>(from));
    }
}

// Loads numbers of K or V likewise, from number `at` of a head.
template <u32 PAIRS>
__device__ inline void load_kv(u32 (&to)[PAIRS], const u8* head, u32 at) {
    const u8* from = head + KV_SCALES_BYTES + at * KV_NUMBER_BYTES;
    if constexpr (!KV_INT8) {
        load(to, reinterpret_cast<const bf16*>(from));
    } else if constexpr (PAIRS == 4) {
        const uint2 x = __ldcs(reinterpret_cast<const uint2*>(from)), low = integers4_to_bf16(x.x), high = integers4_to_bf16(x.y);
        to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
    } else if constexpr (PAIRS == 2) {
        const uint2 x = integers4_to_bf16(__ldcs(reinterpret_cast<const u32*>(from)));
        to[0] = x.x, to[1] = x.y;
    } else {
        to[0] = integers_to_bf16(__byte_perm(__ldcs(reinterpret_cast<const unsigned short*>(from)), 0, 0x4140));
    }
}

// The scales of a head's positions g and g + 8.
__device__ inline void load_scales(float (&to)[2], const u8* head, u32 g) {
    const float* scales = reinterpret_cast<const float*>(head);
    to[0] = __ldcs(scales + g), to[1] = __ldcs(scales + g + 8);
}

// The positions that a row sees, and its parts: the same in both kernels.
struct Row {
    u32 first, end, part, part_first, parts;

    __device__ Row(u32 position, u32 window) {
        end = position + 1;
        first = window < end ? end - window : 0;
        part = end > LONG_FROM ? LONG_PART : SHORT_PART;
        part_first = first / part;
        parts = (end + part - 1) / part - part_first;
    }
};

// Walks the list of all rows' parts. A row at NO_POSITION has one, which has no positions.
struct List {
    const u32* positions;
    u32 rows, window;
    // The number of parts of the rows before the 32 rows that the lanes hold.
    u32 at = 0, before = 0;

    // Finds the row at `place` in the list, which is not below the last place, and the index of its part; returns `rows` beyond the list.
    // All lanes get the same result.
    __device__ u32 find(u32 place, u32& part) {
        const u32 lane = threadIdx.x % 32;
        for (; at < rows; at += 32) {
            const u32 own = at + lane;
            u32 parts = 0;
            if (own < rows) parts = positions[own] == NO_POSITION ? 1 : Row(positions[own], window).parts;
            u32 end = parts;
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 lower = __shfl_up_sync(ALL_LANES, end, step);
                if (lane >= step) end += lower;
            }
            const u32 beyond = __ballot_sync(ALL_LANES, place - before < end);
            if (beyond) {
                const u32 found = __ffs(beyond) - 1;
                part = place - before - __shfl_sync(ALL_LANES, end - parts, found);
                return at + found;
            }
            before += __shfl_sync(ALL_LANES, end, 31);
        }
        return rows;
    }
};

// A warp's running result: the columns are this lane's two heads.
struct State {
    float max[2], sum[2];
    // (numbers 2 j and 2 j + 1 of V_CHUNK's V_VEC) x two heads: [number][head].
    float out[V_TILES][4];
};

// Scores of a block's 16 positions. c[0], c[1]: position g, this lane's heads; c[2], c[3]: position g + 8.
__device__ inline void scores(float (&c)[4], const u32 (&q)[K_LOADS][K_VEC / 2], const u32 (&low)[K_LOADS][K_VEC / 2],
                              const u32 (&high)[K_LOADS][K_VEC / 2]) {
#pragma unroll
    for (u32 i = 0; i < K_LOADS; i++)
#pragma unroll
        for (u32 j = 0; j < K_VEC / 2; j += 2) {
            const u32 a[4] = {low[i][j], high[i][j], low[i][j + 1], high[i][j + 1]};
            mma(c, a, q[i][j], q[i][j + 1]);
        }
}

// Adds a block's scores to the running softmax: `c` becomes the exponentials, in units of 2^max.
__device__ inline void absorb(State& state, float (&c)[4], float scale_log2) {
    float max[2];
    bool grown = false;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        max[h] = fmaxf(c[h], c[h + 2]);
#pragma unroll
        for (u32 step = 4; step < 32; step *= 2) max[h] = fmaxf(max[h], __shfl_xor_sync(ALL_LANES, max[h], step));
        max[h] = fmaxf(state.max[h], max[h] * scale_log2);
        grown |= max[h] > state.max[h];
    }
    if (__any_sync(ALL_LANES, grown)) {
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const float factor = exp2_approx(state.max[h] - max[h]);
            state.max[h] = max[h];
            state.sum[h] *= factor;
#pragma unroll
            for (u32 tile = 0; tile < V_TILES; tile++) {
                state.out[tile][h] *= factor;
                state.out[tile][h + 2] *= factor;
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        c[i] = exp2_approx(c[i] * scale_log2 - state.max[i % 2]);
        state.sum[i % 2] += c[i];
    }
}

// v[n]: this lane's numbers of positions 2t, 2t+1, 2t+8, 2t+9.
__device__ inline void add_values(State& state, const float (&c)[4], const u32 (&v)[4][V_LOADS][V_VEC / 2]) {
    const u32 b0 = transpose8x8(pack(c[0], c[1])), b1 = transpose8x8(pack(c[2], c[3]));
#pragma unroll
    for (u32 i = 0; i < V_LOADS; i++)
#pragma unroll
        for (u32 j = 0; j < V_VEC / 2; j++) {
            const u32 a[4] = {__byte_perm(v[0][i][j], v[1][i][j], 0x5410), __byte_perm(v[0][i][j], v[1][i][j], 0x7632),
                              __byte_perm(v[2][i][j], v[3][i][j], 0x5410), __byte_perm(v[2][i][j], v[3][i][j], 0x7632)};
            mma(state.out[i * (V_VEC / 2) + j], a, b0, b1);
        }
}

// A warp's result, waiting for those of the other warps: [head].
struct Shared {
    float out[WARPS][HEADS][HEAD_DIM];
    float max[WARPS][HEADS];
    float sum[WARPS][HEADS];
};

__device__ inline void share(Shared& shared, const State& state, u32 warp, u32 g, u32 t) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        float sum = state.sum[h];
#pragma unroll
        for (u32 step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        const u32 head = 2 * t + h;
        if (g == 0) {
            shared.max[warp][head] = state.max[h];
            shared.sum[warp][head] = sum;
        }
#pragma unroll
        for (u32 i = 0; i < V_LOADS; i++)
#pragma unroll
            for (u32 j = 0; j < V_VEC / 2; j++) {
                const float* c = state.out[i * (V_VEC / 2) + j];
                float* to = &shared.out[warp][head][i * V_CHUNK + g * V_VEC + 2 * j];
                *reinterpret_cast<float2*>(to) = make_float2(c[h], c[h + 2]);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM <= 128 ? 3 : 2)
    attention_decode(bf16* __restrict__ out, float* __restrict__ part_out, float2* __restrict__ part_state, const bf16* __restrict__ q, u32 q_stride,
                     const u8* __restrict__ kv, const u32* __restrict__ tables, u32 table_stride, const u32* __restrict__ positions, u32 rows, u32 heads,
                     u32 kv_heads, u32 window, float scale_log2, u32 parts_max, float cap_log2, const float* __restrict__ sinks) {
    __shared__ Shared shared;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 group = heads / kv_heads, tiles = (group + HEADS - 1) / HEADS;
    const u32 kv_head = blockIdx.y / tiles;
    // `present` of these heads exist.
    const u32 first_head = kv_head * group + blockIdx.y % tiles * HEADS;
    const u32 present = min(HEADS, (kv_head + 1) * group - first_head);
    const u8* keys = kv + u64(kv_head) * KV_HEAD_BYTES;
    const u64 block_bytes = 2 * u64(kv_heads) * KV_HEAD_BYTES;
    const u64 values_after = u64(kv_heads) * KV_HEAD_BYTES;

    List list = {positions, rows, window};
    u32 index, part;
    for (u32 place = blockIdx.x; (index = list.find(place, part)) < rows; place += gridDim.x) {
        bf16* row_out = out + (u64(index) * heads + first_head) * HEAD_DIM;
        if (positions[index] == NO_POSITION) {
            for (u32 i = threadIdx.x; i < present * HEAD_DIM; i += THREADS) row_out[i] = 0;
            continue;
        }
        const Row row(positions[index], window);
        const u32* table = tables + u64(index) * table_stride;
        u32 queries[K_LOADS][K_VEC / 2] = {};
        if (g < present) {
            const bf16* query = q + u64(index) * q_stride + (first_head + g) * HEAD_DIM + t * K_VEC;
#pragma unroll
            for (u32 i = 0; i < K_LOADS; i++) load(queries[i], query + i * K_CHUNK);
        }

        const u32 part_start = (row.part_first + part) * row.part;
        const u32 start = max(part_start, row.first), end = min(part_start + row.part, row.end);
        const u32 first_block = part_start / BLOCK, end_block = (end + BLOCK - 1) / BLOCK;
        // A part has up to 32 blocks: one table entry per lane, all fetched at once.
        const u32 entry = first_block + lane < end_block ? table[first_block + lane] : 0;

        State state = {{NEG_INFINITY, NEG_INFINITY}, {0.0f, 0.0f}, {}};
        for (u32 block = start / BLOCK + (warp + WARPS - (start / BLOCK) % WARPS) % WARPS; block < end_block; block += WARPS) {
            const u8* k = keys + __shfl_sync(ALL_LANES, entry, block - first_block) * block_bytes;
            const u8* v = k + values_after;
            u32 low[K_LOADS][K_VEC / 2], high[K_LOADS][K_VEC / 2], pairs[4][V_LOADS][V_VEC / 2];
#pragma unroll
            for (u32 i = 0; i < K_LOADS; i++) {
                load_kv(low[i], k, g * HEAD_DIM + i * K_CHUNK + t * K_VEC);
                load_kv(high[i], k, (g + 8) * HEAD_DIM + i * K_CHUNK + t * K_VEC);
            }
#pragma unroll
            for (u32 n = 0; n < 4; n++)
#pragma unroll
                for (u32 i = 0; i < V_LOADS; i++) load_kv(pairs[n][i], v, (2 * t + n % 2 + n / 2 * 8) * HEAD_DIM + i * V_CHUNK + g * V_VEC);
            float k_scales[2] = {1.0f, 1.0f}, v_scales[2] = {1.0f, 1.0f};
            if constexpr (KV_INT8) {
                load_scales(k_scales, k, g);
                load_scales(v_scales, v, g);
            }

            float c[4] = {};
            scores(c, queries, low, high);
#pragma unroll
            for (u32 n = 0; n < 4; n++) c[n] *= k_scales[n / 2];
            cap_scores(c, scale_log2, cap_log2);
            const u32 base = block * BLOCK;
            if (base < start || base + BLOCK > end) {
                // The contents of an unseen position must not matter, not even NaN.
#pragma unroll
                for (u32 n = 0; n < 4; n++) {
                    const u32 of_score = base + g + n / 2 * 8, of_value = base + 2 * t + n % 2 + n / 2 * 8;
                    if (of_score < start || of_score >= end) c[n] = NEG_INFINITY, v_scales[n / 2] = 0.0f;
                    if (of_value < start || of_value >= end) {
#pragma unroll
                        for (u32 i = 0; i < V_LOADS; i++)
#pragma unroll
                            for (u32 j = 0; j < V_VEC / 2; j++) pairs[n][i][j] = 0;
                    }
                }
            }
            absorb(state, c, scale_left(scale_log2));
#pragma unroll
            for (u32 n = 0; n < 4; n++) c[n] *= v_scales[n / 2];
            add_values(state, c, pairs);
        }

        share(shared, state, warp, g, t);
        __syncthreads();
        for (u32 i = threadIdx.x; i < present * HEAD_DIM; i += THREADS) {
            const u32 head = i / HEAD_DIM, d = i % HEAD_DIM;
            float max = shared.max[0][head];
#pragma unroll
            for (u32 w = 1; w < WARPS; w++) max = fmaxf(max, shared.max[w][head]);
            float sum = 0.0f, total = 0.0f;
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) {
                const float factor = exp2_approx(shared.max[w][head] - max);
                sum += factor * shared.sum[w][head];
                total += factor * shared.out[w][head][d];
            }
            if (row.parts == 1) {
                row_out[i] = bf16(pack(total / with_sink(sum, max, sinks, first_head + head), 0.0f));
            } else {
                const u64 at = (u64(index) * heads + first_head + head) * parts_max + part;
                part_out[at * HEAD_DIM + d] = total;
                if (d == 0) part_state[at] = make_float2(max, sum);
            }
        }
        __syncthreads();
    }
}

constexpr u32 COMBINE_THREADS = 128;
// Threads that share a row's numbers, four each; and the number of groups of such threads, which share the row's parts.
constexpr u32 COMBINE_LANES = HEAD_DIM / 4;
constexpr u32 COMBINE_GROUPS = COMBINE_THREADS / COMBINE_LANES;

// Combines the parts of each row and head, in one order. Grid (heads, rows), 128 threads.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    attention_combine(bf16* __restrict__ out, const float* __restrict__ part_out, const float2* __restrict__ part_state,
                      const u32* __restrict__ positions, u32 heads, u32 window, u32 parts_max, const float* __restrict__ sinks) {
    __shared__ float4 totals[COMBINE_GROUPS][COMBINE_LANES];
    __shared__ float sums[COMBINE_GROUPS];
    const u32 index = blockIdx.y;
    if (positions[index] == NO_POSITION) return;
    const u32 parts = Row(positions[index], window).parts;
    if (parts == 1) return;
    const u64 at = u64(index) * heads + blockIdx.x;
    part_state += at * parts_max;
    part_out += at * parts_max * HEAD_DIM;
    float max = NEG_INFINITY;
    for (u32 part = threadIdx.x; part < parts; part += COMBINE_THREADS) max = fmaxf(max, part_state[part].x);
    max = block_max(max);

    const u32 group = threadIdx.x / COMBINE_LANES, lane = threadIdx.x % COMBINE_LANES;
    if (group < COMBINE_GROUPS) {
        float sum = 0.0f;
        float4 total = {};
#pragma unroll 4
        for (u32 part = group; part < parts; part += COMBINE_GROUPS) {
            const float2 state = part_state[part];
            const float4 x = reinterpret_cast<const float4*>(part_out + part * HEAD_DIM)[lane];
            const float factor = exp2_approx(state.x - max);
            sum += factor * state.y;
            total.x += factor * x.x, total.y += factor * x.y, total.z += factor * x.z, total.w += factor * x.w;
        }
        totals[group][lane] = total;
        if (lane == 0) sums[group] = sum;
    }
    __syncthreads();
    if (group > 0) return;
    float sum = 0.0f;
    float4 total = {};
#pragma unroll
    for (u32 i = 0; i < COMBINE_GROUPS; i++) {
        const float4 x = totals[i][lane];
        sum += sums[i];
        total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
    }
    sum = with_sink(sum, max, sinks, blockIdx.x);
    reinterpret_cast<uint2*>(out + at * HEAD_DIM)[lane] = make_uint2(pack(total.x / sum, total.y / sum), pack(total.z / sum, total.w / sum));
}

// Prefill attention: many rows of a sequence over paged K and V, on tensor cores (Dao, "FlashAttention-2", 2023), for
// chunked prefill behind a cached prefix and for the tails that a decode worker computes. Runs on any device from sm_80
// on; Hopper has a faster kernel for the usual head sizes.
//
// A block of threads computes up to TILE_ROWS rows of one query head over the sequence's K and V, TILE_POSITIONS at a
// time, in absolute order from a multiple of TILE_POSITIONS. Hidden positions contribute exactly nothing, so a row's
// bits do not depend on how the prompt was cut into chunks. The tile of V arrives while scores are computed, the next
// tile of K while V is added up. (8-bit integers do not arrive meanwhile: the threads wait for them to convert them to bf16.)
//
// q: bf16, row r at q + r q_stride, [heads, HEAD_DIM]. kv: one layer, as common.cuh says.
// tables: u32 [sequences, table_stride]. tiles: (sequence, first row in q and out, its position, rows), rows at
// consecutive positions; their K and V, and those of all positions before, are already written. window: positions seen,
// including the row's own; 2^31 for all. scale_log2: log2(e) / sqrt(HEAD_DIM). cap_log2, sinks: as common.cuh
// says. out: bf16 [rows, heads, HEAD_DIM].
// Grid (heads, tiles), 128 threads, sizeof(Shared) of dynamic shared memory. HEAD_DIM is a multiple of 16, up to 256.
#include "common.cuh"

constexpr u32 WARPS = 4;
constexpr u32 THREADS = WARPS * 32;
// Operand tiles of 16 rows per warp: two share each read of K and V, as long as the sums fit the registers.
constexpr u32 M_TILES = HEAD_DIM <= 128 ? 2 : 1;
constexpr u32 WARP_ROWS = M_TILES * 16;
constexpr u32 TILE_ROWS = WARPS * WARP_ROWS;
// Positions whose scores fit the registers.
constexpr u32 TILE_POSITIONS = HEAD_DIM > 80 && M_TILES == 2 ? 32 : 64;
constexpr u32 SCORE_TILES = TILE_POSITIONS / 8;
constexpr u32 OUT_TILES = HEAD_DIM / 8;
// Rows in shared memory are an odd number of 16 bytes apart: eight neighbours then lie in different banks.
constexpr u32 STRIDE = HEAD_DIM + 8;
constexpr u32 VECTORS = HEAD_DIM / 8;

struct Tile {
    u32 sequence, row, position, rows;
};

struct Shared {
    bf16 q[TILE_ROWS][STRIDE];
    bf16 k[TILE_POSITIONS][STRIDE];
    bf16 v[TILE_POSITIONS][STRIDE];
};

// A warp's sums. A lane has rows g and g + 8 of each operand tile.
struct State {
    float max[M_TILES][2], sum[M_TILES][2];
    float out[M_TILES][OUT_TILES][4];
};

// Starts copying the queries of a tile; zeros for missing rows.
__device__ inline void load_queries(Shared& shared, const bf16* q, u32 q_stride, u32 rows) {
    for (u32 i = threadIdx.x; i < TILE_ROWS * VECTORS; i += THREADS) {
        const u32 row = i / VECTORS, vector = i % VECTORS;
        const bool present = row < rows;
        copy16_async(&shared.q[row][vector * 8], q + u64(present ? row : 0) * q_stride + vector * 8, present);
    }
}

// Starts copying a head's K or V, at `head` in a block, for positions first..first + TILE_POSITIONS; zeros from `end`
// on.
__device__ inline void load_tile(bf16 (&to)[TILE_POSITIONS][STRIDE], const u8* kv, u32 head, u32 block_bytes, const u32* table, u32 first, u32 end) {
#pragma unroll
    for (u32 round = 0; round < (TILE_POSITIONS * VECTORS + THREADS - 1) / THREADS; round++) {
        const u32 i = round * THREADS + threadIdx.x;
        if (TILE_POSITIONS * VECTORS % THREADS != 0 && i >= TILE_POSITIONS * VECTORS) break;
        const u32 row = i / VECTORS, vector = i % VECTORS;
        const u32 position = first + row;
        const bool present = position < end;
        const u32 block = present ? table[position / BLOCK] : 0;
        copy8_of_kv(&to[row][vector * 8], kv + u64(block) * block_bytes + head, position % BLOCK, vector * 8, present);
    }
}

// scores = Q K^T for this warp's rows.
__device__ inline void score(float (&scores)[M_TILES][SCORE_TILES][4], const Shared& shared, u32 warp_row, u32 lane) {
#pragma unroll
    for (u32 step = 0; step < HEAD_DIM / 16; step++) {
        u32 a[M_TILES][4];
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++) load_matrices(a[m], &shared.q[warp_row + m * 16 + lane % 16][step * 16 + lane / 16 * 8]);
#pragma unroll
        for (u32 n = 0; n < SCORE_TILES; n += 2) {
            u32 b[4];
            load_matrices(b, &shared.k[n * 8 + lane % 8 + lane / 16 * 8][step * 16 + lane / 8 % 2 * 8]);
#pragma unroll
            for (u32 m = 0; m < M_TILES; m++) {
                mma(scores[m][n], a[m], b[0], b[1]);
                mma(scores[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Masks hidden positions with minus infinity. `row`: position of the lane's first row; `column`: of its first score.
__device__ inline void mask(float (&scores)[M_TILES][SCORE_TILES][4], u32 row, u32 column, u32 window) {
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++)
#pragma unroll
        for (u32 n = 0; n < SCORE_TILES; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 at = row + m * 16 + i / 2 * 8, seen = column + n * 8 + i % 2;
                // Future positions wrap around to large unsigned numbers.
                if (at - seen >= window) scores[m][n][i] = NEG_INFINITY;
            }
}

// Scores to exponentials in units of 2^max, which may grow.
__device__ inline void absorb(State& state, float (&scores)[M_TILES][SCORE_TILES][4], float scale_log2) {
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float max = NEG_INFINITY;
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++) max = fmaxf(max, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 1));
            max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 2));
            max = fmaxf(state.max[m][half], max * scale_log2);
            // A row that has not seen any position yet has no maximum: any value will do, as its exponentials are zeros.
            const float unit = max == NEG_INFINITY ? 0.0f : max;
            const float factor = exp2_approx(state.max[m][half] - unit);
            state.max[m][half] = max;
            state.sum[m][half] *= factor;
#pragma unroll
            for (u32 n = 0; n < OUT_TILES; n++) {
                state.out[m][n][2 * half] *= factor;
                state.out[m][n][2 * half + 1] *= factor;
            }
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++)
#pragma unroll
                for (u32 i = 2 * half; i < 2 * half + 2; i++) {
                    scores[m][n][i] = exp2_approx(scores[m][n][i] * scale_log2 - unit);
                    state.sum[m][half] += scores[m][n][i];
                }
        }
}

// out += P V. The scores already have the layout of a first operand.
__device__ inline void add_values(State& state, const float (&p)[M_TILES][SCORE_TILES][4], const Shared& shared, u32 lane) {
#pragma unroll
    for (u32 step = 0; step < TILE_POSITIONS / 16; step++) {
        u32 a[M_TILES][4];
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) a[m][i] = pack(p[m][2 * step + i / 2][i % 2 * 2], p[m][2 * step + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (u32 n = 0; n < OUT_TILES; n += 2) {
            u32 b[4];
            load_matrices_transposed(b, &shared.v[step * 16 + lane % 16][n * 8 + lane / 16 * 8]);
#pragma unroll
            for (u32 m = 0; m < M_TILES; m++) {
                mma(state.out[m][n], a[m], b[0], b[1]);
                mma(state.out[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_prefill(bf16* __restrict__ out, const bf16* __restrict__ q, u32 q_stride, const u8* __restrict__ kv, const u32* __restrict__ tables,
                      u32 table_stride, const Tile* __restrict__ tiles, u32 heads, u32 kv_heads, u32 window, float scale_log2, float cap_log2,
                      const float* __restrict__ sinks) {
    extern __shared__ __align__(16) u8 dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 head = blockIdx.x, kv_head = head / (heads / kv_heads);
    const Tile tile = tiles[blockIdx.y];
    const u32* table = tables + u64(tile.sequence) * table_stride;
    // The offsets of this head's K and V in a block.
    const u32 block_bytes = 2 * kv_heads * KV_HEAD_BYTES;
    const u32 keys = kv_head * KV_HEAD_BYTES, values = (kv_heads + kv_head) * KV_HEAD_BYTES;

    const u32 end = tile.position + tile.rows;
    const u32 first_seen = tile.position < window ? 0 : tile.position + 1 - window;
    const u32 warp_row = warp * WARP_ROWS, warp_position = tile.position + warp_row;
    State state;
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            state.max[m][half] = NEG_INFINITY;
            state.sum[m][half] = 0.0f;
#pragma unroll
            for (u32 n = 0; n < OUT_TILES; n++) state.out[m][n][2 * half] = state.out[m][n][2 * half + 1] = 0.0f;
        }

    const u32 first = first_seen / TILE_POSITIONS * TILE_POSITIONS;
    load_queries(shared, q + u64(tile.row) * q_stride + head * HEAD_DIM, q_stride, tile.rows);
    load_tile(shared.k, kv, keys, block_bytes, table, first, end);
    copies_commit();
    for (u32 base = first; base < end; base += TILE_POSITIONS) {
        // K is there, and no thread reads the last V any more.
        copies_wait<0>();
        __syncthreads();
        load_tile(shared.v, kv, values, block_bytes, table, base, end);
        copies_commit();

        // The last rows of the tile see further than the first.
        const bool sees = base < warp_position + WARP_ROWS;
        float scores[M_TILES][SCORE_TILES][4] = {};
        if (sees) {
            score(scores, shared, warp_row, lane);
#pragma unroll
            for (u32 m = 0; m < M_TILES; m++)
#pragma unroll
                for (u32 n = 0; n < SCORE_TILES; n++) cap_scores(scores[m][n], scale_log2, cap_log2);
        }

        // V is there, and no thread reads K any more.
        copies_wait<0>();
        __syncthreads();
        if (base + TILE_POSITIONS < end) load_tile(shared.k, kv, keys, block_bytes, table, base + TILE_POSITIONS, end);
        copies_commit();

        if (sees) {
            const bool all_seen = base + TILE_POSITIONS <= warp_position + 1 && warp_position + WARP_ROWS - 1 - base < window;
            if (!all_seen) mask(scores, warp_position + g, base + 2 * t, window);
            absorb(state, scores, scale_left(scale_log2));
            add_values(state, scores, shared, lane);
        }
    }

#pragma unroll
    for (u32 m = 0; m < M_TILES; m++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float sum = state.sum[m][half];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            sum = with_sink(sum, state.max[m][half], sinks, head);
            const u32 row = warp_row + m * 16 + half * 8 + g;
            if (row >= tile.rows) continue;
            u32* to = reinterpret_cast<u32*>(out + (u64(tile.row + row) * heads + head) * HEAD_DIM);
#pragma unroll
            for (u32 n = 0; n < OUT_TILES; n++)
                to[n * 4 + t] = pack(state.out[m][n][2 * half] / sum, state.out[m][n][2 * half + 1] / sum);
        }
}

// Prefill attention with Hopper's warpgroup products (sm_90a): attention_prefill.cu's result from the same arguments,
// for HEAD_DIM 64 and 128. After Shah et al., "FlashAttention-3", 2024.
//
// A block of threads is two warpgroups of 64 rows each. K and V pass TILE_POSITIONS at a time, in absolute order; all
// threads copy them into double buffers. A warpgroup starts the products Q K^T of this tile and P V of the last one
// together. While the tensor cores work on the first, it asks for the next K and V; while they work on the second, it
// turns the first into exponentials:
//
//   tensor cores   | S(n) = Q K(n)^T      | O += P(n-1) V(n-1)   |               | S(n+1) = ..
//   other units    | copy K(n+1) and V(n) | exponentials of S(n) | scale O, P(n) | copy ..
//
// The assembler is free to move a wait for products up to the beginning of its basic block, and everything that should
// overlap with them down behind it. So the wait for P V stands behind the loop's edge, not behind the exponentials;
// kernels/tests/sass.rs looks at the machine code.
//
// Arguments and grid: see attention_prefill.cu. 256 threads; dynamic shared memory for Q, two tiles each of K and V,
// and alignment: 5 OPERAND_BYTES + ALIGNMENT.
#include "common.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "the operand layouts below are of panels of 64 columns");

constexpr u32 THREADS = 256;
constexpr u32 TILE_ROWS = 128;
constexpr u32 TILE_POSITIONS = 128;
constexpr u32 VECTORS = HEAD_DIM / 8;
// Operands lie in panels of 64 columns, whose rows of 128 bytes are swizzled: 16-byte vector v of row r lies at v ^ (r
// % 8).
constexpr u32 ROW_BYTES = 128;
constexpr u32 PANEL_BYTES = 128 * ROW_BYTES;
constexpr u32 PANELS = HEAD_DIM / 64;
constexpr u32 OPERAND_BYTES = PANELS * PANEL_BYTES;
// The swizzle's period.
constexpr u32 ALIGNMENT = 1024;
static_assert(TILE_ROWS == 128 && TILE_POSITIONS == 128, "all operands have 128 rows");

// Numbers of a lane: of S (64 x 128 in a warpgroup), and of O.
constexpr u32 SCORES = TILE_POSITIONS / 2;
constexpr u32 OUTS = HEAD_DIM / 2;

struct Tile {
    u32 sequence, row, position, rows;
};

// --- Warpgroup products.

// An operand's descriptor: its address, and its layout's strides, all in units of 16 bytes. Groups of 8 rows of K (and Q)
// are 1,024 bytes apart, and so are those of V; V's panels, which are columns of the product, PANEL_BYTES.
__device__ inline u64 operand(u32 address) {
    constexpr u64 SWIZZLE_128_BYTES = 1ull << 62;
    constexpr u64 EIGHT_ROWS = u64(8 * ROW_BYTES / 16) << 32;
    constexpr u64 PANEL = u64(PANEL_BYTES / 16) << 16;
    return SWIZZLE_128_BYTES | EIGHT_ROWS | PANEL | ((address & 0x3ffff) >> 4);
}

// The descriptor of an operand that lies `bytes` behind another.
__device__ inline u64 behind(u64 operand, u32 bytes) { return operand + bytes / 16; }

#define NUMBERS_8(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7])
#define NUMBERS_32(x, i) NUMBERS_8(x, i), NUMBERS_8(x, i + 8), NUMBERS_8(x, i + 16), NUMBERS_8(x, i + 24)
#define NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// c (64 x 128) = a b^T, plus c if `added`: a is 64 x 16, b 128 x 16, both in shared memory.
__device__ inline void multiply_shared(float (&c)[64], u64 a, u64 b, u32 added) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"
                 : NUMBERS_32(c, 0), NUMBERS_32(c, 32)
                 : "l"(a), "l"(b), "r"(added));
}

// c (64 x HEAD_DIM) += a b: a is 64 x 16, in registers, b 16 x HEAD_DIM, in shared memory.
__device__ inline void multiply_registers(float (&c)[64], const u32* a, u64 b) {
    asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
                 : NUMBERS_32(c, 0), NUMBERS_32(c, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ inline void multiply_registers(float (&c)[32], const u32* a, u64 b) {
    asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"
                 : NUMBERS_32(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Makes earlier writes to registers visible to the products that follow.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` groups of products are in flight.
template <int PENDING>
__device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A product goes on after it was started, which the compiler does not know: keeps it from moving uses of the registers
// across this.
template <u32 N>
__device__ inline void pin(float (&x)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

template <u32 N>
__device__ inline void pin(u32 (&x)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Makes this thread's copies visible to the products of all threads that meet it at a later barrier.
__device__ inline void copies_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- Operands in shared memory.

__device__ inline u32 place(u32 row, u32 vector) {
    return vector / 8 * PANEL_BYTES + row * ROW_BYTES + (vector % 8 ^ row % 8) * 16;
}

__device__ inline void load_queries(u8* to, const bf16* q, u32 q_stride, u32 rows) {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < TILE_ROWS * VECTORS; i += THREADS) {
        const u32 row = i / VECTORS, vector = i % VECTORS;
        const bool present = row < rows;
        copy16_async(to + place(row, vector), q + u64(present ? row : 0) * q_stride + vector * 8, present);
    }
}

// All threads together copy ROWS_AT_ONCE positions of a tile, whole blocks of them. So a thread's rows are alike: they have
// one place in their blocks, and one in the swizzle.
constexpr u32 ROWS_AT_ONCE = THREADS / VECTORS;
constexpr u32 TIMES = TILE_POSITIONS / ROWS_AT_ONCE;
static_assert(ROWS_AT_ONCE % BLOCK == 0 && ROWS_AT_ONCE % 8 == 0 && TILE_POSITIONS % ROWS_AT_ONCE == 0, "a thread's rows are alike");

// The blocks of this thread's rows in the tile from position `first` on.
__device__ inline void load_blocks(u32 (&blocks)[TIMES], const u32* table, u32 first, u32 end) {
#pragma unroll
    for (u32 i = 0; i < TIMES; i++) {
        const u32 position = first + i * ROWS_AT_ONCE + threadIdx.x / VECTORS;
        blocks[i] = position < end ? table[position / BLOCK] : 0;
    }
}

// A head's K or V, at `head` in each of the blocks, for positions first..first + TILE_POSITIONS; zeros from `end` on.
__device__ inline void load_tile(u8* to, const u8* kv, u32 head, u32 block_bytes, const u32 (&blocks)[TIMES], u32 first, u32 end) {
    const u32 row = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS;
    to += place(row, vector);
#pragma unroll
    for (u32 i = 0; i < TIMES; i++) {
        const bool present = first + i * ROWS_AT_ONCE + row < end;
        copy8_of_kv(to + i * ROWS_AT_ONCE * ROW_BYTES, kv + u64(blocks[i]) * block_bytes + head, row % BLOCK, vector * 8, present);
    }
}

// --- One warpgroup. A lane has rows g and g + 8 of its warp's 16, at columns 2t and 2t + 1 of every eight.

struct State {
    float max[2], sum[2];
    float out[OUTS];
    // Exponentials of the last tile, as the first operand of P V: four registers for every 16 positions.
    u32 p[SCORES / 2];
};

// Starts S = Q K^T.
__device__ inline void start_scores(float (&scores)[SCORES], u64 q, u64 k) {
#pragma unroll
    for (u32 step = 0; step < HEAD_DIM / 16; step++) {
        // 16 columns are 32 bytes of a panel.
        const u32 offset = step / 4 * PANEL_BYTES + step % 4 * 32;
        multiply_shared(scores, behind(q, offset), behind(k, offset), step > 0);
    }
}

// Starts O += P V.
__device__ inline void start_values(State& state, u64 v) {
#pragma unroll
    for (u32 step = 0; step < TILE_POSITIONS / 16; step++) multiply_registers(state.out, state.p + 4 * step, behind(v, step * 16 * ROW_BYTES));
}

// Scores to exponentials in units of 2^max; returns the factors for all earlier sums, which are in units of the old
// one.
__device__ inline float2 absorb(State& state, float (&scores)[SCORES], float scale_log2) {
    float factors[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float max = NEG_INFINITY;
#pragma unroll
        for (u32 i = 2 * half; i < SCORES; i += 4) max = fmaxf(max, fmaxf(scores[i], scores[i + 1]));
        max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 1));
        max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 2));
        max = fmaxf(state.max[half], max * scale_log2);
        // A row that has seen nothing yet has no maximum: any will do, as its exponentials are zeros.
        const float unit = max == NEG_INFINITY ? 0.0f : max;
        factors[half] = exp2_approx(state.max[half] - unit);
        state.max[half] = max;
        state.sum[half] *= factors[half];
#pragma unroll
        for (u32 i = 2 * half; i < SCORES; i += 4) {
            scores[i] = exp2_approx(scores[i] * scale_log2 - unit);
            scores[i + 1] = exp2_approx(scores[i + 1] * scale_log2 - unit);
            state.sum[half] += scores[i] + scores[i + 1];
        }
    }
    return make_float2(factors[0], factors[1]);
}

__device__ inline void rescale(State& state, float2 factors) {
#pragma unroll
    for (u32 i = 0; i < OUTS; i++) state.out[i] *= i % 4 < 2 ? factors.x : factors.y;
}

__device__ inline void keep_exponentials(State& state, const float (&scores)[SCORES]) {
#pragma unroll
    for (u32 i = 0; i < SCORES / 2; i++) state.p[i] = pack(scores[2 * i], scores[2 * i + 1]);
}

// Masks hidden positions with minus infinity. `row`: position of the lane's first row; `column`: of its first score.
__device__ inline void mask(float (&scores)[SCORES], u32 row, u32 column, u32 window) {
#pragma unroll
    for (u32 i = 0; i < SCORES; i++) {
        const u32 at = row + i % 4 / 2 * 8, seen = column + i / 4 * 8 + i % 2;
        // Future positions wrap around to large unsigned numbers.
        if (at - seen >= window) scores[i] = NEG_INFINITY;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill_hopper(bf16* __restrict__ out, const bf16* __restrict__ q, u32 q_stride, const u8* __restrict__ kv,
                             const u32* __restrict__ tables, u32 table_stride, const Tile* __restrict__ tiles, u32 heads, u32 kv_heads, u32 window,
                             float scale_log2) {
    extern __shared__ u8 dynamic[];
    u8* queries = dynamic + (ALIGNMENT - shared_address(dynamic) % ALIGNMENT) % ALIGNMENT;
    u8* k_buffers = queries + OPERAND_BYTES;
    u8* v_buffers = k_buffers + 2 * OPERAND_BYTES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // All lanes have the same: the compiler must know it, so that descriptors are made once for the warp.
    const u32 warpgroup = __shfl_sync(ALL_LANES, warp / 4, 0);
    const u32 head = blockIdx.x, kv_head = head / (heads / kv_heads);
    const Tile tile = tiles[blockIdx.y];
    const u32* table = tables + u64(tile.sequence) * table_stride;
    const u32 block_bytes = 2 * kv_heads * KV_HEAD_BYTES;
    const u32 keys = kv_head * KV_HEAD_BYTES, values = (kv_heads + kv_head) * KV_HEAD_BYTES;

    const u32 end = tile.position + tile.rows;
    const u32 first_seen = tile.position < window ? 0 : tile.position + 1 - window;
    const u32 first = first_seen / TILE_POSITIONS * TILE_POSITIONS;
    const u32 position = tile.position + warp * 16 + g;
    const u32 warpgroup_position = tile.position + warpgroup * 64;
    const auto hide = [&](float(&scores)[SCORES], u32 base) {
        const bool all_seen = base + TILE_POSITIONS <= warpgroup_position + 1 && warpgroup_position + 63 - base < window;
        if (!all_seen) mask(scores, position, base + 2 * t, window);
    };

    State state;
    state.max[0] = state.max[1] = NEG_INFINITY;
    state.sum[0] = state.sum[1] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < OUTS; i++) state.out[i] = 0.0f;

    load_queries(queries, q + u64(tile.row) * q_stride + head * HEAD_DIM, q_stride, tile.rows);
    // Those of the tile whose V comes next, which its K needed before.
    u32 blocks[TIMES];
    load_blocks(blocks, table, first, end);
    load_tile(k_buffers, kv, keys, block_bytes, blocks, first, end);
    copies_commit();
    // Asks for V of a tile, and K of the next.
    const auto load_next = [&](u8* v_buffer, u8* k_buffer, u32 base) {
        load_tile(v_buffer, kv, values, block_bytes, blocks, base, end);
        if (base + TILE_POSITIONS < end) {
            load_blocks(blocks, table, base + TILE_POSITIONS, end);
            load_tile(k_buffer, kv, keys, block_bytes, blocks, base + TILE_POSITIONS, end);
        }
        copies_commit();
    };
    const u64 own_queries = operand(shared_address(queries) + warpgroup * 64 * ROW_BYTES);
    const u64 k_operand = operand(shared_address(k_buffers)), v_operand = operand(shared_address(v_buffers));

    // The first tile has nothing to overlap with.
    copies_wait<0>();
    copies_to_products();
    __syncthreads();
    load_next(v_buffers, k_buffers + OPERAND_BYTES, first);
    float scores[SCORES];
    pin(scores);
    products_begin();
    start_scores(scores, own_queries, k_operand);
    products_commit();
    products_wait<0>();
    pin(scores);
    hide(scores, first);
    absorb(state, scores, scale_log2);

    u32 buffer = 1;
    // What the last exponentials make of O, once the product before them is in it.
    float2 factors = make_float2(1.0f, 1.0f);
    for (u32 base = first + TILE_POSITIONS; base < end; base += TILE_POSITIONS, buffer ^= 1) {
        // From the barrier on, this tile's K and the last one's V are there, and no product reads the K and V before them.
        copies_wait<0>();
        copies_to_products();
        products_wait<0>();
        pin(state.out);
        pin(state.p);
        __syncthreads();
        rescale(state, factors);
        keep_exponentials(state, scores);
        pin(scores);
        pin(state.out);
        pin(state.p);
        products_begin();
        start_scores(scores, own_queries, behind(k_operand, buffer * OPERAND_BYTES));
        products_commit();
        start_values(state, behind(v_operand, (buffer ^ 1) * OPERAND_BYTES));
        products_commit();
        load_next(v_buffers + buffer * OPERAND_BYTES, k_buffers + (buffer ^ 1) * OPERAND_BYTES, base);
        products_wait<1>();
        pin(scores);
        hide(scores, base);
        factors = absorb(state, scores, scale_log2);
    }
    copies_wait<0>();
    copies_to_products();
    products_wait<0>();
    pin(state.out);
    pin(state.p);
    __syncthreads();
    rescale(state, factors);
    keep_exponentials(state, scores);
    pin(state.out);
    pin(state.p);
    products_begin();
    start_values(state, behind(v_operand, (buffer ^ 1) * OPERAND_BYTES));
    products_commit();
    products_wait<0>();
    pin(state.out);

#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float sum = state.sum[half];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        const float inverse = 1.0f / sum;
        const u32 row = warp * 16 + half * 8 + g;
        if (row >= tile.rows) continue;
        u32* to = reinterpret_cast<u32*>(out + (u64(tile.row + row) * heads + head) * HEAD_DIM);
#pragma unroll
        for (u32 n = 0; n < HEAD_DIM / 8; n++) to[n * 4 + t] = pack(state.out[4 * n + 2 * half] * inverse, state.out[4 * n + 2 * half + 1] * inverse);
    }
}

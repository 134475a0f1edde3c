// Prefill attention with Hopper's warpgroup products (sm_90a): attention_prefill.cu's result from the same arguments,
// for HEAD_DIM 64 and 128. After Shah et al., "FlashAttention-3", 2024.
//
// A block of threads is three warpgroups. Two consumers multiply, for 64 rows each; a producer copies K and V for both,
// TILE_POSITIONS at a time in absolute order, into double buffers (KV blocks are too small for the bulk copy engine to pay
// off), and gives most of its registers to them. A consumer starts the products Q K^T of this tile and P V of the last one together, and turns
// the first into exponentials while the tensor cores work on the second, or for the other consumer:
//
//   tensor cores   | S(n) = Q K(n)^T  | O += P(n-1) V(n-1)   |                | S(n+1) = ..
//   other units    |                  | exponentials of S(n) | scale O, P(n)  |
//
// Warpgroups meet at named barriers: a buffer is full, or empty again. The consumers never meet, so one computes while the
// other waits. On an H100, two warpgroups that also copied, and met for each tile, took 1.5 times as long (docs/results/gpu.md).
//
// The assembler is free to move a wait for products up to the beginning of its basic block, and everything that should
// overlap with them down behind it. So the wait for P V is at the loop's edge, not after the exponentials;
// kernels/tests/cuda/sass.rs checks the machine code.
//
// Arguments and grid: see attention_prefill.cu. 384 threads; dynamic shared memory for Q, two tiles each of K and V,
// and alignment: 5 OPERAND_BYTES + ALIGNMENT.
#include "common.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "the operand layouts below are of panels of 64 columns");

constexpr u32 GROUP_THREADS = 128;
constexpr u32 CONSUMERS = 2;
constexpr u32 THREADS = (CONSUMERS + 1) * GROUP_THREADS;
// Registers per thread. Their sum must not exceed the 168 per thread that the block starts with, or a warpgroup waits forever for more.
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 224
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (CONSUMERS + 1) * (65536 / THREADS / 8 * 8), "registers of a block");
constexpr u32 STAGES = 2;
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

// Numbers per lane: of S (64 x 128 in a warpgroup), and of O.
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

// The descriptor of an operand that lies `bytes` after another.
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

// A product continues after it was started, which the compiler does not know: this keeps it from moving uses of the registers
// across.
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

// 64 rows from row `first` on.
__device__ inline void load_queries(u8* to, const bf16* q, u32 q_stride, u32 first, u32 rows, u32 thread) {
#pragma unroll 4
    for (u32 i = thread; i < 64 * VECTORS; i += GROUP_THREADS) {
        const u32 row = first + i / VECTORS, vector = i % VECTORS;
        const bool present = row < rows;
        copy16_async(to + place(row, vector), q + u64(present ? row : 0) * q_stride + vector * 8, present);
    }
}

// Sixteen threads copy a block: each of them one vector of every row, or of every second one. So a thread needs one entry of
// the table for a tile's K and V, and can load it a tile ahead.
constexpr u32 BLOCK_THREADS = 16;
constexpr u32 ROW_STEP = BLOCK_THREADS / VECTORS;
static_assert(GROUP_THREADS / BLOCK_THREADS * BLOCK == TILE_POSITIONS, "the threads copy a tile");

// A head's K or V in this thread's block of a tile: positions from `first` on, zeros from `end` on.
__device__ inline void load_block(u8* to, const u8* block, u32 thread, u32 first, u32 end) {
    const u32 vector = thread % VECTORS, first_row = thread % BLOCK_THREADS / VECTORS, in_tile = thread / BLOCK_THREADS * BLOCK;
#pragma unroll
    for (u32 i = 0; i < BLOCK / ROW_STEP; i++) {
        const u32 row = first_row + i * ROW_STEP;
        copy8_of_kv(to + place(in_tile + row, vector), block, row, vector * 8, first + row < end);
    }
}

// --- Named barriers between warpgroups.

__device__ inline void meet(u32 barrier, u32 threads) { asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// Arrives at a barrier without waiting, for the threads that wait there.
__device__ inline void tell(u32 barrier, u32 threads) { asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

constexpr u32 K = 0, V = 1;

// The barrier for a full buffer of K or V: one for each consumer, as they do not wait for each other.
__device__ inline u32 full(u32 which, u32 stage, u32 group) { return 1 + (which * STAGES + stage) * CONSUMERS + group; }
constexpr u32 FULL_THREADS = 2 * GROUP_THREADS;

// The barrier for an empty buffer: both consumers have finished all products that read it.
__device__ inline u32 empty(u32 which, u32 stage) { return 1 + 2 * STAGES * CONSUMERS + which * STAGES + stage; }

// The barrier of one consumer's threads.
__device__ inline u32 alone(u32 group) { return 1 + 2 * STAGES * (CONSUMERS + 1) + group; }
static_assert(1 + 2 * STAGES * (CONSUMERS + 1) + CONSUMERS <= 16, "barriers of a block");

__device__ inline u32 before(u32 stage) { return stage == 0 ? STAGES - 1 : stage - 1; }
__device__ inline u32 after(u32 stage) { return stage == STAGES - 1 ? 0 : stage + 1; }

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

// Turns scores into exponentials in units of 2^max; returns the factors for all earlier sums, which are in units of the old
// maximum.
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
        // A row that has not seen any position yet has no maximum: any value will do, as its exponentials are zeros.
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

// Tiles of K and V that a tile of rows attends to: positions first, first + TILE_POSITIONS, .. below end.
struct Span {
    u32 first, end;
};

// A head's K and V in all blocks.
struct Source {
    const u8* kv;
    const u32* table;
    u32 block_bytes, keys, values;
};

// The producer: copies all tiles.
__device__ inline void copy_tiles(u8* k_buffers, u8* v_buffers, const Source& source, Span span) {
    const u32 thread = threadIdx.x % GROUP_THREADS, in_tile = thread / BLOCK_THREADS * BLOCK;
    const auto fill = [&](u8* buffer, const u8* block, u32 base) {
        load_block(buffer, block, thread, base + in_tile, span.end);
        copies_commit();
    };
    const auto tell_full = [&](u32 which, u32 stage) {
        copies_to_products();
#pragma unroll
        for (u32 group = 0; group < CONSUMERS; group++) tell(full(which, stage, group), FULL_THREADS);
    };
    const auto block_in = [&](u32 base) { return base + in_tile < span.end ? source.table[(base + in_tile) / BLOCK] : 0; };
    u32 stage = 0, next = block_in(span.first);
    u32 used = 0;
    for (u32 base = span.first; base < span.end; base += TILE_POSITIONS) {
        const u8* block = source.kv + u64(next) * source.block_bytes;
        if (used > 0) meet(empty(K, stage), THREADS);
        fill(k_buffers + stage * OPERAND_BYTES, block + source.keys, base);
        next = block_in(base + TILE_POSITIONS);
        if (base > span.first) {
            copies_wait<1>();
            tell_full(V, before(stage));
        }
        copies_wait<0>();
        tell_full(K, stage);
        if (used > 0) meet(empty(V, stage), THREADS);
        fill(v_buffers + stage * OPERAND_BYTES, block + source.values, base);
        stage = after(stage);
        if (stage == 0) used = 1;
    }
    copies_wait<0>();
    tell_full(V, before(stage));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill_hopper(bf16* __restrict__ out, const bf16* __restrict__ q, u32 q_stride, const u8* __restrict__ kv,
                             const u32* __restrict__ tables, u32 table_stride, const Tile* __restrict__ tiles, u32 heads, u32 kv_heads, u32 window,
                             float scale_log2, float cap_log2, const float* __restrict__ sinks) {
    extern __shared__ u8 dynamic[];
    u8* queries = dynamic + (ALIGNMENT - shared_address(dynamic) % ALIGNMENT) % ALIGNMENT;
    u8* k_buffers = queries + OPERAND_BYTES;
    u8* v_buffers = k_buffers + STAGES * OPERAND_BYTES;
    // All lanes have the same group: the compiler must know it, so that descriptors are computed once per warp.
    const u32 group = __shfl_sync(ALL_LANES, threadIdx.x / GROUP_THREADS, 0);
    const u32 head = blockIdx.x, kv_head = head / (heads / kv_heads);
    const Tile tile = tiles[blockIdx.y];
    const u32 first_seen = tile.position < window ? 0 : tile.position + 1 - window;
    const Span span = {first_seen / TILE_POSITIONS * TILE_POSITIONS, tile.position + tile.rows};

    if (group == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        const Source source = {kv, tables + u64(tile.sequence) * table_stride, 2 * kv_heads * KV_HEAD_BYTES, kv_head * KV_HEAD_BYTES,
                               (kv_heads + kv_head) * KV_HEAD_BYTES};
        copy_tiles(k_buffers, v_buffers, source, span);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const u32 thread = threadIdx.x % GROUP_THREADS, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const u32 group_position = tile.position + group * 64;
    const u32 position = group_position + warp * 16 + g;
    const auto hide = [&](float(&scores)[SCORES], u32 base) {
        const bool all_seen = base + TILE_POSITIONS <= group_position + 1 && group_position + 63 - base < window;
        if (!all_seen) mask(scores, position, base + 2 * t, window);
    };
    // A buffer's last tile is not reported, as no tile follows.
    const auto tell_empty = [&](u32 which, u32 stage, u32 base) {
        if (base + STAGES * TILE_POSITIONS < span.end) tell(empty(which, stage), THREADS);
    };

    State state;
    state.max[0] = state.max[1] = NEG_INFINITY;
    state.sum[0] = state.sum[1] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < OUTS; i++) state.out[i] = 0.0f;

    load_queries(queries, q + u64(tile.row) * q_stride + head * HEAD_DIM, q_stride, group * 64, tile.rows, thread);
    copies_commit();
    copies_wait<0>();
    copies_to_products();
    meet(alone(group), GROUP_THREADS);
    const u64 own_queries = operand(shared_address(queries) + group * 64 * ROW_BYTES);
    const u64 k_operand = operand(shared_address(k_buffers)), v_operand = operand(shared_address(v_buffers));

    // The first tile has nothing to overlap with.
    float scores[SCORES];
    meet(full(K, 0, group), FULL_THREADS);
    pin(scores);
    products_begin();
    start_scores(scores, own_queries, k_operand);
    products_commit();
    products_wait<0>();
    pin(scores);
    tell_empty(K, 0, span.first);
    cap_scores(scores, scale_log2, cap_log2);
    hide(scores, span.first);
    absorb(state, scores, scale_left(scale_log2));

    u32 stage = 0;
    // The factors of O due to the last exponentials, once the product before them has been added.
    float2 factors = make_float2(1.0f, 1.0f);
    for (u32 base = span.first + TILE_POSITIONS; base < span.end; base += TILE_POSITIONS) {
        const u32 last = stage;
        stage = after(stage);
        products_wait<0>();
        pin(state.out);
        pin(state.p);
        if (base > span.first + TILE_POSITIONS) tell_empty(V, before(last), base - 2 * TILE_POSITIONS);
        rescale(state, factors);
        keep_exponentials(state, scores);
        meet(full(K, stage, group), FULL_THREADS);
        pin(scores);
        pin(state.out);
        pin(state.p);
        products_begin();
        start_scores(scores, own_queries, behind(k_operand, stage * OPERAND_BYTES));
        products_commit();
        meet(full(V, last, group), FULL_THREADS);
        start_values(state, behind(v_operand, last * OPERAND_BYTES));
        products_commit();
        products_wait<1>();
        pin(scores);
        tell_empty(K, stage, base);
        cap_scores(scores, scale_log2, cap_log2);
        hide(scores, base);
        factors = absorb(state, scores, scale_left(scale_log2));
    }
    products_wait<0>();
    pin(state.out);
    pin(state.p);
    rescale(state, factors);
    keep_exponentials(state, scores);
    meet(full(V, stage, group), FULL_THREADS);
    pin(state.out);
    pin(state.p);
    products_begin();
    start_values(state, behind(v_operand, stage * OPERAND_BYTES));
    products_commit();
    products_wait<0>();
    pin(state.out);

#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float sum = state.sum[half];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        sum = with_sink(sum, state.max[half], sinks, head);
        const float inverse = 1.0f / sum;
        const u32 row = group * 64 + warp * 16 + half * 8 + g;
        if (row >= tile.rows) continue;
        u32* to = reinterpret_cast<u32*>(out + (u64(tile.row + row) * heads + head) * HEAD_DIM);
#pragma unroll
        for (u32 n = 0; n < HEAD_DIM / 8; n++) to[n * 4 + t] = pack(state.out[4 * n + 2 * half] * inverse, state.out[4 * n + 2 * half + 1] * inverse);
    }
}

// The products of a layer of experts: each expert's matrix with the rows that chose it.
//
// Rows are in the order of their experts (`experts_sort`). A tile is up to ROWS rows of one expert by COLUMNS of its
// outputs. The grid has the largest possible number of tiles for the number of rows; each block finds its tile in the
// experts' offsets, and those beyond the last end at once. So the host needs to know nothing about the routing.
//
// The weights come through shared memory in STAGES steps of 64 numbers, with up to STAGES - 1 on their way: in a decode step
// an expert has a few rows, and only reading its weights takes time. Rows beyond the tile's last are neither read nor
// multiplied, in sixteens. A row's sums go through the inner numbers in order, 16 at a time on tensor cores: its bits depend
// neither on the tile's form nor on the rows beside it.
//
// x: bf16 [.., inner], weight: bf16 [experts, outputs, inner]; inner is a multiple of 8. offsets: u32 [experts + 1].
// bias: bf16 [experts, outputs], or null.
// gate and up: slot s takes row rows_by_slot[s] of x; the outputs of gate and up alternate, and out is bf16
//   [slots, outputs / 2], activated; outputs is a multiple of 16.
// down: slot s takes row s; out is bf16 [slots, outputs]; outputs is a multiple of 8.
// Grid (outputs by COLUMNS, tiles), sizeof(Shared) of dynamic shared memory.
#include "common.cuh"

// Numbers of a row that are in shared memory at once.
constexpr u32 STEP = 64;
constexpr u32 VECTORS = STEP / 8;

template <u32 ROWS_, u32 COLUMNS_, u32 WARPS_DOWN, u32 WARPS_ACROSS, u32 STAGES_>
struct Form {
    static constexpr u32 ROWS = ROWS_, COLUMNS = COLUMNS_, ACROSS = WARPS_ACROSS, STAGES = STAGES_;
    static constexpr u32 THREADS = WARPS_DOWN * WARPS_ACROSS * 32;
    // Rows and columns per warp.
    static constexpr u32 WARP_ROWS = ROWS / WARPS_DOWN, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
    static constexpr u32 M_TILES = WARP_ROWS / 16, N_TILES = WARP_COLUMNS / 8;
    // Rows that the threads copy at once, a vector each.
    static constexpr u32 AT_ONCE = THREADS / VECTORS;

    struct Stage {
        bf16 x[ROWS][STEP], weight[COLUMNS][STEP];
    };
    struct Shared {
        Stage stages[STAGES];
    };
};

// Up to 16 rows in the whole step; a decode step, or a small prompt; a large prompt.
typedef Form<16, 64, 1, 4, 6> Few;
typedef Form<64, 64, 2, 2, 4> Some;
typedef Form<128, 128, 2, 4, 3> Many;

struct Tile {
    // `rows` is 0 beyond the last tile.
    u32 expert, first, rows;
};

// Neighbouring rows have their vectors in different banks.
__device__ inline u32 place(u32 row, u32 vector) { return (vector ^ row % VECTORS) * 8; }

// Finds a tile. Every warp does so by itself, four experts per lane.
template <u32 ROWS>
__device__ inline Tile find_tile(const u32* offsets, u32 experts, u32 index, u32 lane) {
    constexpr u32 EACH = 4;
    u32 before = 0;
    for (u32 start = 0; start < experts; start += 32 * EACH) {
        u32 at[EACH + 1], tiles[EACH], sum = 0;
#pragma unroll
        for (u32 i = 0; i <= EACH; i++) at[i] = offsets[min(start + lane * EACH + i, experts)];
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            tiles[i] = (at[i + 1] - at[i] + ROWS - 1) / ROWS;
            sum += tiles[i];
        }
        u32 upto = sum;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 lower = __shfl_up_sync(ALL_LANES, upto, step);
            if (lane >= step) upto += lower;
        }
        const u32 owners = __ballot_sync(ALL_LANES, index < before + upto);
        if (owners) {
            const u32 owner = __ffs(owners) - 1;
            u32 rest = index - before - (upto - sum);
            Tile tile = {};
            bool found = false;
#pragma unroll
            for (u32 i = 0; i < EACH; i++) {
                if (!found && rest < tiles[i]) {
                    found = true;
                    const u32 first = at[i] + rest * ROWS;
                    tile = {start + lane * EACH + i, first, min(ROWS, at[i + 1] - first)};
                }
                if (!found) rest -= tiles[i];
            }
            return {__shfl_sync(ALL_LANES, tile.expert, owner), __shfl_sync(ALL_LANES, tile.first, owner),
                    __shfl_sync(ALL_LANES, tile.rows, owner)};
        }
        before += __shfl_sync(ALL_LANES, upto, 31);
    }
    return {0, 0, 0};
}

// `gate * sigmoid(gate) * up`; with a limit, both are clamped, and it is `gate * sigmoid(alpha gate) * (up + 1)`.
__device__ inline float activate(float gate, float up, float alpha, float limit) {
    if (limit > 0.0f) {
        gate = fminf(gate, limit);
        up = fminf(fmaxf(up, -limit), limit) + 1.0f;
    }
    return gate / (1.0f + __expf(-alpha * gate)) * up;
}

template <typename F, bool GATED>
__device__ inline void multiply(bf16* out, const bf16* x, const bf16* weight, const bf16* bias, const u32* offsets, const u32* rows_by_slot,
                                u32 experts, u32 inner, u32 outputs, float alpha, float limit) {
    typedef typename F::Shared Shared;
    extern __shared__ uint4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Tile tile = find_tile<F::ROWS>(offsets, experts, blockIdx.y, lane);
    if (tile.rows == 0) return;
    const u32 first_column = blockIdx.x * F::COLUMNS;

    // The vector and first row that this thread copies: a vector of every AT_ONCE-th row.
    const u32 vector = threadIdx.x % VECTORS, copied = threadIdx.x / VECTORS;
    const u32 rows16 = (tile.rows + 15) / 16 * 16;
    u32 x_rows[F::ROWS / F::AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < F::ROWS / F::AT_ONCE; i++) {
        const u32 row = copied + i * F::AT_ONCE, slot = tile.first + min(row, tile.rows - 1);
        x_rows[i] = GATED ? rows_by_slot[slot] : slot;
    }
    const bf16* of_expert = weight + u64(tile.expert) * outputs * inner;
    const u32 steps = (inner + STEP - 1) / STEP;

    auto load = [&](u32 step) {
        if (step < steps) {
            auto& stage = shared.stages[step % F::STAGES];
            const u32 at = step * STEP + vector * 8;
            const bool inside = at < inner;
            const u32 from = inside ? at : 0;
#pragma unroll
            for (u32 i = 0; i < F::COLUMNS / F::AT_ONCE; i++) {
                const u32 row = copied + i * F::AT_ONCE, column = first_column + row;
                const bool present = inside && column < outputs;
                copy16_async(&stage.weight[row][place(row, vector)], of_expert + u64(present ? column : 0) * inner + from, present);
            }
#pragma unroll
            for (u32 i = 0; i < F::ROWS / F::AT_ONCE; i++) {
                const u32 row = copied + i * F::AT_ONCE;
                if (row >= rows16) break;
                copy16_async(&stage.x[row][place(row, vector)], x + u64(x_rows[i]) * inner + from, inside && row < tile.rows);
            }
        }
        // A group is committed even without copies, as groups are counted.
        copies_commit();
    };

    const u32 warp_row = warp / F::ACROSS * F::WARP_ROWS, warp_column = warp % F::ACROSS * F::WARP_COLUMNS;
    float sums[F::M_TILES][F::N_TILES][4] = {};
#pragma unroll
    for (u32 step = 0; step + 1 < F::STAGES; step++) load(step);
    for (u32 step = 0; step < steps; step++) {
        // This step's numbers have arrived, and no thread still reads those of the previous step.
        copies_wait<F::STAGES - 2>();
        __syncthreads();
        load(step + F::STAGES - 1);
        const auto& stage = shared.stages[step % F::STAGES];
#pragma unroll
        for (u32 part = 0; part < STEP / 16; part++) {
            u32 b[F::N_TILES / 2][4];
#pragma unroll
            for (u32 n = 0; n < F::N_TILES / 2; n++) {
                const u32 row = warp_column + n * 16 + lane % 8 + lane / 16 * 8;
                load_matrices(b[n], &stage.weight[row][place(row, part * 2 + lane / 8 % 2)]);
            }
#pragma unroll
            for (u32 m = 0; m < F::M_TILES; m++) {
                if (warp_row + m * 16 >= tile.rows) break;
                u32 a[4];
                const u32 row = warp_row + m * 16 + lane % 16;
                load_matrices(a, &stage.x[row][place(row, part * 2 + lane / 16)]);
#pragma unroll
                for (u32 n = 0; n < F::N_TILES; n++) mma(sums[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            }
        }
    }

    const u32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 n = 0; n < F::N_TILES; n++) {
        const u32 column = first_column + warp_column + n * 8 + 2 * t;
        const bool inside = column < outputs;
        const u32 added = bias && inside ? *reinterpret_cast<const u32*>(bias + u64(tile.expert) * outputs + column) : 0;
        const float low = low_f32(added), high = high_f32(added);
#pragma unroll
        for (u32 m = 0; m < F::M_TILES; m++) {
            const float* c = sums[m][n];
            const u32 row = warp_row + m * 16 + g;
            if constexpr (GATED) {
                const float upper = activate(c[0] + low, c[1] + high, alpha, limit);
                const float lower = activate(c[2] + low, c[3] + high, alpha, limit);
                // The even lane of two neighbours writes both numbers of row g, the odd one those of row g + 8.
                const bool odd = t % 2;
                const float other = __shfl_xor_sync(ALL_LANES, odd ? upper : lower, 1);
                const u32 at = odd ? row + 8 : row, from = column / 2 - (odd ? 1 : 0);
                const u32 pair = odd ? pack(other, lower) : pack(upper, other);
                if (inside && at < tile.rows) *reinterpret_cast<u32*>(out + u64(tile.first + at) * (outputs / 2) + from) = pair;
            } else if (inside) {
                bf16* to = out + u64(tile.first + row) * outputs + column;
                if (row < tile.rows) *reinterpret_cast<u32*>(to) = pack(c[0] + low, c[1] + high);
                if (row + 8 < tile.rows) *reinterpret_cast<u32*>(to + 8 * u64(outputs)) = pack(c[2] + low, c[3] + high);
            }
        }
    }
}

#define KERNELS(FORM, GATE_UP, DOWN, BLOCKS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(FORM::THREADS, BLOCKS)                                                             \
        GATE_UP(bf16* __restrict__ out, const bf16* __restrict__ x, const bf16* __restrict__ weight, const bf16* __restrict__ bias, \
                const u32* __restrict__ offsets, const u32* __restrict__ rows_by_slot, u32 experts, u32 inner, u32 outputs,         \
                float alpha, float limit) {                                                                                         \
        multiply<FORM, true>(out, x, weight, bias, offsets, rows_by_slot, experts, inner, outputs, alpha, limit);                   \
    }                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(FORM::THREADS, BLOCKS)                                                             \
        DOWN(bf16* __restrict__ out, const bf16* __restrict__ x, const bf16* __restrict__ weight, const bf16* __restrict__ bias,    \
             const u32* __restrict__ offsets, u32 experts, u32 inner, u32 outputs) {                                                \
        multiply<FORM, false>(out, x, weight, bias, offsets, nullptr, experts, inner, outputs, 1.0f, 0.0f);                         \
    }

KERNELS(Few, experts_gate_up_of_few, experts_down_of_few, 3)
KERNELS(Some, experts_gate_up_of_some, experts_down_of_some, 3)
KERNELS(Many, experts_gate_up_of_many, experts_down_of_many, 2)

// Gathers a matrix whose columns several devices have computed, each some of all rows.
//
// parts.at[i]: rows of part_chunks chunks of 16 bytes, in the memory of device i; the last part may be narrower. Row r of `to` is
// the concatenation of row r of all parts, row_chunks long. The devices' memory is read over their link; neighbouring threads
// read neighbouring chunks.
#include "common.cuh"

struct Parts {
    u64 at[16];
};

extern "C" __global__ void gather(uint4* __restrict__ to, const __grid_constant__ Parts parts, u32 row_chunks, u32 part_chunks, u32 rows) {
    const u32 chunks = rows * row_chunks;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < chunks; i += gridDim.x * blockDim.x) {
        const u32 row = i / row_chunks, column = i - row * row_chunks;
        const u32 part = column / part_chunks, first = part * part_chunks;
        const u32 width = min(part_chunks, row_chunks - first);
        to[i] = reinterpret_cast<const uint4*>(parts.at[part])[u64(row) * width + (column - first)];
    }
}

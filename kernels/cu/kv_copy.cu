// Copies blocks between the paged memory and contiguous block slots.
//
// pool: [layer][block][slice], the paged memory, which keeps a layer's blocks together for attention to read. A slot
// holds [layer][slice] of one block, the format of the KV pool and of peers, in device memory or in pinned host memory. A
// slice is K and V of one layer of a block: slice_bytes, a multiple of 16. Copies layers first_layer.. of grid (layers,
// blocks), so that a layer can leave as soon as it is done.
#include "common.cuh"

// Blocks and the addresses of their slots. Passed by value with the launch: nothing to upload, nothing to wait for.
struct Batch {
    u64 slots[64];
    u32 blocks[64];
};

__device__ inline void copy_slice(uint4* __restrict__ to, const uint4* __restrict__ from, u64 bytes) {
#pragma unroll 4
    for (u64 i = threadIdx.x; i < bytes / 16; i += blockDim.x) to[i] = from[i];
}

// A slice's place in the paged memory, and in its slot.
struct Slice {
    u64 in_pool, in_slot;

    __device__ Slice(const Batch& batch, u32 pool_blocks, u32 first_layer, u64 slice_bytes) {
        const u32 layer = first_layer + blockIdx.x;
        in_pool = (u64(layer) * pool_blocks + batch.blocks[blockIdx.y]) * slice_bytes;
        in_slot = batch.slots[blockIdx.y] + layer * slice_bytes;
    }
};

// Copies paged memory to slots.
extern "C" __global__ void kv_gather(const u8* pool, const __grid_constant__ Batch batch, u32 pool_blocks, u32 first_layer, u64 slice_bytes) {
    const Slice slice(batch, pool_blocks, first_layer, slice_bytes);
    copy_slice(reinterpret_cast<uint4*>(slice.in_slot), reinterpret_cast<const uint4*>(pool + slice.in_pool), slice_bytes);
}

// Copies slots to paged memory.
extern "C" __global__ void kv_scatter(u8* pool, const __grid_constant__ Batch batch, u32 pool_blocks, u32 first_layer, u64 slice_bytes) {
    const Slice slice(batch, pool_blocks, first_layer, slice_bytes);
    copy_slice(reinterpret_cast<uint4*>(pool + slice.in_pool), reinterpret_cast<const uint4*>(slice.in_slot), slice_bytes);
}

// Blocks between the paged memory and contiguous block slots.
//
// pool: [layer][block][slice], the paged memory, in which a layer's blocks are side by side: attention then walks through
// memory that lies together. slots[i]: the address of block blocks[i]'s slot, [layer][slice], as the KV pool and peers know it;
// device memory, or pinned memory of the host as the device sees it. A slice is K and V of one layer of a block: slice_bytes, a
// multiple of 16. Layers first_layer.. of grid (layers, blocks) are copied, so that a layer can leave as soon as it is done.
#include "common.cuh"

__device__ inline void copy_slice(uint4* __restrict__ to, const uint4* __restrict__ from, u64 bytes) {
    for (u64 i = threadIdx.x; i < bytes / 16; i += blockDim.x) to[i] = from[i];
}

__device__ inline u64 pool_offset(u32 layer, u32 block, u32 pool_blocks, u64 slice_bytes) {
    return (u64(layer) * pool_blocks + block) * slice_bytes;
}

// Paged memory to slots.
extern "C" __global__ void kv_gather(const u8* pool, const u64* slots, const u32* blocks, u32 pool_blocks, u32 first_layer, u64 slice_bytes) {
    const u32 layer = first_layer + blockIdx.x;
    const u8* from = pool + pool_offset(layer, blocks[blockIdx.y], pool_blocks, slice_bytes);
    u8* to = reinterpret_cast<u8*>(slots[blockIdx.y]) + layer * slice_bytes;
    copy_slice(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), slice_bytes);
}

// Slots to paged memory.
extern "C" __global__ void kv_scatter(u8* pool, const u64* slots, const u32* blocks, u32 pool_blocks, u32 first_layer, u64 slice_bytes) {
    const u32 layer = first_layer + blockIdx.x;
    const u8* from = reinterpret_cast<const u8*>(slots[blockIdx.y]) + layer * slice_bytes;
    u8* to = pool + pool_offset(layer, blocks[blockIdx.y], pool_blocks, slice_bytes);
    copy_slice(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), slice_bytes);
}

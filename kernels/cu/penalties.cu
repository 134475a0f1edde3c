// Edits rows of logits before tokens are drawn, in this order: the model's soft cap, bias, penalties (as vLLM defines them), bans,
// masks.
//
// logits: f32 [rows, vocab].
#include "common.cuh"

// `cap tanh(logit / cap)` of every logit. factor: 2 log2(e) / cap. One thread per logit.
extern "C" __global__ void cap_logits(float* __restrict__ logits, u64 count, float factor, float cap) {
    const u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) logits[i] = soft_cap(logits[i], factor, cap);
}

struct Entry {
    u32 row, token;
    float value;
};

// Adds to single logits: bias, before the penalties. No (row, token) may occur twice among the entries. One thread per
// entry.
extern "C" __global__ void add_to_logits(float* __restrict__ logits, const Entry* __restrict__ entries, u32 count, u32 vocab) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count || entries[i].token >= vocab) return;
    logits[u64(entries[i].row) * vocab + entries[i].token] += entries[i].value;
}

struct Penalty {
    u32 row, token;
    // The divisor of a logit above 0, and the factor of others; 1 changes nothing.
    float repetition;
    // The number that is subtracted afterwards.
    float subtracted;
};

// Penalizes tokens that occurred, after the bias, to the bits that the CPU computes (model/src/penalties.rs): so nothing
// is fused. No (row, token) may occur twice. One thread per penalty.
extern "C" __global__ void penalize(float* __restrict__ logits, const Penalty* __restrict__ penalties, u32 count, u32 vocab) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count || penalties[i].token >= vocab) return;
    const Penalty p = penalties[i];
    float* logit = logits + u64(p.row) * vocab + p.token;
    const float x = *logit > 0.0f ? __fdiv_rn(*logit, p.repetition) : __fmul_rn(*logit, p.repetition);
    *logit = __fsub_rn(x, p.subtracted);
}

// Makes tokens impossible, after all other edits. One thread per entry; its value is not used.
extern "C" __global__ void ban(float* __restrict__ logits, const Entry* __restrict__ entries, u32 count, u32 vocab) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count || entries[i].token >= vocab) return;
    logits[u64(entries[i].row) * vocab + entries[i].token] = NEG_INFINITY;
}

// Makes the tokens impossible that a mask leaves out: the last edit. masks: u32 [masks, ceil(vocab / 32)], bit token % 32
// of word token / 32 set if the token is allowed. rows: the row of logits that each mask is for. Grid (vocab over the
// block, masks).
extern "C" __global__ void mask_logits(float* __restrict__ logits, const u32* __restrict__ masks, const u32* __restrict__ rows, u32 vocab) {
    const u32 token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= vocab) return;
    const u32 word = masks[u64(blockIdx.y) * ((vocab + 31) / 32) + token / 32];
    if (!(word >> token % 32 & 1)) logits[u64(rows[blockIdx.y]) * vocab + token] = NEG_INFINITY;
}

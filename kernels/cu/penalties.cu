// Edits rows of logits before tokens are drawn, in this order: bias, penalties (as vLLM defines them), bans,
// masks.
//
// logits: f32 [rows, vocab].
#include "common.cuh"

// Bits of `occurred`: set for tokens of the prompt. The other bits count how often the token was generated.
constexpr u32 IN_PROMPT = 1u << 31;

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

struct Penalties {
    // Row of `occurred` that belongs to the sequence.
    u32 history;
    float repetition, frequency, presence;
};

// Repetition penalizes every token that occurred; presence and frequency those that were generated. penalties: one per
// row; (1, 0, 0) changes nothing. occurred: u32 [histories, vocab]. Grid (vocab over the block, rows).
extern "C" __global__ void penalize(float* __restrict__ logits, const Penalties* __restrict__ penalties, const u32* __restrict__ occurred, u32 vocab) {
    const u32 token = blockIdx.x * blockDim.x + threadIdx.x;
    const Penalties p = penalties[blockIdx.y];
    const bool neutral = p.repetition == 1.0f && p.frequency == 0.0f && p.presence == 0.0f;
    if (neutral || token >= vocab) return;
    const u32 seen = occurred[u64(p.history) * vocab + token];
    if (!seen) return;
    float* logit = logits + u64(blockIdx.y) * vocab + token;
    float x = *logit > 0.0f ? *logit / p.repetition : *logit * p.repetition;
    const u32 generated = seen & ~IN_PROMPT;
    if (generated) x -= p.frequency * float(generated) + p.presence;
    *logit = x;
}

// Makes tokens impossible, after all other edits. One thread per entry; its value is not used.
extern "C" __global__ void ban(float* __restrict__ logits, const Entry* __restrict__ entries, u32 count, u32 vocab) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count || entries[i].token >= vocab) return;
    logits[u64(entries[i].row) * vocab + entries[i].token] = NEG_INFINITY;
}

// Makes the tokens impossible that a mask leaves out: the last edit. masks: u32 [masks, ceil(vocab / 32)], bit token % 32
// of word token / 32 set where the token may come. rows: the row of logits that each mask is for. Grid (vocab over the
// block, masks).
extern "C" __global__ void mask_logits(float* __restrict__ logits, const u32* __restrict__ masks, const u32* __restrict__ rows, u32 vocab) {
    const u32 token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= vocab) return;
    const u32 word = masks[u64(blockIdx.y) * ((vocab + 31) / 32) + token / 32];
    if (!(word >> token % 32 & 1)) logits[u64(rows[blockIdx.y]) * vocab + token] = NEG_INFINITY;
}

// Starts the history of a new sequence: clears its row and marks the prompt's tokens. One block of threads.
extern "C" __global__ void begin_history(u32* __restrict__ occurred, u32 history, const u32* __restrict__ prompt, u32 count, u32 vocab) {
    u32* row = occurred + u64(history) * vocab;
    for (u32 i = threadIdx.x; i < vocab; i += blockDim.x) row[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += blockDim.x)
        if (prompt[i] < vocab) row[prompt[i]] = IN_PROMPT;
}

// Counts the tokens just drawn. One thread per row; rows at NO_POSITION are skipped.
extern "C" __global__ void extend_history(u32* __restrict__ occurred, const Penalties* __restrict__ penalties, const u32* __restrict__ tokens,
                                          const u32* __restrict__ positions, u32 rows, u32 vocab) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || positions[row] == NO_POSITION) return;
    occurred[u64(penalties[row].history) * vocab + tokens[row]] += 1;
}

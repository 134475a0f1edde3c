// Draws one token from each row of logits: greedy, or under temperature, min_p, top_k and top_p, as the CPU's sampler
// defines them (model/src/sampler.rs), and with the same random numbers. Equal logits are ordered by token id. NaN is
// impossible.
//
// Nothing is sorted. Tokens are ordered by a 32-bit key, their distance below the largest logit. The place where a filter cuts,
// or the draw falls, is found by descending through the key 8 bits at a time: a histogram of 256 bins, by count or by
// weight, gives the bin, and the next 8 bits continue inside it. Weights are fixed-point integers, 2^40 for the likeliest
// token: their sums do not depend on the order of addition, so a row's token depends on that row alone and is always
// the same. A token less likely than 2^-40 of the likeliest one is impossible.
//
// One multiprocessor reads a row slowly, so a row is read as rarely as possible: for its largest logit, and for the sum of
// all weights, when its likeliest tokens are also kept. The filters nearly always leave only tokens among these. Otherwise, a
// row is read for the first 8 bits of a key, and once more to keep the tokens that have them.
//
// logits: f32 [rows, vocab], vocab up to 2^18. requests: one per row. tokens: u32 [rows]. One block of 1,024 threads
// per row.
#include "common.cuh"

constexpr u32 THREADS = 1024;
constexpr u32 WARPS = THREADS / 32;
static_assert(WARPS == 32, "a warp reduces what the warps have");
constexpr u32 BINS = 256;
// Temperatures below this are greedy: the quotient would overflow long before the draw could differ.
constexpr float TEMPERATURE_MIN = 1e-5f;
// Powers of two between the likeliest token and an impossible one, and keys from one power to the next.
constexpr float POWERS = 40.0f;
constexpr float KEYS_PER_POWER = 0x1p32f / POWERS;
constexpr float POWERS_PER_KEY = POWERS / 0x1p32f;
constexpr u32 IMPOSSIBLE = 0xffffffffu;
constexpr u32 NO_TOKEN = 0xffffffffu;
// A token is likely if its weight is at least 2^-12 of the likeliest one's.
constexpr u32 LIKELY_KEY = u32(12.0f * KEYS_PER_POWER);
// Capacity for kept tokens in shared memory.
constexpr u32 KEPT_MAX = 4096;

struct Request {
    u64 seed;
    // The index of the draw in its sequence.
    u64 index;
    float temperature;
    float top_p;
    float min_p;
    // 0 for all tokens.
    u32 top_k;
};

// --- Philox4x32-10 (Salmon et al., SC 2011), as in model/src/rng.rs: 53 random bits.

__device__ inline u64 random53(u64 seed, u64 index) {
    u32 c0 = u32(index), c1 = u32(index >> 32), c2 = 0, c3 = 0;
    u32 k0 = u32(seed), k1 = u32(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const u64 a = u64(0xd2511f53u) * c0, b = u64(0xcd9e8d57u) * c2;
        c0 = u32(b >> 32) ^ c1 ^ k0;
        c1 = u32(b);
        c2 = u32(a >> 32) ^ c3 ^ k1;
        c3 = u32(a);
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return (u64(c0) << 32 | c1) >> 11;
}

// --- One row.

struct Shared {
    // 64-bit sums in halves, because shared memory has atomic additions of 32 bits, while those of 64 bits are retry loops.
    u32 low[BINS], high[BINS];
    // The bin found, its sum, and the sum of those before it.
    u32 bin;
    u64 inside, before;
    u64 of_warps[WARPS];
    u32 token;
    // The number of tokens to keep: above KEPT_MAX if some did not fit.
    u32 kept;
    u32 keys[KEPT_MAX], ids[KEPT_MAX];

    __device__ u64 sum(u32 bin) const { return u64(high[bin]) << 32 | low[bin]; }

    // Adds to the halves, with a carry if the addition makes the low half wrap around.
    __device__ void add(u32 bin, u64 x) {
        const u32 part = u32(x), old = atomicAdd(&low[bin], part);
        const u32 above = u32(x >> 32) + (old + part < old);
        if (above) atomicAdd(&high[bin], above);
    }

    __device__ void keep_none() {
        __syncthreads();
        if (threadIdx.x == 0) kept = 0;
        __syncthreads();
    }

    // Keeps a token of each lane for which `own` is set, in no particular order.
    __device__ void keep(bool own, u32 key, u32 token) {
        const u32 lanes = __ballot_sync(ALL_LANES, own);
        if (lanes == 0) return;
        const u32 leader = __ffs(lanes) - 1, lane = threadIdx.x % 32;
        u32 at = 0;
        if (lane == leader) at = atomicAdd(&kept, __popc(lanes));
        at = __shfl_sync(ALL_LANES, at, leader) + __popc(lanes & ((1u << lane) - 1));
        if (own && at < KEPT_MAX) keys[at] = key, ids[at] = token;
    }
};

// Reduces over all threads; each gets the result.
template <typename Reduce>
__device__ inline u64 block_reduce(Shared& shared, u64 x, Reduce reduce) {
    for (int step = 16; step > 0; step /= 2) x = reduce(x, __shfl_xor_sync(ALL_LANES, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared.of_warps[threadIdx.x % 32];
    for (int step = 16; step > 0; step /= 2) x = reduce(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

__device__ inline u64 block_sum(Shared& shared, u64 x) {
    return block_reduce(shared, x, [](u64 a, u64 b) { return a + b; });
}

__device__ inline u64 warp_sum(u64 x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// Four logits from token `first` on, a multiple of 4; NaN beyond the vocabulary. A row begins at a multiple of 16 bytes if
// the vocabulary is a multiple of 4.
__device__ inline void load4(float (&x)[4], const float* logits, u32 vocab, u32 first) {
    if (vocab % 4 == 0) {
        const float nan = __int_as_float(0x7fffffff);
        const float4 all = first < vocab ? *reinterpret_cast<const float4*>(logits + first) : make_float4(nan, nan, nan, nan);
        x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
    } else {
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = first + i < vocab ? logits[first + i] : __int_as_float(0x7fffffff);
    }
}

// The weight of a key: at least 1 unless the token is impossible.
__device__ inline u64 weight(u32 key) {
    return key == IMPOSSIBLE ? 0 : __float2ull_rn(exp2f(POWERS - float(key) * POWERS_PER_KEY));
}

// All tokens of a row.
struct Row {
    const float* logits;
    u32 vocab;
    float max;
    // log2(e) / temperature.
    float powers_per_logit;
    // The largest key that min_p admits.
    u32 key_max;

    // The key of a logit, which ascends as likelihood descends.
    __device__ u32 key(float logit) const {
        const float powers = (max - logit) * powers_per_logit;
        if (!(powers < POWERS)) return IMPOSSIBLE;
        const u32 key = min(__float2uint_rz(powers * KEYS_PER_POWER), IMPOSSIBLE - 1);
        return key <= key_max ? key : IMPOSSIBLE;
    }

    // Calls `take(key, token)` for all tokens, distributed among the threads, and for impossible ones beyond the vocabulary.
    // Warps stay together.
    template <typename Take>
    __device__ void each(Take take) const {
#pragma unroll 1
        for (u32 start = 0; start < vocab; start += 4 * THREADS) {
            const u32 first = start + 4 * threadIdx.x;
            float x[4];
            load4(x, logits, vocab, first);
#pragma unroll
            for (u32 i = 0; i < 4; i++) take(key(x[i]), first + i);
        }
    }
};

// All tokens of a row, or only those that matter, which are kept in shared memory.
struct Tokens {
    const Row& row;
    u32 kept;

    template <typename Take>
    __device__ void each(const Shared& shared, Take take) const {
        if (kept) {
#pragma unroll 1
            for (u32 i = threadIdx.x; i < shared.kept; i += THREADS) take(shared.keys[i], shared.ids[i]);
        } else {
            row.each(take);
        }
    }
};

__device__ inline void clear_bins(Shared& shared) {
    __syncthreads();
    if (threadIdx.x < BINS) shared.low[threadIdx.x] = shared.high[threadIdx.x] = 0;
    __syncthreads();
}

// Finds the bin in which the running sum exceeds `target`, which is below the sum of all bins.
__device__ inline void find_bin(Shared& shared, u64 target) {
    constexpr u32 PER_LANE = BINS / 32;
    __syncthreads();
    if (threadIdx.x < 32) {
        const u32 first = threadIdx.x * PER_LANE;
        u64 own = 0;
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) own += shared.sum(first + i);
        u64 running = own;
        for (u32 step = 1; step < 32; step *= 2) {
            const u64 lower = __shfl_up_sync(ALL_LANES, running, step);
            if (threadIdx.x >= step) running += lower;
        }
        const u32 lane = __ffs(__ballot_sync(ALL_LANES, running > target)) - 1;
        if (threadIdx.x == lane) {
            u64 before = running - own;
            u32 bin = first;
#pragma unroll 1
            while (bin + 1 < first + PER_LANE && before + shared.sum(bin) <= target) before += shared.sum(bin++);
            shared.bin = bin;
            shared.inside = shared.sum(bin);
            shared.before = before;
        }
    }
    __syncthreads();
}

struct Found {
    u32 digits;
    // The measure of tokens before, and of tokens with these digits.
    u64 before, inside;
};

// Finds the next 8 bits, from `shift` on, of the place where the running sum of `measure(key, token)` exceeds `target`, in the order
// of `digits(key, token)`.
template <typename Digits, typename Measure>
__device__ void narrow(Shared& shared, const Tokens& tokens, Found& found, int shift, u64 target, Digits digits, Measure measure) {
    clear_bins(shared);
    tokens.each(shared, [&](u32 key, u32 token) {
        // The digits above are those found so far.
        const bool inside = u64(digits(key, token)) >> (shift + 8) == u64(found.digits) >> (shift + 8);
        const u64 x = inside ? measure(key, token) : 0;
        if (x) shared.add(digits(key, token) >> shift & (BINS - 1), x);
    });
    find_bin(shared, target - found.before);
    found.digits |= shared.bin << shift;
    found.before += shared.before;
    found.inside = shared.inside;
}

// Finds the place in the order of likelihood. `measure` is zero for impossible tokens. Afterwards `tokens` contains those with the key
// found, and may lack others.
template <typename Measure>
__device__ Found descend_by_key(Shared& shared, Tokens& tokens, u64 target, Measure measure) {
    Found found = {0, 0, 0};
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
        narrow(shared, tokens, found, shift, target, [](u32 key, u32) { return key; }, measure);
        if (shift < 24 || tokens.kept) continue;
        shared.keep_none();
        tokens.row.each([&](u32 key, u32 token) { shared.keep(key >> 24 == found.digits >> 24 && key != IMPOSSIBLE, key, token); });
        __syncthreads();
        tokens.kept = shared.kept <= KEPT_MAX;
    }
    return found;
}

// floor(x * random / 2^53), for 53 random bits.
__device__ inline u64 fraction(u64 x, u64 random) { return __umul64hi(x, random) << 11 | (x * random) >> 53; }

// The token that `random` selects among all, by id.
__device__ u32 draw_by_id(Shared& shared, const Row& row, u64 random) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Weights of runs of tokens, a warp each; then of a run's warps, then of their lanes.
    constexpr u32 RUN = THREADS;
    clear_bins(shared);
    for (u32 run = warp; run * RUN < row.vocab; run += WARPS) {
        u64 sum = 0;
#pragma unroll 2
        for (u32 first = run * RUN; first < (run + 1) * RUN; first += 4 * 32) {
            float x[4];
            load4(x, row.logits, row.vocab, first + 4 * lane);
#pragma unroll
            for (u32 i = 0; i < 4; i++) sum += weight(row.key(x[i]));
        }
        sum = warp_sum(sum);
        if (lane == 0) shared.low[run] = u32(sum), shared.high[run] = u32(sum >> 32);
    }
    __syncthreads();
    u64 target = fraction(block_sum(shared, threadIdx.x < BINS ? shared.sum(threadIdx.x) : 0), random);
    find_bin(shared, target);
    const u32 start = shared.bin * RUN, token = start + threadIdx.x;
    target -= shared.before;
    const u64 own = token < row.vocab ? weight(row.key(row.logits[token])) : 0;
    const u64 sum = warp_sum(own);

    clear_bins(shared);
    if (lane == 0) shared.add(warp, sum);
    find_bin(shared, target);
    const u32 of_warp = shared.bin;
    target -= shared.before;

    clear_bins(shared);
    if (warp == of_warp) shared.add(lane, own);
    find_bin(shared, target);
    return start + of_warp * 32 + shared.bin;
}

// The part of `total` that suffices for top_p.
__device__ inline u64 enough_for(float top_p, u64 total) {
    return top_p < 1.0f ? min(max(u64(ceil(double(top_p) * double(total))), u64(1)), total) : total;
}

// The token that `random` selects among those that the filters leave, by likelihood. `tokens` contains all of these; the row's tokens have
// a total weight of `total`. `top_k` is 0 if it cuts nothing.
__device__ u32 draw_by_key(Shared& shared, const Tokens& tokens, u32 top_k, float top_p, u64 total, u64 random) {
    const auto by_weight = [](u32 key, u32) { return weight(key); };
    // Filters cut the order of keys at some place: `total` is the weight of the tokens that remain.
    if (top_k) {
        Tokens near = tokens;
        const Found last = descend_by_key(shared, near, top_k - 1, [](u32 key, u32) { return u64(key != IMPOSSIBLE); });
        u64 above = 0;
        tokens.each(shared, [&](u32 key, u32) { above += key < last.digits ? weight(key) : 0; });
        total = block_sum(shared, above) + (top_k - last.before) * weight(last.digits);
    }
    if (top_p < 1.0f) {
        Tokens near = tokens;
        const u64 enough = enough_for(top_p, total);
        const Found last = descend_by_key(shared, near, enough - 1, by_weight);
        const u64 each = weight(last.digits);
        total = last.before + ((enough - 1 - last.before) / each + 1) * each;
    }
    const u64 target = fraction(total, random);
    Tokens near = tokens;
    const Found drawn = descend_by_key(shared, near, target, by_weight);
    const u64 each = weight(drawn.digits);
    if (drawn.inside == each) {
        // No other token has that key.
        near.each(shared, [&](u32 key, u32 token) {
            if (key == drawn.digits) shared.token = token;
        });
        __syncthreads();
        return shared.token;
    }
    Found found = {0, 0, 0};
#pragma unroll 1
    for (int shift = 16; shift >= 0; shift -= 8) {
        narrow(
            shared, near, found, shift, (target - drawn.before) / each, [](u32, u32 token) { return token; },
            [&](u32 key, u32) { return u64(key == drawn.digits); });
    }
    return found.digits;
}

// The token that the 53 bits of `random` select.
__device__ u32 draw(Shared& shared, const Row& row, const Request& request, u64 random) {
    const bool by_rank = request.top_k > 0 && request.top_k < row.vocab;
    // No order of likelihood is needed: as on the CPU, the draw goes by id. Row::key applies min_p.
    if (!by_rank && request.top_p >= 1.0f) return draw_by_id(shared, row, random);

    shared.keep_none();
    u64 possible = 0, total = 0, likely_total = 0;
    row.each([&](u32 key, u32 token) {
        const u64 own = weight(key);
        const bool likely = key <= LIKELY_KEY;
        possible += own > 0;
        total += own;
        likely_total += likely ? own : 0;
        shared.keep(likely, key, token);
    });
    possible = block_sum(shared, possible);
    total = block_sum(shared, total);
    likely_total = block_sum(shared, likely_total);
    const u32 top_k = by_rank && request.top_k < possible ? request.top_k : 0;
    const bool all_likely = top_k ? top_k <= shared.kept : enough_for(request.top_p, total) <= likely_total;
    const Tokens tokens = {row, all_likely && shared.kept <= KEPT_MAX};
    return draw_by_key(shared, tokens, top_k, request.top_p, total, random);
}

// Index of the largest number, the first among equals; 0 if there is none.
__device__ inline u32 argmax(Shared& shared, const float* logits, u32 vocab) {
    float largest = NEG_INFINITY;
    u32 own = NO_TOKEN;
#pragma unroll 4
    for (u32 first = 4 * threadIdx.x; first < vocab; first += 4 * THREADS) {
        float x[4];
        load4(x, logits, vocab, first);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (x[i] > largest || own == NO_TOKEN && x[i] == NEG_INFINITY) largest = x[i], own = first + i;
        }
    }
    // Orders by larger logit, then by smaller id, as one integer that is never zero. The addition turns negative zero into zero.
    const u32 bits = __float_as_uint(largest + 0.0f);
    const u32 ordered = bits >> 31 ? ~bits : bits | 1u << 31;
    const u64 best = block_reduce(shared, own == NO_TOKEN ? 0 : u64(ordered) << 32 | ~own, [](u64 a, u64 b) { return max(a, b); });
    return best ? ~u32(best) : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample(u32* __restrict__ tokens, const float* __restrict__ logits, const Request* __restrict__ requests, u32 vocab) {
    __shared__ Shared shared;
    const Request request = requests[blockIdx.x];
    logits += u64(blockIdx.x) * vocab;
    u32 token = argmax(shared, logits, vocab);
    const float max = logits[token];
    if (request.temperature >= TEMPERATURE_MIN && isfinite(max)) {
        const float powers_per_logit = 1.44269504f / request.temperature;
        const u32 key_max = request.min_p > 0.0f ? __float2uint_rz(-log2f(request.min_p) * KEYS_PER_POWER) : IMPOSSIBLE - 1;
        const Row row = {logits, vocab, max, powers_per_logit, key_max};
        token = draw(shared, row, request, random53(request.seed, request.index));
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = token;
}

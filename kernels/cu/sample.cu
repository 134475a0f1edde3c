// Draws one token from each row of logits: greedy, or under temperature, min_p, top_k and top_p, as the CPU's sampler
// defines them (model/src/sampler.rs), and with the same random numbers. Equal logits are ordered by token id. NaN is
// impossible.
//
// Nothing is sorted. Tokens are ordered by a 32-bit key, their distance below the largest logit. Where a filter cuts,
// or the draw falls, is found by descending through the key 8 bits at a time: a histogram of 256 bins, by count or by
// weight, gives the bin, and the next 8 bits go on inside it. Weights are fixed-point integers, 2^40 for the likeliest
// token: their sums do not depend on the order of addition, so a row's token depends on that row alone and is always
// the same. A token less likely than 2^-40 of the likeliest one is impossible.
//
// logits: f32 [rows, vocab], vocab up to 2^18. requests: one per row. tokens: u32 [rows]. One block of 1,024 threads
// per row.
#include "common.cuh"

constexpr u32 THREADS = 1024;
constexpr u32 BINS = 256;
// Temperatures below this are greedy: the quotient would overflow long before the draw could differ.
constexpr float TEMPERATURE_MIN = 1e-5f;
// Powers of two between the likeliest token and an impossible one, and keys from one power to the next.
constexpr float POWERS = 40.0f;
constexpr float KEYS_PER_POWER = 0x1p32f / POWERS;
constexpr u32 IMPOSSIBLE = 0xffffffffu;

struct Request {
    u64 seed;
    // Number of the draw in its sequence.
    u64 index;
    float temperature;
    float top_p;
    float min_p;
    // 0: all.
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
    u64 bins[BINS];
    // The bin found, and the sum of those before it.
    u32 bin;
    u64 before;
    u64 best;
};

struct Row {
    const float* logits;
    u32 vocab;
    float max;
    // log2(e) / temperature.
    float powers_per_logit;
    // min_p cuts off larger keys.
    u32 key_max;

    // Ascends as likelihood descends.
    __device__ u32 key(u32 token) const {
        const float powers = (max - logits[token]) * powers_per_logit;
        if (!(powers < POWERS)) return IMPOSSIBLE;
        const u32 key = min(__float2uint_rz(powers * KEYS_PER_POWER), IMPOSSIBLE - 1);
        return key <= key_max ? key : IMPOSSIBLE;
    }

    // At least 1 unless impossible.
    __device__ static u64 weight(u32 key) {
        return key == IMPOSSIBLE ? 0 : __float2ull_rn(exp2f(POWERS - float(key) / KEYS_PER_POWER));
    }
};

__device__ inline u64 warp_sum(u64 x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ inline void clear_bins(Shared& shared) {
    __syncthreads();
    if (threadIdx.x < BINS) shared.bins[threadIdx.x] = 0;
    __syncthreads();
}

// Finds the bin in which the running sum exceeds `target`, which is below the sum of all bins.
__device__ inline void find_bin(Shared& shared, u64 target) {
    constexpr u32 PER_LANE = BINS / 32;
    __syncthreads();
    if (threadIdx.x < 32) {
        const u64* bins = shared.bins + threadIdx.x * PER_LANE;
        u64 own = 0;
        for (u32 i = 0; i < PER_LANE; i++) own += bins[i];
        u64 running = own;
        for (u32 step = 1; step < 32; step *= 2) {
            const u64 lower = __shfl_up_sync(ALL_LANES, running, step);
            if (threadIdx.x >= step) running += lower;
        }
        const u32 lane = __ffs(__ballot_sync(ALL_LANES, running > target)) - 1;
        if (threadIdx.x == lane) {
            u64 before = running - own;
            u32 bin = 0;
            while (bin + 1 < PER_LANE && before + bins[bin] <= target) before += bins[bin++];
            shared.bin = threadIdx.x * PER_LANE + bin;
            shared.before = before;
        }
    }
    __syncthreads();
}

template <typename Measure>
__device__ u64 sum_by_key(Shared& shared, const Row& row, Measure measure) {
    clear_bins(shared);
    u64 sum = 0;
    for (u32 token = threadIdx.x; token < row.vocab; token += THREADS) sum += measure(row.key(token));
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) atomicAdd(&shared.bins[0], sum);
    __syncthreads();
    return shared.bins[0];
}

struct Found {
    u32 key;
    // Measure of all smaller keys.
    u64 before;
};

// The key in which the running sum of `measure(key)` exceeds `target`, in order of keys.
template <typename Measure>
__device__ Found descend(Shared& shared, const Row& row, u64 target, Measure measure) {
    Found found = {0, 0};
    for (int shift = 24; shift >= 0; shift -= 8) {
        clear_bins(shared);
        for (u32 token = threadIdx.x; token < row.vocab; token += THREADS) {
            const u32 key = row.key(token);
            // The digits above are those found so far.
            const bool inside = u64(key) >> (shift + 8) == u64(found.key) >> (shift + 8);
            if (key != IMPOSSIBLE && inside) atomicAdd(&shared.bins[key >> shift & (BINS - 1)], measure(key));
        }
        find_bin(shared, target - found.before);
        found.key |= shared.bin << shift;
        found.before += shared.before;
    }
    return found;
}

// The token in which the running sum of `measure(key)` exceeds `target`, in order of ids: searches runs of THREADS
// tokens, then that run's warps, then the lanes.
template <typename Measure>
__device__ u32 select_by_id(Shared& shared, const Row& row, u64 target, Measure measure) {
    clear_bins(shared);
    for (u32 start = 0; start < row.vocab; start += THREADS) {
        const u32 token = start + threadIdx.x;
        const u64 sum = warp_sum(token < row.vocab ? measure(row.key(token)) : 0);
        if (threadIdx.x % 32 == 0) atomicAdd(&shared.bins[start / THREADS], sum);
    }
    find_bin(shared, target);
    const u32 start = shared.bin * THREADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    target -= shared.before;
    const u64 own = start + threadIdx.x < row.vocab ? measure(row.key(start + threadIdx.x)) : 0;
    const u64 sum = warp_sum(own);

    clear_bins(shared);
    if (lane == 0) shared.bins[warp] = sum;
    find_bin(shared, target);
    const u32 of_warp = shared.bin;
    target -= shared.before;

    clear_bins(shared);
    if (warp == of_warp) shared.bins[lane] = own;
    find_bin(shared, target);
    return start + of_warp * 32 + shared.bin;
}

// The token that the 53 bits of `random` select.
__device__ u32 draw(Shared& shared, const Row& row, const Request& request, u64 random) {
    // floor(x * random / 2^53).
    const auto fraction = [&](u64 x) { return __umul64hi(x, random) << 11 | (x * random) >> 53; };
    const bool by_rank = request.top_k > 0 && request.top_k < row.vocab;
    // Nothing needs an order of likelihood: as the CPU's, the draw goes by id. Row::key knows min_p.
    if (!by_rank && request.top_p >= 1.0f) {
        const u64 total = sum_by_key(shared, row, Row::weight);
        return select_by_id(shared, row, fraction(total), Row::weight);
    }

    // Filters cut the order of keys somewhere: `total` is the weight of what stays.
    u64 total;
    const u64 possible = sum_by_key(shared, row, [](u32 key) { return u64(key != IMPOSSIBLE); });
    if (by_rank && request.top_k < possible) {
        const Found last = descend(shared, row, request.top_k - 1, [](u32) { return u64(1); });
        const u64 ties = request.top_k - last.before;
        total = sum_by_key(shared, row, [&](u32 key) { return key < last.key ? Row::weight(key) : 0; }) + ties * Row::weight(last.key);
    } else {
        total = sum_by_key(shared, row, Row::weight);
    }
    if (request.top_p < 1.0f) {
        const u64 enough = min(max(u64(ceil(double(request.top_p) * double(total))), u64(1)), total);
        const Found last = descend(shared, row, enough - 1, Row::weight);
        const u64 weight = Row::weight(last.key);
        total = last.before + ((enough - 1 - last.before) / weight + 1) * weight;
    }
    const u64 target = fraction(total);
    const Found drawn = descend(shared, row, target, Row::weight);
    const u64 tie = (target - drawn.before) / Row::weight(drawn.key);
    return select_by_id(shared, row, tie, [&](u32 key) { return u64(key == drawn.key); });
}

// Index of the largest number, the first among equals; 0 if there is none.
__device__ inline u32 argmax(Shared& shared, const float* logits, u32 vocab) {
    // Larger logit first, then smaller id, as one integer.
    u64 best = 0;
    for (u32 token = threadIdx.x; token < vocab; token += THREADS) {
        const float x = logits[token];
        if (isnan(x)) continue;
        // Turns negative zero into zero.
        const u32 bits = __float_as_uint(x + 0.0f);
        const u32 ordered = bits >> 31 ? ~bits : bits | 1u << 31;
        best = max(best, u64(ordered) << 32 | ~token);
    }
    for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, step));
    if (threadIdx.x == 0) shared.best = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&shared.best, best);
    __syncthreads();
    return shared.best ? ~u32(shared.best) : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
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

// Drawing a token from one row of logits, and advancing the sequence.
//
// A block takes 1024 logits: penalty, the largest of each 32 and of all, the sum of weights. The last block to come here draws. What
// passes top-k, top-p and min-p lies among the groups of 32 with the largest maxima: k groups have k logits as large as the least of their
// maxima. So it reads those groups alone, makes a list of what may count, and compares each entry with all others. Where the list
// would be long or does not hold what is needed (flat distributions), thresholds are found by bisection over all logits.
#pragma once
#include "device.cuh"
#include "model.cuh"

/// Temperature 0 takes the largest logit, of equal ones the lowest token. Otherwise weights exp((l - max) / temperature) pass
/// top-k, top-p and min-p as thresholds on the weight (equal weights stay together), and the draw runs over the survivors in the order
/// of tokens.
struct SampleArgs {
    Step* step;
    float* logits;          // (vocabulary)
    uint32_t* out;          // tokens drawn so far
    const float* uniforms;  // one for every draw
    unsigned char* seen;    // (vocabulary), for the repetition penalty; null: none
    float* groups;          // (vocabulary / 32, rounded up): the largest logit of each 32
    float* tiles;           // (blocks, 3): largest logit, its token as bits, sum of weights beside the largest
    uint32_t* counter;      // zero before and after
    uint32_t vocabulary, top_k;
    float temperature, top_p, min_p, penalty;
};

constexpr uint32_t SAMPLE_TILE = 1024, SAMPLE_GROUPS = 512, SAMPLE_LIST = 4096, SAMPLE_RANKED = 512;
/// Shared memory: sums of a block, pairs of a warp, groups and their places, weights and tokens of the list.
constexpr uint32_t SAMPLE_PAIRS = 256, SAMPLE_IDS = 1024, SAMPLE_PLACES = SAMPLE_IDS + 4 * SAMPLE_GROUPS;
constexpr uint32_t SAMPLE_WEIGHTS = SAMPLE_PLACES + 4 * SAMPLE_GROUPS, SAMPLE_TOKENS = SAMPLE_WEIGHTS + 4 * SAMPLE_LIST;

/// A logit and its token; the larger logit wins, of equal ones the lower token.
struct Best {
    float logit;
    uint32_t token;
    FB_DEVICE void meet(float l, uint32_t t) {
        if (l > logit || (l == logit && t < token)) logit = l, token = t;
    }
};
FB_DEVICE void best_lanes(Best& b) {
    FB_UNROLL
    for (uint32_t m = 16; m > 0; m /= 2) {
        const float l = float_of(shfl_xor(bits_of(b.logit), m));
        b.meet(l, shfl_xor(b.token, m));
    }
}
/// The best of a block of 1024 threads, in every thread.
FB_DEVICE void best_block(Best& b) {
    const uint32_t lane = thread_x() % 32;
    best_lanes(b);
    sync_block();
    if (lane == 0) {
        sts<float>(SAMPLE_PAIRS + 8 * (thread_x() / 32), b.logit);
        sts<uint32_t>(SAMPLE_PAIRS + 4 + 8 * (thread_x() / 32), b.token);
    }
    sync_block();
    b = Best{lds<float>(SAMPLE_PAIRS + 8 * lane), lds<uint32_t>(SAMPLE_PAIRS + 4 + 8 * lane)};
    best_lanes(b);
}

/// The sum of `v` over threads up to this one, of a block of 1024; `total` gets all.
FB_DEVICE float scan_block(float v, float& total) {
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32;
    const auto scan = [&](float s) {
        FB_UNROLL
        for (uint32_t m = 1; m < 32; m *= 2) {
            const float before = float_of(shfl(bits_of(s), lane < m ? lane : lane - m));
            if (lane >= m) s += before;
        }
        return s;
    };
    const float mine = scan(v);
    sync_block();
    if (lane == 31) sts<float>(4 * warp, mine);
    sync_block();
    const float warps = scan(lds<float>(4 * lane));
    total = float_of(shfl(bits_of(warps), 31));
    const float before = float_of(shfl(bits_of(warps), warp == 0 ? 0 : warp - 1));
    return warp == 0 ? mine : before + mine;
}

/// The first thread whose sum over all up to it exceeds `left`, or the last with any; `left` becomes what is left of it there.
FB_DEVICE uint32_t pick(float v, float& left) {
    float total;
    const float sum = scan_block(v, total);
    // As pairs: the lowest thread wins among those that reach it, the highest among the others.
    const bool reached = v > 0.f && left < sum;
    Best b{reached ? 2.f : v > 0.f ? 1.f : 0.f, reached ? thread_x() : ~thread_x()};
    best_block(b);
    const uint32_t found = b.logit == 2.f ? b.token : b.logit == 1.f ? ~b.token : 0;
    sync_block();
    if (thread_x() == found) sts<float>(0, left - (sum - v));
    sync_block();
    left = lds<float>(0);
    sync_block();
    return found;
}

FB_DEVICE float weight_at(const SampleArgs& a, float top, uint32_t i) { return fast_exp((ldg(a.logits + i) - top) / a.temperature); }

/// The largest threshold from `least` on whose survivors are still `want` in number, or in weight; `each` calls with every weight of this
/// thread.
template <class Each> FB_DEVICE float bisect(float least, bool count, float want, const Each& each) {
    uint32_t low = bits_of(least), high = bits_of(1.f);
    while (low < high) {
        const uint32_t middle = high - (high - low) / 2;
        float v = 0.f;
        each([&](float w) { v += bits_of(w) >= middle && w > 0.f ? (count ? 1.f : w) : 0.f; });
        if (sum_block(v, 0) >= want) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return float_of(low);
}

/// Draws among `n` weights: each thread takes a run of them.
template <class Weight> FB_DEVICE uint32_t draw(uint32_t n, float least, float uniform, const Weight& weight) {
    const uint32_t run = (n + threads_x() - 1) / threads_x(), first = thread_x() * run, end = first + run < n ? first + run : n;
    float v = 0.f, total;
    for (uint32_t i = first; i < end; i++) v += weight(i) >= least ? weight(i) : 0.f;
    scan_block(v, total);
    float left = uniform * total;
    const uint32_t thread = pick(v, left);
    if (thread_x() == thread) {
        uint32_t found = first;
        for (uint32_t i = first; i < end; i++) {
            const float w = weight(i);
            if (!(w >= least)) continue;
            found = i;
            if (left < w) break;
            left -= w;
        }
        sts<uint32_t>(0, found);
    }
    sync_block();
    return lds<uint32_t>(0);
}

/// Thresholds by bisection over all logits.
FB_DEVICE uint32_t draw_any(const SampleArgs& a, float top, float uniform) {
    const uint32_t n = a.vocabulary;
    const auto each = [&](const auto& f) {
        for (uint32_t i = thread_x(); i < n; i += threads_x()) f(weight_at(a, top, i));
    };
    float least = a.min_p;
    if (a.top_k > 0 && a.top_k < n) least = bisect(least, true, (float)a.top_k, each);
    if (a.top_p < 1.f) {
        float total = 0.f;
        each([&](float w) { total += w >= least ? w : 0.f; });
        least = bisect(least, false, a.top_p * sum_block(total, 0), each);
    }
    return draw(n, least, uniform, [&](uint32_t i) { return weight_at(a, top, i); });
}

/// Draws among what the largest groups hold; false where that does not tell.
FB_DEVICE bool draw_listed(const SampleArgs& a, float top, float uniform, float all, uint32_t& token) {
    constexpr uint32_t PER = 16;  // groups of a thread, at the most
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, n = a.vocabulary, groups = (n + 31) / 32;
    const bool counted = a.top_k > 0 && a.top_k < n;
    const uint32_t per = (groups + threads_x() - 1) / threads_x();
    const float most = 1.f / a.temperature;
    if (per > PER || (counted && a.top_k > SAMPLE_GROUPS)) return false;
    // How far a group's largest logit lies below the top; how far a group may lie to be read.
    const auto below = [&](float l) { return (top - l) * most; };
    float depth[PER], reach;
    FB_UNROLL
    for (uint32_t j = 0; j < PER; j++) {
        const uint32_t i = thread_x() * per + j;
        depth[j] = j < per && i < groups ? below(ldg(a.groups + i)) : INFINITY;
    }
    const auto within = [&](float r) {
        float v = 0.f;
        FB_UNROLL
        for (uint32_t j = 0; j < PER; j++) v += depth[j] <= r ? 1.f : 0.f;
        return v;
    };
    // In eighths, the least that brings enough groups, or one more than what min-p lets through.
    const bool floor = !counted && a.min_p > 0.f;
    const uint32_t some = groups < SAMPLE_GROUPS / 2 ? groups : SAMPLE_GROUPS / 2, want = counted ? a.top_k : some;
    uint32_t low = 0, high = 1024;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        const float r = (float)middle * .125f;
        if (floor ? fast_exp(-r) < a.min_p : sum_block(within(r), 0) >= (float)want) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    reach = (float)(low + floor) * .125f;
    float found;
    const float mine = within(reach), upto = scan_block(mine, found);
    if (found > (float)SAMPLE_GROUPS || (counted && found < (float)a.top_k)) return false;
    uint32_t place = (uint32_t)(upto - mine);
    FB_UNROLL
    for (uint32_t j = 0; j < PER; j++) {
        if (depth[j] <= reach) sts<uint32_t>(SAMPLE_IDS + 4 * place++, thread_x() * per + j);
    }
    sync_block();
    // The entries in the order of tokens: how many there are in each group, then where they go.
    const uint32_t listed = (uint32_t)found;
    const auto near = [&](uint32_t i) { return i < n && below(ldg(a.logits + i)) <= reach; };
    for (uint32_t g = warp; g < listed; g += threads_x() / 32) {
        const float v = sum_lanes(near(lds<uint32_t>(SAMPLE_IDS + 4 * g) * 32 + lane) ? 1.f : 0.f);
        if (lane == 0) sts<float>(SAMPLE_PLACES + 4 * g, v);
    }
    sync_block();
    float total;
    const float held = thread_x() < listed ? lds<float>(SAMPLE_PLACES + 4 * thread_x()) : 0.f, ends = scan_block(held, total);
    const uint32_t count = (uint32_t)total;
    if (count > SAMPLE_LIST) return false;
    if (thread_x() < listed) sts<uint32_t>(SAMPLE_PLACES + 4 * thread_x(), (uint32_t)(ends - held));
    sync_block();
    for (uint32_t g = warp; g < listed; g += threads_x() / 32) {
        const uint32_t i = lds<uint32_t>(SAMPLE_IDS + 4 * g) * 32 + lane;
        float upto_lane = near(i) ? 1.f : 0.f;
        const bool mine_too = upto_lane > 0.f;
        FB_UNROLL
        for (uint32_t m = 1; m < 32; m *= 2) {
            const float before = float_of(shfl(bits_of(upto_lane), lane < m ? lane : lane - m));
            if (lane >= m) upto_lane += before;
        }
        if (mine_too) {
            const uint32_t to = 4 * (lds<uint32_t>(SAMPLE_PLACES + 4 * g) + (uint32_t)upto_lane - 1);
            sts<float>(SAMPLE_WEIGHTS + to, weight_at(a, top, i));
            sts<uint32_t>(SAMPLE_TOKENS + to, i);
        }
    }
    sync_block();
    const auto weight = [&](uint32_t i) { return lds<float>(SAMPLE_WEIGHTS + 4 * i); };
    const auto each = [&](const auto& f) {
        for (uint32_t i = thread_x(); i < count; i += threads_x()) f(weight(i));
    };
    const auto sum_from = [&](float least) {
        float v = 0.f;
        each([&](float w) { v += w >= least ? w : 0.f; });
        return sum_block(v, 0);
    };
    float least = a.min_p;
    if (counted || a.top_p < 1.f) {
        const bool ranked = count <= SAMPLE_RANKED;
        // Number and weight of the entries that are as large as this thread's.
        const float w = thread_x() < count ? weight(thread_x()) : -1.f;
        float number = 0.f, sum = 0.f;
        if (ranked && w >= least) {
            FB_UNROLL_8
            for (uint32_t i = 0; i < count; i++) {
                const float v = weight(i);
                number += v >= w ? 1.f : 0.f;
                sum += v >= w ? v : 0.f;
            }
        }
        const auto threshold = [&](float value, float want) {
            Best b{w >= least && value >= want ? w : -1.f, 0};
            best_block(b);
            return b.logit >= 0.f ? b.logit : least;
        };
        if (counted) least = ranked ? threshold(number, (float)a.top_k) : bisect(least, true, (float)a.top_k, each);
        if (a.top_p < 1.f) {
            const float here = sum_from(least), want = a.top_p * (counted || a.min_p > 0.f ? here : all);
            if (here < want) return false;
            least = ranked ? threshold(sum, want) : bisect(least, false, want, each);
        }
    }
    token = lds<uint32_t>(SAMPLE_TOKENS + 4 * draw(count, least, uniform, weight));
    return true;
}

FB_DEVICE void sample(const SampleArgs& a) {
    const uint32_t n = a.vocabulary, at = block_x() * SAMPLE_TILE + thread_x(), tiles = blocks_x();
    float l = at < n ? ldg(a.logits + at) : -INFINITY;
    if (a.seen && at < n && ldg(a.seen + at)) {
        l = l > 0.f ? l / a.penalty : l * a.penalty;
        stg(a.logits + at, l);
    }
    Best best{-INFINITY, 0};
    if (l > best.logit) best = Best{l, at};
    best_lanes(best);
    if (thread_x() % 32 == 0 && at < n) stg(a.groups + at / 32, best.logit);
    best_block(best);
    float sum = 0.f;
    if (a.temperature > 0.f) sum = sum_block(l > -INFINITY ? fast_exp((l - best.logit) / a.temperature) : 0.f, 0);
    if (thread_x() == 0) {
        stg(a.tiles + 3 * block_x(), best.logit);
        stg(a.tiles + 3 * block_x() + 1, float_of(best.token));
        stg(a.tiles + 3 * block_x() + 2, sum);
    }
    fence();
    sync_block();
    if (thread_x() == 0) sts<uint32_t>(0, atomic_inc(a.counter));
    sync_block();
    const bool last = lds<uint32_t>(0) == tiles - 1;
    if (!last) return;
    fence();
    best = Best{-INFINITY, 0};
    for (uint32_t i = thread_x(); i < tiles; i += threads_x()) best.meet(ld_fresh(a.tiles + 3 * i), bits_of(ld_fresh(a.tiles + 3 * i + 1)));
    best_block(best);
    const uint32_t drawn = ldg(&a.step->drawn);
    uint32_t token = best.token;
    if (a.temperature > 0.f) {
        const float uniform = ldg(a.uniforms + drawn);
        // Weights of whole tiles; none has more than 1024 of them but vocabularies beyond a million tokens.
        float v = 0.f, all;
        for (uint32_t i = thread_x(); i < tiles; i += threads_x()) {
            const float far = ld_fresh(a.tiles + 3 * i) - best.logit;
            v += far > -INFINITY ? ld_fresh(a.tiles + 3 * i + 2) * fast_exp(far / a.temperature) : 0.f;
        }
        scan_block(v, all);
        const bool plain = (a.top_k == 0 || a.top_k >= n) && a.top_p >= 1.f && a.min_p <= 0.f;
        if (plain && tiles <= threads_x()) {
            float left = uniform * all;
            const uint32_t i = pick(v, left) * SAMPLE_TILE + thread_x();
            const float w = i < n ? weight_at(a, best.logit, i) : 0.f;
            token = i - thread_x() + pick(w > 0.f ? w : 0.f, left);
        } else if (plain || !draw_listed(a, best.logit, uniform, all, token)) {
            token = draw_any(a, best.logit, uniform);
        }
    }
    if (thread_x() == 0) {
        stg(a.out + drawn, token);
        stg(&a.step->drawn, drawn + 1);
        stg(&a.step->tokens[0], token);
        stg(&a.step->positions[0], ldg(&a.step->positions[0]) + 1);
        if (a.seen) stg(a.seen + token, (unsigned char)1);
        stg(a.counter, 0u);
    }
}

static_assert(sizeof(SampleArgs) == 88, "arguments");

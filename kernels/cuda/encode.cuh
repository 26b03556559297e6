// The exact tail-biting Viterbi search of fracbit-trellis (`search.rs`): the same integers, hence the same bytes.
//
// A block of 1024 threads searches two tiles at once: every cost is a pair of 16-bit halves, one of each tile, so that hashes, addresses
// and lookups are shared. The branch costs of a step are tabulated first, by what the code looks up (bits of its hash or bytes of it).
// The costs of all overlaps are one array in shared memory. Steps with few new bits hold the entries that a thread needs in registers and
// write the results over them; those with many divide the continuations of an overlap among threads.
//
// Arrays between groups of at most six new bits (or of one step) also go to global memory, and the trace decides a group at a time
// from them: a warp enumerates the group's continuations, the least total and of equal ones the first path wins, as on the processor.
#pragma once
#include "device.cuh"

struct EncodeArgs {
    const int16_t* tiles;     // (tiles, 256) on the grid
    const int16_t* entries;   // values by what is looked up: (index, weights) for hashes, (weight, byte) for bytes
    uint32_t* costs;          // (blocks, bounds, overlaps) workspace
    unsigned char* codes;     // (tiles, tile_bytes)
    uint32_t tile_count, doublings;
    uint32_t bounds;          // cost arrays of a block
    int32_t least, most;      // of the values
    uint32_t pad;
};
static_assert(sizeof(EncodeArgs) == 56, "arguments");

/// Threads of a block.
constexpr uint32_t encode_threads = 1024;
/// States that a thread looks at in a step.
constexpr uint32_t encode_share = 65536 / encode_threads;

FB_DEVICE int32_t clamp16(int32_t d) { return d > 32767 ? 32767 : d < -32768 ? -32768 : d; }
/// Cost of coding `x` as `v`.
FB_DEVICE uint32_t branch_cost(int32_t v, int32_t x, uint32_t doublings) {
    const int32_t d = clamp16(clamp16(v - x) << doublings);
    return (uint32_t)(d * d + (1 << 14)) >> 15;
}
/// a + b in both halves, at most 65535; with `room` it is known to be at most that.
template <bool room = false> FB_DEVICE uint32_t add_limited2(uint32_t a, uint32_t b) { return room ? a + b : min2(a, ~b) + b; }
/// Byte `i` of `v` as an offset into a table of words.
FB_DEVICE uint32_t byte_offset(uint32_t v, uint32_t i) { return prmt(v, 0, 0x4440 | i) * 4; }

/// Codes that look up the upper `bits` of x (x + add) mod 2^16.
template <uint32_t values, uint32_t bits, uint32_t add> struct Hashed {
    static constexpr uint32_t weights = values;
    /// Entries of the table. A second copy behind it saves the wrap around.
    static constexpr uint32_t entries = 1u << bits, copies = 2, mask = 4 * (entries - 1);
    /// Overlaps this far apart look up different banks of shared memory, as powers of two.
    static constexpr uint32_t stride = 16 - bits;

    /// Branch costs of entry `i` for both tiles; `x` are the weights of the step.
    static FB_DEVICE uint32_t entry(uint32_t, uint32_t own, uint32_t x, uint32_t doublings) {
        uint32_t sum = 0;
        FB_UNROLL
        for (uint32_t w = 0; w < weights; w++) {
            const int32_t v = (int16_t)(own >> (16 * w));
            const uint32_t word = lds<uint32_t>(x + 4 * w);
            const uint32_t low = branch_cost(v, (int16_t)word, doublings), high = branch_cost(v, (int16_t)(word >> 16), doublings);
            sum = add_limited2(sum, high << 16 | low);
        }
        return sum;
    }
    static FB_DEVICE uint32_t own(const int16_t* from, uint32_t i) {
        return weights == 1 ? (uint16_t)ldg(from + i) : ldg(reinterpret_cast<const uint32_t*>(from) + i);
    }

    /// Weight `w` of a state.
    static FB_DEVICE int32_t value(const int16_t* from, uint32_t state, uint32_t w) {
        return ldg(from + (state * (state + add) >> (16 - bits)) % entries * weights + w);
    }

    struct Start {
        uint32_t hash, odd;
        FB_DEVICE explicit Start(uint32_t u) : hash(u * (u + add)), odd(2 * u + add) {}
    };
    /// The states that extend `u` by K bits `n` at the top. `low` is as much of `u` as is known when this is compiled.
    template <uint32_t K> struct Fan {
        uint32_t at, turn;
        /// The one for `start | more`, where they have no bits in common.
        Fan() = default;
        FB_DEVICE Fan(Start start, uint32_t more) {
            const uint32_t hash = start.hash + more * (start.odd + more);
            at = hash >> (14 - bits) & mask;
            turn = (start.odd + 2 * more) << (bits - K + 2);
        }
        FB_DEVICE void hold() { at = hidden(at); }
        /// Numbers `n` that differ by a multiple of `rounds` are known offsets apart in the table, of `u` being known what is below `near`.
        template <uint32_t near> static constexpr uint32_t rounds = 2 * near < 1u << K ? (1u << (K - 1)) / near : 1;
        FB_DEVICE uint32_t begin(uint32_t r) const { return r == 0 ? at : (at + r * turn) & mask; }
        template <bool room> static FB_DEVICE uint32_t cost(uint32_t table, uint32_t begin, uint32_t n, uint32_t low) {
            return fetch(table + begin + ((n * (2 * low + add) & ((1u << K) - 1)) << (bits - K + 2)));
        }
    };
};

constexpr uint32_t fast_factors[11][2] = {{4, 0xE84B7101}, {5, 0x89A3E601}, {6, 0x62F08201}, {7, 0x5D613201}, {8, 0x28B86601},
                                          {10, 0x57CE01},  {12, 0x176601},  {14, 0xB68F01},  {16, 0xD6C401},  {18, 0xE99401},
                                          {20, 0xB05201}};
constexpr uint32_t encode_factor(uint32_t quarters) {
    uint32_t i = 0;
    while (fast_factors[i][0] != quarters) i++;
    return fast_factors[i][1];
}

/// The `fast` code: a byte of its hash for every weight.
template <uint32_t quarters> struct Bytes {
    static constexpr uint32_t weights = quarters <= 8 ? 4 : 2, entries = 256 * weights, copies = 1, stride = 8;
    static constexpr uint32_t factor = encode_factor(quarters);

    static FB_DEVICE uint32_t entry(uint32_t i, uint32_t own, uint32_t x, uint32_t doublings) {
        const uint32_t word = lds<uint32_t>(x + 4 * (i / 256));
        const int32_t v = (int16_t)own;
        return branch_cost(v, (int16_t)(word >> 16), doublings) << 16 | branch_cost(v, (int16_t)word, doublings);
    }
    static FB_DEVICE uint32_t own(const int16_t* from, uint32_t i) { return (uint16_t)ldg(from + i); }

    /// What bits of a state add to its hash, before the lowest byte of the product is dropped if there are two.
    static FB_DEVICE uint32_t part(uint32_t x) {
        if (weights == 2) return x * factor;
        return x * 0x10001 * (factor >> 8) + (x * 0x10001 >> 8);
    }
    static FB_DEVICE int32_t value(const int16_t* from, uint32_t state, uint32_t w) {
        const uint32_t hash = weights == 2 ? part(state - (state >> 15 << 16)) >> 8 : part(state);
        return ldg(from + 256 * w + (hash >> (8 * w) & 255));
    }
    struct Start {
        uint32_t hash;
        FB_DEVICE explicit Start(uint32_t u) : hash(part(u)) {}
    };
    template <uint32_t K> struct Fan {
        uint32_t hash;
        Fan() = default;
        FB_DEVICE Fan(Start start, uint32_t more) : hash(start.hash + part(more)) {}
        FB_DEVICE void hold() { hash = hidden(hash); }
        template <uint32_t near> static constexpr uint32_t rounds = 1;
        /// The state is signed where two bytes count.
        static FB_DEVICE uint32_t turned(uint32_t hash, uint32_t n) {
            return hash + (weights == 2 ? n - (n >> (K - 1) << K) : n) * part(1u << (16 - K));
        }
        FB_DEVICE uint32_t begin(uint32_t n) const { return turned(hash, n); }
        template <bool room> static FB_DEVICE uint32_t cost(uint32_t table, uint32_t hash, uint32_t n, uint32_t) {
            const uint32_t p = turned(hash, n);
            if (weights == 2) return add_limited2<room>(fetch(table + byte_offset(p, 1)), fetch(table + 1024 + byte_offset(p, 2)));
            const uint32_t a = add_limited2<room>(fetch(table + byte_offset(p, 0)), fetch(table + 1024 + byte_offset(p, 1)));
            const uint32_t b = add_limited2<room>(fetch(table + 2048 + byte_offset(p, 2)), fetch(table + 3072 + byte_offset(p, 3)));
            return add_limited2(a, b);
        }
    };
};

template <uint32_t quarters> using EncodeFine = Hashed<1, 9, 0x79B5>;
template <uint32_t quarters> using EncodeHyb = Hashed<2, quarters <= 16 ? 10 : quarters <= 18 ? 11 : 12, 1>;
template <uint32_t quarters> using EncodeFast = Bytes<quarters>;

/// Where the costs of overlap `v` lie: five neighbouring bits of the lower twelve of `v`, whichever they are, lead to 32 banks. Of bits
/// apart, the places combine by exclusive or.
FB_DEVICE constexpr uint32_t place(uint32_t v) { return 4 * (v ^ (v >> 5 & 31) ^ (v >> 10 & 3)); }
/// `at` and another place, known when this is compiled: an offset where no bank changes.
FB_DEVICE uint32_t beside(uint32_t at, uint32_t other) { return other % 128 == 0 ? at + other : at ^ other; }

/// How the threads share the overlaps of a step with K <= 5 new bits and a shift by S after it. Lanes are a stride of the code apart; a
/// thread takes `near` overlaps that differ in their lowest bits, hence all go on to the same entries, of each of its items.
template <uint32_t K, uint32_t S, uint32_t stride> struct Share {
    static constexpr uint32_t near = encode_share >> K < 1u << S ? encode_share >> K : 1u << S, items = encode_share / (near << K);
    static constexpr uint32_t spread = 16 - K > stride ? 16 - K - stride < 5 ? 16 - K - stride : 5 : 0;
    static constexpr uint32_t rest = (1u << stride) / near, lanes = 1u << spread;
    static FB_DEVICE constexpr uint32_t overlap(uint32_t id) {
        return (id % lanes) << stride | id / lanes % rest * near | (id / lanes / rest) << (stride + spread);
    }
    /// Of overlap `i` of a thread, what no thread's first one has.
    static FB_DEVICE constexpr uint32_t more(uint32_t i) { return overlap(i / near * encode_threads) | i % near; }
};

template <class Code, uint32_t quarters> struct Viterbi {
    static constexpr uint32_t weights = Code::weights, steps = 256 / weights, reach = 128 / weights;
    static constexpr uint32_t low = weights * quarters / 4, high = (weights * quarters + 3) / 4;  // new bits of a step
    static constexpr uint32_t overlaps = 65536 >> low;
    // Byte offsets in shared memory, after the costs.
    static constexpr uint32_t table = 4 * overlaps;
    static constexpr uint32_t xs = table + 4 * Code::entries * Code::copies;  // pairs of weights
    static constexpr uint32_t parts = xs + 1024;                              // minima of parts of the continuations
    static constexpr uint32_t list = parts + 4 * encode_threads;              // bounds of groups, u16
    static constexpr uint32_t states = list + 2 * 264;                        // u16 for every step, of both tiles
    static constexpr uint32_t minima = states + 2 * 2 * 256;                  // two pairs in turn
    static constexpr uint32_t seams = minima + 16;                            // overlaps at the seam
    static constexpr uint32_t firsts = seams + 8;                             // keys of the first least cost
    static constexpr uint32_t limits = firsts + 8;  // of the costs after each step: with more a sum may exceed 16 bits
    static constexpr bool sums_limited = weights == 4;
    static constexpr uint32_t own_entries = Code::entries > encode_threads ? Code::entries / encode_threads : 1;

    const EncodeArgs& a;
    uint32_t tile;
    bool both;  // a second tile
    uint32_t turn;
    uint32_t own[own_entries];  // values of the entries that the thread tabulates
    /// Where all steps are alike, what a thread's overlaps look up stays in registers, if there are enough.
    using Whole = Share<low <= 5 ? low : 5, low, Code::stride>;
    static constexpr uint32_t held = low == high && (low == 3 || (low == 2 && weights == 1)) ? Whole::near * Whole::items : 1;
    typename Code::template Fan<low> fans[held];

    FB_DEVICE explicit Viterbi(const EncodeArgs& args) : a(args), turn(0) {
        FB_UNROLL
        for (uint32_t i = 0; i < own_entries; i++) {
            const uint32_t entry = thread_x() + i * encode_threads;
            own[i] = entry < Code::entries ? Code::own(a.entries, entry) : 0;
        }
        const uint32_t u = Whole::overlap(thread_x());
        FB_UNROLL
        for (uint32_t i = 0; held > 1 && i < held; i++) {
            fans[i] = typename Code::template Fan<low>(typename Code::Start(u), Whole::more(i));
            fans[i].hold();
        }
        if (thread_x() < 4) sts<uint32_t>(minima + 4 * thread_x(), ~0u);
    }
    static FB_DEVICE uint32_t position(uint32_t t) { return t * weights * quarters / 4; }
    static FB_DEVICE uint32_t shift(uint32_t t) { return position(t % steps + 1) - position(t % steps); }
    /// New bits in the state of step `t`: the shift before it.
    static FB_DEVICE uint32_t fresh(uint32_t t) { return shift(t + steps - 1); }
    FB_DEVICE uint32_t* slot(uint32_t i) const { return a.costs + ((size_t)block_x() * a.bounds + i) * overlaps; }
    /// Where overlap `u` after `k` new bits is in a slot: as the threads come to it.
    static FB_DEVICE uint32_t in_slot(uint32_t u, uint32_t k) {
        if (k > 5 || 16 - k <= Code::stride) return u;
        return (u & ((1u << Code::stride) - 1)) << (16 - k - Code::stride) | u >> Code::stride;
    }

    /// Least of each half over the block. Between two calls there is another barrier.
    FB_DEVICE uint32_t least(uint32_t pair) {
        const uint32_t l = least_of_warp(pair & 65535), h = least_of_warp(pair >> 16), cell = minima + 8 * turn;
        turn ^= 1;
        if (thread_x() % 32 == 0) {
            shared_min(cell, l);
            shared_min(cell + 4, h);
        }
        if (thread_x() < 2) sts<uint32_t>(minima + 8 * turn + 4 * thread_x(), ~0u);
        sync_block();
        return lds<uint32_t>(cell) | lds<uint32_t>(cell + 4) << 16;
    }

    /// Branch costs of all entries at step `t`.
    FB_DEVICE void tabulate(uint32_t t) const {
        FB_UNROLL
        for (uint32_t i = 0; i < own_entries; i++) {
            const uint32_t entry = thread_x() + i * encode_threads;
            if (entry < Code::entries) {
                const uint32_t cost = Code::entry(entry, own[i], xs + 4 * weights * (t % steps), a.doublings);
                sts<uint32_t>(table + 4 * entry, cost);
                if (Code::copies == 2) sts<uint32_t>(table + 4 * (Code::entries + entry), cost);
            }
        }
    }

    /// What a thread has in a step with K < 4, from the costs `after` it: see `step`.
    template <uint32_t K, uint32_t S, bool room>
    FB_DEVICE void overlaps_of(uint32_t u, const uint32_t* after, uint32_t base, uint32_t* keep, uint32_t& lowest) {
        using Mine = Share<K, S, Code::stride>;
        constexpr uint32_t near = Mine::near, count = near * Mine::items;
        const uint32_t at = place(u);
        const typename Code::Start start(u);
        uint32_t* const to = keep + in_slot(u, K);
        uint32_t one = 0;
        FB_UNROLL
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t more = Mine::more(i);
            typename Code::template Fan<K> fan;
            if constexpr (held == count) fan = fans[i];
            else fan = typename Code::template Fan<K>(start, more);
            uint32_t best = ~0u;
            constexpr uint32_t rounds = Code::template Fan<K>::template rounds<near>;
            FB_UNROLL
            for (uint32_t r = 0; r < rounds; r++) {
                const uint32_t begin = fan.begin(r);
                FB_UNROLL
                for (uint32_t n = 0; n < 1u << K; n += rounds) {
                    const uint32_t next = after[i / near << K | n | r], cost = fan.template cost<room>(table, begin, n, i % near);
                    best = add_min2(next, room && !sums_limited ? cost : min2(cost, ~next), best);
                }
            }
            best -= base;
            if (i % 2 == 1) lowest = min3_2(lowest, one, best);
            one = best;
            put(beside(beside(at, place(i % near)), place(more - i % near)), best);
            if (keep) stg(to + in_slot(more, K), best);
        }
    }
    /// The same with K of 4 or 5, where a thread has one item: the costs after it need no registers. Writes nothing yet.
    template <uint32_t K, uint32_t S, uint32_t near, bool room> FB_DEVICE void item_of(uint32_t u, uint32_t (&best)[near]) const {
        using Fan = typename Code::template Fan<K>;
        constexpr uint32_t rounds = Fan::template rounds<near>;
        const uint32_t at = place(u >> S);
        const typename Code::Start start(u);
        FB_UNROLL
        for (uint32_t r = 0; r < rounds; r++) {
            uint32_t begin[near];
            FB_UNROLL
            for (uint32_t e = 0; e < near; e++) begin[e] = Fan(start, e).begin(r);
            FB_UNROLL
            for (uint32_t n = 0; n < 1u << K; n += rounds) {
                const uint32_t next = fetch(beside(at, place((n | r) << (16 - K - S))));
                FB_UNROLL
                for (uint32_t e = 0; e < near; e++) {
                    const uint32_t cost = Fan::template cost<room>(table, begin[e], n, e);
                    best[e] = add_min2(next, room && !sums_limited ? cost : min2(cost, ~next), best[e]);
                }
            }
        }
    }
    /// The least of what a thread has of one overlap in a step with K > 5.
    template <uint32_t S, bool room> FB_DEVICE uint32_t part_of(const typename Code::template Fan<6>& fan, uint32_t at) const {
        uint32_t best = ~0u;
        constexpr uint32_t rounds = Code::template Fan<6>::template rounds<1>;
        FB_UNROLL_1
        for (uint32_t eight = 0; eight < 8; eight++) {
            const uint32_t high = rounds > 1 ? 4 * eight : 8 * eight, to = at ^ place(high << 10 >> S);
            FB_UNROLL
            for (uint32_t i = 0; i < 8; i++) {
                const uint32_t r = rounds > 1 ? i / 2 : 0, n = rounds > 1 ? i % 2 * rounds : i;
                const uint32_t next = fetch(to ^ place((r + n) << 10 >> S));
                const uint32_t cost = fan.template cost<room>(table, fan.begin(high + r), n, 0);
                best = add_min2(next, room && !sums_limited ? cost : min2(cost, ~next), best);
            }
        }
        return best;
    }

    /// The costs before step `t`, with K new bits and a shift by S after it, from those after it, less `base`: the least of these.
    /// `keep` is where they also go, or null. Returns their least.
    template <uint32_t K, uint32_t S> FB_DEVICE uint32_t step(uint32_t t, uint32_t base, uint32_t* keep) {
        const uint32_t thread = hidden(thread_x());
        uint32_t lowest = ~0u;
        // Where no sum of a step exceeds 16 bits, none is limited. Four weights mostly do: then only sums of two are known not to.
        const uint32_t limit = lds<uint32_t>(limits + 4 * (t % steps));
        const bool tight = sums_limited ? limit != 0 : (limit & 65535) == 0 || limit >> 16 == 0;
        if constexpr (K == 4 || K == 5) {
            using Mine = Share<K, S, Code::stride>;
            static_assert(Mine::items == 1, "one item");
            tabulate(t);
            bool full = tight;
            FB_UNROLL
            for (uint32_t i = 0; !sums_limited && i < (65536 >> S) / encode_threads; i++) {
                full |= max2(fetch(place(i * encode_threads + thread)), limit) != limit;
            }
            full = sync_block_or(full);
            const uint32_t u = hidden(Mine::overlap(thread)), at = place(u);
            uint32_t best[Mine::near];
            FB_UNROLL
            for (uint32_t e = 0; e < Mine::near; e++) best[e] = ~0u;
            if (full) item_of<K, S, Mine::near, false>(u, best);
            else item_of<K, S, Mine::near, true>(u, best);
            sync_block();
            FB_UNROLL
            for (uint32_t e = 0; e < Mine::near; e++) {
                best[e] -= base;
                lowest = min2(lowest, best[e]);
                put(beside(at, place(e)), best[e]);
                if (keep) stg(keep + in_slot(u | e, K), best[e]);
            }
        } else if constexpr (K < 4) {
            using Mine = Share<K, S, Code::stride>;
            constexpr uint32_t near = Mine::near, items = Mine::items;
            uint32_t u = Mine::overlap(thread), at = place(u >> S);
            uint32_t after[items << K];
            FB_UNROLL
            for (uint32_t i = 0; i < items << K; i++) {
                const uint32_t n = i % (1u << K);
                after[i] = fetch(beside(beside(at, place(Mine::more((i >> K) * near) >> S)), place(n << (16 - K - S))));
            }
            tabulate(t);
            bool full = tight;
            if constexpr (!sums_limited) {
                uint32_t most = 0;
                FB_UNROLL
                for (uint32_t i = 0; i < items << K; i += 2) most = max3_2(most, after[i], after[i + 1]);
                full |= max2(most, limit) != limit;
            }
            full = sync_block_or(full);
            u = hidden(u);
            if (full) overlaps_of<K, S, false>(u, after, base, keep, lowest);
            else overlaps_of<K, S, true>(u, after, base, keep, lowest);
        } else {
            // A thread takes every `divide`-th continuation of one overlap: those that extend the first of them by six bits.
            constexpr uint32_t divide = 1u << (K - 6), fans = 65536u >> K;
            constexpr uint32_t spread = 16 - K > Code::stride ? 16 - K - Code::stride : 0;
            tabulate(t);
            bool full = tight;
            if constexpr (!sums_limited) {
                if (thread < 65536u >> S) full |= max2(fetch(place(thread)), limit) != limit;
            }
            full = sync_block_or(full);
            const uint32_t me = hidden(thread), id = me >> spread, part = id % divide;
            const uint32_t u = id / divide | (me & ((1u << spread) - 1)) << Code::stride;
            const uint32_t first = part << (16 - K) | u, at = place(first >> S);
            const typename Code::template Fan<6> fan(typename Code::Start(first), 0);
            uint32_t best = full ? part_of<S, false>(fan, at) : part_of<S, true>(fan, at);
            put(parts + 4 * (part * fans + u), best);
            sync_block();
            if (thread < fans) {
                best = ~0u;
                FB_UNROLL
                for (uint32_t i = 0; i < divide; i++) best = min2(best, lds<uint32_t>(parts + 4 * (i * fans + thread)));
                best -= base;
                lowest = best;
                put(place(thread), best);
                if (keep) stg(keep + thread, best);
            }
        }
        return least(lowest);
    }

    FB_DEVICE uint32_t any_step(uint32_t t, uint32_t base, uint32_t* keep) {
        if constexpr (low == high) {
            return step<low, low>(t, base, keep);
        } else {
            const bool rise = shift(t) == high;
            if (fresh(t) == high) {
                if (weights * quarters % 4 == 3 && rise) return step<high, high>(t, base, keep);
                return step<high, low>(t, base, keep);
            }
            if (weights * quarters % 4 == 1 && !rise) return step<low, low>(t, base, keep);
            return step<low, high>(t, base, keep);
        }
    }

    /// Cuts steps from..to into groups of at most six new bits; returns the number of bounds.
    FB_DEVICE uint32_t groups(uint32_t from, uint32_t to) {
        uint32_t count = 1, bits = 0;
        sync_block();
        if (thread_x() == 0) sts<uint16_t>(list, (uint16_t)from);
        for (uint32_t t = from; t < to; t++) {
            const uint32_t more = fresh(t);
            if (bits > 0 && bits + more > 6) {
                if (thread_x() == 0) sts<uint16_t>(list + 2 * count, (uint16_t)t);
                count++;
                bits = 0;
            }
            bits += more;
        }
        if (thread_x() == 0) sts<uint16_t>(list + 2 * count, (uint16_t)to);
        sync_block();
        return count + 1;
    }

    /// Costs-to-go from `to` down to `from`; those at the `count` bounds go to their slots. The costs at `to` are there: zero, or with
    /// `closed` zero for the overlap at the seam and all else out of range.
    FB_DEVICE void backward(uint32_t from, uint32_t to, uint32_t count, bool closed) {
        const uint32_t low_seam = lds<uint32_t>(seams), high_seam = lds<uint32_t>(seams + 4), k = fresh(to);
        uint32_t bound = count;
        for (uint32_t u = thread_x(); u < 65536u >> k; u += encode_threads) {
            const uint32_t start = closed ? (u == low_seam ? 0 : 65535) | (u == high_seam ? 0 : 65535u << 16) : 0;
            sts<uint32_t>(place(u), start);
            if (lds<uint16_t>(list + 2 * (bound - 1)) == to) stg(slot(bound - 1) + in_slot(u, k), start);
        }
        if (lds<uint16_t>(list + 2 * (bound - 1)) == to) bound--;
        sync_block();
        uint32_t base = 0;
        FB_UNROLL_1
        for (uint32_t t = to; t-- > from;) {
            const bool keep = bound > 0 && lds<uint16_t>(list + 2 * (bound - 1)) == t;
            bound -= keep;
            base = any_step(t, base, keep ? slot(bound) : nullptr);
        }
        fence();
        sync_block();
    }

    /// Follows the best path of each tile over the groups from its overlap at `seams` on; leaves its states, and there the overlap at the
    /// end. A warp works for each tile.
    FB_DEVICE void trace(uint32_t count) const {
        const uint32_t lane = thread_x() % 32, half = thread_x() / 32;
        if (half < 2) {
            const uint32_t mine = states + 512 * half;
            uint32_t done = 0, overlap = lds<uint32_t>(seams + 4 * half);
            for (uint32_t i = 0; i + 1 < count; i++) {
                const uint32_t from = lds<uint16_t>(list + 2 * i), to = lds<uint16_t>(list + 2 * (i + 1)), k = fresh(to);
                const uint32_t* end = slot(i + 1);
                uint32_t bits = 0;
                for (uint32_t t = from; t < to; t++) bits += fresh(t);
                uint32_t best = ~0u;
                // Two paths at a time, whose last costs are asked for before the others are computed.
                for (uint32_t path = lane; path < 1u << bits; path += 64) {
                    uint32_t total[2], u[2] = {overlap, overlap}, left = bits;
                    const auto state = [&](uint32_t t, uint32_t j) {
                        return ((path + 32 * j) >> left & ((1u << fresh(t)) - 1)) << (16 - fresh(t)) | u[j];
                    };
                    for (uint32_t t = from; t < to; t++) {
                        left -= fresh(t);
                        FB_UNROLL
                        for (uint32_t j = 0; j < 2; j++) u[j] = state(t, j) >> shift(t);
                    }
                    FB_UNROLL
                    for (uint32_t j = 0; j < 2; j++) {
                        total[j] = ldg(end + in_slot(u[j], k)) >> (16 * half) & 65535;
                        u[j] = overlap;
                    }
                    left = bits;
                    for (uint32_t t = from; t < to; t++) {
                        left -= fresh(t);
                        FB_UNROLL
                        for (uint32_t j = 0; j < 2; j++) {
                            const uint32_t s = state(t, j);
                            FB_UNROLL
                            for (uint32_t w = 0; w < weights; w++) {
                                const uint32_t x = lds<uint32_t>(xs + 4 * (t % steps * weights + w)) >> (16 * half);
                                total[j] += branch_cost(Code::value(a.entries, s, w), (int16_t)x, a.doublings);
                            }
                            u[j] = s >> shift(t);
                        }
                    }
                    FB_UNROLL
                    for (uint32_t j = 0; j < 2; j++) {
                        const uint32_t key = total[j] << 10 | (path + 32 * j);
                        if (path + 32 * j < 1u << bits) best = key < best ? key : best;
                    }
                }
                const uint32_t path = least_of_warp(best) & 1023;
                for (uint32_t t = from; t < to; t++) {
                    bits -= fresh(t);
                    const uint32_t state = (path >> bits & ((1u << fresh(t)) - 1)) << (16 - fresh(t)) | overlap;
                    if (lane == 0) sts<uint16_t>(mine + 2 * done, (uint16_t)state);
                    done++;
                    overlap = state >> shift(t);
                }
            }
            sync_warp();
            if (lane == 0) sts<uint32_t>(seams + 4 * half, overlap);
        }
        sync_block();
    }

    /// Overlaps of the first least costs at step `t`, to `seams`.
    FB_DEVICE void first_least(uint32_t t) const {
        if (thread_x() < 2) sts<uint32_t>(firsts + 4 * thread_x(), ~0u);
        sync_block();
        uint32_t keys[2] = {~0u, ~0u};
        for (uint32_t u = thread_x(); u < 65536u >> fresh(t); u += encode_threads) {
            const uint32_t pair = lds<uint32_t>(place(u)), l = pair << 16 | u, h = (pair & 0xFFFF0000u) | u;
            keys[0] = l < keys[0] ? l : keys[0];
            keys[1] = h < keys[1] ? h : keys[1];
        }
        FB_UNROLL
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t key = least_of_warp(keys[i]);
            if (thread_x() % 32 == 0) shared_min(firsts + 4 * i, key);
        }
        sync_block();
        if (thread_x() < 2) sts<uint32_t>(seams + 4 * thread_x(), lds<uint32_t>(firsts + 4 * thread_x()) & 65535);
        sync_block();
    }

    /// The tape of both tiles: step t holds bits position(t) on.
    FB_DEVICE void write() const {
        constexpr uint32_t bytes = 8 * quarters;
        for (uint32_t i = thread_x(); i < 2 * bytes; i += encode_threads) {
            const uint32_t half = i / bytes, first = i % bytes * 8;
            if (half == 1 && !both) break;
            uint32_t byte = 0, t = first * 4 / (weights * quarters);
            for (uint32_t bit = first; bit < first + 8; bit++) {
                while (position(t + 1) <= bit) t++;
                byte |= (lds<uint16_t>(states + 512 * half + 2 * t) >> (bit - position(t)) & 1u) << (bit - first);
            }
            stg(a.codes + (size_t)(tile + half) * bytes + i % bytes, (unsigned char)byte);
        }
    }

    /// What costs after step `t` may be at most so that no sum exceeds 16 bits, in both halves, 0 if one may whatever they are; with four
    /// weights whether a sum of two may.
    FB_DEVICE uint32_t limit_of(uint32_t t) const {
        uint32_t all = 0, exceeds = 0;
        FB_UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t sum = 0, two = 0;
            for (uint32_t w = 0; w < weights; w++) {
                const int16_t x = (int16_t)(lds<uint32_t>(xs + 4 * (t * weights + w)) >> (16 * half));
                const uint32_t l = branch_cost(a.least, x, a.doublings), h = branch_cost(a.most, x, a.doublings), more = l > h ? l : h;
                two = w % 2 == 0 ? more : two + more;
                exceeds |= two > 65535;
                sum += more;
            }
            all |= (sum > 65535 ? 0 : 65535 - sum) << (16 * half);
        }
        return sums_limited ? exceeds : all;
    }

    /// Tiles `which` and the one after it, if there is one.
    FB_DEVICE void run(uint32_t which) {
        tile = which;
        both = which + 1 < a.tile_count;
        for (uint32_t i = thread_x(); i < 256; i += encode_threads) {
            const int16_t* x = a.tiles + (size_t)tile * 256 + i;
            sts<uint32_t>(xs + 4 * i, low_high((uint16_t)ldg(x), (uint16_t)ldg(both ? x + 256 : x)));
        }
        sync_block();
        if (thread_x() < steps) sts<uint32_t>(limits + 4 * thread_x(), limit_of(thread_x()));
        // A free pass around the seam at step 0, on the circle unrolled; then a closed one, whose ends share that overlap.
        FB_UNROLL_1
        for (uint32_t closed = 0; closed < 2; closed++) {
            const uint32_t from = closed ? 0 : steps - reach, to = closed ? steps : steps + reach, count = groups(from, steps);
            backward(from, to, count, closed);
            if (!closed) first_least(from);
            trace(count);
        }
        write();
        sync_block();
    }
};

template <class Code, uint32_t quarters> FB_DEVICE void encode(const EncodeArgs& a) {
    check_base();
    Viterbi<Code, quarters> search(a);
    for (uint32_t pair = block_x(); 2 * pair < a.tile_count; pair += blocks_x()) search.run(2 * pair);
}

// The exact tail-biting Viterbi search of fracbit-trellis (`search.rs`), one block per tile: the same integers, hence the same bytes.
//
// Costs are 16-bit with saturation, renormalized each step. The arrays of a step lie in shared memory; those between groups of at
// most six new bits (or of one step) also go to global memory, and the trace decides a group at a time from them: a warp enumerates the
// group's continuations, the least total and of equal ones the first path wins, exactly as on the processor.
#pragma once
#include "device.cuh"

struct EncodeArgs {
    const int16_t* tiles;     // (tiles, 256) on the grid
    const int16_t* values;    // (weights, 65536) on the grid
    uint16_t* costs;          // (blocks, bounds, overlaps) workspace
    unsigned char* codes;     // (tiles, tile_bytes)
    uint32_t tile_count, weights, quarters, doublings;
    uint32_t reach;           // steps on either side of the seam that the free pass looks at
    uint32_t overlaps;        // entries of a cost array: 2^(16 - least shift)
    uint32_t bounds, pad;     // cost arrays of a block
};
static_assert(sizeof(EncodeArgs) == 64, "arguments");

struct Viterbi {
    const EncodeArgs& a;
    uint32_t steps, current, next, list, states, sums, tile;  // counts, and byte offsets in shared memory

    FB_DEVICE explicit Viterbi(const EncodeArgs& args) : a(args) {
        steps = 256 / a.weights;
        current = 0;
        next = 2 * a.overlaps;
        list = 4 * a.overlaps;          // bounds of groups, u16
        states = list + 2 * 264;        // u16 for every step
        sums = states + 2 * 264;        // a word for every warp, and results
        tile = 0;
    }
    FB_DEVICE uint32_t position(uint32_t t) const { return t * a.weights * a.quarters / 4; }
    FB_DEVICE uint32_t shift(uint32_t t) const { return position(t % steps + 1) - position(t % steps); }
    /// New bits in the state of step `t`: the shift before it.
    FB_DEVICE uint32_t fresh(uint32_t t) const { return shift(t + steps - 1); }
    FB_DEVICE uint32_t cost(int32_t v, int32_t x) const {
        int32_t d = v - x;
        d = d > 32767 ? 32767 : d < -32768 ? -32768 : d;
        for (uint32_t i = 0; i < a.doublings; i++) {
            d += d;
            d = d > 32767 ? 32767 : d < -32768 ? -32768 : d;
        }
        return (uint32_t)(d * d + (1 << 14)) >> 15;
    }
    FB_DEVICE uint32_t costs_of(uint32_t t, uint32_t state, uint32_t total, bool saturate) const {
        for (uint32_t i = 0; i < a.weights; i++) {
            const int32_t x = ldg(a.tiles + (size_t)tile * 256 + t % steps * a.weights + i);
            total += cost(ldg(a.values + (size_t)i * 65536 + state), x);
            if (saturate && total > 65535) total = 65535;
        }
        return total;
    }
    FB_DEVICE uint16_t* slot(uint32_t i) const { return a.costs + ((size_t)block_x() * a.bounds + i) * a.overlaps; }

    /// Least `key` of the block, for every thread.
    FB_DEVICE uint32_t least(uint32_t key) const {
        FB_UNROLL
        for (uint32_t m = 16; m > 0; m /= 2) {
            const uint32_t other = shfl_xor(key, m);
            key = other < key ? other : key;
        }
        sync_block();
        if (thread_x() % 32 == 0) sts<uint32_t>(sums + thread_x() / 32 * 4, key);
        sync_block();
        for (uint32_t w = 0; w < threads_x() / 32; w++) {
            const uint32_t other = lds<uint32_t>(sums + 4 * w);
            key = other < key ? other : key;
        }
        return key;
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

    /// Costs-to-go from `to` down to `from`; those at the `count` bounds go to their slots. The costs at `to` are in `current`.
    FB_DEVICE void backward(uint32_t from, uint32_t to, uint32_t count) {
        uint32_t base = 0, bound = count;
        const auto keep = [&](uint32_t t, uint32_t entries) {
            while (bound > 0 && lds<uint16_t>(list + 2 * (bound - 1)) > t) bound--;
            if (bound == 0 || lds<uint16_t>(list + 2 * (bound - 1)) != t) return;
            for (uint32_t u = thread_x(); u < entries; u += threads_x()) {
                stg(slot(bound - 1) + u, lds<uint16_t>(current + 2 * u));
            }
        };
        keep(to, 1u << (16 - fresh(to)));
        for (uint32_t t = to; t-- > from;) {
            const uint32_t k = fresh(t), s = shift(t), entries = 65536u >> k;
            uint32_t lowest = 65535;
            for (uint32_t u = thread_x(); u < entries; u += threads_x()) {
                uint32_t best = 65535;
                for (uint32_t n = 0; n < 1u << k; n++) {
                    const uint32_t state = n << (16 - k) | u;
                    const uint32_t total = costs_of(t, state, lds<uint16_t>(current + 2 * (state >> s)), true);
                    best = total < best ? total : best;
                }
                best = best > base ? best - base : 0;
                lowest = best < lowest ? best : lowest;
                sts<uint16_t>(next + 2 * u, (uint16_t)best);
            }
            base = least(lowest);
            const uint32_t other = current;
            current = next;
            next = other;
            keep(t, entries);
        }
        fence();
        sync_block();
    }

    /// Follows the best path over the groups from `overlap` on; leaves its states, returns the overlap at the end. The first warp works.
    FB_DEVICE uint32_t trace(uint32_t overlap, uint32_t count) {
        const uint32_t lane = thread_x() % 32;
        if (thread_x() < 32) {
            uint32_t done = 0;
            for (uint32_t i = 0; i + 1 < count; i++) {
                const uint32_t from = lds<uint16_t>(list + 2 * i), to = lds<uint16_t>(list + 2 * (i + 1));
                const uint16_t* end = slot(i + 1);
                uint32_t bits = 0;
                for (uint32_t t = from; t < to; t++) bits += fresh(t);
                uint32_t best = ~0u;
                for (uint32_t path = lane; path < 1u << bits; path += 32) {
                    uint32_t u = overlap, total = 0, left = bits;
                    for (uint32_t t = from; t < to; t++) {
                        left -= fresh(t);
                        const uint32_t state = (path >> left & ((1u << fresh(t)) - 1)) << (16 - fresh(t)) | u;
                        total = costs_of(t, state, total, false);
                        u = state >> shift(t);
                    }
                    total = (total + ldg(end + u)) << 10 | path;
                    best = total < best ? total : best;
                }
                FB_UNROLL
                for (uint32_t m = 16; m > 0; m /= 2) {
                    const uint32_t other = shfl_xor(best, m);
                    best = other < best ? other : best;
                }
                const uint32_t path = best & 1023;
                for (uint32_t t = from; t < to; t++) {
                    bits -= fresh(t);
                    const uint32_t state = (path >> bits & ((1u << fresh(t)) - 1)) << (16 - fresh(t)) | overlap;
                    if (lane == 0) sts<uint16_t>(states + 2 * done, (uint16_t)state);
                    done++;
                    overlap = state >> shift(t);
                }
            }
            if (lane == 0) sts<uint32_t>(sums + 128, overlap);
        }
        sync_block();
        return lds<uint32_t>(sums + 128);
    }

    FB_DEVICE void fill(uint32_t entries, uint16_t v) {
        sync_block();
        for (uint32_t u = thread_x(); u < entries; u += threads_x()) sts<uint16_t>(current + 2 * u, v);
        sync_block();
    }

    FB_DEVICE void run(uint32_t which) {
        tile = which;
        // Free pass around the seam at step 0, on the circle unrolled.
        const uint32_t from = steps - a.reach, to = steps + a.reach;
        uint32_t count = groups(from, steps);
        fill(65536u >> fresh(to), 0);
        backward(from, to, count);
        uint32_t key = ~0u;
        for (uint32_t u = thread_x(); u < 65536u >> fresh(from); u += threads_x()) {
            const uint32_t other = (uint32_t)ldg(slot(0) + u) << 16 | u;
            key = other < key ? other : key;
        }
        const uint32_t seam = trace(least(key) & 65535, count);
        // Closed pass: both ends share that overlap.
        count = groups(0, steps);
        fill(65536u >> fresh(0), 65535);
        if (thread_x() == 0) sts<uint16_t>(current + 2 * seam, (uint16_t)0);
        sync_block();
        backward(0, steps, count);
        trace(seam, count);
        // The tape: step t holds bits position(t) on.
        const uint32_t bytes = 8 * a.quarters;
        for (uint32_t i = thread_x(); i < bytes; i += threads_x()) {
            uint32_t byte = 0;
            for (uint32_t bit = 8 * i; bit < 8 * i + 8; bit++) {
                uint32_t t = bit * 4 / (a.weights * a.quarters);
                while (position(t + 1) <= bit) t++;
                while (position(t) > bit) t--;
                byte |= (lds<uint16_t>(states + 2 * t) >> (bit - position(t)) & 1u) << (bit - 8 * i);
            }
            stg(a.codes + (size_t)which * bytes + i, (unsigned char)byte);
        }
        sync_block();
    }
};

FB_DEVICE void encode(const EncodeArgs& a) {
    for (uint32_t tile = block_x(); tile < a.tile_count; tile += blocks_x()) {
        Viterbi search(a);
        search.run(tile);
    }
}

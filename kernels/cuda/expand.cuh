// From packed codes to half-precision weights in memory, for products with many tokens and for embeddings.
//
// Memory written is the bound to come near to: a warp takes a run of octets, the codes of the next one on their way, and writes pieces of 16
// bytes, of which two neighbouring lanes make whole 32-byte sectors.
#pragma once
#include "gemv.cuh"

struct DequantArgs {
    Matrix w;
    uint16_t* out;     // f16 (rows, cols)
    uint32_t segment;  // which segment
    uint32_t raw;      // integers instead of weights
    uint32_t add;      // to what is there: the planes of nested trellises
    uint32_t pad;
};

/// Writes a lane's 16 weights of one row and tile, which begins at column `col`.
FB_DEVICE void put_tile(const DequantArgs& a, uint32_t end_col, uint32_t row, uint32_t col, const uint32_t (&words)[8]) {
    // Of two neighbours, which have two neighbouring tiles of a row, the even lane writes the first halves, the odd one the second.
    const bool odd = thread_x() % 2 == 1;
    Words4 pieces[2];
    FB_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t other = shfl_xor(odd ? words[i] : words[4 + i], 1);
        pieces[0].w[i] = odd ? other : words[i];
        pieces[1].w[i] = odd ? words[4 + i] : other;
    }
    col = odd ? col - 8 : col;
    uint16_t* out = a.out + (size_t)row * a.w.cols + col;
    const uint32_t end = row < a.w.rows ? end_col : 0;
    const auto added = [&](const uint32_t* to, uint32_t word) { return a.add ? fma_halves(ldg(to), 0x3C003C00, word) : word; };
    if (a.w.cols % 8 == 0) {
        FB_UNROLL
        for (uint32_t i = 0; i < 8; i++) {
            if (col + i / 4 * 16 < end) pieces[i / 4].w[i % 4] = added((const uint32_t*)(out + i / 4 * 16) + i % 4, pieces[i / 4].w[i % 4]);
        }
        if (col < end) stg((Words4*)out, pieces[0]);
        if (col + 16 < end) stg((Words4*)(out + 16), pieces[1]);
    } else {  // rows begin and end anywhere
        FB_UNROLL
        for (uint32_t i = 0; i < 16; i++) {
            const uint32_t at = i / 8 * 16 + i % 8;
            if (col + at < end) {
                const uint32_t word = pieces[i / 8].w[i % 8 / 2] >> (16 * (i % 2)) & 0xFFFF;
                stg(out + at, (uint16_t)(a.add ? fma_halves(ldg(out + at), 0x3C003C00, word) : word));
            }
        }
    }
}

/// Whether rows have scales beside the codes.
template <class E, bool GROUPED = E::GROUPED> struct RowScales { static constexpr bool yes = true; };
template <class E> struct RowScales<E, true> { static constexpr bool yes = E::LEVELS; };

/// Expands one segment to half precision. Octets of all pairs are dealt evenly over the warps.
template <class E> FB_DEVICE void dequant(const DequantArgs& a) {
    const Segment& s = a.w.segments[a.segment];
    const uint32_t bytes = octet_bytes<E>(s);
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t g = lane / 4, c = lane % 4, slots = table_bytes(s.book) + warp * 2 * bytes + lane * 16;
    const uint64_t items = (uint64_t)a.w.pairs * s.octets, all = (uint64_t)blocks_x() * warps, mine = (uint64_t)block_x() * warps + warp;
    const uint32_t first = (uint32_t)(items * mine / all), end = (uint32_t)(items * (mine + 1) / all);
    const unsigned char* from = s.codes + (size_t)first * s.stride + lane * 16;
    uint32_t pair = first / s.octets, octet = first % s.octets;
    if (first < end) fetch<E>(slots, from, s, lane);
    cp_commit();
    Spread(s.book).store(s.book);
    sync_block();
    const Table t = table_of<E>(s.book, lane);
    FB_UNROLL_1
    for (uint32_t item = first; item < end; item++) {
        from += s.stride;
        if (item + 1 < end) fetch<E>(slots + (item + 1 - first) % 2 * bytes, from, s, lane);
        cp_commit();
        const uint32_t row = pair * 32 + 2 * g, col = s.first_col + octet * 128 + c * 16, slot = slots + (item - first) % 2 * bytes;
        // One scale for both tiles of a row but for group-wise schemes, whose scales come with the codes.
        float scales[4] = {};
        if constexpr (RowScales<E>::yes) {
            const uint32_t group = a.w.groups == 1 ? 0 : col / a.w.group < a.w.groups ? col / a.w.group : a.w.groups - 1;
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) {  // strip, row
                const uint32_t r = row + i / 2 * 16 + i % 2;
                scales[i] = r < a.w.rows ? mul_rn(ldc(a.w.scales + (size_t)r * a.w.groups + group), s.factor) : 0.f;
            }
        }
        cp_wait<1>();
        sync_warp();
        FB_UNROLL
        for (uint32_t strip = 0; strip < 2; strip++) {
            CodesOf<E> codes;
            codes.load_strip(slot, strip, lane);
            if constexpr (E::TRELLIS) codes.link(lane);
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) {  // tile, row
                const uint32_t q = i / 2, r = i % 2;
                Table own = t;
                float scale = scales[2 * strip + r];
                uint16_t half = 0;
                if constexpr (E::GROUPED) {
                    const uint32_t group = (q * 4 + c) * s.scales / 8;
                    half = lds<uint16_t>(slot - lane * 16 + 128 * E::Q + ((strip * 16 + 2 * g + r) * s.scales + group) * 2);
                    own = E::table(t, s.book, half);
                    if constexpr (!E::LEVELS) scale = mul_rn(mul_rn(from_half(half), a.w.gain), s.factor);
                }
                if (a.raw) scale = 1.f;
                uint32_t words[8];
                FB_UNROLL
                for (int j = 0; j < 4; j++) {
                    uint32_t found[E::WORDS];
                    E::quad(codes, own, (int)q, 4 * (int)r + j, found);
                    if constexpr (E::GROUPED && RowScales<E>::yes) {
                        FB_UNROLL
                        for (int k = 0; k < E::WORDS; k++) found[k] = E::times(found[k], E::factor(half));
                    }
                    FB_UNROLL
                    for (int k = 0; k < 2; k++) {
                        const uint32_t low = E::WORDS == 4 ? found[2 * k % E::WORDS] : found[k];
                        const uint32_t high = E::WORDS == 4 ? found[(2 * k + 1) % E::WORDS] : found[k] >> 16;
                        words[2 * j + k] = two_halves(mul_rn(from_half((uint16_t)low), scale), mul_rn(from_half((uint16_t)high), scale));
                    }
                }
                put_tile(a, s.end_col, row + strip * 16 + r, col + q * 64, words);
            }
        }
        sync_warp();
        if (++octet == s.octets) octet = 0, pair++;
    }
}

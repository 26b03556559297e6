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
};

/// Copies the codes of one pair and octet (contiguous) to shared memory.
template <int Q> FB_DEVICE void fetch(uint32_t at, const unsigned char* from, uint32_t lane) {
    constexpr uint32_t rest = Q % 4 * 8;  // lanes that the last bytes take
    FB_UNROLL
    for (int i = 0; i < Q / 4; i++) cp_async16(at + (uint32_t)i * 512 + lane * 16, from + (size_t)i * 512 + lane * 16);
    if constexpr (rest != 0) {
        if (lane < rest) cp_async16(at + (Q / 4) * 512 + lane * 16, from + (Q / 4) * 512 + lane * 16);
    }
}

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
    if (a.w.cols % 8 == 0) {
        if (col < end) stg((Words4*)out, pieces[0]);
        if (col + 16 < end) stg((Words4*)(out + 16), pieces[1]);
    } else {  // rows begin and end anywhere
        FB_UNROLL
        for (uint32_t i = 0; i < 16; i++) {
            const uint32_t at = i / 8 * 16 + i % 8;
            if (col + at < end) stg(out + at, (uint16_t)(pieces[i / 8].w[i % 8 / 2] >> (16 * (i % 2))));
        }
    }
}

/// The group of a column.
FB_DEVICE uint32_t group_of(const Matrix& w, uint32_t col) { return w.groups == 1 ? 0 : col / w.group; }
/// The canonical scale of a row at a column; 0 outside.
FB_DEVICE uint16_t scale_of(const Matrix& w, uint32_t row, uint32_t col) {
    const uint32_t group = group_of(w, col);
    return row < w.rows && group < w.groups ? ldg((const uint16_t*)w.scales + (size_t)row * w.groups + group) : (uint16_t)0;
}

/// Walks over a segment. `scale(row, group)` is what a group of columns takes from memory beside its codes, `weights(codes, q, r, scale,
/// words)` yields the 16 weights that a lane has of tile q and row r of its two; APART: those tiles may be of different groups.
template <class E, bool APART, class S, class F> FB_DEVICE void expand(const DequantArgs& a, const Segment& s, S scale, F weights) {
    constexpr uint32_t SLOT = 128 * E::Q;
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t g = lane / 4, c = lane % 4, slots = table_bytes(s.book) + warp * 2 * SLOT;
    // Octets of all pairs, dealt evenly.
    const uint64_t items = (uint64_t)a.w.pairs * s.octets, all = (uint64_t)blocks_x() * warps, mine = (uint64_t)block_x() * warps + warp;
    const uint32_t first = (uint32_t)(items * mine / all), end = (uint32_t)(items * (mine + 1) / all);
    const unsigned char* from = s.codes + (size_t)first * SLOT;
    uint32_t pair = first / s.octets, octet = first % s.octets;
    if (first < end) fetch<E::Q>(slots, from, lane);
    cp_commit();
    FB_UNROLL_1
    for (uint32_t item = first; item < end; item++) {
        from += SLOT;
        if (item + 1 < end) fetch<E::Q>(slots + (item + 1 - first) % 2 * SLOT, from, lane);
        cp_commit();
        const uint32_t row = pair * 32 + 2 * g, col = s.first_col + octet * 128 + c * 16;
        // What lies outside the matrix repeats its last row and group.
        const auto inside = [&](uint32_t group) { return group < a.w.groups ? group : a.w.groups - 1; };
        const uint32_t groups[2] = {inside(group_of(a.w, col)), APART ? inside(group_of(a.w, col + 64)) : 0};
        decltype(scale(row, col)) scales[8];
        FB_UNROLL
        for (uint32_t i = 0; i < 8; i++) {  // strip, tile, row
            const uint32_t r = row + i / 4 * 16 + i % 2;
            if (APART || i / 2 % 2 == 0) scales[i] = scale(r < a.w.rows ? r : a.w.rows - 1, groups[i / 2 % 2]);
        }
        cp_wait<1>();
        sync_warp();
        FB_UNROLL
        for (uint32_t strip = 0; strip < 2; strip++) {
            Codes<E::Q> codes;
            codes.load(slots + (item - first) % 2 * SLOT + strip * (SLOT / 2) + lane * 16, lane);
            if constexpr (E::TRELLIS) codes.link(lane);
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t words[8];
                weights(codes, (int)i / 2, (int)i % 2, scales[4 * strip + (APART ? i : i % 2)], words);
                put_tile(a, s.end_col, row + strip * 16 + i % 2, col + i / 2 * 64, words);
            }
        }
        sync_warp();
        if (++octet == s.octets) octet = 0, pair++;
    }
}

/// Expands one segment to half precision.
template <class E> FB_DEVICE void dequant(const DequantArgs& a) {
    const Segment& s = a.w.segments[a.segment];
    spread(s.book);
    sync_block();
    const Table t = table_of(s.book, thread_x() % 32);
    const auto scale = [&](uint32_t row, uint32_t group) {
        const float v = mul_rn(ldg(a.w.scales + (size_t)row * a.w.groups + group), s.factor);
        return a.raw ? 1.f : v;
    };
    expand<E, false>(a, s, scale, [&](const Codes<E::Q>& codes, int q, int r, float scale, uint32_t (&words)[8]) {
        FB_UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t found[E::WORDS];
            E::quad(codes, t, q, 4 * r + i, found);
            FB_UNROLL
            for (int j = 0; j < 2; j++) {
                const uint32_t low = E::WORDS == 4 ? found[2 * j % E::WORDS] : found[j];
                const uint32_t high = E::WORDS == 4 ? found[(2 * j + 1) % E::WORDS] : found[j] >> 16;
                words[2 * i + j] = two_halves(mul_rn(from_half((uint16_t)low), scale), mul_rn(from_half((uint16_t)high), scale));
            }
        }
    });
}

/// The same for group-wise schemes (grouped.cuh), whose scales also choose codebooks.
template <class E> FB_DEVICE void dequant_grouped(const DequantArgs& a) {
    const Segment& s = a.w.segments[0];
    spread(s.book);
    sync_block();
    const Table t = table_of(s.book, thread_x() % 32);
    const auto scale = [&](uint32_t row, uint32_t group) { return ldg((const uint16_t*)a.w.scales + (size_t)row * a.w.groups + group); };
    expand<E, true>(a, s, scale, [&](const Codes<E::Q>& codes, int q, int r, uint16_t half, uint32_t (&words)[8]) {
        const Table own = E::table(t, s.book, half);
        const float scale = a.raw ? 1.f : mul_rn(mul_rn(from_half(half), a.w.gain), s.factor);
        FB_UNROLL
        for (int i = 0; i < 8; i++) {
            const uint16_t low = E::half(codes, own, q, 16 * r + 2 * i), high = E::half(codes, own, q, 16 * r + 2 * i + 1);
            words[i] = two_halves(mul_rn(from_half(low), scale), mul_rn(from_half(high), scale));
        }
    });
}

// From packed codes to half-precision weights in memory, for products with many tokens and for embeddings.
#pragma once
#include "gemv.cuh"

struct DequantArgs {
    Matrix w;
    uint16_t* out;     // f16 (rows, cols)
    uint32_t segment;  // which segment
    uint32_t raw;      // integers instead of weights
};

/// Expands one segment to half precision. A warp takes one pair and octet at a time.
template <class E> FB_DEVICE void dequant(const DequantArgs& a) {
    const Segment& s = a.w.segments[a.segment];
    const uint32_t bytes = octet_bytes<E>(s);
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t g = lane / 4, c = lane % 4, slot = table_bytes(s.book) + warp * bytes;
    spread(s.book);
    sync_block();
    const Table t = table_of<E>(s.book, lane);
    const uint32_t items = a.w.pairs * s.octets;
    for (uint32_t item = block_x() * warps + warp; item < items; item += blocks_x() * warps) {
        const uint32_t pair = item / s.octets, octet = item % s.octets;
        fetch<E>(slot + lane * 16, s.codes + (size_t)item * bytes + lane * 16, s, lane);
        cp_commit();
        cp_wait<0>();
        sync_warp();
        FB_UNROLL_1
        for (uint32_t strip = 0; strip < 2; strip++) {
            Codes<E::Q> codes;
            codes.load(slot + strip * (64 * E::Q) + lane * 16, lane);
            if constexpr (E::TRELLIS) codes.link(lane);
            FB_UNROLL
            for (int i = 0; i < 16; i++) {  // tile, row, quad
                uint32_t words[E::WORDS];
                const int q = i / 8;
                const uint32_t in_strip = 2 * g + (uint32_t)(i % 8 / 4);
                uint16_t half = 0;
                Table own = t;
                if constexpr (E::GROUPED) {
                    const uint32_t group = ((uint32_t)q * 4 + c) * s.scales / 8;
                    half = lds<uint16_t>(slot + 128 * E::Q + ((strip * 16 + in_strip) * s.scales + group) * 2);
                    own = E::table(t, s.book, half);
                }
                E::quad(codes, own, q, i % 8, words);
                const uint32_t row = pair * 32 + strip * 16 + in_strip;
                const uint32_t col = s.first_col + octet * 128 + ((uint32_t)q * 4 + c) * 16 + (uint32_t)(i % 4) * 4;
                if (row >= a.w.rows) continue;
                float scale;
                if constexpr (E::GROUPED) {
                    scale = mul_rn(from_half(half), a.w.gain);
                } else {
                    scale = ldc(a.w.scales + (size_t)row * a.w.groups + (a.w.groups == 1 ? 0 : col / a.w.group));
                }
                const float factor = mul_rn(scale, s.factor);
                FB_UNROLL
                for (uint32_t j = 0; j < 4; j++) {
                    const uint32_t word = E::WORDS == 4 ? words[j % E::WORDS] : words[j / 2 % E::WORDS] >> (16 * (j % 2));
                    const uint16_t h = (uint16_t)word;
                    if (col + j < s.end_col) {
                        stg(a.out + (size_t)row * a.w.cols + col + j, a.raw ? h : to_half(mul_rn(from_half(h), factor)));
                    }
                }
            }
        }
        sync_warp();
    }
}

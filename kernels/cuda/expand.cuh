// From packed codes to half-precision weights in memory, for products with many tokens and for embeddings.
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

/// Expands one segment to half precision. A warp takes one pair and octet at a time.
template <class E> FB_DEVICE void dequant(const DequantArgs& a) {
    constexpr uint32_t SLOT = 128 * E::Q;
    const Segment& s = a.w.segments[a.segment];
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t g = lane / 4, c = lane % 4, slot = table_bytes(s.book) + warp * SLOT;
    spread(s.book);
    sync_block();
    const Table t = table_of(s.book, lane);
    const uint32_t items = a.w.pairs * s.octets;
    for (uint32_t item = block_x() * warps + warp; item < items; item += blocks_x() * warps) {
        const uint32_t pair = item / s.octets, octet = item % s.octets;
        fetch<E::Q>(slot, s.codes + (size_t)item * SLOT, lane);
        cp_commit();
        cp_wait<0>();
        sync_warp();
        FB_UNROLL_1
        for (uint32_t strip = 0; strip < 2; strip++) {
            Codes<E::Q> codes;
            codes.load(slot + strip * (SLOT / 2) + lane * 16, lane);
            if constexpr (E::TRELLIS) codes.link(lane);
            FB_UNROLL
            for (int i = 0; i < 16; i++) {  // tile, row, quad
                uint32_t words[E::WORDS];
                const int q = i / 8;
                E::quad(codes, t, q, i % 8, words);
                const uint32_t row = pair * 32 + strip * 16 + 2 * g + (uint32_t)(i % 8 / 4);
                const uint32_t col = s.first_col + octet * 128 + ((uint32_t)q * 4 + c) * 16 + (uint32_t)(i % 4) * 4;
                if (row >= a.w.rows) continue;
                const float scale = ldg(a.w.scales + (size_t)row * a.w.groups + (a.w.groups == 1 ? 0 : col / a.w.group));
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

/// The canonical scale of a row at a column; 0 outside.
FB_DEVICE uint16_t scale_of(const Matrix& w, uint32_t row, uint32_t col) {
    const uint32_t group = w.groups == 1 ? 0 : col / w.group;
    return row < w.rows && group < w.groups ? ldg((const uint16_t*)w.scales + (size_t)row * w.groups + group) : (uint16_t)0;
}

/// Expands the matrix to half precision, as `dequant`.
template <class E> FB_DEVICE void dequant_grouped(const DequantArgs& a) {
    constexpr uint32_t SLOT = 128 * E::Q;
    const Segment& s = a.w.segments[0];
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t g = lane / 4, c = lane % 4, slot = table_bytes(s.book) + warp * SLOT;
    spread(s.book);
    sync_block();
    const Table t = table_of(s.book, lane);
    const uint32_t items = a.w.pairs * s.octets;
    for (uint32_t item = block_x() * warps + warp; item < items; item += blocks_x() * warps) {
        const uint32_t pair = item / s.octets, octet = item % s.octets;
        fetch<E::Q>(slot, s.codes + (size_t)item * SLOT, lane);
        cp_commit();
        cp_wait<0>();
        sync_warp();
        FB_UNROLL_1
        for (uint32_t strip = 0; strip < 2; strip++) {
            Codes<E::Q> codes;
            codes.load(slot + strip * (SLOT / 2) + lane * 16, lane);
            FB_UNROLL
            for (int i = 0; i < 4; i++) {  // tile, row
                const uint32_t row = pair * 32 + strip * 16 + 2 * g + (uint32_t)(i % 2);
                const uint32_t first = (octet * 8 + (uint32_t)(i / 2) * 4 + c) * 16;
                const uint16_t half = scale_of(a.w, row, first);
                const Table own = E::table(t, s.book, half);
                const float factor = mul_rn(mul_rn(from_half(half), a.w.gain), s.factor);
                FB_UNROLL
                for (int j = 0; j < 16; j++) {
                    const uint16_t h = E::half(codes, own, i / 2, i % 2 * 16 + j);
                    if (row < a.w.rows && first + (uint32_t)j < a.w.cols) {
                        stg(a.out + (size_t)row * a.w.cols + first + j, a.raw ? h : to_half(mul_rn(from_half(h), factor)));
                    }
                }
            }
        }
        sync_warp();
    }
}

// y = W x for progressive codes (qoq) and up to 64 tokens a tile, in integers: 4-bit codes meet int8 activations on the tensor cores
// as they are (QServe, sections 5.2.2 and 5.2.3).
//
// With w = s (q - z) the product of a group of 128 columns is s (sum q x) - s z (sum x): scale and zero leave the loop over weights, which
// costs a mask or a mask and a shift for four codes. A group is one octet. Activations are rounded once for all
// matrices that read them, one scale for 256 columns as the processor does, and laid out as fragments. All sums of 256 columns are exact;
// what is made of them in floats is in the processor's order: the same bits as the scalar reference where one block has all
// columns of a row, else sums of ranges of columns are added in their order.
#pragma once
#include "gemv.cuh"

/// Activations as integers: (tile of tokens, octet, (q, token of the tile, tile column, 16 bytes), (token, scale and sum)). The bytes of a
/// lane's tile column are columns 0, 2, 4, 6, then 1, 3, 5, 7 of either half: what the halves of four bytes of codes meet.
struct Round8Args {
    const float* x;         // (tokens, cols)
    unsigned char* to;
    uint32_t tokens, cols, octets, tile;  // tokens of a tile: a multiple of 8
};

struct W4a8Args {
    Matrix w;
    const unsigned char* x;  // of Round8Args
    float* y;                // (tokens, y_stride)
    float* parts;            // (range, token, 32 pairs), of several ranges
    uint32_t tokens, y_stride, accumulate;
    uint32_t ranges;         // of columns
};
static_assert(sizeof(Round8Args) == 32 && sizeof(W4a8Args) == 240, "arguments");

/// Warps of a block, each with a strip of 16 rows.
constexpr uint32_t W4A8_WARPS = 8, W4A8_STAGES = 4;
/// Bytes of an octet of a pair: codes, and of every row scale and scale times zero.
constexpr uint32_t W4A8_PAIR = 2112;
/// Bytes of an octet of a tile's activations.
FB_DEVICE constexpr uint32_t w4a8_octet(uint32_t tile) { return tile * 136; }

/// Rounds 256 columns (`block_x`) of a token (a warp each, from `block_y` on), as `fracbit_kernels::Activations` says.
FB_DEVICE void round8(const Round8Args& a) {
    constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: sums have their last bit at the integers
    const uint32_t lane = thread_x() % 32, token = block_y() * (threads_x() / 32) + thread_x() / 32;
    const uint32_t tiles = (a.tokens + a.tile - 1) / a.tile;
    if (token >= tiles * a.tile) return;
    const uint32_t first = block_x() * 256 + lane * 8;
    float v[8];
    uint32_t top = 0;
    FB_UNROLL
    for (uint32_t i = 0; i < 8; i++) {
        v[i] = token < a.tokens && first + i < a.cols ? ldg(a.x + (size_t)token * a.cols + first + i) : 0.f;
        const uint32_t bits = bits_of(v[i]) & 0x7FFFFFFF;  // ordered as magnitudes are, NaN above all
        top = bits > top ? bits : top;
    }
    FB_UNROLL
    for (uint32_t m = 16; m > 0; m /= 2) {
        const uint32_t other = shfl_xor(top, m);
        top = other > top ? other : top;
    }
    const float most = float_of(top);
    const bool tiny = most < 1e-30f;
    const float inverse = tiny ? 0.f : div_rn(127.f, most), scale = tiny ? 0.f : div_rn(most, 127.f);
    Words2 words{};
    int32_t sum = 0;
    FB_UNROLL
    for (uint32_t i = 0; i < 8; i++) {
        const float scaled = mul_rn(v[i], inverse), real = scaled == scaled ? scaled : 0.f;
        const uint32_t integer = bits_of(add_rn(real, MAGIC)) - bits_of(MAGIC);
        sum += (int32_t)(int8_t)integer;
        words.w[i % 2] |= (integer & 255) << (i / 2 * 8);
    }
    // Lanes of an octet's 128 columns are neighbours: 16 of them.
    FB_UNROLL
    for (uint32_t m = 8; m > 0; m /= 2) sum += (int32_t)shfl_xor((uint32_t)sum, m);
    const uint32_t octet = block_x() * 2 + lane / 16;
    if (octet >= a.octets) return;
    const uint32_t column = lane % 16 / 2, q = column / 4, c = column % 4, in_tile = token % a.tile;
    unsigned char* to = a.to + ((size_t)(token / a.tile) * a.octets + octet) * w4a8_octet(a.tile);
    stg((Words2*)(to + q * 64 * a.tile + in_tile * 64 + c * 16 + lane % 2 * 8), words);
    if (lane % 16 == 0) stg((Words2*)(to + 128 * a.tile + in_tile * 8), Words2{{bits_of(scale), (uint32_t)sum}});
}

/// What a row's sum becomes.
FB_DEVICE void w4a8_emit(const W4a8Args& a, uint32_t row, uint32_t token, float inner) {
    float v = mul_rn(inner, ldc(a.w.scales + row));
    if (a.w.bias) v = add_rn(v, ldc(a.w.bias + row));
    float* y = a.y + (size_t)token * a.y_stride + row;
    stg(y, a.accumulate ? add_rn(ldg(y), v) : v);
}

/// Rows of eight strips (`block_x`), a range of columns (`block_y`, as part of it) and a tile of 8 N tokens (the rest of `block_y`).
template <uint32_t N> FB_DEVICE void w4a8(const W4a8Args& a) {
    constexpr uint32_t TILE = 8 * N, X = w4a8_octet(TILE), PAIRS = W4A8_WARPS / 2, STAGE = X + PAIRS * W4A8_PAIR;
    const Segment& s = a.w.segments[0];
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, g = lane / 4, c = lane % 4;
    const uint32_t range = block_y() % a.ranges, tile = block_y() / a.ranges;
    // Ranges are of whole blocks of two octets.
    const uint32_t blocks = (s.octets + 1) / 2, first = blocks * range / a.ranges * 2;
    const uint32_t last = blocks * (range + 1) / a.ranges * 2, end = last < s.octets ? last : s.octets;
    const uint32_t pair0 = block_x() * PAIRS, pairs = a.w.pairs - pair0 < PAIRS ? a.w.pairs - pair0 : PAIRS;
    const unsigned char* x = a.x + (size_t)tile * s.octets * X;
    const auto fetch_octet = [&](uint32_t octet) {
        const uint32_t at = (octet - first) % W4A8_STAGES * STAGE;
        if (octet < end) {
            for (uint32_t i = thread_x(); i < X / 16; i += threads_x()) cp_async16(at + 16 * i, x + (size_t)octet * X + 16 * i);
            for (uint32_t i = thread_x(); i < pairs * (W4A8_PAIR / 16); i += threads_x()) {
                const uint32_t pair = i / (W4A8_PAIR / 16), piece = i % (W4A8_PAIR / 16) * 16;
                cp_async16(at + X + pair * W4A8_PAIR + piece, s.codes + ((size_t)(pair0 + pair) * s.octets + octet) * s.stride + piece);
            }
        }
        cp_commit();
    };
    grid_release();
    grid_wait();
    FB_UNROLL
    for (uint32_t i = 0; i + 1 < W4A8_STAGES; i++) fetch_octet(first + i);
    const bool busy = warp / 2 < pairs;
    int32_t sums[N][4] = {};
    float inner[N][4] = {};
    FB_UNROLL_1
    for (uint32_t octet = first; octet < end; octet++) {
        cp_wait<(int)W4A8_STAGES - 2>();
        sync_block();  // this octet is there, and all warps are done with the one before, whose place is filled next
        fetch_octet(octet + W4A8_STAGES - 1);
        if (!busy) continue;
        const uint32_t at = (octet - first) % W4A8_STAGES * STAGE, own = at + X + warp / 2 * W4A8_PAIR;
        Codes<16> codes;
        codes.load_strip(own + lane * 16, warp % 2, lane);
        const uint32_t of_rows = lds<uint32_t>(own + 2048 + (warp % 2 * 16 + 2 * g) * 2);
        int32_t acc[N][4] = {};
        FB_UNROLL
        for (uint32_t q = 0; q < 2; q++) {
            uint32_t low[4], high[4];  // (row, half of the tile's columns)
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) low[i] = codes.w[4 * q + i] & 0x0F0F0F0F, high[i] = codes.w[4 * q + i] >> 4 & 0x0F0F0F0F;
            FB_UNROLL
            for (uint32_t n = 0; n < N; n++) {
                const Words4 b = lds<Words4>(at + q * 64 * TILE + (8 * n + g) * 64 + c * 16);
                mma8(acc[n], low[0], low[2], high[0], high[2], b.w[0], b.w[1]);
                mma8(acc[n], low[1], low[3], high[1], high[3], b.w[2], b.w[3]);
            }
        }
        const int32_t scale[2] = {(int32_t)(of_rows & 255), (int32_t)(of_rows >> 16 & 255)};
        const int32_t zero[2] = {(int32_t)(of_rows >> 8 & 255), (int32_t)(of_rows >> 24)};
        const bool closes = octet % 2 == 1 || octet + 1 == s.octets;
        FB_UNROLL
        for (uint32_t n = 0; n < N; n++) {
            const Words4 of = lds<Words4>(at + 128 * TILE + (8 * n + 2 * c) * 8);  // scale and sum of two tokens
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) {
                sums[n][i] += scale[i / 2] * acc[n][i] - zero[i / 2] * (int32_t)of.w[i % 2 * 2 + 1];
                if (closes) {
                    inner[n][i] = add_rn(inner[n][i], mul_rn((float)sums[n][i], mul_rn(float_of(of.w[i % 2 * 2]), s.factor)));
                    sums[n][i] = 0;
                }
            }
        }
    }
    if (!busy) return;
    FB_UNROLL
    for (uint32_t n = 0; n < N; n++) {
        FB_UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = (pair0 * 2 + warp) * 16 + 2 * g + i / 2, token = tile * TILE + 8 * n + 2 * c + i % 2;
            if (row >= a.w.rows || token >= a.tokens) continue;
            if (a.ranges == 1) {
                w4a8_emit(a, row, token, inner[n][i]);
            } else {
                stg(a.parts + ((size_t)range * a.tokens + token) * a.w.pairs * 32 + row, inner[n][i]);
            }
        }
    }
}

/// Adds the ranges of a row (`block_x` and thread) and token (`block_y`), in their order.
FB_DEVICE void w4a8_finish(const W4a8Args& a) {
    const uint32_t row = block_x() * threads_x() + thread_x(), token = block_y();
    if (row >= a.w.rows) return;
    float inner = 0.f;
    FB_UNROLL_4
    for (uint32_t range = 0; range < a.ranges; range++) {
        inner = add_rn(inner, ldg(a.parts + ((size_t)range * a.tokens + token) * a.w.pairs * 32 + row));
    }
    w4a8_emit(a, row, token, inner);
}

// Additive codebooks: `V` neighbouring weights are the sum of `M` centroids, each named by a byte.
//
// A lane's bytes of a tile are its first row's codes in the order (vector of columns, codebook),
// then its second row's: repack.cuh turns the canonical order, by places and then rows, into this
// one.
//
// A table word holds four bytes of a centroid, shifted so that words can be added as they are: no
// byte is negative, and no sum of one of each codebook leaves its byte. Sums are 128 above the
// weights (fracbit-kernels-cuda, `book`).
#pragma once
#include "expand.cuh"

/// Table rows are (codebook, code, word of the centroid).
template <int M_, int V_> struct Additive {
    static constexpr int M = M_, V = V_, Q = 32 * M / V, WORDS = 2, CODES = Q / 2;  // codes of a row in a tile
    static constexpr bool TRELLIS = false, GROUPED = false;
    static_assert(V == 4 || V == 8, "a word or two");
    static constexpr int LOG_PARTS = V / 8, LOG_BOOKS = M > 2 ? 2 : M - 1, LOG_ROWS = 8 + LOG_PARTS + LOG_BOOKS;
    static constexpr int LOG_STRIDE = LOG_ROWS <= 9 ? 7 : 16 - LOG_ROWS, LOG_COPIES = LOG_STRIDE - 2;
    /// The sum of one word of the centroids at `place`: the last bit of `part` says which.
    FB_DEVICE static uint32_t sum_of(const Codes<Q>& codes, Table t, int place, uint32_t part) {
        uint32_t sum = 0;
        FB_UNROLL
        for (int book = 0; book < M; book++) {
            const uint32_t offset = ((uint32_t)book << (8 + LOG_PARTS) | part) << LOG_STRIDE;
            sum += lookup(row_address<8, LOG_STRIDE + LOG_PARTS>(codes.w, 8 * (place + book), Table{t.lane | offset, t.mask}));
        }
        return sum;
    }
    FB_DEVICE static void quad(const Codes<Q>& codes, Table t, int q, int i, uint32_t (&out)[WORDS]) {
        const int place = q * Q + i / 4 * CODES + i % 4 * 4 / V * M;
        const uint32_t part = (uint32_t)i * 4 % V / 4;
        uint32_t sum;
        if constexpr (V == 8 && LOG_COPIES < 5) {
            // Lanes that share a copy look up different words of a centroid at a time, which lie in
            // different banks. Both words are asked for by this quad and its neighbour: the
            // compiler does so once.
            const uint32_t turned = thread_x() / 16 % 2;
            const uint32_t first = sum_of(codes, t, place, turned), second = sum_of(codes, t, place, turned ^ 1);
            sum = part == turned ? first : second;
        } else {
            sum = sum_of(codes, t, place, part);
        }
        // A byte below 0x64 is the half 1024 + byte.
        out[0] = sub_halves(prmt(sum, 0x64646464, 0x4140), 0x64806480);
        out[1] = sub_halves(prmt(sum, 0x64646464, 0x4342), 0x64806480);
    }
};

// Names without a comma, for macros.
using M1V4 = Additive<1, 4>;
using M1V8 = Additive<1, 8>;
using M2V8 = Additive<2, 8>;
using M3V8 = Additive<3, 8>;

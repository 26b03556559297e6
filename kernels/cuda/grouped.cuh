// y = W x for group-wise schemes (integers, group-wise codebooks) and up to 8 tokens: a scale for every few columns of a row.
//
// Engine, activations and ranges are those of core.cuh. The scales of a block's rows and range are staged with its activations, as the
// canonical halves: their lowest bits also number the group's codebook. A lane's share of a tile, 16 columns, has one scale a row; its
// integer sum is turned to a float there, and only there.
#pragma once
#include "core.cuh"
#include "expand.cuh"

/// Columns that share a staged scale. Groups are a power of two from here on, or the row.
constexpr uint32_t SCALE_COLS = 32;

/// Two neighbouring indices into one of several codebooks: rows are (codebook, indices).
template <int Q_> struct Books {
    static constexpr int Q = Q_, BITS = Q / 2, WORDS = 16, BYTES = 1, PLANES = 1, MOST = 127;
    static constexpr bool TRELLIS = false, GROUPED = true;
    static constexpr int LOG_STRIDE = BITS <= 6 ? 7 : 6;
    /// The table of the codebook that a scale chooses.
    FB_DEVICE static Table table(Table t, const Book& book, uint16_t scale) {
        const uint32_t books = ((1u << book.log_rows) - 1) >> BITS;
        return Table{t.lane | (scale & books) << (BITS + LOG_STRIDE), t.mask};
    }
    FB_DEVICE static uint32_t word(const Codes<Q>& codes, Table t, int q, int i) {
        return lookup(row_address<BITS, LOG_STRIDE>(codes.w, q * codes.UNIT + i * BITS, t));
    }
    FB_DEVICE static int32_t add(int32_t sum, uint32_t word, int i, const Words4& x) {
        return i % 2 == 0 ? dot2_low(word, x.w[i / 2], sum) : dot2_high(word, x.w[i / 2], sum);
    }
    /// One weight of 32 as a half.
    FB_DEVICE static uint16_t half(const Codes<Q>& codes, Table t, int q, int i) {
        return to_half((float)(int16_t)(word(codes, t, q, i / 2) >> (i % 2 * 16)));
    }
};

/// Integers of 8 bits, which are their own table. Repacking has made -128 what it means, -127.
template <int Q_> struct Bytes {
    static constexpr int Q = Q_, WORDS = 8, BYTES = 1, PLANES = 1, MOST = 127;
    static constexpr bool TRELLIS = false, GROUPED = true;
    FB_DEVICE static Table table(Table t, const Book&, uint16_t) { return t; }
    FB_DEVICE static uint32_t word(const Codes<Q>& codes, Table, int q, int i) { return codes.w[q * 8 + i]; }
    FB_DEVICE static int32_t add(int32_t sum, uint32_t word, int i, const Words4& x) { return dot4(word, x.w[i], sum); }
    FB_DEVICE static uint16_t half(const Codes<Q>& codes, Table t, int q, int i) {
        return to_half((float)(int8_t)(word(codes, t, q, i / 4) >> (i % 4 * 8)));
    }
};

/// Halves from one row's staged scales to the next; the odd number of words puts rows into different banks.
FB_DEVICE uint32_t scales_stride(uint32_t octets) { return octets * (128 / SCALE_COLS) + 2; }

/// The product with up to N tokens.
template <class E, int N> FB_DEVICE void grouped(const GemvArgs& a) {
    constexpr uint32_t OCTET = 128 * E::Q;
    const Segment& s = a.w.segments[0];
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t pair = block_x() * warps + warp, g = lane / 4, c = lane % 4;
    const uint32_t first = block_y() * s.per_split;
    const uint32_t count = first >= s.octets ? 0 : (s.octets - first < s.per_split ? s.octets - first : s.per_split);
    const uint32_t turns = (count + 1) / TURN;
    const uint32_t staged = table_bytes(s.book), stride = rounded_stride<E>(turns * TURN);
    const uint32_t scales = staged + (a.batch * (rounded_stride<E>(s.per_split) + 4 * (s.per_split / TURN)) + 15) / 16 * 16;
    const uint32_t to_row = 2 * scales_stride(turns * TURN);
    const uint32_t rings = scales + 32 * warps * 2 * scales_stride(s.per_split);
    // Warps past the last pair repeat it, and keep the loops free of divergence.
    const uint32_t mine = pair < a.w.pairs ? pair : a.w.pairs - 1;
    Ring<E> ring;
    ring.start(rings + warp * ring.STAGES * ring.BYTES, s.codes + ((size_t)mine * s.octets + first) * OCTET, turns, lane);
    spread(s.book);
    round_to<E>(staged, a, first, turns * TURN);
    const uint32_t width = turns * TURN * (128 / SCALE_COLS);
    for (uint32_t i = thread_x(); i < 32 * warps * width; i += threads_x()) {
        const uint32_t row = i / width, at = i % width;
        sts<uint16_t>(scales + row * to_row + 2 * at, scale_of(a.w, block_x() * warps * 32 + row, first * 128 + at * SCALE_COLS));
    }
    sync_block();
    const Table t = table_of(s.book, lane);
    uint32_t x_at[N], rounded_at[N], scale_at = scales + (warp * 32 + 2 * g) * to_row + c / 2 * 2;
    FB_UNROLL
    for (uint32_t n = 0; n < N; n++) {
        const uint32_t token = n < a.batch ? n : a.batch - 1;
        x_at[n] = staged + token * stride + c * 16;
        rounded_at[n] = staged + a.batch * stride + 4 * token * turns;
    }
    float sums[4][N] = {};
    FB_UNROLL_1
    while (ring.left != 0) {
        const uint32_t at = ring.turn();
        float rounded[N];
        FB_UNROLL
        for (int n = 0; n < N; n++) rounded[n] = lds<float>(rounded_at[n]);
        FB_UNROLL
        for (uint32_t i = 0; i < TURN; i++) {
            FB_UNROLL
            for (uint32_t strip = 0; strip < 2; strip++) {
                Codes<E::Q> codes;
                codes.load(at + i * OCTET + strip * 64 * E::Q, lane);
                FB_UNROLL
                for (int q = 0; q < 2; q++) {
                    FB_UNROLL
                    for (int r = 0; r < 2; r++) {
                        const uint16_t half = lds<uint16_t>(scale_at + (strip * 16 + (uint32_t)r) * to_row + i * 8 + (uint32_t)q * 4);
                        const Table own = E::table(t, s.book, half);
                        const float scale = mul_rn(from_half(half), a.w.gain);
                        uint32_t words[E::WORDS / 2];
                        FB_UNROLL
                        for (int j = 0; j < E::WORDS / 2; j++) words[j] = E::word(codes, own, q, r * (E::WORDS / 2) + j);
                        FB_UNROLL
                        for (int n = 0; n < N; n++) {
                            const Words4 x = lds<Words4>(x_at[n] + (i * 128 + (uint32_t)q * 64));
                            int32_t sum = 0;
                            FB_UNROLL
                            for (int j = 0; j < E::WORDS / 2; j++) sum = E::add(sum, words[j], j, x);
                            sums[2 * strip + r][n] += (float)sum * (scale * rounded[n]);
                        }
                    }
                }
            }
        }
        scale_at += TURN * 8;
        FB_UNROLL
        for (int n = 0; n < N; n++) x_at[n] += TURN * 128, rounded_at[n] += 4;
    }
    FB_UNROLL
    for (uint32_t r = 0; r < 4; r++) {
        FB_UNROLL
        for (uint32_t n = 0; n < N; n++) {
            float v = sums[r][n] * s.factor;
            v += float_of(shfl_xor(bits_of(v), 1));
            v += float_of(shfl_xor(bits_of(v), 2));
            if (pair < a.w.pairs && n % 4 == c) put(a, pair * 32 + 2 * g + r / 2 * 16 + r % 2, n, v);
        }
    }
    finish(a);
}

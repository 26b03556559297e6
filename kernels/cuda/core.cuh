// y = W x for packed scalar and vector codes and up to 8 tokens, without tensor cores: integer dot products.
//
// Codes, ring, ranges and the final sum are those of gemv.cuh. Activations are rounded while a block stages them, to the integers of the
// processor's kernels (`Activations` of fracbit-kernels): a scale for 256 columns of a token, absmax / 127, or absmax / 1023 where the
// table is on the 16-bit grid. Sums of an octet are exact.
//
// A looked-up word holds what one index of merged codes yields: four weights of 8 bits for codes up to 2.5 bits (a 4-way
// dot product takes them), two of 16 bits up to 6 bits (a 2-way one), one of 32 bits above. Activations of 11 bits meet two weights
// as two digits, x = 8 high + low.
#pragma once
#include "gemv.cuh"

// The forms. WORDS is what a lane looks up in a tile (32 weights), BYTES what a staged activation takes.

/// Four weights of a word: two vector codes, or four scalar ones.
template <int Q_> struct Quads {
    static constexpr bool TRELLIS = false;
    static constexpr int Q = Q_, WORDS = 8, BYTES = 1, PLANES = 1, MOST = 127;
    static constexpr int BITS = Q, LOG_STRIDE = BITS <= 9 ? 7 : 16 - BITS;
    FB_DEVICE static void add(int32_t (&sum)[PLANES], uint32_t word, int i, const Words4 (&x)[BYTES]) {
        sum[0] = dot4(word, x[0].w[i], sum[0]);
    }
};
/// Two weights of a word, activations of 8 bits.
template <int Q_> struct Pairs {
    static constexpr bool TRELLIS = false;
    static constexpr int Q = Q_, WORDS = 16, BYTES = 1, PLANES = 1, MOST = 127;
    static constexpr int BITS = Q / 2, LOG_STRIDE = BITS <= 9 ? 7 : 16 - BITS;
    FB_DEVICE static void add(int32_t (&sum)[PLANES], uint32_t word, int i, const Words4 (&x)[BYTES]) {
        sum[0] = i % 2 == 0 ? dot2_low(word, x[0].w[i / 2], sum[0]) : dot2_high(word, x[0].w[i / 2], sum[0]);
    }
};
/// Two weights of a word, activations of 11 bits: a sum for each digit.
template <int Q_> struct WidePairs {
    static constexpr bool TRELLIS = false;
    static constexpr int Q = Q_, WORDS = 16, BYTES = 2, PLANES = 2, MOST = 1023;
    static constexpr int BITS = Q / 2, LOG_STRIDE = BITS <= 9 ? 7 : 16 - BITS;
    FB_DEVICE static void add(int32_t (&sum)[PLANES], uint32_t word, int i, const Words4 (&x)[BYTES]) {
        FB_UNROLL
        for (int p = 0; p < 2; p++) {
            const uint32_t v = x[p].w[i / 2];
            sum[p] = i % 2 == 0 ? dot2_low(word, v, sum[p]) : dot2_high(word, v, sum[p]);
        }
    }
};
/// One weight of a word, activations of 11 bits.
template <int Q_> struct Ones {
    static constexpr bool TRELLIS = false;
    static constexpr int Q = Q_, WORDS = 32, BYTES = 4, PLANES = 1, MOST = 1023;
    static constexpr int BITS = Q / 4, LOG_STRIDE = BITS == 8 ? 8 : 7;
    FB_DEVICE static void add(int32_t (&sum)[PLANES], uint32_t word, int i, const Words4 (&x)[BYTES]) {
        sum[0] += (int32_t)word * (int32_t)x[i / 4].w[i % 4];
    }
};

/// Bytes from one token's staged activations to the next.
template <class E> FB_DEVICE uint32_t rounded_stride(uint32_t octets) { return octets * 128 * E::BYTES + 16; }

/// Rounds the activations of `octets` octets from octet `first` on (both even) into shared memory, and their scales behind them. A warp
/// takes one token and 256 columns at a time.
template <class E> FB_DEVICE void round_to(uint32_t at, const GemvArgs& a, uint32_t first, uint32_t octets) {
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t stride = rounded_stride<E>(octets), groups = octets / 2;
    for (uint32_t item = warp; item < groups * a.batch; item += warps) {
        const uint32_t n = item / groups, g = item % groups, col = first * 128 + g * 256 + lane * 8;
        float v[8];
        uint32_t top = 0;
        FB_UNROLL
        for (uint32_t j = 0; j < 8; j++) {
            v[j] = col + j < a.w.cols ? ldg(a.x + (size_t)n * a.x_stride + col + j) : 0.f;
            // The order of positive floats is that of their bits, and NaN is above infinity.
            const uint32_t magnitude = bits_of(v[j]) & 0x7FFFFFFF;
            top = magnitude > top ? magnitude : top;
        }
        FB_UNROLL
        for (uint32_t m = 16; m > 0; m /= 2) {
            const uint32_t other = shfl_xor(top, m);
            top = other > top ? other : top;
        }
        const float most = float_of(top);
        const bool tiny = most < 1e-30f;
        const float inverse = tiny ? 0.f : div_rn((float)E::MOST, most);
        if (lane == 0) {
            sts<float>(at + a.batch * stride + 4 * (n * groups + g), tiny ? 0.f : div_rn(most, (float)E::MOST));
        }
        const uint32_t tile = at + n * stride + (g * 16 + lane / 2) * 16 * E::BYTES;  // this lane's is half of it
        int32_t i[8];
        FB_UNROLL
        for (uint32_t j = 0; j < 8; j++) {
            float scaled = mul_rn(v[j], inverse);
            scaled = scaled == scaled ? scaled : 0.f;
            // Adding 1.5 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
            i[j] = (int32_t)(bits_of(add_rn(scaled, 12582912.f)) - bits_of(12582912.f));
        }
        FB_UNROLL
        for (uint32_t j = 0; j < 8; j += 4) {
            const uint32_t half = lane % 2 * 8 + j;
            if constexpr (E::BYTES == 4) {
                sts(tile + half * 4, Words4{{(uint32_t)i[j], (uint32_t)i[j + 1], (uint32_t)i[j + 2], (uint32_t)i[j + 3]}});
            } else {
                FB_UNROLL
                for (int p = 0; p < E::BYTES; p++) {
                    uint32_t word = 0;
                    FB_UNROLL
                    for (uint32_t k = 0; k < 4; k++) {
                        const int32_t digit = E::BYTES == 1 ? i[j + k] : p == 0 ? i[j + k] >> 3 : i[j + k] & 7;
                        word |= ((uint32_t)digit & 255) << (8 * k);
                    }
                    sts<uint32_t>(tile + (uint32_t)p * 16 + half, word);
                }
            }
        }
    }
}

/// Adds the sums of one octet: four rows of a lane (strip, row 2g or 2g + 1) by N tokens.
template <class E, int N>
FB_DEVICE void dots(int32_t (&sums)[4][N][E::PLANES], uint32_t at, uint32_t offset, uint32_t lane, Table t, const uint32_t (&x_at)[N]) {
    Codes<E::Q> codes[2];
    codes[0].load(at, lane);
    codes[1].load(at + 64 * E::Q, lane);
    FB_UNROLL
    for (int q = 0; q < 2; q++) {
        uint32_t words[2][E::WORDS];
        FB_UNROLL
        for (int strip = 0; strip < 2; strip++) {
            FB_UNROLL
            for (int i = 0; i < E::WORDS; i++) {
                words[strip][i] = lookup(row_address<E::BITS, E::LOG_STRIDE>(codes[strip].w, q * 8 * E::Q + i * E::BITS, t));
            }
        }
        FB_UNROLL
        for (int n = 0; n < N; n++) {
            Words4 x[E::BYTES];
            FB_UNROLL
            for (int p = 0; p < E::BYTES; p++) x[p] = lds<Words4>(x_at[n] + (offset + (uint32_t)(q * 64 * E::BYTES + p * 16)));
            FB_UNROLL
            for (int strip = 0; strip < 2; strip++) {
                FB_UNROLL
                for (int i = 0; i < E::WORDS; i++) {
                    E::add(sums[2 * strip + i / (E::WORDS / 2)][n], words[strip][i], i % (E::WORDS / 2), x);
                }
            }
        }
    }
}

/// The product with up to N tokens.
template <class E, int N> FB_DEVICE void core(const GemvArgs& a) {
    constexpr uint32_t OCTET = 128 * E::Q, X_OCTET = 128 * E::BYTES;
    const Segment& s = a.w.segments[0];
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t pair = block_x() * warps + warp, g = lane / 4, c = lane % 4;
    const uint32_t first = block_y() * s.per_split;
    const uint32_t count = first >= s.octets ? 0 : (s.octets - first < s.per_split ? s.octets - first : s.per_split);
    const uint32_t turns = (count + 1) / TURN;
    const uint32_t staged = table_bytes(s.book), stride = rounded_stride<E>(turns * TURN);
    const uint32_t rings = staged + (a.batch * (rounded_stride<E>(s.per_split) + 4 * (s.per_split / TURN)) + 15) / 16 * 16;
    // Warps past the last pair repeat it, and keep the loops free of divergence.
    const uint32_t mine = pair < a.w.pairs ? pair : a.w.pairs - 1;
    Ring<E> ring;
    ring.start(rings + warp * ring.STAGES * ring.BYTES, s.codes + ((size_t)mine * s.octets + first) * OCTET, turns, lane);
    spread(s.book);
    round_to<E>(staged, a, first, turns * TURN);
    sync_block();
    const Table t = table_of(s.book, lane);
    uint32_t x_at[N], scale_at[N];
    FB_UNROLL
    for (uint32_t n = 0; n < N; n++) {
        const uint32_t token = n < a.batch ? n : a.batch - 1;
        x_at[n] = staged + token * stride + c * 16 * E::BYTES;
        scale_at[n] = staged + a.batch * stride + 4 * token * turns;
    }
    float sums[4][N] = {}, total[4][N] = {};
    const uint32_t row = pair * 32 + 2 * g;
    // Adds integer sums of columns that share a scale of activations.
    const auto add = [&](const int32_t (&ints)[4][N][E::PLANES]) {
        FB_UNROLL
        for (int n = 0; n < N; n++) {
            const float scale = lds<float>(scale_at[n]);
            FB_UNROLL
            for (int r = 0; r < 4; r++) {
                const int32_t high = ints[r][n][0], low = ints[r][n][E::PLANES - 1];
                sums[r][n] += (float)(E::PLANES == 2 ? 8 * high + low : high) * scale;
            }
        }
    };
    const auto flush = [&](uint32_t group) {
        FB_UNROLL
        for (uint32_t r = 0; r < 4; r++) {
            const uint32_t at = row + r / 2 * 16 + r % 2;
            const float scale = at < a.w.rows ? ldg(a.w.scales + (size_t)at * a.w.groups + group) * s.factor : 0.f;
            FB_UNROLL
            for (int n = 0; n < N; n++) {
                total[r][n] += sums[r][n] * scale;
                sums[r][n] = 0.f;
            }
        }
    };
    if (a.w.groups == 1) {
        // One scale a row: the usual case. A turn is the 256 columns of one scale of activations.
        FB_UNROLL_1
        while (ring.left != 0) {
            const uint32_t at = ring.turn();
            int32_t ints[4][N][E::PLANES] = {};
            FB_UNROLL
            for (uint32_t i = 0; i < TURN; i++) dots<E, N>(ints, at + i * OCTET, i * X_OCTET, lane, t, x_at);
            add(ints);
            FB_UNROLL
            for (int n = 0; n < N; n++) x_at[n] += TURN * X_OCTET, scale_at[n] += 4;
        }
        flush(0);
    } else {
        // One per `group` columns, a multiple of an octet.
        uint32_t group = first * 128 / a.w.group, stop = (group + 1) * a.w.group / 128 - first;
        FB_UNROLL_1
        for (uint32_t o = 0; o < count;) {
            const uint32_t at = ring.turn();
            FB_UNROLL_1
            for (uint32_t i = 0; i < TURN && o < count; i++, o++) {
                int32_t ints[4][N][E::PLANES] = {};
                dots<E, N>(ints, at + i * OCTET, 0, lane, t, x_at);
                add(ints);
                FB_UNROLL
                for (int n = 0; n < N; n++) x_at[n] += X_OCTET, scale_at[n] += i * 4;
                if (o + 1 == stop || o + 1 == count) {
                    flush(group++);
                    stop += a.w.group / 128;
                }
            }
        }
    }
    FB_UNROLL
    for (uint32_t r = 0; r < 4; r++) {
        FB_UNROLL
        for (uint32_t n = 0; n < N; n++) {
            float v = total[r][n];
            v += float_of(shfl_xor(bits_of(v), 1));
            v += float_of(shfl_xor(bits_of(v), 2));
            if (pair < a.w.pairs && n % 4 == c) put(a, row + r / 2 * 16 + r % 2, n, v);
        }
    }
    finish(a);
}

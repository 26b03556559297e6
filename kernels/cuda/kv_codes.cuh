// Caches of 8, 6 and 4 bits: every key and value of a head is codes and a scale (crates/fracbit-model/src/kv.rs says what they stand for).
//
// A page has for each key-value head a block of keys and one of values: the codes of its PAGE positions, then their f32 scales. Keys lie
// position by position, rows padded to 16 dimensions. Values lie in pairs of positions whose bytes alternate, so that a load gives the
// right operand's neighbours of a product with weights.
#pragma once
#include "model.cuh"

/// What codes of 4 bits stand for: `LEVELS` of fracbit-kernels.
constexpr int32_t LEVELS[16] = {-108, -85, -66, -51, -38, -26, -14, -2, 9, 20, 32, 45, 60, 76, 97, 127};
constexpr int32_t FINE = 127 * 64;  // what rows are rounded to before the nearest levels are found
/// Four of them as bytes, each less its highest bit or with it.
constexpr uint32_t levels_word(uint32_t i, uint32_t flip) {
    uint32_t word = 0;
    for (uint32_t k = 0; k < 4; k++) word |= (((uint32_t)LEVELS[4 * i + k] & 255) ^ flip) << (8 * k);
    return word;
}
template <uint32_t I, uint32_t FLIP> constexpr uint32_t LEVELS_WORD = levels_word(I, FLIP);
/// Halfway between two of them, as fine as rows are rounded.
template <uint32_t I> constexpr int32_t HALFWAY = (LEVELS[I] + LEVELS[I + 1]) * 32;
/// The place of the level next to a number: how many points halfway are below it.
template <uint32_t I = 0> FB_DEVICE int32_t level_next_to(int32_t v) {
    if constexpr (I == 15) return 0;
    else return (v > HALFWAY<I> ? 1 : 0) + level_next_to<I + 1>(v);
}

/// Of queries: the largest integer, and what its upper byte counts.
constexpr int32_t QUERY_MOST = 127 * 128, QUERY_LOW = 128;

/// The levels of eight codes, as signed bytes, or with FLIP = 128 as bytes that are 128 more.
///
/// A byte permutation looks up three bits of four codes; the fourth bit says in which half of the table.
template <uint32_t FLIP> FB_DEVICE void levels_of(uint32_t codes, uint32_t (&bytes)[2]) {
    constexpr uint32_t A = LEVELS_WORD<0, FLIP>, B = LEVELS_WORD<1, FLIP>, C = LEVELS_WORD<2, FLIP>, D = LEVELS_WORD<3, FLIP>;
    const uint32_t low = codes & 0x77777777, half = (codes >> 1 & 0x44444444) | 0x32103210;
    bytes[0] = prmt(prmt(A, B, low), prmt(C, D, low), half);
    bytes[1] = prmt(prmt(A, B, low >> 16), prmt(C, D, low >> 16), half >> 16);
}

/// (u - 128) / 128 of two bytes of a word as halves: 8 + u / 128 has the byte in its lowest bits.
FB_DEVICE uint32_t halves_of(uint32_t bytes, uint32_t which) { return sub_halves(prmt(bytes, 0x48484848, which), 0x48804880); }

/// Codes that are signed bytes.
struct Bytes {
    static constexpr uint32_t BITS = 8;
    typedef Words4 Word;  // 16 dimensions of a key, or 8 of a pair of values
    /// Keys as operands of mma8: words of four dimensions.
    static FB_DEVICE void keys(const Word& from, uint32_t (&to)[4]) {
        FB_UNROLL
        for (uint32_t i = 0; i < 4; i++) to[i] = from.w[i];
    }
    /// Dimensions as halves (of a 128th) of both positions.
    static FB_DEVICE void values(const Word& from, uint32_t (&to)[8]) {
        FB_UNROLL
        for (uint32_t i = 0; i < 8; i++) to[i] = halves_of(from.w[i / 2], i % 2 ? 0x4342 : 0x4140);
    }
    /// The number of dimension `i` in the byte that holds it.
    static FB_DEVICE float number(uint32_t byte, bool value, uint32_t) {
        return (float)(int32_t)(int8_t)(value ? byte ^ 128 : byte);
    }
};

/// Codes that are places in the table of levels, two dimensions a byte.
struct Levels {
    static constexpr uint32_t BITS = 4;
    typedef uint64_t Word;
    static FB_DEVICE void keys(const Word& from, uint32_t (&to)[4]) {
        FB_UNROLL
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t bytes[2];
            levels_of<0>((uint32_t)(from >> (32 * i)), bytes);
            to[2 * i] = bytes[0], to[2 * i + 1] = bytes[1];
        }
    }
    static FB_DEVICE void values(const Word& from, uint32_t (&to)[8]) {
        FB_UNROLL
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t bytes[2];  // two dimensions of the first position, then of the second
            levels_of<128>((uint32_t)(from >> (32 * i)), bytes);
            FB_UNROLL
            for (uint32_t k = 0; k < 4; k++) to[4 * i + k] = halves_of(bytes[k / 2], k % 2 ? 0x4341 : 0x4240);
        }
    }
    static FB_DEVICE float number(uint32_t byte, bool, uint32_t i) {
        uint32_t bytes[2];
        levels_of<0>(i % 2 ? byte >> 4 : byte & 15, bytes);
        return (float)(int32_t)(int8_t)bytes[0];
    }
};

/// What the keys and the values of a cache are.
struct AttendCodesArgs;
template <class K, class V> struct Codes {
    static constexpr bool CODES = true;
    typedef AttendCodesArgs Args;
    typedef K Key;
    typedef V Value;
};
typedef Codes<Bytes, Bytes> Codes8;
typedef Codes<Bytes, Levels> Codes6;
typedef Codes<Levels, Levels> Codes4;

/// Bytes of the codes of a position.
template <class Form> FB_DEVICE uint32_t code_row(uint32_t d, bool value) { return (value ? d : (d + 15) / 16 * 16) * Form::BITS / 8; }
/// Bytes of a block of so many positions.
template <class Form> FB_DEVICE uint32_t code_block(uint32_t d, bool value, uint32_t positions) {
    return positions * (code_row<Form>(d, value) + 4);
}
/// The byte of a block that holds dimension `i` of a position.
template <class Form> FB_DEVICE uint32_t code_place(uint32_t d, bool value, uint32_t position, uint32_t i) {
    const uint32_t row = code_row<Form>(d, value), at = i * Form::BITS / 8;
    return value ? position / 2 * 2 * row + 2 * at + position % 2 : position * row + at;
}

/// The rotation of queries and keys of such caches: signs, then the Kronecker product of a dense factor and a Walsh matrix.
struct HeadTurn {
    const float* signs;  // (d), scaled by 1/sqrt(d); null: none
    const float* dense;  // (order, order)
    uint32_t order, walsh;
};

/// Rotates a head of `d` dimensions that a warp holds, lane i dimensions i, i + 32 and so on; `scratch` takes 32 M floats.
template <int M> FB_DEVICE void turn_head(const HeadTurn& turn, uint32_t d, uint32_t scratch, float (&v)[M]) {
    if (!turn.signs) return;
    const uint32_t lane = thread_x() % 32;
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) v[t] *= lane + 32 * t < d ? ldc(turn.signs + lane + 32 * t) : 0.f;
    FB_UNROLL
    for (uint32_t h = 1; h < 32; h *= 2) {
        if (h >= turn.walsh) break;
        FB_UNROLL
        for (uint32_t t = 0; t < M; t++) {
            const float other = float_of(shfl_xor(bits_of(v[t]), h));
            v[t] = (lane & h) ? other - v[t] : v[t] + other;
        }
    }
    FB_UNROLL
    for (uint32_t h = 1; h < M; h *= 2) {
        if (32 * h >= turn.walsh) break;
        FB_UNROLL
        for (uint32_t t = 0; t < M; t++) {
            if (t & h) continue;
            const float a = v[t], b = v[t + h];
            v[t] = a + b, v[t + h] = a - b;
        }
    }
    if (turn.order <= 1) return;
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) sts<float>(scratch + 4 * (lane + 32 * t), v[t]);
    sync_warp();
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) v[t] = 0.f;
    FB_UNROLL_1
    for (uint32_t k = 0; k < turn.order; k++) {
        FB_UNROLL
        for (uint32_t t = 0; t < M; t++) {
            const uint32_t i = lane + 32 * t;
            if (i < d) v[t] += ldc(turn.dense + i / turn.walsh * turn.order + k) * lds<float>(scratch + 4 * (k * turn.walsh + i % turn.walsh));
        }
    }
    sync_warp();
}

/// A plane of a head whose constant the keys are stored without: its two numbers, and the row of the table of angles that has its own.
struct alignas(16) KeyPlane {
    uint32_t plane, row;
    float at, beside;
};
/// Constants of keys (crates/fracbit-model/src/key_bias.rs): keys are stored without them, and scores get what they add apart.
struct KeyConstants {
    const float* shift;       // (kv_heads, d): what keys get before they turn; null: there are none
    const KeyPlane* planes;   // (kv_heads, most)
    const uint32_t* counts;   // (kv_heads): planes of each head
    const float* angles;      // (rows, positions, 2): cosines and sines, 0 before position `first`
    uint32_t most, first;     // keys before position `first` are stored as they are
    uint32_t positions, pad;  // FEW_CHUNK more than a sequence may have
};
/// What the key of a head gets before it turns, or null.
FB_DEVICE const float* key_shift(const KeyConstants& k, uint32_t d, uint32_t kv, uint32_t position) {
    return k.shift && position >= k.first ? k.shift + (size_t)kv * d : nullptr;
}
/// Planes of a head.
FB_DEVICE uint32_t key_planes(const KeyConstants& k, uint32_t kv) { return k.most > 0 ? ldc(k.counts + kv) : 0; }
FB_DEVICE KeyPlane key_plane(const KeyConstants& k, uint32_t kv, uint32_t n) {
    const Words4 of = ldc((const Words4*)(k.planes + (size_t)kv * k.most + n));
    return {of.w[0], of.w[1], float_of(of.w[2]), float_of(of.w[3])};
}

/// Rounds a row that a warp holds (as above, zeros behind its end) to integers up to `most` in magnitude, as the processor does; returns
/// their scale. Numbers that are all below 1e-30 become zero; where one is infinite or no number, the scale is none.
///
/// Nothing may be contracted, since the processor's operations are not.
template <int M> FB_DEVICE float round_ints(const float (&v)[M], int32_t most, int32_t (&codes)[M]) {
    uint32_t top = 0;
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) {
        const uint32_t magnitude = bits_of(v[t]) & 0x7FFFFFFF;
        top = magnitude > top ? magnitude : top;
    }
    top = ~least_of_warp(~top);
    // Positive floats are in the order of their bits, what is no number above infinity.
    const bool tiny = top < bits_of(1e-30f), real = !tiny && top < 0x7F800000;
    const float inverse = real ? div_rn((float)most, float_of(top)) : 0.f;
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) {
        codes[t] = real ? (int32_t)(int16_t)bits_of(add_rn(mul_rn(v[t], inverse), 12582912.f)) : 0;
    }
    return real ? div_rn(float_of(top), (float)most) : tiny ? 0.f : float_of(0x7FC00000);
}
/// Rounds it to codes.
template <int M> FB_DEVICE float round_as(const Bytes&, const float (&v)[M], int32_t (&codes)[M]) { return round_ints(v, 127, codes); }
template <int M> FB_DEVICE float round_as(const Levels&, const float (&v)[M], int32_t (&codes)[M]) {
    const float scale = round_ints(v, FINE, codes);
    // Of the largest in magnitude the first one says the sign: it is to get the last level.
    uint32_t first = 0;
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) {
        const uint32_t magnitude = (uint32_t)(codes[t] < 0 ? -codes[t] : codes[t]), i = thread_x() % 32 + 32 * t;
        const uint32_t key = magnitude << 10 | (511 - i) << 1 | (codes[t] < 0 ? 1u : 0u);
        first = key > first ? key : first;
    }
    const int32_t sign = ~least_of_warp(~first) & 1 ? -1 : 1;
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) codes[t] = level_next_to(sign * codes[t]);
    return scale * (float)(64 * sign);
}

/// Gives `put` each byte that the codes of a position are, and where it lies in a block.
template <int M, class Put> FB_DEVICE void put_codes(const Bytes&, uint32_t d, bool value, uint32_t position, const int32_t (&codes)[M], const Put& put) {
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) {
        const uint32_t i = thread_x() % 32 + 32 * t;
        if (i < d) put(code_place<Bytes>(d, value, position, i), (uint8_t)((uint32_t)codes[t] + (value ? 128 : 0)));
    }
}
template <int M, class Put> FB_DEVICE void put_codes(const Levels&, uint32_t d, bool value, uint32_t position, const int32_t (&codes)[M], const Put& put) {
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) {
        const uint32_t i = thread_x() % 32 + 32 * t, both = (uint32_t)codes[t] | shfl_xor((uint32_t)codes[t], 1) << 4;
        if (i < d && i % 2 == 0) put(code_place<Levels>(d, value, position, i), (uint8_t)both);
    }
}

/// Writes a row of a cache, by a warp.
template <class Form, int M>
FB_DEVICE void keep_codes(uint16_t* cache, uint32_t d, bool value, uint32_t row, const int32_t (&codes)[M], float scale) {
    uint8_t* block = (uint8_t*)cache + (size_t)(row / PAGE) * code_block<Form>(d, value, PAGE);
    put_codes(Form{}, d, value, row % PAGE, codes, [&](uint32_t at, uint8_t byte) { stg(block + at, byte); });
    if (thread_x() % 32 == 0) stg((float*)(block + PAGE * code_row<Form>(d, value)) + row % PAGE, scale);
}

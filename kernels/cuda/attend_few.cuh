// Attention of up to eight tokens over a long cache: norms, rotary embedding, cache and attention in one launch.
//
// A block takes one key-value head of one sequence and one share of its cache for up to 8 T
// queries (tokens times query heads of the group), so that keys and values are read once. A warp
// takes 16 positions at a time, loaded straight into the operands of mma: any order of the
// dimensions serves a dot product, so that a lane reads 16 bytes in one piece. Products with keys
// have the queries' upper halves in rows 0 to 7 and their lower halves in rows 8 to 15; products
// with values have dimensions as rows and queries as columns.
//
// The keys and values of the step's own tokens come from `qkv`, never from the cache, so that blocks need not wait for each other and the
// cache is read before `grid_wait`. Shares depend on the position alone and are added in their order: the same bits at every run.
//
// Caches of fewer bits (kv_codes.cuh) go the same way. Their keys meet queries of 15 bits, two bytes, in products of bytes, so that codes
// of 8 bits are operands as they are. Values are turned into halves, and their scales into the weights. Constants of keys that such a cache
// does without are in the scores as sums over planes, A cos + B sin of the position's angles, in f32: A and B of a query are made once.
#pragma once
#include "kv_codes.cuh"

struct AttendFewArgs {
    const Step* step;         // not written by the kernels before this one in its graph
    const float* qkv;         // (rows, heads + 2 kv_heads, d)
    const float* query_norm;  // (d) or null
    const float* key_norm;    // (d) or null
    const float* turns;       // (positions, d) cosines, then sines of d/2 planes; null: no rotation
    const float* growth;      // (positions) factors of queries, or null
    uint16_t* keys;           // the cache
    uint16_t* values;
    const uint32_t* tables;   // (sequences, pages)
    float* out;               // (rows, heads, d)
    float* partial;           // (blocks_x, blocks_y, 8 T, 64 N), then most and weight (blocks_x, blocks_y, 8 T, 2)
    uint32_t* counters;       // (blocks_x), zero before and after
    uint32_t heads, kv_heads, d, pages, window;
    uint32_t rows;            // of each sequence
    uint32_t tiles;           // blocks along x of one key-value head of a sequence
    float eps, scale;         // scale of the queries
    float cap;                // of scores; 0: none
};

constexpr uint32_t FEW_WARPS = 8, FEW_CHUNK = 16;
constexpr float FEW_LEAST = -1e30f;  // below every score, and finite: differences of it are numbers

/// The same with a cache of codes.
struct AttendCodesArgs : AttendFewArgs {
    HeadTurn turn;
    KeyConstants constants;
};

/// A cache of half precision.
struct Halves {
    static constexpr bool CODES = false;
    typedef AttendFewArgs Args;
};

/// Shared memory of what a block of Q queries of D dimensions reads: the queries, then keys and values of the step's own tokens.
template <class Kv, uint32_t D, uint32_t Q> struct FewInputs {
    static constexpr uint32_t QUERY = 2 * D + 16;  // of each four dimensions the upper bytes, then the lower ones
    static constexpr uint32_t SCALES = Q * QUERY;  // of the queries
    static constexpr uint32_t KEYS = SCALES + 4 * Q, VALUES = KEYS + FEW_CHUNK * (D * Kv::Key::BITS / 8 + 4);
    static constexpr uint32_t INPUTS = VALUES + FEW_CHUNK * (D * Kv::Value::BITS / 8 + 4);
};
template <uint32_t D, uint32_t Q> struct FewInputs<Halves, D, Q> {
    static constexpr uint32_t QUERY = 4 * D + 16;  // of each two dimensions the upper halves, then the lower ones
    static constexpr uint32_t ROW = 2 * D + 64;    // neighbouring rows in different banks
    static constexpr uint32_t KEYS = Q * QUERY, VALUES = KEYS + FEW_CHUNK * ROW, INPUTS = VALUES + FEW_CHUNK * ROW;
};

/// Shared memory of a block for heads of up to 64 N dimensions and 8 T queries.
template <int N, int T, class Kv> struct FewRoom : FewInputs<Kv, 64 * N, 8 * T> {
    static constexpr uint32_t D = 64 * N, Q = 8 * T;
    static constexpr uint32_t MOST = FewInputs<Kv, D, Q>::INPUTS;  // (warps, Q), then weights
    static constexpr uint32_t WEIGHT = MOST + 4 * FEW_WARPS * Q;
    static constexpr uint32_t SUMS = WEIGHT + 4 * FEW_WARPS * Q;  // (warps, Q, D)
    static constexpr uint32_t SUM = 4 * Q * D;
    static constexpr uint32_t END = SUMS + FEW_WARPS * SUM;
    /// What query `i` makes of constants, (D / 2, 2) at most: among the sums, which come later, behind what warps turn heads in. Eight
    /// neighbouring queries lie in different banks.
    static FB_DEVICE constexpr uint32_t factors(uint32_t i) { return SUMS + i % FEW_WARPS * (SUM + 8) + 4 * D * (1 + 2 * (i / FEW_WARPS)); }
};

/// 16 positions as operands: keys by 8 positions and 32 dimensions, values by 64 dimensions and a lane's four positions.
template <int N> struct Positions { Words4 k[2][2 * N], v[N][4]; };

/// The same of a cache of codes, with the scales of positions 2 (lane % 4) and the next, and of those 8 behind.
template <int N, class Kv> struct CodePositions {
    typename Kv::Key::Word k[2][N];
    typename Kv::Value::Word v[N][2];
    uint64_t key_scales[2], value_scales[2];
};

/// What a warp holds of 8 queries.
template <int N> struct Running {
    float most, weight;  // of query lane / 4; weight of this lane's positions alone
    float sum[N][4][4];  // dimensions 64 n + 8 (lane / 4) + 2 i and the next, of queries 2 (lane % 4) and the next
};

/// Keys at `position(0..16)`, by 16-byte loads at (position, dimension).
template <int N, class Load> FB_DEVICE void take_keys(Positions<N>& p, uint32_t d, const Load& load) {
    const uint32_t g = thread_x() % 32 / 4, c = thread_x() % 4;
    FB_UNROLL
    for (uint32_t j = 0; j < 2; j++) {
        FB_UNROLL
        for (uint32_t b = 0; b < 2 * N; b++) {
            p.k[j][b] = 32 * b + 8 * c < d ? load(8 * j + g, 32 * b + 8 * c) : Words4{};
        }
    }
}
template <int N, class Load> FB_DEVICE void take_values(Positions<N>& p, uint32_t d, const Load& load) {
    const uint32_t g = thread_x() % 32 / 4, c = thread_x() % 4;
    FB_UNROLL
    for (uint32_t h = 0; h < N; h++) {
        FB_UNROLL
        for (uint32_t r = 0; r < 4; r++) {
            p.v[h][r] = 64 * h + 8 * g < d ? load(2 * c + r % 2 + r / 2 * 8, 64 * h + 8 * g) : Words4{};
        }
    }
}

template <int N, class Kv> struct PositionsOf { typedef CodePositions<N, Kv> Type; };
template <int N> struct PositionsOf<N, Halves> { typedef Positions<N> Type; };

/// Where a block of codes begins.
struct CodesInCache {
    const uint8_t* at;
    template <class Word> FB_DEVICE Word load(uint32_t i) const { return ldc((const Word*)(at + i)); }
};
struct CodesInShared {
    uint32_t at;
    template <class Word> FB_DEVICE Word load(uint32_t i) const { return lds<Word>(at + i); }
};

/// The block that holds a row of a cache.
template <class Form> FB_DEVICE CodesInCache codes_at(const uint16_t* cache, uint32_t d, bool value, uint32_t row) {
    return {(const uint8_t*)cache + (size_t)(row / PAGE) * code_block<Form>(d, value, PAGE)};
}

/// Keys of 16 positions from `first` on, of a block of `room`.
template <int N, class Kv, class From>
FB_DEVICE void take_keys(CodePositions<N, Kv>& p, uint32_t d, const From& from, uint32_t first, uint32_t room) {
    typedef typename Kv::Key Key;
    const uint32_t g = thread_x() % 32 / 4, c = thread_x() % 4, row = code_row<Key>(d, false);
    FB_UNROLL
    for (uint32_t j = 0; j < 2; j++) {
        FB_UNROLL
        for (uint32_t b = 0; b < N; b++) {
            const uint32_t i = 64 * b + 16 * c;
            p.k[j][b] = i < d ? from.template load<typename Key::Word>((first + 8 * j + g) * row + i * Key::BITS / 8) : typename Key::Word{};
        }
        p.key_scales[j] = from.template load<uint64_t>(room * row + 4 * (first + 8 * j + 2 * c));
    }
}
template <int N, class Kv, class From>
FB_DEVICE void take_values(CodePositions<N, Kv>& p, uint32_t d, const From& from, uint32_t first, uint32_t room) {
    typedef typename Kv::Value Value;
    const uint32_t g = thread_x() % 32 / 4, c = thread_x() % 4, row = code_row<Value>(d, true);
    FB_UNROLL
    for (uint32_t r = 0; r < 2; r++) {
        FB_UNROLL
        for (uint32_t h = 0; h < N; h++) {
            const uint32_t i = 64 * h + 8 * g;
            p.v[h][r] = i < d ? from.template load<typename Value::Word>((first + 8 * r + 2 * c) * row + i * Value::BITS / 4) : typename Value::Word{};
        }
        p.value_scales[r] = from.template load<uint64_t>(room * row + 4 * (first + 8 * r + 2 * c));
    }
}
FB_DEVICE float scale_of(const uint64_t (&scales)[2], uint32_t i) { return float_of((uint32_t)(scales[i / 2] >> (32 * (i % 2)))); }

/// Scores of 8 queries (from tile `tile` of those in shared memory) and 16 positions: s[j][e] is position 8 j + 2 (lane % 4) + e.
template <int N, int T> FB_DEVICE void few_scores(const Positions<N>& p, uint32_t tile, float cap, float (&s)[2][2]) {
    using Room = FewRoom<N, T, Halves>;
    const uint32_t at = (8 * tile + thread_x() % 32 / 4) * Room::QUERY + 32 * (thread_x() % 4);
    float d[2][4] = {};
    FB_UNROLL
    for (uint32_t b = 0; b < 2 * N; b++) {
        FB_UNROLL
        for (uint32_t i = 0; i < 2; i++) {
            const Words4 q = lds<Words4>(at + 128 * b + 16 * i);
            FB_UNROLL
            for (uint32_t j = 0; j < 2; j++) mma(d[j], q.w[0], q.w[1], q.w[2], q.w[3], p.k[j][b].w[2 * i], p.k[j][b].w[2 * i + 1]);
        }
    }
    FB_UNROLL
    for (uint32_t j = 0; j < 2; j++) s[j][0] = capped(d[j][0] + d[j][2], cap), s[j][1] = capped(d[j][1] + d[j][3], cap);
}
template <int N, int T, class Kv> FB_DEVICE void few_scores(const CodePositions<N, Kv>& p, uint32_t tile, float (&s)[2][2]) {
    using Room = FewRoom<N, T, Kv>;
    const uint32_t query = 8 * tile + thread_x() % 32 / 4, at = query * Room::QUERY + 32 * (thread_x() % 4);
    int32_t d[2][4] = {};
    FB_UNROLL
    for (uint32_t b = 0; b < N; b++) {
        uint32_t k[2][4];
        FB_UNROLL
        for (uint32_t j = 0; j < 2; j++) Kv::Key::keys(p.k[j][b], k[j]);
        FB_UNROLL
        for (uint32_t i = 0; i < 2; i++) {
            const Words4 q = lds<Words4>(at + 128 * b + 16 * i);
            FB_UNROLL
            for (uint32_t j = 0; j < 2; j++) mma8(d[j], q.w[0], q.w[1], q.w[2], q.w[3], k[j][2 * i], k[j][2 * i + 1]);
        }
    }
    const float scale = lds<float>(Room::SCALES + 4 * query);
    FB_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        const int32_t(&both)[4] = d[i / 2];  // below 2^30 in magnitude
        s[i / 2][i % 2] = (float)(QUERY_LOW * both[i % 2] + both[2 + i % 2]) * (scale * scale_of(p.key_scales, i));
    }
}

/// Adds what constants of keys make of positions first + 0..16.
template <int N, int T, class Kv> FB_DEVICE void few_constants(const KeyConstants& k, uint32_t kv, uint32_t first, float (&s)[T][2][2]) {
    using Room = FewRoom<N, T, Kv>;
    const uint32_t count = key_planes(k, kv), query = thread_x() % 32 / 4, at = first + 2 * (thread_x() % 4);
    FB_UNROLL_4
    for (uint32_t n = 0; n < count; n++) {
        const float* angles = k.angles + 2 * ((size_t)ldc(&k.planes[(size_t)kv * k.most + n].row) * k.positions + at);
        uint64_t turn[4];  // cosine and sine; the step's own positions may begin anywhere
        FB_UNROLL
        for (uint32_t i = 0; i < 4; i++) turn[i] = ldc((const uint64_t*)(angles + 2 * (i % 2 + i / 2 * 8)));
        FB_UNROLL
        for (uint32_t t = 0; t < T; t++) {
            const uint64_t factors = lds<uint64_t>(Room::factors(8 * t + query) + 8 * n);
            const float a = float_of((uint32_t)factors), b = float_of((uint32_t)(factors >> 32));
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) {
                s[t][i / 2][i % 2] += a * float_of((uint32_t)turn[i]) + b * float_of((uint32_t)(turn[i] >> 32));
            }
        }
    }
}

/// Scores of all queries and positions first + 0..16 of a head.
template <int N, int T> FB_DEVICE void few_scores(const AttendFewArgs& a, const Positions<N>& p, uint32_t, uint32_t, float (&s)[T][2][2]) {
    FB_UNROLL
    for (uint32_t t = 0; t < T; t++) few_scores<N, T>(p, t, a.cap, s[t]);
}
template <int N, int T, class Kv>
FB_DEVICE void few_scores(const AttendCodesArgs& a, const CodePositions<N, Kv>& p, uint32_t kv, uint32_t first, float (&s)[T][2][2]) {
    FB_UNROLL
    for (uint32_t t = 0; t < T; t++) few_scores<N, T>(p, t, s[t]);
    few_constants<N, T, Kv>(a.constants, kv, first, s);
    FB_UNROLL
    for (uint32_t i = 0; i < 4 * T; i++) s[i / 4][i / 2 % 2][i % 2] = capped(s[i / 4][i / 2 % 2][i % 2], a.cap);
}

/// Turns scores of positions first + 0..16 into weights, packed as the right operand of the values; only low <= position < high count.
/// Operands are what `scaled` makes of the weights of the lane's four positions.
template <int N, class Scaled>
FB_DEVICE void few_weights(Running<N>& q, float (&s)[2][2], uint32_t first, uint32_t low, uint32_t high, const Scaled& scaled, uint32_t (&b)[2]) {
    const uint32_t c = thread_x() % 4;
    float top = FEW_LEAST;
    FB_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t position = first + 8 * (i / 2) + 2 * c + i % 2;
        float& v = s[i / 2][i % 2];
        v = position >= low && position < high ? v : -INFINITY;
        top = larger(top, v);
    }
    top = larger(top, float_of(shfl_xor(bits_of(top), 1)));
    top = larger(top, float_of(shfl_xor(bits_of(top), 2)));
    const float higher = larger(q.most, top), old = fast_exp(q.most - higher);
    q.most = higher;
    q.weight *= old;
    FB_UNROLL
    for (uint32_t j = 0; j < 2; j++) {
        const float v = fast_exp(s[j][0] - higher), w = fast_exp(s[j][1] - higher);
        q.weight += v + w;
        b[j] = low_high(to_half(scaled(2 * j, v)), to_half(scaled(2 * j + 1, w)));
    }
    const float even = float_of(shfl(bits_of(old), 8 * c)), odd = float_of(shfl(bits_of(old), 8 * c + 4));
    FB_UNROLL
    for (uint32_t i = 0; i < 4 * N; i++) {
        float(&sum)[4] = q.sum[i / 4][i % 4];
        sum[0] *= even, sum[1] *= odd, sum[2] *= even, sum[3] *= odd;
    }
}

template <int N> FB_DEVICE void few_values(Running<N>& q, const Positions<N>& p, const uint32_t (&b)[2]) {
    FB_UNROLL
    for (uint32_t h = 0; h < N; h++) {
        FB_UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t v0 = p.v[h][0].w[i], v1 = p.v[h][1].w[i], v2 = p.v[h][2].w[i], v3 = p.v[h][3].w[i];
            mma(q.sum[h][i], prmt(v0, v1, 0x5410), prmt(v0, v1, 0x7632), prmt(v2, v3, 0x5410), prmt(v2, v3, 0x7632), b[0], b[1]);
        }
    }
}

/// Takes positions first + 0..16 with their scores; `low` and `high` bound those that count, by tile of queries.
template <int N, int T, class Low, class High>
FB_DEVICE void few_take(Running<N> (&q)[T], const Positions<N>& p, float (&s)[T][2][2], uint32_t first, const Low& low, const High& high) {
    FB_UNROLL
    for (uint32_t t = 0; t < T; t++) {
        uint32_t b[2];
        few_weights(q[t], s[t], first, low(t), high(t), [](uint32_t, float weight) { return weight; }, b);
        few_values(q[t], p, b);
    }
}
template <int N, int T, class Kv, class Low, class High>
FB_DEVICE void few_take(Running<N> (&q)[T], const CodePositions<N, Kv>& p, float (&s)[T][2][2], uint32_t first, const Low& low, const High& high) {
    // Values are 128ths: so weights times scales are as large as those of a cache in half precision. A position that does not count may
    // have any scale, also one that is no number.
    const auto scaled = [&](uint32_t i, float weight) { return weight > 0.f ? weight * (128.f * scale_of(p.value_scales, i)) : 0.f; };
    uint32_t b[T][2];
    FB_UNROLL
    for (uint32_t t = 0; t < T; t++) few_weights(q[t], s[t], first, low(t), high(t), scaled, b[t]);
    FB_UNROLL
    for (uint32_t h = 0; h < N; h++) {
        uint32_t v[2][8];
        FB_UNROLL
        for (uint32_t r = 0; r < 2; r++) Kv::Value::values(p.v[h][r], v[r]);
        FB_UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            FB_UNROLL
            for (uint32_t t = 0; t < T; t++) mma(q[t].sum[h][i], v[0][2 * i], v[0][2 * i + 1], v[1][2 * i], v[1][2 * i + 1], b[t][0], b[t][1]);
        }
    }
}

/// Turns the planes of a head that a warp holds, lane i dimensions i, i + 32 and so on; `scratch` takes 32 M floats.
template <int M> FB_DEVICE void turn_planes(uint32_t d, uint32_t scratch, const float (&cosine)[M], const float (&sine)[M], float (&v)[M]) {
    const uint32_t lane = thread_x() % 32, half = d / 2;
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) sts<float>(scratch + 4 * (lane + 32 * t), v[t]);
    sync_warp();
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) {
        const uint32_t i = lane + 32 * t;
        const float other = i < half ? -lds<float>(scratch + 4 * (i + half)) : i < d ? lds<float>(scratch + 4 * (i - half)) : 0.f;
        v[t] = v[t] * cosine[t] + other * sine[t];
    }
    sync_warp();
}

/// One head of one token, by a warp: norm, what is added to it, and rotary embedding. Lane i gets dimensions i, i + 32 and so on; `scratch`
/// takes 64 N floats.
template <int N, class Args>
FB_DEVICE void few_head(const Args& a, const float* x, const float* norm, const float* shift, const float* turns, uint32_t scratch, float (&v)[2 * N]) {
    const uint32_t lane = thread_x() % 32, half = a.d / 2;
    float gain[2 * N], cosine[2 * N], sine[2 * N], square = 0.f;
    FB_UNROLL
    for (uint32_t t = 0; t < 2 * N; t++) {
        const uint32_t i = lane + 32 * t, plane = i < half ? i : i - half;
        v[t] = i < a.d ? ldg(x + i) : 0.f;
        gain[t] = norm && i < a.d ? ldc(norm + i) : 1.f;
        cosine[t] = turns && i < a.d ? ldc(turns + plane) : 1.f;
        sine[t] = turns && i < a.d ? ldc(turns + half + plane) : 0.f;
    }
    if (norm) {
        FB_UNROLL
        for (uint32_t t = 0; t < 2 * N; t++) square += v[t] * v[t];
        const float by = 1.f / root(sum_lanes(square) / (float)a.d + a.eps);
        FB_UNROLL
        for (uint32_t t = 0; t < 2 * N; t++) v[t] *= by * gain[t];
    }
    if (shift) {
        FB_UNROLL
        for (uint32_t t = 0; t < 2 * N; t++) v[t] += lane + 32 * t < a.d ? ldc(shift + lane + 32 * t) : 0.f;
    }
    turn_planes(a.d, scratch, cosine, sine, v);
}

/// What constants of keys make of query `i` of the block, by a warp that holds it turned; `scratch` takes 32 M floats.
template <class Room, int M>
FB_DEVICE void few_factors(const KeyConstants& k, uint32_t d, uint32_t kv, uint32_t i, uint32_t scratch, float scale, const float (&v)[M]) {
    const uint32_t lane = thread_x() % 32, count = key_planes(k, kv);
    if (count == 0) return;
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) sts<float>(scratch + 4 * (lane + 32 * t), v[t] * scale);
    sync_warp();
    for (uint32_t n = lane; n < count; n += 32) {
        const KeyPlane p = key_plane(k, kv, n);
        const float x = lds<float>(scratch + 4 * p.plane), y = lds<float>(scratch + 4 * (p.plane + d / 2));
        const uint32_t to = Room::factors(i) + 8 * n;
        sts<float>(to, x * p.at + y * p.beside);
        sts<float>(to + 4, y * p.at - x * p.beside);
    }
    sync_warp();
}

/// Query `i` of the block, by a warp: two bytes of each number, and a scale.
template <class Room, int M> FB_DEVICE void few_query(uint32_t i, const float (&v)[M]) {
    int32_t codes[M];
    const float scale = round_ints(v, QUERY_MOST, codes);
    FB_UNROLL
    for (uint32_t t = 0; t < M; t++) {
        const uint32_t at = thread_x() % 32 + 32 * t, to = i * Room::QUERY + 8 * (at / 4) + at % 4;
        const int32_t high = (codes[t] + QUERY_LOW / 2) >> 7;
        sts<uint8_t>(to, (uint8_t)high);
        sts<uint8_t>(to + 4, (uint8_t)(codes[t] - QUERY_LOW * high));
    }
    if (thread_x() % 32 == 0) sts<float>(Room::SCALES + 4 * i, scale);
}

/// A key or a value of the step, by a warp: as position `near` of the block at `to` in shared memory and, if it is `kept`, as a row of the cache.
template <class Form, int M>
FB_DEVICE void few_keep(uint16_t* cache, uint32_t d, bool value, uint32_t to, uint32_t near, uint32_t row, bool kept, const float (&v)[M]) {
    int32_t codes[M];
    const float scale = round_as(Form{}, v, codes);
    put_codes(Form{}, d, value, near, codes, [&](uint32_t at, uint8_t byte) { sts<uint8_t>(to + at, byte); });
    if (thread_x() % 32 == 0) sts<float>(to + FEW_CHUNK * code_row<Form>(d, value) + 4 * near, scale);
    if (kept) keep_codes<Form>(cache, d, value, row, codes, scale);
}

/// Joins the shares of all blocks, in the last of them to come here.
template <int N, int T, class Kv, class Place>
FB_DEVICE void few_join(uint32_t d, uint32_t shares, uint32_t queries, const float* partial, const float* summary, const Place& place) {
    using Room = FewRoom<N, T, Kv>;
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32;
    // Weights of the shares of a query, (shares, Q), and behind them sums of parts of the shares, (parts, items).
    const uint32_t weights = 0, parts_at = (4 * shares * Room::Q + 15) / 16 * 16;
    for (uint32_t q = warp; q < queries; q += FEW_WARPS) {
        float top = FEW_LEAST, total = 0.f;
        for (uint32_t s = lane; s < shares; s += 32) top = larger(top, ld_fresh(summary + 2 * (s * Room::Q + q)));
        FB_UNROLL
        for (uint32_t m = 16; m > 0; m /= 2) top = larger(top, float_of(shfl_xor(bits_of(top), m)));
        for (uint32_t s = lane; s < shares; s += 32) {
            const float* at = summary + 2 * (s * Room::Q + q);
            const float by = fast_exp(ld_fresh(at) - top);
            total += by * ld_fresh(at + 1);
            sts<float>(weights + 4 * (s * Room::Q + q), by);
        }
        total = 1.f / sum_lanes(total);
        sync_warp();
        for (uint32_t s = lane; s < shares; s += 32) {
            const uint32_t at = weights + 4 * (s * Room::Q + q);
            sts<float>(at, lds<float>(at) * total);
        }
    }
    sync_block();
    constexpr uint32_t QUADS = Room::D / 4;
    const uint32_t items = queries * QUADS, parts = items < threads_x() ? threads_x() / items : 1;
    const uint32_t each = (shares + parts - 1) / parts;
    for (uint32_t i = thread_x(); i < items * parts; i += threads_x()) {
        const uint32_t item = i % items, part = i / items, q = item / QUADS;
        const uint32_t end = (part + 1) * each < shares ? (part + 1) * each : shares;
        float v[4] = {};
        FB_UNROLL_8
        for (uint32_t s = part * each; s < end; s++) {
            const Words4 w = ldg((const Words4*)(partial + ((size_t)s * Room::Q + q) * Room::D + 4 * (item % QUADS)));
            const float by = lds<float>(weights + 4 * (s * Room::Q + q));
            FB_UNROLL
            for (uint32_t k = 0; k < 4; k++) v[k] += by * float_of(w.w[k]);
        }
        sts<Words4>(parts_at + 16 * i, Words4{{bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])}});
    }
    sync_block();
    for (uint32_t i = thread_x(); i < queries * Room::D; i += threads_x()) {
        float v = 0.f;
        for (uint32_t p = 0; p < parts; p++) v += lds<float>(parts_at + 16 * p * items + 4 * i);
        const uint32_t q = i / Room::D, at = i % Room::D;
        if (at < d) stg(place(q) + at, v);
    }
}

template <int N, int T, class Kv> FB_DEVICE void attend_few(const typename Kv::Args& a) {
    using Room = FewRoom<N, T, Kv>;
    grid_release();
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, g = lane / 4, c = lane % 4;
    const uint32_t kv = block_x() / a.tiles % a.kv_heads, sequence = block_x() / a.tiles / a.kv_heads;
    const uint32_t group = a.heads / a.kv_heads, first_query = block_x() % a.tiles * Room::Q;
    const uint32_t first_row = sequence * a.rows;
    const uint32_t* table = a.tables + sequence * a.pages;
    const uint32_t left = a.rows * group - first_query, queries = left < Room::Q ? left : Room::Q;
    // Positions in the cache, from the first that a token sees on; chunks of them are dealt to the warps of a block, then to the blocks.
    const uint32_t position = ldc(&a.step->positions[sequence]);
    // A chunk lies within a page.
    const uint32_t start = a.window > 0 && position + 1 > a.window ? (position + 1 - a.window) / FEW_CHUNK * FEW_CHUNK : 0;
    const uint32_t count = position - start, chunks = (count + FEW_CHUNK - 1) / FEW_CHUNK;
    const uint32_t turns = (chunks + FEW_WARPS - 1) / FEW_WARPS, some = turns < blocks_y() ? turns : blocks_y();
    const uint32_t shares = some > 0 ? some : 1;
    if (block_y() >= shares) return;
    // The chunk's first position, and the row of the cache that holds it. A position behind the
    // last repeats that, with no weight. Caches have less than 2^32 values: 64-bit places would
    // take registers.
    const uint32_t end = position, stride = FEW_CHUNK * FEW_WARPS * blocks_y();
    uint32_t first = start + (block_y() * FEW_WARPS + warp) * FEW_CHUNK;
    const auto row_of = [&](uint32_t at) { return at < end ? cache_row(table, a.kv_heads, kv, at) : 0u; };
    uint32_t begins = row_of(first);
    const auto fetch = [&](const uint16_t* from) {
        return [=, &first, &begins, &a](uint32_t at, uint32_t i) {
            const uint32_t last = end - 1 - first;
            return ldc((const Words4*)(from + (size_t)((begins + (at < last ? at : last)) * a.d) + i));
        };
    };
    typename PositionsOf<N, Kv>::Type p;
    const auto fetch_keys = [&] {
        if constexpr (Kv::CODES) take_keys(p, a.d, codes_at<typename Kv::Key>(a.keys, a.d, false, begins), begins % PAGE, PAGE);
        else take_keys(p, a.d, fetch(a.keys));
    };
    const auto fetch_values = [&] {
        if constexpr (Kv::CODES) take_values(p, a.d, codes_at<typename Kv::Value>(a.values, a.d, true, begins), begins % PAGE, PAGE);
        else take_values(p, a.d, fetch(a.values));
    };
    if (first < end) {
        fetch_keys();
        fetch_values();
    }
    for (uint32_t i = thread_x(); i < Room::MOST / 16; i += threads_x()) sts<Words4>(16 * i, Words4{});
    sync_block();
    grid_wait();

    // Queries, then keys and values of the step's own tokens where this block takes them.
    const bool own = block_y() + 1 == shares;
    const uint32_t all = a.heads + 2 * a.kv_heads, scratch = Room::SUMS + warp * Room::SUM;
    FB_UNROLL_1
    for (uint32_t i = warp; i < queries + (own ? 2 * a.rows : 0); i += FEW_WARPS) {
        const bool query = i < queries, value = !query && (i - queries) % 2 == 1;
        const uint32_t row = query ? (first_query + i) / group : (i - queries) / 2;  // of the sequence
        const uint32_t head = query ? kv * group + (first_query + i) % group : a.heads + (value ? a.kv_heads : 0) + kv;
        const float* shift = nullptr;
        if constexpr (Kv::CODES) {
            if (!query && !value) shift = key_shift(a.constants, a.d, kv, position + row);
        }
        float v[2 * N];
        few_head<N>(a, a.qkv + ((size_t)(first_row + row) * all + head) * a.d, query ? a.query_norm : value ? nullptr : a.key_norm, shift,
                    a.turns && !value ? a.turns + (size_t)(position + row) * a.d : nullptr, scratch, v);
        const float scale = a.scale * (a.growth ? ldc(a.growth + position + row) : 1.f);
        const uint32_t here = query ? 0u : cache_row(table, a.kv_heads, kv, position + row);
        const bool kept = first_query == 0;
        if constexpr (Kv::CODES) {
            if (query) {
                few_factors<Room>(a.constants, a.d, kv, i, scratch, scale, v);
                turn_head(a.turn, a.d, scratch, v);
                FB_UNROLL
                for (uint32_t t = 0; t < 2 * N; t++) v[t] *= scale;
                few_query<Room>(i, v);
            } else if (value) {
                few_keep<typename Kv::Value>(a.values, a.d, true, Room::VALUES, row, here, kept, v);
            } else {
                turn_head(a.turn, a.d, scratch, v);
                few_keep<typename Kv::Key>(a.keys, a.d, false, Room::KEYS, row, here, kept, v);
            }
        } else {
            uint16_t* cache = (value ? a.values : a.keys) + (size_t)here * a.d;
            const uint32_t to = (value ? Room::VALUES : Room::KEYS) + row * Room::ROW;
            FB_UNROLL
            for (uint32_t t = 0; t < 2 * N; t++) {
                const uint32_t at = lane + 32 * t;
                const float scaled = query ? v[t] * scale : v[t];
                const uint16_t high = to_half(scaled);
                if (query) {
                    const uint32_t word = i * Room::QUERY + 8 * (at / 2) + 2 * (at % 2);
                    sts<uint16_t>(word, high);
                    sts<uint16_t>(word + 4, to_half(scaled - from_half(high)));
                } else {
                    sts<uint16_t>(to + 2 * at, high);
                    if (kept && at < a.d) stg(cache + at, high);
                }
            }
        }
    }
    sync_block();

    Running<N> q[T];
    uint32_t low[T];  // first position in the cache of this lane's query
    FB_UNROLL
    for (uint32_t t = 0; t < T; t++) {
        q[t] = Running<N>{};
        q[t].most = FEW_LEAST;
        const uint32_t seen = position + (first_query + 8 * t + g) / group + 1;
        low[t] = a.window > 0 && seen > a.window ? seen - a.window : 0;
    }
    FB_UNROLL_1
    while (first < end) {
        sync_warp();  // or the compiler keeps the queries in registers, which positions need
        float s[T][2][2];
        few_scores<N, T>(a, p, kv, first, s);
        first += stride, begins = row_of(first);
        if (first < end) fetch_keys();
        few_take(q, p, s, first - stride, [&](uint32_t t) { return low[t]; }, [&](uint32_t) { return end; });
        if (first < end) fetch_values();
    }
    if (own && warp == chunks % FEW_WARPS) {
        if constexpr (Kv::CODES) {
            take_keys(p, a.d, CodesInShared{Room::KEYS}, 0, FEW_CHUNK);
            take_values(p, a.d, CodesInShared{Room::VALUES}, 0, FEW_CHUNK);
        } else {
            const auto near = [&](uint32_t from) {
                return [=](uint32_t at, uint32_t i) { return lds<Words4>(from + at * Room::ROW + 2 * i); };
            };
            take_keys(p, a.d, near(Room::KEYS));
            take_values(p, a.d, near(Room::VALUES));
        }
        float s[T][2][2];
        few_scores<N, T>(a, p, kv, position, s);
        const auto seen = [&](uint32_t t) { return (first_query + 8 * t + g) / group + 1; };
        few_take(q, p, s, 0, [&](uint32_t t) { return a.window > 0 && seen(t) > a.window ? seen(t) - a.window : 0; }, seen);
    }

    if constexpr (Kv::CODES) {
        if (a.constants.most > 0) sync_block();  // sums come where other warps may still read factors
    }
    // The warps of the block, in their order.
    FB_UNROLL
    for (uint32_t t = 0; t < T; t++) {
        float weight = q[t].weight;
        weight += float_of(shfl_xor(bits_of(weight), 1));
        weight += float_of(shfl_xor(bits_of(weight), 2));
        if (c == 0) {
            sts<float>(Room::MOST + 4 * (warp * Room::Q + 8 * t + g), q[t].most);
            sts<float>(Room::WEIGHT + 4 * (warp * Room::Q + 8 * t + g), weight);
        }
        FB_UNROLL
        for (uint32_t h = 0; h < N; h++) {
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) {  // query, four of the lane's dimensions
                const uint32_t e = i / 2, k = i % 2 * 2;
                const float(&v)[4] = q[t].sum[h][k], (&w)[4] = q[t].sum[h][k + 1];
                sts<Words4>(Room::SUMS + warp * Room::SUM + 4 * ((8 * t + 2 * c + e) * Room::D + 64 * h + 8 * g + 2 * k),
                            Words4{{bits_of(v[e]), bits_of(v[2 + e]), bits_of(w[e]), bits_of(w[2 + e])}});
            }
        }
    }
    sync_block();
    const size_t place = (size_t)block_x() * blocks_y() * Room::Q;
    float* partial = a.partial + place * Room::D;
    float* summary = a.partial + (size_t)blocks_x() * blocks_y() * Room::Q * Room::D + place * 2;
    const auto output = [&](uint32_t i) {
        const uint32_t n = first_query + i;
        return a.out + ((size_t)(first_row + n / group) * a.heads + kv * group + n % group) * a.d;
    };
    for (uint32_t i = thread_x(); i < queries * (Room::D / 4); i += threads_x()) {
        const uint32_t n = i / (Room::D / 4), at = 4 * (i % (Room::D / 4));
        float top = FEW_LEAST, weight = 0.f, v[4] = {};
        FB_UNROLL
        for (uint32_t w = 0; w < FEW_WARPS; w++) top = larger(top, lds<float>(Room::MOST + 4 * (w * Room::Q + n)));
        FB_UNROLL
        for (uint32_t w = 0; w < FEW_WARPS; w++) {
            const float by = fast_exp(lds<float>(Room::MOST + 4 * (w * Room::Q + n)) - top);
            weight += by * lds<float>(Room::WEIGHT + 4 * (w * Room::Q + n));
            const Words4 sum = lds<Words4>(Room::SUMS + w * Room::SUM + 4 * (n * Room::D + at));
            FB_UNROLL
            for (uint32_t k = 0; k < 4; k++) v[k] += by * float_of(sum.w[k]);
        }
        if (shares == 1) {
            FB_UNROLL
            for (uint32_t k = 0; k < 4; k++) {
                if (at + k < a.d) stg(output(n) + at + k, v[k] / weight);
            }
        } else {
            const size_t to = (size_t)block_y() * Room::Q + n;
            stg((Words4*)(partial + to * Room::D + at), Words4{{bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])}});
            if (at == 0) stg(summary + 2 * to, top), stg(summary + 2 * to + 1, weight);
        }
    }
    if (shares == 1) return;
    fence();
    sync_block();
    if (thread_x() == 0) sts<uint32_t>(0, atomic_inc(a.counters + block_x()));
    sync_block();
    const bool last = lds<uint32_t>(0) == shares - 1;
    if (!last) return;
    fence();
    sync_block();
    few_join<N, T, Kv>(a.d, shares, queries, partial, summary, output);
    if (thread_x() == 0) stg(a.counters + block_x(), 0u);
}

static_assert(sizeof(AttendFewArgs) == 136 && sizeof(AttendCodesArgs) == 208, "arguments");

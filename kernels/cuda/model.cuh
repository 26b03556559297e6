// What a decoder does beside packed products: dense products, norms, rotations, rotary embedding, cache, attention.
//
// A row is a token; up to PROMPT run together. Whatever changes from token to token (position, token, random numbers) is read from
// device memory, so that a recorded step repeats without the host.
#pragma once
#include "device.cuh"

constexpr int PROMPT = 1024, SEQUENCES = 8;

/// What a step runs: read, and where it draws advanced, by its kernels. Rows are those of the
/// sequences, one behind the other and the same number of each.
struct Step {
    uint32_t drawn;                 // tokens drawn
    uint32_t positions[SEQUENCES];  // tokens in the cache, of each sequence
    uint32_t tokens[PROMPT];        // to be run
};

/// Positions of a page. A cache is f16 (pages, kv_heads, PAGE, d) for keys and the same for values
/// of a layer; which pages a sequence has stands in its row of a table, (sequences, pages).
constexpr uint32_t PAGE = 64;

/// The row of a cache that holds a position of a head. No kernel writes tables.
FB_DEVICE uint32_t cache_row(const uint32_t* table, uint32_t kv_heads, uint32_t kv, uint32_t position) {
    return (ldc(table + position / PAGE) * kv_heads + kv) * PAGE + position % PAGE;
}

/// Sums `v` over the block; every thread gets the result. Uses 132 bytes of shared memory at `at`.
FB_DEVICE float sum_block(float v, uint32_t at) {
    const uint32_t warp = thread_x() / 32, warps = threads_x() / 32;
    v = sum_lanes(v);
    sync_block();
    if (thread_x() % 32 == 0) sts<float>(at + 4 * warp, v);
    sync_block();
    float total = 0.f;
    for (uint32_t i = 0; i < warps; i++) total += lds<float>(at + 4 * i);
    return total;
}

struct EmbedArgs {
    const Step* step;
    const uint16_t* table;  // f16 (vocabulary, width)
    float* x;               // (rows, width)
    uint32_t width, pad;
};
FB_DEVICE void embed(const EmbedArgs& a) {
    const uint32_t token = ldg(&a.step->tokens[block_x()]);
    for (uint32_t i = thread_x(); i < a.width; i += threads_x()) {
        stg(a.x + (size_t)block_x() * a.width + i, from_half(ldg(a.table + (size_t)token * a.width + i)));
    }
}

struct NormArgs {
    const float* x;     // (rows, width)
    const float* gain;  // (width) or null
    float* out;         // (rows, width); may be x
    uint32_t width;
    float eps;
    uint32_t stride;  // from row to row of both
    uint32_t pad;
};
FB_DEVICE void norm(const NormArgs& a) {
    constexpr uint32_t MOST = 4;  // four neighbours each of a thread that keeps its part of the row
    grid_release();
    const float* x = a.x + (size_t)block_x() * a.stride;
    float* out = a.out + (size_t)block_x() * a.stride;
    float square = 0.f;
    if (a.stride % 4 != 0 || ((size_t)a.x | (size_t)a.out) % 16 != 0 || a.width % 4 != 0 || a.width > 4 * MOST * threads_x()) {
        grid_wait();
        for (uint32_t i = thread_x(); i < a.width; i += threads_x()) square += ldg(x + i) * ldg(x + i);
        const float scale = 1.f / root(sum_block(square, 0) / (float)a.width + a.eps);
        for (uint32_t i = thread_x(); i < a.width; i += threads_x()) stg(out + i, ldg(x + i) * scale * (a.gain ? ldc(a.gain + i) : 1.f));
        return;
    }
    Words4 gain[MOST], v[MOST];
    const auto each = [&](const auto& f) {
        FB_UNROLL
        for (uint32_t t = 0; t < MOST; t++) {
            const uint32_t i = 4 * (thread_x() + t * threads_x());
            if (i < a.width) f(t, i);
        }
    };
    if (a.gain) each([&](uint32_t t, uint32_t i) { gain[t] = ldc((const Words4*)(a.gain + i)); });
    grid_wait();
    each([&](uint32_t t, uint32_t i) { v[t] = ldg((const Words4*)(x + i)); });
    each([&](uint32_t t, uint32_t) {
        FB_UNROLL
        for (uint32_t e = 0; e < 4; e++) square += float_of(v[t].w[e]) * float_of(v[t].w[e]);
    });
    const float scale = 1.f / root(sum_block(square, 0) / (float)a.width + a.eps);
    each([&](uint32_t t, uint32_t i) {
        FB_UNROLL
        for (uint32_t e = 0; e < 4; e++) v[t].w[e] = bits_of(float_of(v[t].w[e]) * scale * (a.gain ? float_of(gain[t].w[e]) : 1.f));
        stg((Words4*)(out + i), v[t]);
    });
}

struct GainArgs {
    float* x;           // (rows, width)
    const float* gain;  // (width)
    uint32_t width, pad;
};
FB_DEVICE void gain(const GainArgs& a) {
    float* x = a.x + (size_t)block_x() * a.width;
    for (uint32_t i = thread_x(); i < a.width; i += threads_x()) stg(x + i, ldg(x + i) * ldg(a.gain + i));
}

/// Adds what a block makes to the residual stream, where a norm stands between.
struct AddArgs {
    float* to;
    const float* x;
    uint32_t count, pad;
};
FB_DEVICE void add(const AddArgs& a) {
    for (uint32_t i = block_x() * threads_x() + thread_x(); i < a.count; i += blocks_x() * threads_x()) stg(a.to + i, ldg(a.to + i) + ldg(a.x + i));
}

/// The columns of a product of several matrices, one behind the other, to where they belong: bands
/// of rows.
struct PlaceArgs {
    const float* from;       // (rows, width)
    const uint32_t* places;  // (width), a permutation
    float* to;               // (rows, width), not from
    uint32_t width, accumulate;
};
FB_DEVICE void place(const PlaceArgs& a) {
    const float* from = a.from + (size_t)block_x() * a.width;
    float* to = a.to + (size_t)block_x() * a.width;
    for (uint32_t i = block_y() * threads_x() + thread_x(); i < a.width; i += blocks_y() * threads_x()) {
        float* at = to + ldg(a.places + i);
        stg(at, a.accumulate ? ldg(at) + ldg(from + i) : ldg(from + i));
    }
}

/// cap tanh(x / cap); cap 0: x.
FB_DEVICE float capped(float x, float cap) { return cap > 0.f ? cap - fast_div(2.f * cap, 1.f + fast_exp(2.f * x / cap)) : x; }
struct CapArgs {
    float* x;
    uint32_t count;
    float cap;
};
FB_DEVICE void cap(const CapArgs& a) {
    for (uint32_t i = block_x() * threads_x() + thread_x(); i < a.count; i += blocks_x() * threads_x()) stg(a.x + i, capped(ldg(a.x + i), a.cap));
}

/// What stands between gate and up.
constexpr uint32_t GATE_NONE = 0, GATE_SILU = 1, GATE_GELU = 2;
/// The gated product: of SiLU, x / (1 + exp(-x)), or of GELU by a hyperbolic tangent, which is
/// x / (1 + exp(-2 u)) with u the polynomial.
FB_DEVICE float gated_of(uint32_t kind, float gate, float up) {
    const float by = kind == GATE_SILU ? 1.f : 1.5957691216f * (1.f + 0.044715f * gate * gate);
    return fast_div(gate, 1.f + fast_exp(-gate * by)) * up;
}
/// The gated product where no rotation follows.
struct GateArgs {
    const float* gate_up;  // (rows, 2 width)
    float* out;            // (rows, width)
    uint32_t width, kind;
};
FB_DEVICE void gate(const GateArgs& a) {
    const float* from = a.gate_up + (size_t)block_x() * 2 * a.width;
    for (uint32_t i = block_y() * threads_x() + thread_x(); i < a.width; i += blocks_y() * threads_x()) {
        stg(a.out + (size_t)block_x() * a.width + i, gated_of(a.kind, ldg(from + i), ldg(from + a.width + i)));
    }
}

/// Rotation of a row: signs, then the Kronecker product of dense factors and a Walsh matrix (fracbit-rotation), or its inverse.
struct RotateArgs {
    const float* x;           // (rows, n), or gate and up (rows, 2n) where `gated` says by what
    float* out;               // (rows, n), not x
    const float* signs;       // (n), scaled by 1/sqrt(n)
    const float* factors[2];  // dense (order, order), slowest first; transposed for the inverse
    uint32_t orders[2];       // 0: absent
    uint32_t n, walsh, inverse, gated;
    uint32_t room;            // floats of shared memory: n, or less for rows that do not fit
    uint32_t pad;
};

/// out[j] = sum_k M[j][k] x[k] along one axis of the row in shared memory; through global memory, so that one copy of the row suffices.
FB_DEVICE void across(const RotateArgs& a, const float* m, uint32_t order, uint32_t stride, float* out) {
    for (uint32_t i = thread_x(); i < a.n; i += threads_x()) {
        const uint32_t j = i / stride % order, base = i - j * stride;
        float v = 0.f;
        for (uint32_t k = 0; k < order; k++) v += ldg(m + j * order + k) * lds<float>(4 * (base + k * stride));
        stg(out + i, v);
    }
    fence();
    sync_block();
    for (uint32_t i = thread_x(); i < a.n; i += threads_x()) sts<float>(4 * i, ld_fresh(out + i));
    sync_block();
}
/// Walsh matrices of order `walsh` on `count` floats in shared memory.
FB_DEVICE void butterflies(uint32_t count, uint32_t walsh) {
    for (uint32_t h = 1; h < walsh; h *= 2) {
        for (uint32_t i = thread_x(); i < count / 2; i += threads_x()) {
            const uint32_t low = i / h * 2 * h + i % h;
            const float p = lds<float>(4 * low), q = lds<float>(4 * (low + h));
            sts<float>(4 * low, p + q);
            sts<float>(4 * (low + h), p - q);
        }
        sync_block();
    }
}

/// As `across` and `butterflies`, on a row in global memory that is taken through shared memory in parts.
FB_DEVICE void across_parts(const RotateArgs& a, const float* m, uint32_t order, uint32_t stride, float* out) {
    // Columns of the dense factor: `stride` from each multiple of `order stride` on; some of them at a time.
    const uint32_t columns = a.n / order, most = a.room / order;
    for (uint32_t first = 0; first < columns; first += most) {
        const uint32_t part = columns - first < most ? columns - first : most;
        const auto place = [&](uint32_t column, uint32_t k) {
            return column / stride * order * stride + column % stride + k * stride;
        };
        sync_block();
        for (uint32_t i = thread_x(); i < part * order; i += threads_x()) {
            sts<float>(4 * i, ldg(out + place(first + i % part, i / part)));
        }
        sync_block();
        for (uint32_t i = thread_x(); i < part * order; i += threads_x()) {
            const uint32_t j = i / part;
            float v = 0.f;
            for (uint32_t k = 0; k < order; k++) v += ldg(m + j * order + k) * lds<float>(4 * (k * part + i % part));
            stg(out + place(first + i % part, j), v);
        }
    }
    sync_block();
}
FB_DEVICE void butterflies_parts(const RotateArgs& a, float* out) {
    uint32_t part = a.walsh;
    while (part > a.room) part /= 2;
    for (uint32_t first = 0; first < a.n; first += part) {
        sync_block();
        for (uint32_t i = thread_x(); i < part; i += threads_x()) sts<float>(4 * i, ldg(out + first + i));
        sync_block();
        butterflies(part, part);
        for (uint32_t i = thread_x(); i < part; i += threads_x()) stg(out + first + i, lds<float>(4 * i));
    }
    for (uint32_t h = part; h < a.walsh; h *= 2) {
        sync_block();
        for (uint32_t i = thread_x(); i < a.n / 2; i += threads_x()) {
            const uint32_t low = i / h * 2 * h + i % h;
            const float p = ldg(out + low), q = ldg(out + low + h);
            stg(out + low, p + q);
            stg(out + low + h, p - q);
        }
    }
    sync_block();
}
FB_DEVICE void rotate_parts(const RotateArgs& a, const float* x, float* out) {
    const uint32_t inner = a.orders[1] > 0 ? a.walsh * a.orders[1] : a.walsh;
    for (uint32_t i = thread_x(); i < a.n; i += threads_x()) {
        const float v = a.gated ? gated_of(a.gated, ldg(x + i), ldg(x + a.n + i)) : ldg(x + i);
        stg(out + i, a.inverse ? v : v * ldg(a.signs + i));
    }
    if (!a.inverse) butterflies_parts(a, out);
    for (uint32_t f = 0; f < 2; f++) {
        const uint32_t i = a.inverse ? f : 1 - f;
        if (a.orders[i] > 0) across_parts(a, a.factors[i], a.orders[i], i == 0 ? inner : a.walsh, out);
    }
    if (!a.inverse) return;
    butterflies_parts(a, out);
    for (uint32_t i = thread_x(); i < a.n; i += threads_x()) stg(out + i, ldg(out + i) * ldg(a.signs + i));
}
FB_DEVICE void rotate(const RotateArgs& a) {
    const float* x = a.x + (size_t)block_x() * a.n * (a.gated ? 2 : 1);
    float* out = a.out + (size_t)block_x() * a.n;
    if (a.room < a.n) return rotate_parts(a, x, out);
    for (uint32_t i = thread_x(); i < a.n; i += threads_x()) {
        const float v = a.gated ? gated_of(a.gated, ldg(x + i), ldg(x + a.n + i)) : ldg(x + i);
        sts<float>(4 * i, a.inverse ? v : v * ldg(a.signs + i));
    }
    sync_block();
    // Strides: the first factor is the slowest index, the Walsh matrix the fastest.
    const uint32_t inner = a.orders[1] > 0 ? a.walsh * a.orders[1] : a.walsh;
    if (!a.inverse) {
        butterflies(a.n, a.walsh);
        if (a.orders[1] > 0) across(a, a.factors[1], a.orders[1], a.walsh, out);
        if (a.orders[0] > 0) across(a, a.factors[0], a.orders[0], inner, out);
    } else {
        if (a.orders[0] > 0) across(a, a.factors[0], a.orders[0], inner, out);
        if (a.orders[1] > 0) across(a, a.factors[1], a.orders[1], a.walsh, out);
        butterflies(a.n, a.walsh);
    }
    for (uint32_t i = thread_x(); i < a.n; i += threads_x()) {
        stg(out + i, lds<float>(4 * i) * (a.inverse ? ldg(a.signs + i) : 1.f));
    }
}

/// Norm and rotary embedding of every head of queries, keys, values (rows, heads + 2 kv_heads, d); keys and values go to the cache.
struct HeadsArgs {
    const Step* step;
    float* qkv;
    const float* query_norm;  // (d) or null
    const float* key_norm;    // (d) or null
    const float* turns;       // (positions, d) cosines, then sines of d/2 planes; null: no rotation
    const float* growth;      // (positions) factors of queries, or null
    uint16_t* keys;           // the cache
    uint16_t* values;
    const uint32_t* tables;  // (sequences, pages)
    uint32_t heads, kv_heads, d, pages;
    uint32_t each;     // rows of a sequence
    float eps, scale;  // scale of the queries
    uint32_t pad;
};
FB_DEVICE void heads(const HeadsArgs& a) {
    const uint32_t head = block_x(), row = block_y(), sequence = row / a.each;
    const uint32_t position = ldg(&a.step->positions[sequence]) + row % a.each;
    const uint32_t all = a.heads + 2 * a.kv_heads, half = a.d / 2;
    float* x = a.qkv + ((size_t)row * all + head) * a.d;
    const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
    const float* norm = value ? nullptr : query ? a.query_norm : a.key_norm;
    float square = 0.f;
    for (uint32_t i = thread_x(); i < a.d; i += threads_x()) {
        const float v = ldg(x + i);
        sts<float>(256 + 4 * i, v);
        square += v * v;
    }
    const float norm_scale = norm ? 1.f / root(sum_block(square, 0) / (float)a.d + a.eps) : 1.f;
    sync_block();
    const auto normed = [&](uint32_t i) {
        return lds<float>(256 + 4 * i) * (norm ? norm_scale * ldg(norm + i) : 1.f);
    };
    for (uint32_t i = thread_x(); i < a.d; i += threads_x()) {
        float v = normed(i);
        if (a.turns && !value) {
            const uint32_t plane = i % half;
            const float c = ldg(a.turns + (size_t)position * a.d + plane), s = ldg(a.turns + (size_t)position * a.d + half + plane);
            v = i < half ? v * c - normed(i + half) * s : v * c + normed(i - half) * s;
        }
        if (query) {
            stg(x + i, v * a.scale * (a.growth ? ldc(a.growth + position) : 1.f));
        } else {
            const uint32_t kv = (head - a.heads) % a.kv_heads;
            uint16_t* cache = value ? a.values : a.keys;
            stg(cache + (size_t)cache_row(a.tables + sequence * a.pages, a.kv_heads, kv, position) * a.d + i, to_half(v));
        }
    }
}

/// Attention of one head and row over the cache: a warp takes every eighth position with sums of its own, joined at the end.
struct AttendArgs {
    const Step* step;
    const float* qkv;        // (rows, heads + 2 kv_heads, d)
    const uint16_t* keys;    // the cache
    const uint16_t* values;
    const uint32_t* tables;  // (sequences, pages)
    float* out;              // (rows, heads, d)
    uint32_t heads, kv_heads, d, pages, window;  // window 0: all positions
    uint32_t each;                               // rows of a sequence
    float cap;                                   // of scores; 0: none
    uint32_t pad;
};
constexpr int MAX_SLICE = 8;  // head dimensions up to 256
FB_DEVICE void attend(const AttendArgs& a) {
    const uint32_t head = block_x(), row = block_y(), sequence = row / a.each;
    const uint32_t last = ldg(&a.step->positions[sequence]) + row % a.each;
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t kv = head / (a.heads / a.kv_heads);
    const uint32_t first = a.window > 0 && last + 1 > a.window ? last + 1 - a.window : 0;
    const float* q = a.qkv + ((size_t)row * (a.heads + 2 * a.kv_heads) + head) * a.d;
    float query[MAX_SLICE], sum[MAX_SLICE];
    FB_UNROLL
    for (int t = 0; t < MAX_SLICE; t++) {
        const uint32_t i = lane + 32 * (uint32_t)t;
        query[t] = i < a.d ? ldg(q + i) : 0.f;
        sum[t] = 0.f;
    }
    float most = -INFINITY, weight = 0.f;
    for (uint32_t p = first + warp; p <= last; p += warps) {
        const size_t at = (size_t)cache_row(a.tables + sequence * a.pages, a.kv_heads, kv, p) * a.d;
        const uint16_t *k = a.keys + at, *v = a.values + at;
        float score = 0.f;
        FB_UNROLL
        for (int t = 0; t < MAX_SLICE; t++) {
            const uint32_t i = lane + 32 * (uint32_t)t;
            if (i < a.d) score += query[t] * from_half(ldg(k + i));
        }
        score = capped(sum_lanes(score), a.cap);
        const float higher = score > most ? score : most;
        const float old = fast_exp(most - higher), fresh = fast_exp(score - higher);
        weight = weight * old + fresh;
        FB_UNROLL
        for (int t = 0; t < MAX_SLICE; t++) {
            const uint32_t i = lane + 32 * (uint32_t)t;
            if (i < a.d) sum[t] = sum[t] * old + fresh * from_half(ldg(v + i));
        }
        most = higher;
    }
    // Per warp: most, weight, sums.
    const uint32_t slot = warp * (a.d + 2) * 4;
    if (lane == 0) {
        sts<float>(slot, most);
        sts<float>(slot + 4, weight);
    }
    FB_UNROLL
    for (int t = 0; t < MAX_SLICE; t++) {
        const uint32_t i = lane + 32 * (uint32_t)t;
        if (i < a.d) sts<float>(slot + 8 + 4 * i, sum[t]);
    }
    sync_block();
    float top = -INFINITY;
    for (uint32_t w = 0; w < warps; w++) {
        const float m = lds<float>(w * (a.d + 2) * 4);
        top = m > top ? m : top;
    }
    float total = 0.f;
    for (uint32_t w = 0; w < warps; w++) {
        total += lds<float>(w * (a.d + 2) * 4 + 4) * fast_exp(lds<float>(w * (a.d + 2) * 4) - top);
    }
    for (uint32_t i = thread_x(); i < a.d; i += threads_x()) {
        float v = 0.f;
        for (uint32_t w = 0; w < warps; w++) {
            v += lds<float>(w * (a.d + 2) * 4 + 8 + 4 * i) * fast_exp(lds<float>(w * (a.d + 2) * 4) - top);
        }
        stg(a.out + ((size_t)row * a.heads + head) * a.d + i, v / total);
    }
}

static_assert(sizeof(Step) == 4132 && sizeof(EmbedArgs) == 32 && sizeof(NormArgs) == 40 && sizeof(GainArgs) == 24, "arguments");
static_assert(sizeof(GateArgs) == 24 && sizeof(AddArgs) == 24 && sizeof(PlaceArgs) == 32 && sizeof(CapArgs) == 16 && sizeof(RotateArgs) == 72 && sizeof(HeadsArgs) == 104, "arguments");
static_assert(sizeof(AttendArgs) == 80, "arguments");

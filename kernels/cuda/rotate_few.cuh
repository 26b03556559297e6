// Rotation of a few rows, after a norm where one stands before it, by many blocks a row.
//
// The row is seen as a matrix (order, length): the first factor mixes its rows, whatever else there is works inside them, and both
// commute. A block makes R rows of the result: it reads the whole row of the input, multiplies it by R rows of the first factor, and
// turns what it got by the second factor and the Walsh matrix. Blocks do not wait for each other; as each reads the whole input, the
// norm takes no pass of its own.
#pragma once
#include "device.cuh"
#include "model.cuh"

struct RotateFewArgs {
    const float* x;      // (rows, n), or gate and up (rows, 2n) where `gated` says by what
    float* out;          // (rows, n), not x
    const float* signs;  // (n), scaled by 1/sqrt(n)
    const float* gain;   // (n) or null, before the signs
    const float* first;  // (order, order); transposed for the inverse, as `second`
    const float* second; // (second_order, second_order) or null
    uint32_t n, order, second_order, walsh;  // n = order length, length = max(second_order, 1) walsh, a multiple of 4
    uint32_t inverse, gated, norm;
    float eps;
};

/// Walsh matrix of order R in registers.
template <uint32_t R> FB_DEVICE void walsh_of(float (&v)[R]) {
    FB_UNROLL
    for (uint32_t h = 1; h < R; h *= 2) {
        FB_UNROLL
        for (uint32_t i = 0; i < R; i++) {
            if (i & h) continue;
            const float p = v[i], q = v[i + h];
            v[i] = p + q, v[i + h] = p - q;
        }
    }
}

/// The stages from h to h R - 1 of Walsh matrices on `count` floats of shared memory; `put` gets every place and value.
template <uint32_t R, class Put> FB_DEVICE void walsh_pass(uint32_t at, uint32_t count, uint32_t h, const Put& put) {
    for (uint32_t i = thread_x(); i < count / R; i += threads_x()) {
        const uint32_t low = i & (h - 1), base = (i - low) * R + low;
        float v[R];
        FB_UNROLL
        for (uint32_t k = 0; k < R; k++) v[k] = lds<float>(at + 4 * (base + k * h));
        walsh_of(v);
        FB_UNROLL
        for (uint32_t k = 0; k < R; k++) put(base + k * h, v[k]);
    }
}

/// out = first (signs gain x / rms), row by row of the first factor; R rows a block.
template <uint32_t R> FB_DEVICE void rotate_few(const RotateFewArgs& a) {
    constexpr uint32_t TURN = 2;  // loads of a thread in flight
    grid_release();
    const uint32_t length = a.n / a.order, quads = length / 4, first_row = block_x() * R;
    const uint32_t parts = quads < threads_x() ? threads_x() / quads : 1, each = (a.order + parts - 1) / parts;
    const uint32_t sums = 144, matrix = sums + 4 * parts * R * length;  // behind the 132 bytes of sum_block
    for (uint32_t i = thread_x(); i < R * a.order; i += threads_x()) {
        const uint32_t r = i / a.order, row = first_row + r;
        sts<float>(matrix + 4 * i, row < a.order ? ldc(a.first + (size_t)row * a.order + i - r * a.order) : 0.f);
    }
    // What stands before the first factor: signs and gain.
    const auto factors = [&](uint32_t at, float (&v)[4]) {
        Words4 s = {}, g = {};
        if (!a.inverse) s = ldc((const Words4*)(a.signs + at));
        if (a.gain) g = ldc((const Words4*)(a.gain + at));
        FB_UNROLL
        for (uint32_t i = 0; i < 4; i++) v[i] = (a.inverse ? 1.f : float_of(s.w[i])) * (a.gain ? float_of(g.w[i]) : 1.f);
    };
    float before[TURN][4];
    {
        const uint32_t quad = thread_x() % quads, k = thread_x() / quads * each;
        FB_UNROLL
        for (uint32_t t = 0; t < TURN; t++) {
            if (t < each && k + t < a.order) factors((k + t) * length + 4 * quad, before[t]);
        }
    }
    sync_block();
    grid_wait();
    const float* x = a.x + (size_t)block_y() * a.n * (a.gated ? 2 : 1);
    float square = 0.f;
    for (uint32_t i = thread_x(); i < quads * parts; i += threads_x()) {
        const uint32_t quad = i % quads, part = i / quads;
        const uint32_t end = (part + 1) * each < a.order ? (part + 1) * each : a.order;
        float sum[R][4] = {};
        for (uint32_t k = part * each; k < end; k += TURN) {
            const bool again = i != thread_x() || k != part * each;
            Words4 v[TURN], up[TURN];
            FB_UNROLL
            for (uint32_t t = 0; t < TURN; t++) {
                const uint32_t at = (k + t) * length + 4 * quad;
                v[t] = k + t < end ? ldg((const Words4*)(x + at)) : Words4{};
                up[t] = a.gated && k + t < end ? ldg((const Words4*)(x + a.n + at)) : Words4{};
                if (again && k + t < end) factors(at, before[t]);
            }
            FB_UNROLL
            for (uint32_t t = 0; t < TURN; t++) {
                if (k + t >= end) break;
                float m[R];
                FB_UNROLL
                for (uint32_t r = 0; r < R; r++) m[r] = lds<float>(matrix + 4 * (r * a.order + k + t));
                FB_UNROLL
                for (uint32_t e = 0; e < 4; e++) {
                    float w = float_of(v[t].w[e]);
                    if (a.gated) w = gated_of(a.gated, w, float_of(up[t].w[e]));
                    square += w * w;
                    w *= before[t][e];
                    FB_UNROLL
                    for (uint32_t r = 0; r < R; r++) sum[r][e] += m[r] * w;
                }
            }
        }
        FB_UNROLL
        for (uint32_t r = 0; r < R; r++) {
            const uint32_t to = sums + 4 * ((part * R + r) * length + 4 * quad);
            sts<Words4>(to, Words4{{bits_of(sum[r][0]), bits_of(sum[r][1]), bits_of(sum[r][2]), bits_of(sum[r][3])}});
        }
    }
    const float scale = a.norm ? 1.f / root(sum_block(square, 0) / (float)a.n + a.eps) : 1.f;
    sync_block();

    // Sums of the parts, four neighbours a thread; the Walsh matrix's stages inside a warp at once.
    const uint32_t count = R * length;
    const auto emit = [&](uint32_t at, float v) {
        const uint32_t r = R == 1 ? 0 : at / length, place = first_row * length + at;
        if (first_row + r < a.order) stg(a.out + (size_t)block_y() * a.n + place, v * scale * (a.inverse ? ldc(a.signs + place) : 1.f));
    };
    const auto keep = [&](uint32_t at, float v) { sts<float>(sums + 4 * at, v); };
    const auto add_parts = [&](uint32_t quad, float (&v)[4]) {
        FB_UNROLL
        for (uint32_t e = 0; e < 4; e++) v[e] = 0.f;
        FB_UNROLL_8
        for (uint32_t p = 0; p < parts; p++) {
            const Words4 w = lds<Words4>(sums + 4 * (p * count + 4 * quad));
            FB_UNROLL
            for (uint32_t e = 0; e < 4; e++) v[e] += float_of(w.w[e]);
        }
    };
    const uint32_t inner = a.walsh < 128 ? a.walsh : 128;
    const bool whole = a.second_order == 0;  // else the second factor stands between
    if (!whole) {
        for (uint32_t i = thread_x(); i < count / 4; i += threads_x()) {
            float v[4];
            add_parts(i, v);
            FB_UNROLL
            for (uint32_t e = 0; e < 4; e++) keep(4 * i + e, v[e]);  // the first part's place, which only this thread reads
        }
        sync_block();
        // Into the room behind it, and back.
        for (uint32_t i = thread_x(); i < count; i += threads_x()) {
            const uint32_t j = i / a.walsh % a.second_order, base = i - j * a.walsh;
            float v = 0.f;
            for (uint32_t k = 0; k < a.second_order; k++) {
                v += ldc(a.second + j * a.second_order + k) * lds<float>(sums + 4 * (base + k * a.walsh));
            }
            sts<float>(matrix + 4 * R * a.order + 4 * i, v);
        }
        sync_block();
    }
    for (uint32_t i = thread_x(); i < (count / 4 + 31) / 32 * 32; i += threads_x()) {
        float v[4] = {};
        if (i < count / 4) {
            if (whole) {
                add_parts(i, v);
            } else {
                FB_UNROLL
                for (uint32_t e = 0; e < 4; e++) v[e] = lds<float>(matrix + 4 * R * a.order + 16 * i + 4 * e);
            }
        }
        if (inner >= 4) {
            walsh_of(v);
        } else if (inner == 2) {
            const float p = v[0], q = v[2];
            v[0] = p + v[1], v[1] = p - v[1], v[2] = q + v[3], v[3] = q - v[3];
        }
        FB_UNROLL
        for (uint32_t m = 1; m < 32; m *= 2) {
            if (4 * m >= inner) break;
            FB_UNROLL
            for (uint32_t e = 0; e < 4; e++) {
                const float other = float_of(shfl_xor(bits_of(v[e]), m));
                v[e] = thread_x() & m ? other - v[e] : v[e] + other;
            }
        }
        if (i >= count / 4) continue;
        FB_UNROLL
        for (uint32_t e = 0; e < 4; e++) {
            if (inner == a.walsh) {
                emit(4 * i + e, v[e]);
            } else {
                keep(4 * i + e, v[e]);
            }
        }
    }
    for (uint32_t h = inner; h < a.walsh;) {
        sync_block();
        const uint32_t rest = a.walsh / h;
        if (rest > 8) {
            walsh_pass<8>(sums, count, h, keep);
            h *= 8;
        } else {
            if (rest == 8) walsh_pass<8>(sums, count, h, emit);
            if (rest == 4) walsh_pass<4>(sums, count, h, emit);
            if (rest == 2) walsh_pass<2>(sums, count, h, emit);
            h = a.walsh;
        }
    }
}

static_assert(sizeof(RotateFewArgs) == 80, "arguments");

// y = W x + b for dense half-precision W and up to 8 tokens, on the tensor cores.
//
// Reading W once is the bound. A block takes 16 rows at a time; its warps take every eighth group of 64 columns, straight from global
// memory into the left operand of mma.m16n8k16: the k slots may be any columns as long as both operands agree, so a lane holds eight
// neighbours of a row. The right operand is activations as two halves (21 bits), which the block stages a range of columns at a time.
#pragma once
#include "device.cuh"

struct DenseArgs {
    const uint16_t* w;  // f16 (rows, cols)
    const float* bias;  // (rows) or null
    const float* x;     // (batch, cols)
    float* y;           // (batch, y_stride)
    uint32_t rows, cols, batch, y_stride, accumulate;
    uint32_t width;     // columns that are staged together: a multiple of 512
};
static_assert(sizeof(DenseArgs) == 56, "arguments");

constexpr uint32_t DENSE_WARPS = 8;
/// Bytes from one token's staged halves to the next: neighbouring tokens begin in different banks.
FB_DEVICE uint32_t dense_stride(uint32_t width) { return 2 * width + 64; }

/// What a lane has of 64 columns of rows g and g + 8: eight neighbours of each of two groups of 32.
struct DenseWords { Words4 w[2][2]; };
FB_DEVICE DenseWords dense_words(const DenseArgs& a, uint32_t row, uint32_t col, uint32_t stop) {
    DenseWords d;
    FB_UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        FB_UNROLL
        for (uint32_t r = 0; r < 2; r++) {
            const uint32_t at = row + 8 * r, c = col + 32 * i;
            d.w[i][r] = at < a.rows && c < stop ? ldc((const Words4*)(a.w + (size_t)at * a.cols + c)) : Words4{{0, 0, 0, 0}};
        }
    }
    return d;
}

/// Widths are multiples of 8.
FB_DEVICE void dense(const DenseArgs& a) {
    constexpr uint32_t AHEAD = 2;  // groups of 64 columns that are on their way
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, g = lane / 4, c = lane % 4;
    const uint32_t stride = dense_stride(a.width), low = a.batch * stride, sums = 2 * a.batch * stride;
    const uint32_t token = g < a.batch ? g : a.batch - 1, x_at = token * stride + c * 16;
    const uint32_t tiles = (a.rows + 15) / 16;
    DenseWords words[AHEAD];
    // The first weights of a tile and range of columns: W is no other kernel's output.
    const auto begin = [&](uint32_t tile, uint32_t first) {
        FB_UNROLL
        for (uint32_t i = 0; i < AHEAD; i++) {
            words[i] = dense_words(a, tile * 16 + g, first + (warp + i * DENSE_WARPS) * 64 + c * 8, a.cols);
        }
    };
    if (block_x() < tiles) begin(block_x(), 0);
    grid_release();
    grid_wait();
    bool staged = false;
    FB_UNROLL_1
    for (uint32_t tile = block_x(); tile < tiles; tile += blocks_x()) {
        float acc[4] = {};
        FB_UNROLL_1
        for (uint32_t first = 0; first < a.cols; first += a.width) {
            const uint32_t end = a.cols - first < a.width ? a.cols - first : a.width, width = (end + 63) / 64 * 64;
            if (!staged) {
                sync_block();
                FB_UNROLL_4
                for (uint32_t i = thread_x(); i < a.batch * (width / 4); i += threads_x()) {
                    const uint32_t n = i / (width / 4), at = i % (width / 4) * 4;
                    float v[4] = {};
                    if (at < end) {
                        const Floats4 f = ldg((const Floats4*)(a.x + (size_t)n * a.cols + first + at));
                        FB_UNROLL
                        for (int j = 0; j < 4; j++) v[j] = f.v[j] > 65504.f ? 65504.f : f.v[j] < -65504.f ? -65504.f : f.v[j];
                    }
                    uint16_t high[4], rest[4];
                    FB_UNROLL
                    for (int j = 0; j < 4; j++) high[j] = to_half(v[j]), rest[j] = to_half(v[j] - from_half(high[j]));
                    sts(n * stride + 2 * at, Words2{{low_high(high[0], high[1]), low_high(high[2], high[3])}});
                    sts(low + n * stride + 2 * at, Words2{{low_high(rest[0], rest[1]), low_high(rest[2], rest[3])}});
                }
                sync_block();
                // One range: it stays for all tiles.
                staged = a.width >= a.cols;
            }
            FB_UNROLL_1
            for (uint32_t group = warp; group * 64 < end; group += DENSE_WARPS * AHEAD) {
                FB_UNROLL
                for (uint32_t k = 0; k < AHEAD; k++) {
                    const uint32_t col = (group + k * DENSE_WARPS) * 64;
                    const DenseWords now = words[k];
                    words[k] = dense_words(a, tile * 16 + g, first + (col + AHEAD * DENSE_WARPS * 64) + c * 8, first + end);
                    if (col >= end) continue;  // all lanes alike
                    FB_UNROLL
                    for (uint32_t i = 0; i < 2; i++) {
                        const Words4 x = lds<Words4>(x_at + 2 * (col + 32 * i)), rest = lds<Words4>(low + x_at + 2 * (col + 32 * i));
                        FB_UNROLL
                        for (uint32_t j = 0; j < 4; j += 2) {
                            const uint32_t *w0 = now.w[i][0].w + j, *w1 = now.w[i][1].w + j;
                            mma(acc, w0[0], w1[0], w0[1], w1[1], x.w[j], x.w[j + 1]);
                            mma(acc, w0[0], w1[0], w0[1], w1[1], rest.w[j], rest.w[j + 1]);
                        }
                    }
                }
            }
            if (first + a.width < a.cols) {
                begin(tile, first + a.width);
            } else if (tile + blocks_x() < tiles) {
                begin(tile + blocks_x(), 0);
            }
        }
        // Sums of the warps, in their order.
        FB_UNROLL
        for (uint32_t i = 0; i < 4; i++) sts<float>(sums + 4 * (warp * 128 + (g + i / 2 * 8) * 8 + 2 * c + i % 2), acc[i]);
        sync_block();
        const uint32_t row = tile * 16 + thread_x() / 8, n = thread_x() % 8;
        if (thread_x() < 128 && row < a.rows && n < a.batch) {
            float v = 0.f;
            FB_UNROLL
            for (uint32_t w = 0; w < DENSE_WARPS; w++) v += lds<float>(sums + 4 * (w * 128 + thread_x()));
            if (a.bias) v += ldc(a.bias + row);
            float* y = a.y + (size_t)n * a.y_stride + row;
            stg(y, a.accumulate ? ldg(y) + v : v);
        }
        sync_block();
    }
}

/// The same for any width: a warp takes a row of W at a time.
FB_DEVICE void dense_any(const DenseArgs& a) {
    const uint32_t lane = thread_x() % 32, warps = threads_x() / 32;
    for (uint32_t row = block_x() * warps + thread_x() / 32; row < a.rows; row += blocks_x() * warps) {
        float sum[8] = {};
        for (uint32_t i = lane; i < a.cols; i += 32) {
            const float v = from_half(ldg(a.w + (size_t)row * a.cols + i));
            FB_UNROLL
            for (uint32_t n = 0; n < 8; n++) {
                if (n < a.batch) sum[n] += v * ldg(a.x + (size_t)n * a.cols + i);
            }
        }
        FB_UNROLL
        for (uint32_t n = 0; n < 8; n++) {
            if (n >= a.batch) break;
            float v = sum_lanes(sum[n]);
            if (lane == 0) {
                if (a.bias) v += ldg(a.bias + row);
                float* y = a.y + (size_t)n * a.y_stride + row;
                stg(y, a.accumulate ? ldg(y) + v : v);
            }
        }
    }
}

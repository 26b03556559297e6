// Y = X W^T for many tokens: half-precision weights and activations, f32 sums, on the tensor cores.
//
// What long prompts run on, after packed weights were expanded. This file holds what every architecture runs: a block makes 128 tokens by 128
// outputs; tiles of 32 columns of both operands go through a ring in shared memory. sm_90 has a faster way: gemm_warpgroup.cuh.
#pragma once
#include "device.cuh"

struct GemmArgs {
    const uint16_t* w;  // f16 (rows, cols)
    const uint16_t* x;  // f16 (tokens, cols)
    const float* bias;  // (rows) or null
    float* y;           // (tokens, y_stride)
    uint32_t rows, cols, tokens, y_stride;  // cols: a multiple of 8
    uint32_t accumulate, pad;
};
static_assert(sizeof(GemmArgs) == 56, "arguments");

/// Pairs of outputs r, r + 1, then r + 8, r + 9 and so on of one token, where they exist.
template <int P> FB_DEVICE void gemm_put(const GemmArgs& a, uint32_t token, uint32_t r, const float (&v)[P][2]) {
    if (token >= a.tokens) return;
    float* y = a.y + (size_t)token * a.y_stride + r;
    if (r + 8 * P - 6 <= a.rows && (uintptr_t)y % 8 == 0) {
        // All loads before all stores.
        Floats2 sum[P];
        FB_UNROLL
        for (int i = 0; i < P; i++) sum[i] = a.accumulate ? ldg((const Floats2*)(y + 8 * i)) : Floats2{{0.f, 0.f}};
        FB_UNROLL
        for (int i = 0; i < P; i++) {
            const float bias[2] = {a.bias ? ldg(a.bias + r + 8 * i) : 0.f, a.bias ? ldg(a.bias + r + 8 * i + 1) : 0.f};
            stg((Floats2*)(y + 8 * i), Floats2{{sum[i].v[0] + (v[i][0] + bias[0]), sum[i].v[1] + (v[i][1] + bias[1])}});
        }
    } else {
        FB_UNROLL
        for (int i = 0; i < 2 * P; i++) {
            const uint32_t at = (uint32_t)(i / 2 * 8 + i % 2);
            if (r + at >= a.rows) continue;
            const float sum = v[i / 2][i % 2] + (a.bias ? ldg(a.bias + r + at) : 0.f);
            stg(y + at, a.accumulate ? ldg(y + at) + sum : sum);
        }
    }
}

constexpr uint32_t GEMM_SIDE = 128, GEMM_COLS = 32, GEMM_STAGES = 3, GEMM_SLOT = 2 * GEMM_SIDE * 2 * GEMM_COLS;

/// Where piece p (8 columns) of a row lies: two rows fill the banks once, and four pairs of rows permute their pieces, so that ldmatrix meets
/// every bank once.
FB_DEVICE uint32_t gemm_at(uint32_t row, uint32_t piece) { return row * 2 * GEMM_COLS + (piece ^ row / 2 % 4) * 16; }

/// 256 threads: warps of 64 tokens by 32 outputs, two by four.
FB_DEVICE void gemm_mma(const GemmArgs& a) {
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32;
    const uint32_t token = warp % 2 * 64, row = warp / 2 * 32;
    const uint32_t tiles = (a.cols + GEMM_COLS - 1) / GEMM_COLS;
    // This thread's copies: one piece of rows 64 apart, first of the inputs, then of the weights.
    const uint32_t line = thread_x() / 4, piece = thread_x() % 4, to = gemm_at(line, piece);
    const uint32_t copy_token = block_x() * GEMM_SIDE + line, copy_row = block_y() * GEMM_SIDE + line;
    const uint16_t* x = a.x + (size_t)copy_token * a.cols + piece * 8;
    const uint16_t* w = a.w + (size_t)copy_row * a.cols + piece * 8;
    const bool real[4] = {copy_token < a.tokens, copy_token + 64 < a.tokens, copy_row < a.rows, copy_row + 64 < a.rows};
    const auto fetch = [&](uint32_t tile) {
        if (tile < tiles) {
            const uint32_t at = tile % GEMM_STAGES * GEMM_SLOT + to, col = tile * GEMM_COLS;
            const bool inside = col + piece * 8 < a.cols;
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) {
                cp_async16(at + i * 128 * GEMM_COLS, (i < 2 ? x : w) + (size_t)(i % 2 * 64) * a.cols + col, real[i] && inside);
            }
        }
        cp_commit();
    };
    FB_UNROLL
    for (uint32_t i = 0; i < GEMM_STAGES - 1; i++) fetch(i);
    // Rows of the four 8 x 8 matrices that this lane names: tokens by columns, and outputs by columns.
    const uint32_t x_row = token + lane % 16, x_piece = lane / 16;
    const uint32_t w_row = GEMM_SIDE + row + lane / 16 * 8 + lane % 8, w_piece = lane / 8 % 2;
    float acc[4][4][4] = {};
    FB_UNROLL_1
    for (uint32_t t = 0; t < tiles; t++) {
        cp_wait<GEMM_STAGES - 2>();
        sync_block();
        fetch(t + GEMM_STAGES - 1);
        const uint32_t slot = t % GEMM_STAGES * GEMM_SLOT;
        FB_UNROLL
        for (uint32_t k = 0; k < GEMM_COLS / 16; k++) {
            uint32_t x_words[4][4], w_words[2][4];
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) ldmatrix4(x_words[i], slot + gemm_at(x_row + 16 * i, 2 * k + x_piece));
            FB_UNROLL
            for (uint32_t i = 0; i < 2; i++) ldmatrix4(w_words[i], slot + gemm_at(w_row + 16 * i, 2 * k + w_piece));
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) {
                FB_UNROLL
                for (uint32_t j = 0; j < 4; j++) {
                    const uint32_t* v = w_words[j / 2] + j % 2 * 2;
                    mma(acc[i][j], x_words[i][0], x_words[i][1], x_words[i][2], x_words[i][3], v[0], v[1]);
                }
            }
        }
    }
    FB_UNROLL
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t part = i / 2, half = i % 2;
        float v[4][2];
        FB_UNROLL
        for (uint32_t j = 0; j < 8; j++) v[j / 2][j % 2] = acc[part][j / 2][2 * half + j % 2];
        const uint32_t n = block_x() * GEMM_SIDE + token + part * 16 + half * 8 + lane / 4;
        gemm_put(a, n, block_y() * GEMM_SIDE + row + lane % 4 * 2, v);
    }
}

/// Rounds to half precision, saturated. Both buffers start at multiples of 16 bytes.
struct HalveArgs {
    const float* x;
    uint16_t* out;
    uint64_t count;
};
static_assert(sizeof(HalveArgs) == 24, "arguments");
FB_DEVICE float within_halves(float v) { return v > 65504.f ? 65504.f : v < -65504.f ? -65504.f : v; }
FB_DEVICE void halve(const HalveArgs& a) {
    const uint64_t thread = (uint64_t)block_x() * threads_x() + thread_x(), threads = (uint64_t)blocks_x() * threads_x();
    for (uint64_t i = thread; i < a.count / 8; i += threads) {
        Words4 out;
        FB_UNROLL
        for (uint32_t j = 0; j < 2; j++) {
            const Words4 v = ldg((const Words4*)(a.x + 8 * i) + j);
            FB_UNROLL
            for (uint32_t k = 0; k < 2; k++) {
                out.w[2 * j + k] = two_halves(within_halves(float_of(v.w[2 * k])), within_halves(float_of(v.w[2 * k + 1])));
            }
        }
        stg((Words4*)a.out + i, out);
    }
    for (uint64_t i = a.count / 8 * 8 + thread; i < a.count; i += threads) stg(a.out + i, to_half(within_halves(ldg(a.x + i))));
}

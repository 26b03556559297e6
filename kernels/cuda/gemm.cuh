// Y = X W^T for many tokens: half-precision weights and activations, f32 sums, on the tensor cores.
//
// What long prompts run on, after packed weights were expanded. A block makes 128 outputs of 64 tokens; tiles of 32 columns of both
// operands go through a ring in shared memory (cp.async), whose rows are padded to 80 bytes so that ldmatrix meets every bank once.
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

constexpr uint32_t GEMM_ROWS = 128, GEMM_TOKENS = 64, GEMM_COLS = 32, GEMM_STAGES = 3;
constexpr uint32_t GEMM_STRIDE = 2 * GEMM_COLS + 16, GEMM_SLOT = (GEMM_ROWS + GEMM_TOKENS) * GEMM_STRIDE;

/// Copies a tile of either operand; what lies outside is zero.
FB_DEVICE void gemm_fetch(const GemmArgs& a, uint32_t slot, uint32_t col) {
    const uint32_t row = block_x() * GEMM_ROWS, token = block_y() * GEMM_TOKENS;
    for (uint32_t i = thread_x(); i < (GEMM_ROWS + GEMM_TOKENS) * 4; i += threads_x()) {
        const uint32_t line = i / 4, c = col + i % 4 * 8, at = slot + line * GEMM_STRIDE + i % 4 * 16;
        const bool weight = line < GEMM_ROWS;
        const uint32_t r = weight ? row + line : token + line - GEMM_ROWS;
        if (r < (weight ? a.rows : a.tokens) && c < a.cols) {
            cp_async16(at, (weight ? a.w : a.x) + (size_t)r * a.cols + c);
        } else {
            sts(at, Words4{{0, 0, 0, 0}});
        }
    }
}

/// 256 threads: warps of 32 outputs by 32 tokens, four by two.
FB_DEVICE void gemm(const GemmArgs& a) {
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32;
    const uint32_t row = warp % 4 * 32, token = warp / 4 * 32;
    const uint32_t tiles = (a.cols + GEMM_COLS - 1) / GEMM_COLS;
    FB_UNROLL
    for (uint32_t i = 0; i < GEMM_STAGES - 1; i++) {
        if (i < tiles) gemm_fetch(a, i * GEMM_SLOT, i * GEMM_COLS);
        cp_commit();
    }
    // Rows of the four 8 x 8 matrices that this lane names: outputs by columns, and tokens by columns.
    const uint32_t w_at = (row + lane % 16) * GEMM_STRIDE + lane / 16 * 16;
    const uint32_t x_at = (GEMM_ROWS + token + lane / 16 * 8 + lane % 8) * GEMM_STRIDE + lane / 8 % 2 * 16;
    float acc[2][4][4] = {};
    uint32_t slot = 0, ahead = (GEMM_STAGES - 1) * GEMM_SLOT;
    FB_UNROLL_1
    for (uint32_t t = 0; t < tiles; t++) {
        cp_wait<GEMM_STAGES - 2>();
        sync_block();
        if (t + GEMM_STAGES - 1 < tiles) gemm_fetch(a, ahead, (t + GEMM_STAGES - 1) * GEMM_COLS);
        cp_commit();
        FB_UNROLL
        for (uint32_t k = 0; k < GEMM_COLS / 16; k++) {
            uint32_t w[2][4], x[2][4];
            FB_UNROLL
            for (uint32_t i = 0; i < 2; i++) {
                ldmatrix4(w[i], slot + w_at + i * 16 * GEMM_STRIDE + k * 32);
                ldmatrix4(x[i], slot + x_at + i * 16 * GEMM_STRIDE + k * 32);
            }
            FB_UNROLL
            for (uint32_t i = 0; i < 2; i++) {
                FB_UNROLL
                for (uint32_t j = 0; j < 4; j++) {
                    mma(acc[i][j], w[i][0], w[i][1], w[i][2], w[i][3], x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
        ahead = slot;
        slot = slot + GEMM_SLOT == GEMM_STAGES * GEMM_SLOT ? 0 : slot + GEMM_SLOT;
    }
    FB_UNROLL
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t part = i / 16, column = i / 4 % 4, e = i % 4;
        const uint32_t r = block_x() * GEMM_ROWS + row + part * 16 + lane / 4 + e / 2 * 8;
        const uint32_t n = block_y() * GEMM_TOKENS + token + column * 8 + lane % 4 * 2 + e % 2;
        if (r >= a.rows || n >= a.tokens) continue;
        float v = acc[part][column][e];
        if (a.bias) v += ldg(a.bias + r);
        float* y = a.y + (size_t)n * a.y_stride + r;
        stg(y, a.accumulate ? ldg(y) + v : v);
    }
}

/// Rounds to half precision, saturated.
struct HalveArgs {
    const float* x;
    uint16_t* out;
    uint64_t count;
};
FB_DEVICE void halve(const HalveArgs& a) {
    for (uint64_t i = (uint64_t)block_x() * threads_x() + thread_x(); i < a.count; i += (uint64_t)blocks_x() * threads_x()) {
        const float v = ldg(a.x + i);
        stg(a.out + i, to_half(v > 65504.f ? 65504.f : v < -65504.f ? -65504.f : v));
    }
}

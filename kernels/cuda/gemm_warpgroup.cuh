// The product of gemm.cuh with the tensor cores of sm_90a: 128 tokens by N outputs a block, a warpgroup for each 64 tokens.
//
// Tiles of 64 columns go through a ring by plain asynchronous copies, issued while products of the tile before run: the tensor cores always
// have one tile's products waiting behind the current ones, so that barriers and copies cost them nothing.
#pragma once
#include "gemm.cuh"
#include "warpgroup.cuh"

constexpr uint32_t WIDE_TOKENS = 128;

/// 256 threads. The ring takes 192 KiB (`gemm` of the host).
template <int N> FB_DEVICE void gemm_warpgroup(const GemmArgs& a) {
    constexpr uint32_t LINES = WIDE_TOKENS + N, SLOT = LINES * TILE_ROW, STAGES = (192 << 10) / SLOT;
    // Tiles copied ahead: products of two tiles may be under way, whose slots are not free.
    constexpr uint32_t AHEAD = STAGES - 2;
    check_base();
    const uint32_t lane = thread_x() % 32, group = thread_x() / 128;
    const uint32_t tiles = (a.cols + TILE_COLS - 1) / TILE_COLS;
    // This thread's copies: one piece of rows 32 apart, first of the inputs, then of the weights.
    const uint32_t line = thread_x() / 8, piece = thread_x() % 8;
    const uint32_t token = block_x() * WIDE_TOKENS + line, row = block_y() * N + line;
    const uint16_t* x = a.x + (size_t)token * a.cols + piece * 8;
    const uint16_t* w = a.w + (size_t)row * a.cols + piece * 8;
    uint32_t real = 0;  // a bit for each copy
    FB_UNROLL
    for (uint32_t i = 0; i < LINES / 32; i++) {
        const bool weight = i >= WIDE_TOKENS / 32;
        const uint32_t at = weight ? row + i * 32 - WIDE_TOKENS : token + i * 32;
        real |= (uint32_t)(at < (weight ? a.rows : a.tokens)) << i;
    }
    uint32_t filled = piece_at(line, piece);  // where the next copies go
    uint32_t left = tiles;                    // tiles to be copied
    const auto fetch = [&] {
        if (left > 0) {
            const uint32_t these = (tiles - left) * TILE_COLS + piece * 8 < a.cols ? real : 0;
            FB_UNROLL
            for (uint32_t i = 0; i < LINES / 32; i++) {
                const bool weight = i >= WIDE_TOKENS / 32;
                const uint16_t* from = weight ? w + (size_t)(i * 32 - WIDE_TOKENS) * a.cols : x + (size_t)(i * 32) * a.cols;
                cp_async16(filled + i * 32 * TILE_ROW, from, these >> i & 1);
            }
            x += TILE_COLS, w += TILE_COLS, left--;
            filled = filled + SLOT < STAGES * SLOT ? filled + SLOT : filled + SLOT - STAGES * SLOT;
        }
        cp_commit();
    };
    FB_UNROLL
    for (uint32_t i = 0; i < AHEAD; i++) fetch();
    float acc[N / 2] = {};
    uint32_t slot = 0;
    FB_UNROLL_1
    for (uint32_t t = 0; t < tiles; t++) {
        cp_wait<AHEAD - 1>();
        fence_async();
        // All of this tile is here; all products of the tile before the last are done.
        sync_block();
        const uint64_t of_x = tile_at(slot + group * 64 * TILE_ROW), of_w = tile_at(slot + WIDE_TOKENS * TILE_ROW);
        wgmma_fence();
        FB_UNROLL
        for (uint32_t k = 0; k < TILE_COLS / 16; k++) wgmma(acc, of_x + 2 * k, of_w + 2 * k);
        wgmma_commit();
        fetch();
        wgmma_wait<1>();
        slot = slot + SLOT < STAGES * SLOT ? slot + SLOT : 0;
    }
    wgmma_finish(acc);
    FB_UNROLL
    for (uint32_t i = 0; i < N / 32; i++) {  // 8 pairs of one token
        const uint32_t half = i / (N / 64), first = i % (N / 64) * 64;
        float v[8][2];
        FB_UNROLL
        for (uint32_t j = 0; j < 16; j++) v[j / 2][j % 2] = acc[first / 2 + j / 2 * 4 + 2 * half + j % 2];
        const uint32_t n = block_x() * WIDE_TOKENS + thread_x() / 32 * 16 + half * 8 + lane / 4;
        gemm_put(a, n, block_y() * N + first + lane % 4 * 2, v);
    }
}

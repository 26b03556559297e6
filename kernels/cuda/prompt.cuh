// Attention of the rows of a prompt over the cache, on the tensor cores.
//
// A block takes 64 rows of one head, a warp 16 of them. Tiles of keys and values go through two places in shared memory, the next one while
// this one is used; softmax runs along (largest score, sum of weights and weighted values of each row so far, in f32), and scores never leave
// registers. Rows in shared memory are an odd number of 16-byte pieces long, so that ldmatrix meets every bank once.
#pragma once
#include "model.cuh"

struct PromptArgs {
    const Step* step;
    const float* qkv;        // (rows, heads + 2 kv_heads, d)
    const uint16_t* keys;    // the cache
    const uint16_t* values;
    const uint32_t* table;   // pages of the one sequence
    float* out;              // (rows, heads, d)
    uint32_t heads, kv_heads, d, window;  // d: a multiple of 8; window 0: all positions
    uint32_t rows;
    float cap;  // of scores; 0: none
};
static_assert(sizeof(PromptArgs) == 72, "arguments");

constexpr uint32_t PROMPT_ROWS = 64;

/// 128 threads, heads of at most D columns. Shared memory: two places for keys and values of a tile.
template <int D> FB_DEVICE void prompt(const PromptArgs& a) {
    constexpr uint32_t POSITIONS = D > 128 ? 32 : 64, PIECES = D / 8, ROW = 16 * (PIECES + 1), TILE = POSITIONS * ROW;
    constexpr float LOG2_E = 1.44269504f;
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, g = lane / 4, c = lane % 4;
    const uint32_t head = block_x(), kv = head / (a.heads / a.kv_heads);
    // Late rows see most positions: their blocks begin first.
    const uint32_t block_row = (blocks_y() - 1 - block_y()) * PROMPT_ROWS, row = block_row + warp * 16 + g;
    const uint32_t position = ldg(&a.step->positions[0]), held = position + a.rows;

    // Queries, scaled so that weights are powers of two.
    uint32_t q[D / 16][4];
    FB_UNROLL
    for (uint32_t i = 0; i < D / 4; i++) {
        const uint32_t r = row + i % 2 * 8, col = i / 4 * 16 + i / 2 % 2 * 8 + 2 * c;
        Floats2 v{{0.f, 0.f}};
        if (r < a.rows && col < a.d) v = ldg((const Floats2*)(a.qkv + ((size_t)r * (a.heads + 2 * a.kv_heads) + head) * a.d + col));
        q[i / 4][i % 4] = two_halves(v.v[0] * LOG2_E, v.v[1] * LOG2_E);
    }

    const uint32_t first = a.window > 0 && position + block_row + 1 > a.window ? (position + block_row + 1 - a.window) / POSITIONS : 0;
    const uint32_t last_row = block_row + PROMPT_ROWS < a.rows ? block_row + PROMPT_ROWS - 1 : a.rows - 1;
    const uint32_t end = (position + last_row) / POSITIONS + 1;
    const auto fetch = [&](uint32_t tile) {
        // A tile lies within a page.
        const size_t begins = cache_row(a.table, a.kv_heads, kv, tile * POSITIONS);
        FB_UNROLL
        for (uint32_t i = 0; i < 2 * POSITIONS * PIECES / 128; i++) {
            constexpr uint32_t EACH = POSITIONS * PIECES / 128;
            const uint32_t piece = (i % EACH * 128 + thread_x()) % PIECES, line = (i % EACH * 128 + thread_x()) / PIECES;
            const uint32_t p = tile * POSITIONS + line, at = (tile % 2 * 2 + i / EACH) * TILE + line * ROW + piece * 16;
            const uint16_t* from = (i < EACH ? a.keys : a.values) + (begins + line) * a.d + piece * 8;
            cp_async16(at, from, p < held && piece * 8 < a.d);
        }
        cp_commit();
    };
    fetch(first);

    float sum[D / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, weight[2] = {0.f, 0.f};
    const uint32_t k_at = (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 16, v_at = lane % 16 * ROW + lane / 16 * 16;
    const uint32_t warp_first = position + block_row + warp * 16, warp_last = warp_first + 15;  // last positions that its rows see
    FB_UNROLL_1
    for (uint32_t t = first; t < end; t++) {
        cp_wait<0>();
        sync_block();
        if (t + 1 < end) fetch(t + 1);
        const uint32_t from = t * POSITIONS, keys = t % 2 * 2 * TILE, values = keys + TILE;
        if (from > warp_last) continue;
        float s[POSITIONS / 8][4] = {};
        FB_UNROLL
        for (uint32_t k = 0; k < D / 16; k++) {
            FB_UNROLL
            for (uint32_t j = 0; j < POSITIONS / 16; j++) {
                uint32_t b[4];
                ldmatrix4(b, keys + k_at + j * 16 * ROW + k * 32);
                mma(s[2 * j], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
                mma(s[2 * j + 1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
            }
        }
        if (a.cap > 0.f) {
            FB_UNROLL
            for (uint32_t i = 0; i < POSITIONS / 2; i++) s[i / 4][i % 4] = capped(s[i / 4][i % 4], a.cap * LOG2_E);
        }
        // Only tiles at the ends of what a row sees hold other positions.
        if (from + POSITIONS - 1 > warp_first || (a.window > 0 && from + a.window <= warp_last)) {
            FB_UNROLL
            for (uint32_t i = 0; i < POSITIONS / 2; i++) {
                const uint32_t p = from + i / 4 * 8 + 2 * c + i % 2, last = warp_first + g + i / 2 % 2 * 8;
                if (p > last || (a.window > 0 && p + a.window <= last)) s[i / 4][i % 4] = -INFINITY;
            }
        }
        FB_UNROLL
        for (uint32_t h = 0; h < 2; h++) {
            float higher = most[h];
            FB_UNROLL
            for (uint32_t i = 0; i < POSITIONS / 4; i++) higher = larger(higher, s[i / 2][2 * h + i % 2]);
            higher = larger(higher, float_of(shfl_xor(bits_of(higher), 1)));
            higher = larger(higher, float_of(shfl_xor(bits_of(higher), 2)));
            // A row may see nothing of a tile, and of those before.
            const float base = higher == -INFINITY ? 0.f : higher, old = power_of_two(most[h] - base);
            most[h] = higher;
            weight[h] *= old;
            FB_UNROLL
            for (uint32_t i = 0; i < POSITIONS / 4; i++) {
                float& v = s[i / 2][2 * h + i % 2];
                v = power_of_two(v - base);
                weight[h] += v;
            }
            FB_UNROLL
            for (uint32_t i = 0; i < D / 4; i++) sum[i / 2][2 * h + i % 2] *= old;
        }
        FB_UNROLL
        for (uint32_t k = 0; k < POSITIONS / 16; k++) {
            uint32_t p[4];
            FB_UNROLL
            for (uint32_t i = 0; i < 4; i++) p[i] = two_halves(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
            FB_UNROLL
            for (uint32_t j = 0; j < D / 16; j++) {
                uint32_t b[4];
                ldmatrix4_turned(b, values + v_at + k * 16 * ROW + j * 32);
                mma(sum[2 * j], p[0], p[1], p[2], p[3], b[0], b[1]);
                mma(sum[2 * j + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
            }
        }
    }
    FB_UNROLL
    for (uint32_t h = 0; h < 2; h++) {
        weight[h] += float_of(shfl_xor(bits_of(weight[h]), 1));
        weight[h] += float_of(shfl_xor(bits_of(weight[h]), 2));
        const uint32_t r = row + 8 * h;
        if (r >= a.rows) continue;
        const float scale = 1.f / weight[h];
        FB_UNROLL
        for (uint32_t j = 0; j < D / 8; j++) {
            const uint32_t col = 8 * j + 2 * c;
            float* out = a.out + ((size_t)r * a.heads + head) * a.d + col;
            if (col < a.d) stg((Floats2*)out, Floats2{{sum[j][2 * h] * scale, sum[j][2 * h + 1] * scale}});
        }
    }
}

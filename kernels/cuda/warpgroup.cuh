// Products of warpgroups (128 threads) on the tensor cores of sm_90a: both operands come from shared memory, and the product runs on while
// the threads do other things.
#pragma once
#include "device.cuh"

/// Tiles of halves in shared memory: rows of 64 (128 bytes), eight rows to 1024 bytes. The 16-byte piece p of row r lies at place
/// p ^ r % 8 of its row, so that eight rows' pieces of equal number lie in different banks.
constexpr uint32_t TILE_COLS = 64, TILE_ROW = 2 * TILE_COLS;
FB_DEVICE uint32_t piece_at(uint32_t row, uint32_t piece) { return row * TILE_ROW + (piece ^ row % 8) * 16; }

/// What a descriptor says beside the address: 1024 bytes (64 units of 16) from eight rows to the next, the order above. The bytes between
/// pieces (bits 16 to 29) are not used with this order.
constexpr uint64_t TILE_ORDER = 1ull << 62 | 64ull << 32 | 1ull << 16;

#ifdef __CUDACC__

/// Names a tile that starts at a multiple of 1024 bytes, or a multiple of 32 bytes further (16 columns) inside its first row.
FB_DEVICE uint64_t tile_at(uint32_t at) { return TILE_ORDER | (uint32_t)__cvta_generic_to_shared(fb_shared + at) >> 4; }
/// Shows what this thread's finished copies wrote to later products of warpgroups.
FB_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// Before the first product after other code wrote the sums.
FB_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FB_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most `LEFT` groups run.
template <int LEFT> FB_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
/// Until all products are done: `d` may be read.
template <int N> FB_DEVICE void wgmma_finish(float (&d)[N]) {
    wgmma_wait<0>();
    FB_UNROLL
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/// d += a b^T for 64 rows of a and twice as many rows of b as d has floats, 16 columns of both. Of warp w of the group, lane (g, c) holds in
/// d[4j + 2h + i] row 16w + 8h + g of a by row 8j + 2c + i of b.
#define FB_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FB_SIXTEEN(i) FB_FOUR(i), FB_FOUR(i + 4), FB_FOUR(i + 8), FB_FOUR(i + 12)
FB_DEVICE void wgmma(float (&d)[128], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
        "%128, %129, p, 1, 1, 0, 0; }"
        : FB_SIXTEEN(0), FB_SIXTEEN(16), FB_SIXTEEN(32), FB_SIXTEEN(48),
          FB_SIXTEEN(64), FB_SIXTEEN(80), FB_SIXTEEN(96), FB_SIXTEEN(112)
        : "l"(a), "l"(b) : "memory");
}
FB_DEVICE void wgmma(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "%64, %65, p, 1, 1, 0, 0; }"
        : FB_SIXTEEN(0), FB_SIXTEEN(16), FB_SIXTEEN(32), FB_SIXTEEN(48)
        : "l"(a), "l"(b) : "memory");
}
FB_DEVICE void wgmma(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : FB_SIXTEEN(0), FB_SIXTEEN(16)
        : "l"(a), "l"(b) : "memory");
}
#undef FB_SIXTEEN
#undef FB_FOUR

#else
#include "host/warpgroup.hpp"
#endif

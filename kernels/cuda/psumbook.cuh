// y = W x for additive codebooks and up to 8 tokens without weights: products of centroids with
// activations are looked up (CodeGEMM, section 3).
//
// A block takes one octet of columns and some strips. It rounds the octet's activations to 8-bit
// integers, one scale for 256 columns as the processor does, builds the *Psumbook*, the products of
// all centroids with them at every place, in shared memory, and reads it by the codes of its
// strips: one code is one lookup for all tokens of a block. All of this is integers and exact. Sums
// of an octet go to a workspace, and a second kernel adds them and multiplies by scales in the
// processor's order: the same bits as the scalar reference, however the work is dealt.
#pragma once
#include "additive.cuh"

struct PsumArgs {
    Matrix w;
    const uint32_t* centroids;  // (codebook, code, word of four int8)
    const float* x;             // (batch, x_stride)
    float* y;                   // (batch, y_stride)
    int32_t* parts;             // (octet, batch, 32 pairs)
    float* scales;              // (batch, half of the octets): of activations
    uint32_t batch, x_stride, y_stride, accumulate;
    uint32_t strips;            // of a block
    uint32_t ranges;            // of strips
};
static_assert(sizeof(PsumArgs) == 264, "arguments");

/// Threads of a block that builds and reads.
constexpr uint32_t PSUM_THREADS = 512;

/// Partial sums of `T` tokens side by side.
template <class Sum, int T> struct Psums {
    static constexpr uint32_t BYTES = sizeof(Sum) * T;
    static_assert(BYTES == 2 || BYTES == 4 || BYTES == 8, "one access to shared memory");
    FB_DEVICE static void store(uint32_t at, const int32_t (&v)[T]) {
        if constexpr (T == 1) {
            sts<Sum>(at, (Sum)v[0]);
        } else if constexpr (sizeof(Sum) == 2) {
            sts(at, Words2{{prmt((uint32_t)v[0], (uint32_t)v[1], 0x5410), prmt((uint32_t)v[2], (uint32_t)v[3], 0x5410)}});
        } else {
            sts(at, Words2{{(uint32_t)v[0], (uint32_t)v[1]}});
        }
    }
    FB_DEVICE static void add(uint32_t at, int32_t (&sums)[T]) {
        if constexpr (T == 1) {
            sums[0] += lds<Sum>(at);
        } else {
            const Words2 v = lds<Words2>(at);
            FB_UNROLL
            for (int t = 0; t < T; t++) {
                sums[t] += sizeof(Sum) == 4 ? (int32_t)v.w[t % 2] : t % 2 ? (int32_t)v.w[t / 2] >> 16 : (int32_t)(int16_t)v.w[t / 2];
            }
        }
    }
};

/// Rounds one token's activations of an octet to integers, four a word at `at`, by the lanes of a
/// warp; returns their scale.
///
/// As `fracbit_kernels::Activations` says, for the 256 columns that share a scale: the octet's and
/// those of its neighbour.
FB_DEVICE float round_octet(uint32_t at, const float* x, uint32_t cols, uint32_t octet, uint32_t lane) {
    constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: sums have their last bit at the integers
    const uint32_t first = octet / 2 * 256 + lane * 8;
    float v[8];
    uint32_t top = 0;
    FB_UNROLL
    for (uint32_t i = 0; i < 8; i++) {
        v[i] = first + i < cols ? ldg(x + first + i) : 0.f;
        const uint32_t bits = bits_of(v[i]) & 0x7FFFFFFF;  // ordered as magnitudes are, NaN above all
        top = bits > top ? bits : top;
    }
    FB_UNROLL
    for (uint32_t m = 16; m > 0; m /= 2) {
        const uint32_t other = shfl_xor(top, m);
        top = other > top ? other : top;
    }
    const float most = float_of(top);
    const bool tiny = most < 1e-30f;
    const float inverse = tiny ? 0.f : div_rn(127.f, most);
    uint32_t words[2] = {};
    FB_UNROLL
    for (uint32_t i = 0; i < 8; i++) {
        const float scaled = mul_rn(v[i], inverse), real = scaled == scaled ? scaled : 0.f;
        words[i / 4] |= ((bits_of(add_rn(real, MAGIC)) - bits_of(MAGIC)) & 255) << (i % 4 * 8);
    }
    if (lane / 16 == octet % 2) sts(at + lane % 16 * 8, Words2{{words[0], words[1]}});
    return tiny ? 0.f : div_rn(most, 127.f);
}

/// A lane's codes of one strip and octet.
template <int WORDS> FB_DEVICE void load_codes(uint32_t (&w)[WORDS], const unsigned char* from, uint32_t lane) {
    constexpr int fours = WORDS / 4 * 4;
    if constexpr (fours > 0) {
        const Words4 v = ldc((const Words4*)(from + lane * 16));
        FB_UNROLL
        for (int i = 0; i < 4; i++) w[i] = v.w[i];
    }
    if constexpr (WORDS % 4 == 2) {
        const uint64_t v = ldc((const uint64_t*)(from + fours * 128 + lane * 8));
        w[fours] = (uint32_t)v, w[fours + 1] = (uint32_t)(v >> 32);
    }
}

/// Integer sums of an octet (`block_x`) for a range of strips and T tokens (`block_y`).
template <class E, class Sum, int T> FB_DEVICE void psums(const PsumArgs& a) {
    using P = Psums<Sum, T>;
    constexpr int WORDS = E::Q / 2, PARTS = E::V / 4, VECTORS = 128 / E::V;
    constexpr uint32_t AHEAD = WORDS > 4 ? 2 : 4, WARPS = PSUM_THREADS / 32, BOOK = VECTORS * E::M * 256 * P::BYTES;
    const Segment& s = a.w.segments[0];
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, g = lane / 4, c = lane % 4;
    const uint32_t octet = block_x(), range = block_y() % a.ranges, token = block_y() / a.ranges * T;
    const uint32_t first = range * a.strips + warp, rest = 2 * a.w.pairs - range * a.strips;
    const uint32_t end = range * a.strips + (rest < a.strips ? rest : a.strips);
    const auto fetch = [&](uint32_t (&w)[WORDS], uint32_t strip) {
        if (strip < end) load_codes(w, s.codes + (((size_t)(strip / 2) * s.octets + octet) * 2 + strip % 2) * 64 * E::Q, lane);
    };
    // Codes and centroids are constants: they are asked for before the activations are there.
    uint32_t codes[AHEAD][WORDS] = {};
    FB_UNROLL
    for (uint32_t i = 0; i < AHEAD; i++) fetch(codes[i], first + i * WARPS);
    const uint32_t code = thread_x() % 256;
    uint32_t centroid[E::M][PARTS];
    FB_UNROLL
    for (int i = 0; i < E::M * PARTS; i++) {
        centroid[i / PARTS][i % PARTS] = ldc(a.centroids + (i / PARTS * 256 + code) * PARTS + i % PARTS);
    }
    grid_release();
    grid_wait();
    if (warp < T) {
        const uint32_t n = token + warp, at = BOOK + warp * 128;
        if (n < a.batch) {
            const float scale = round_octet(at, a.x + (size_t)n * a.x_stride, s.end_col, octet, lane);
            if (range == 0 && octet % 2 == 0 && lane == 0) stg(a.scales + (size_t)n * ((s.octets + 1) / 2) + octet / 2, scale);
        } else {
            sts(at + lane * 4, 0u);
        }
    }
    sync_block();
    // A thread makes the partial sums of its codes at every second place.
    FB_UNROLL_1
    for (uint32_t vector = thread_x() / 256; vector < VECTORS; vector += PSUM_THREADS / 256) {
        int32_t sums[E::M][T] = {};
        FB_UNROLL
        for (int part = 0; part < PARTS; part++) {
            FB_UNROLL
            for (int t = 0; t < T; t++) {
                const uint32_t x = lds<uint32_t>(BOOK + t * 128 + (vector * PARTS + part) * 4);
                FB_UNROLL
                for (int book = 0; book < E::M; book++) sums[book][t] = dot4(centroid[book][part], x, sums[book][t]);
            }
        }
        FB_UNROLL
        for (int book = 0; book < E::M; book++) P::store(((vector * E::M + book) * 256 + code) * P::BYTES, sums[book]);
    }
    sync_block();
    const uint32_t own = c * E::CODES * 256 * P::BYTES;  // places of tile c
    FB_UNROLL_1
    for (uint32_t base = first; base < end; base += AHEAD * WARPS) {
        FB_UNROLL
        for (uint32_t i = 0; i < AHEAD; i++) {
            const uint32_t strip = base + i * WARPS;
            if (strip >= end) break;
            int32_t sums[2][T] = {};
            FB_UNROLL
            for (int b = 0; b < 2 * E::Q; b++) {  // tile, row, place
                const int q = b / E::Q, row = b % E::Q / E::CODES, place = q * 4 * E::CODES + b % E::CODES;
                const uint32_t at = (codes[i][b / 4] >> (b % 4 * 8) & 255) * P::BYTES + own;
                P::add(at + (uint32_t)place * 256 * P::BYTES, sums[row]);
            }
            fetch(codes[i], strip + AHEAD * WARPS);
            FB_UNROLL
            for (int t = 0; t < T; t++) {
                FB_UNROLL
                for (int row = 0; row < 2; row++) {
                    sums[row][t] += (int32_t)shfl_xor((uint32_t)sums[row][t], 1);
                    sums[row][t] += (int32_t)shfl_xor((uint32_t)sums[row][t], 2);
                }
                if ((uint32_t)t == c && token + t < a.batch) {
                    int32_t* to = a.parts + ((size_t)octet * a.batch + token + t) * a.w.pairs * 32 + strip * 16 + 2 * g;
                    stg((Words2*)to, Words2{{(uint32_t)sums[0][t], (uint32_t)sums[1][t]}});
                }
            }
        }
    }
}

/// Adds the sums of a row (`block_x` and thread) and token (`block_y`).
FB_DEVICE void psum_finish(const PsumArgs& a) {
    const Segment& s = a.w.segments[0];
    const uint32_t row = block_x() * threads_x() + thread_x(), n = block_y();
    if (row >= a.w.rows) return;
    const float* scales = a.scales + (size_t)n * ((s.octets + 1) / 2);
    const int32_t* part = a.parts + (size_t)n * a.w.pairs * 32 + row;
    float all = 0.f, inner = 0.f;
    int32_t sum = 0;
    uint32_t which = 0;
    FB_UNROLL_4
    for (uint32_t octet = 0; octet < s.octets; octet++) {
        sum += ldg(part + (size_t)octet * a.batch * a.w.pairs * 32);
        const bool closes = octet + 1 == s.octets || (octet + 1) * 128 % a.w.group == 0;
        if (!closes && octet % 2 == 0) continue;
        inner = add_rn(inner, mul_rn((float)sum, mul_rn(ldg(scales + octet / 2), s.factor)));
        sum = 0;
        if (closes) {
            all = add_rn(all, mul_rn(inner, ldc(a.w.scales + (size_t)row * a.w.groups + which)));
            inner = 0.f, which++;
        }
    }
    if (a.w.bias) all = add_rn(all, ldc(a.w.bias + row));
    float* y = a.y + (size_t)n * a.y_stride + row;
    stg(y, a.accumulate ? add_rn(ldg(y), all) : all);
}

#define FB_PSUMS(name, E, Sum, T) FB_RUN_EARLY_BLOCKS(name, PSUM_THREADS, 2, PsumArgs, (psums<E, Sum, T>(args)))
FB_RUN(fb_psum_finish, 256, PsumArgs, psum_finish(args))

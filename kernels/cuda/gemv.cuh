// y = W x for packed W and up to 8 tokens, on the tensor cores.
//
// A warp walks one pair of strips (32 rows) over a range of octets, two octets a turn; weights are read once, straight from global memory
// into a ring of its own in shared memory (cp.async, no block barrier in the loop), expanded in registers into the left operand
// of mma.m16n8k16 and multiplied by activations that the block staged once. Ranges are even but for the last, whose missing octet meets
// zeros. The eight columns of the right operand are the tokens; with
// fewer, the spare columns repeat the last token and are not stored, so one instance serves every batch.
//
// Words of one weight: the left operand holds it twice, the right one the activation's upper and lower half, so that no instruction joins
// weights and activations keep some 21 bits. Words of two weights: activations are rounded to half (11 bits).
//
// Ranges of octets are dealt over blockIdx.y. Partial sums go to a workspace; the last block of a row of blocks adds them in the order
// of the ranges, so the result depends on the launch shape alone, never on timing.
#pragma once
#include "codes.cuh"

/// A run of tile columns in one scheme.
struct Segment {
    const unsigned char* codes;  // (pair, octet, 128 Q bytes)
    Book book;
    uint32_t octets, first_col, end_col;
    uint32_t splits, per_split;  // ranges, and octets of a range
    float factor;                // step
};

/// A packed matrix.
struct Matrix {
    Segment segments[2];
    const float* scales;     // (rows, groups), gain included; of group-wise schemes the canonical halves
    const float* bias;       // (rows) or null
    uint32_t rows, cols, group, groups, pairs;
    float gain;              // of scales that are canonical halves
};

struct GemvArgs {
    Matrix w;
    const float* x;      // (batch, x_stride)
    float* y;            // (batch, y_stride)
    float* partial;      // (splits, 32 pairs, 8)
    uint32_t* counters;  // one per block row, zero before and after
    uint32_t batch, x_stride, y_stride, accumulate;
};

// The host makes these structures (fracbit-kernels-cuda, `args`).
static_assert(sizeof(Book) == 24 && sizeof(Segment) == 56 && sizeof(Matrix) == 152 && sizeof(GemvArgs) == 200, "layout of arguments");

/// Octets of a turn.
constexpr uint32_t TURN = 2;

/// Half of `v`, saturated.
FB_DEVICE uint16_t half_of(float v) {
    v = v > 65504.f ? 65504.f : v;
    return to_half(v < -65504.f ? -65504.f : v);
}

/// Words of one token's staged activations.
template <class E> FB_DEVICE uint32_t staged_stride(uint32_t octets) {
    // Sixteen words of padding put neighbouring tokens into different banks.
    return octets * (E::WORDS == 4 ? 128 : 64) + 16;
}

/// Puts activations of `octets` octets from column `col` on into shared memory, in fragment order.
template <class E>
FB_DEVICE void stage(uint32_t at, const GemvArgs& a, uint32_t col, uint32_t end_col, uint32_t octets) {
    const uint32_t stride = staged_stride<E>(octets), width = octets * 128;
    for (uint32_t n = 0; n < a.batch; n++) {
        for (uint32_t i = thread_x(); i < width; i += threads_x()) {
            const float v = col + i < end_col ? ldg(a.x + (size_t)n * a.x_stride + col + i) : 0.f;
            const uint32_t tile = i / 16 % 8, q = tile / 4, c = tile % 4, m = i % 16 / 4, j = i % 4;
            if constexpr (E::WORDS == 4) {
                const uint16_t high = half_of(v), low = half_of(v - from_half(high));
                const uint32_t word = i / 128 * 128 + q * 64 + m * 16 + c * 4 + j;
                sts<uint32_t>(at + 4 * (n * stride + word), low_high(high, low));
            } else {
                const uint32_t word = i / 128 * 64 + q * 32 + m / 2 * 16 + c * 4 + m % 2 * 2 + j / 2;
                sts<uint16_t>(at + 4 * (n * stride + word) + j % 2 * 2, half_of(v));
            }
        }
    }
}

/// A warp's ring of turns in shared memory. Codes are followed by an octet of padding, so that an odd range reads no other memory.
template <class E> struct Ring {
    // Slots, each a turn (`stages` of the host's plan): more where a turn is few bytes and few instructions.
    static constexpr uint32_t STAGES = !E::TRELLIS && E::Q <= 10 ? 4 : 2, BYTES = TURN * 128 * E::Q;
    // Copies reach 2048 bytes to either side of a register.
    static constexpr uint32_t BIAS = BYTES >= 4096 ? 2048 : 0;
    uint32_t slot, first, left;
    const unsigned char* source;
    bool lower;  // of the lanes, which copy the last 256 bytes of a turn with odd Q

    /// Begins to copy all stages but one of `turns` turns.
    FB_DEVICE void start(uint32_t at, const unsigned char* from, uint32_t turns, uint32_t lane) {
        slot = first = at + lane * 16, source = from + lane * 16 + BIAS - BYTES, left = turns, lower = lane < 16;
        FB_UNROLL
        for (uint32_t i = 0; i < STAGES - 1; i++) next(first + i * BYTES, i < turns);
    }
    FB_DEVICE void next(uint32_t to, bool more) {
        source += BYTES;
        pin(source);
        if (more) {
            FB_UNROLL
            for (uint32_t i = 0; i < E::Q / 2; i++) cp_async16(to + i * 512, source + (int)(i * 512 - BIAS));
            if constexpr (E::Q % 2 == 1) {
                if (lower) cp_async16(to + E::Q / 2 * 512, source + (int)(E::Q / 2 * 512 - BIAS));
            }
        }
        cp_commit();
    }
    /// Where the codes of a turn lie, with this lane's 16 bytes of each 512 at the front; begins the copy that is furthest ahead.
    FB_DEVICE uint32_t turn() {
        cp_wait<(int)STAGES - 2>();
        sync_warp();
        left--;
        const uint32_t at = slot;
        // Into the slot before this one, free since the last turn.
        next(at == first ? at + (STAGES - 1) * BYTES : at - BYTES, left >= STAGES - 1);
        slot = at == first + (STAGES - 1) * BYTES ? first : at + BYTES;
        return at;
    }
    /// The same in a loop that goes around the ring and knows the slot's number.
    FB_DEVICE uint32_t turn(uint32_t number) {
        cp_wait<(int)STAGES - 2>();
        sync_warp();
        left--;
        next(first + (number == 0 ? STAGES - 1 : number - 1) * BYTES, left >= STAGES - 1);
        return first + number * BYTES;
    }
};

/// Multiplies one strip's octet by the staged activations.
template <class E>
FB_DEVICE void multiply(float (&acc)[4], const Codes<E::Q>& codes, Table t, const Words4 (&b)[E::WORDS == 4 ? 8 : 4]) {
    FB_UNROLL
    for (int q = 0; q < 2; q++) {
        FB_UNROLL
        for (int m = 0; m < 4; m++) {
            uint32_t even[E::WORDS], odd[E::WORDS];
            E::quad(codes, t, q, m, even);
            E::quad(codes, t, q, 4 + m, odd);
            if constexpr (E::WORDS == 4) {
                const Words4& x = b[4 * q + m];
                mma(acc, even[0], odd[0], even[1], odd[1], x.w[0], x.w[1]);
                mma(acc, even[2], odd[2], even[3], odd[3], x.w[2], x.w[3]);
            } else {
                const Words4& x = b[2 * q + m / 2];
                mma(acc, even[0], odd[0], even[1], odd[1], x.w[m % 2 * 2], x.w[m % 2 * 2 + 1]);
            }
        }
    }
}

/// One octet of both strips: `at` is this lane's place in it, `x_at` that of its activations.
template <class E> FB_DEVICE void octet(float (&acc)[2][4], uint32_t at, uint32_t x_at, uint32_t lane, Table t) {
    Codes<E::Q> codes[2];
    Words4 b[E::WORDS == 4 ? 8 : 4];
    FB_UNROLL
    for (uint32_t strip = 0; strip < 2; strip++) {
        codes[strip].load(at + strip * 64 * E::Q, lane);
        if constexpr (E::TRELLIS) codes[strip].link(lane);
    }
    FB_UNROLL
    for (uint32_t i = 0; i < (E::WORDS == 4 ? 8 : 4); i++) b[i] = lds<Words4>(x_at + i * 64);
    FB_UNROLL
    for (int strip = 0; strip < 2; strip++) multiply<E>(acc[strip], codes[strip], t, b);
}

/// One range of one segment; leaves scaled sums in `total`: (strip, row 2g token 2c, 2c + 1, row 2g + 1 alike).
template <class E> FB_DEVICE void walk(const GemvArgs& a, const Segment& s, uint32_t range, float (&total)[2][4]) {
    constexpr uint32_t OCTET = 128 * E::Q, X_OCTET = E::WORDS == 4 ? 512 : 256;
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t pair = block_x() * warps + warp, g = lane / 4, c = lane % 4;
    const uint32_t first = range * s.per_split;
    const uint32_t count = first >= s.octets ? 0 : (s.octets - first < s.per_split ? s.octets - first : s.per_split);
    const uint32_t turns = (count + 1) / TURN;
    const uint32_t staged = table_bytes(s.book);
    const uint32_t stride = staged_stride<E>(turns * TURN);
    const uint32_t rings = staged + (4 * a.batch * staged_stride<E>(s.per_split) + 15) / 16 * 16;
    // Warps past the last pair repeat it, and keep the loops free of divergence.
    const uint32_t mine = pair < a.w.pairs ? pair : a.w.pairs - 1;
    Ring<E> ring;
    ring.start(rings + warp * ring.STAGES * ring.BYTES, s.codes + ((size_t)mine * s.octets + first) * OCTET, turns, lane);
    spread(s.book);
    stage<E>(staged, a, s.first_col + first * 128, s.end_col, turns * TURN);
    sync_block();

    const Table t = table_of(s.book, lane);
    const uint32_t token = g < a.batch ? g : a.batch - 1;
    uint32_t x_at = staged + 4 * token * stride + c * 16;
    float acc[2][4] = {};
    const uint32_t row = pair * 32 + 2 * g;
    const auto flush = [&](uint32_t group) {
        FB_UNROLL
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t strip = i / 4, r = row + strip * 16 + i % 4 / 2;
            const float scale = r < a.w.rows ? ldg(a.w.scales + (size_t)r * a.w.groups + group) : 0.f;
            total[strip][i % 4] += acc[strip][i % 4] * (scale * s.factor);
            acc[strip][i % 4] = 0.f;
        }
    };
    if (a.w.groups == 1) {
        // One scale a row: the usual case.
        const auto turn = [&](uint32_t at) {
            FB_UNROLL
            for (uint32_t i = 0; i < TURN; i++) octet<E>(acc, at + i * OCTET, x_at + i * X_OCTET, lane, t);
            x_at += TURN * X_OCTET;
        };
        FB_UNROLL_1
        while (ring.left != 0) {
            if constexpr (E::AROUND) {
                turn(ring.turn(0));
                if (ring.left == 0) break;
                turn(ring.turn(1));
            } else {
                turn(ring.turn());
            }
        }
        flush(0);
    } else {
        // One per `group` columns, a multiple of an octet.
        uint32_t group = (s.first_col + first * 128) / a.w.group;
        uint32_t stop = ((group + 1) * a.w.group - s.first_col) / 128 - first;
        FB_UNROLL_1
        for (uint32_t o = 0; o < count;) {
            const uint32_t at = ring.turn();
            FB_UNROLL_1
            for (uint32_t i = 0; i < TURN && o < count; i++, o++) {
                octet<E>(acc, at + i * OCTET, x_at, lane, t);
                x_at += X_OCTET;
                if (o + 1 == stop || o + 1 == count) {
                    flush(group++);
                    stop += a.w.group / 128;
                }
            }
        }
    }
}

FB_DEVICE void emit(const GemvArgs& a, uint32_t row, uint32_t token, float v) {
    if (a.w.bias) v += ldg(a.w.bias + row);
    float* y = a.y + (size_t)token * a.y_stride + row;
    stg(y, a.accumulate ? ldg(y) + v : v);
}

/// A row's sum over one range: the result where there is one range, else a partial sum.
FB_DEVICE void put(const GemvArgs& a, uint32_t row, uint32_t token, float v) {
    if (token >= a.batch || row >= a.w.rows) return;
    if (blocks_y() == 1) {
        emit(a, row, token, v);
    } else {
        stg(a.partial + ((size_t)block_y() * a.w.pairs * 32 + row) * 8 + token, v);
    }
}

/// Adds the partial sums of all ranges, in the last block of a row of blocks to come here.
FB_DEVICE void finish(const GemvArgs& a) {
    if (blocks_y() == 1) return;
    fence();
    sync_block();  // nobody reads the tables in shared memory any more
    if (thread_x() == 0) sts<uint32_t>(0, atomic_inc(a.counters + block_x()));
    sync_block();
    if (lds<uint32_t>(0) != blocks_y() - 1) return;
    fence();
    const uint32_t rows = threads_x(), first = block_x() * rows;  // 32 of each warp
    for (uint32_t i = thread_x(); i < rows * a.batch; i += threads_x()) {
        const uint32_t row = first + i / a.batch, token = i % a.batch;
        if (row >= a.w.rows) break;
        float v = 0.f;
        for (uint32_t r = 0; r < blocks_y(); r++) {
            v += ld_fresh(a.partial + ((size_t)r * a.w.pairs * 32 + row) * 8 + token);
        }
        emit(a, row, token, v);
    }
    if (thread_x() == 0) stg(a.counters + block_x(), 0u);
}

template <class A, class B> struct Same { static constexpr bool yes = false; };
template <class A> struct Same<A, A> { static constexpr bool yes = true; };

/// The whole product: `Lo` for the first segment, `Hi` for the second (half-TCQ), otherwise the same.
template <class Lo, class Hi> FB_DEVICE void gemv(const GemvArgs& a) {
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, warps = threads_x() / 32;
    const uint32_t g = lane / 4, c = lane % 4, pair = block_x() * warps + warp;
    float total[2][4] = {};
    const uint32_t range = block_y(), low = a.w.segments[0].splits;
    if (Same<Lo, Hi>::yes || range < low) {
        walk<Lo>(a, a.w.segments[0], range, total);
    } else if constexpr (!Same<Lo, Hi>::yes) {
        walk<Hi>(a, a.w.segments[1], range - low, total);
    }
    if (pair < a.w.pairs) {
        FB_UNROLL
        for (uint32_t i = 0; i < 8; i++) {
            put(a, pair * 32 + i / 4 * 16 + 2 * g + i % 4 / 2, 2 * c + i % 2, total[i / 4][i % 4]);
        }
    }
    finish(a);
}

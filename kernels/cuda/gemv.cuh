// y = W x for packed W and up to 8 tokens, on the tensor cores.
//
// Work is dealt in *units* of one octet of one pair of strips (128 columns of 32 rows), in the order of the codes: pair by pair, the octets of
// a panel (a range of columns whose activations fit into shared memory) within a pair. Every block takes a run of units of one panel, every
// warp a run of its block's: all multiprocessors end together whatever the shape, and a warp reads memory front to back, through a
// ring of its own in shared memory (cp.async, no block barrier in the loop). Codes are expanded in registers into the left operand of mma.m16n8k16
// and multiplied by activations that the block staged once. The eight columns of the right operand are the tokens; with fewer, the spare
// columns repeat the last token and are not stored, so one instance serves every batch.
//
// Words of one weight: the left operand holds it twice, the right one the activation's upper and lower half, so that no instruction joins
// weights and activations keep some 21 bits. Words of two weights: activations are rounded to half (11 bits). Group-wise schemes multiply
// their words by the scale of the group, rounding to half.
//
// Sums of a pair that several warps share are added in the order of the warps; those of several blocks go to a workspace, and the last
// block to come there adds them in the order of the columns: the result depends on the launch shape alone, never on timing.
#pragma once
#include "codes.cuh"

/// A run of tile columns in one scheme.
struct Segment {
    const unsigned char* codes;  // (pair, octet, 128 Q bytes; of group-wise schemes with the scales behind them, of nested ones with planes)
    Book book;
    uint32_t octets, first_col, end_col;
    uint32_t panels, width;   // of the columns, and octets of a panel (the last may have fewer)
    uint32_t blocks;          // of a panel
    uint32_t whole;           // 1: blocks take whole pairs
    uint32_t slots;           // blocks that may share a pair of a panel
    uint32_t scales;          // of an octet's row, of group-wise schemes: 1, 2 or 4
    float factor;             // step
    uint32_t stride;          // bytes from octet to octet: more than are read of nested codes
    uint32_t pad;
};

/// A packed matrix.
struct Matrix {
    Segment segments[2];
    const float* scales;     // (rows, groups), gain included; not of group-wise schemes
    const float* bias;       // (rows) or null
    uint32_t rows, cols, group, groups, pairs;
    float gain;              // of group-wise scales
};

struct GemvArgs {
    Matrix w;
    const float* x;      // (batch, x_stride)
    float* y;            // (batch, y_stride)
    float* partial;      // (slots, pairs, 8, 32)
    uint32_t* counters;  // one per pair, zero before and after
    uint32_t batch, x_stride, y_stride, accumulate;
};

// The host makes these structures (fracbit-kernels-cuda, `args`).
static_assert(sizeof(Book) == 24 && sizeof(Segment) == 80 && sizeof(Matrix) == 200 && sizeof(GemvArgs) == 248, "layout of arguments");

/// Most warps of a block: 128 registers each.
constexpr int GEMV_WARPS = 16;

/// Half of `v`, saturated.
FB_DEVICE uint16_t half_of(float v) {
    v = v > 65504.f ? 65504.f : v;
    return to_half(v < -65504.f ? -65504.f : v);
}

/// Bytes of an octet of staged activations of one token.
template <class E> constexpr uint32_t X_OCTET = E::WORDS == 4 ? 512 : 256;
/// Bytes of one token's staged activations: padding puts neighbouring tokens into different banks.
template <class E> FB_DEVICE uint32_t staged_stride(uint32_t octets) { return octets * X_OCTET<E> + 64; }
/// Bytes of an octet of a pair.
template <class E> FB_DEVICE uint32_t octet_bytes(const Segment& s) {
    if constexpr (E::GROUPED) return 128 * E::Q + 64 * s.scales;
    return 128 * E::Q;
}

/// Four neighbouring activations of one token into shared memory, in fragment order: `i` is their column in the panel.
template <class E> FB_DEVICE void stage_four(uint32_t at, uint32_t i, const float (&v)[4]) {
    const uint32_t tile = i / 16 % 8, q = tile / 4, c = tile % 4, m = i % 16 / 4;
    uint16_t high[4];
    FB_UNROLL
    for (int j = 0; j < 4; j++) high[j] = half_of(v[j]);
    if constexpr (E::WORDS == 4) {
        Words4 words;
        FB_UNROLL
        for (int j = 0; j < 4; j++) words.w[j] = low_high(high[j], half_of(v[j] - from_half(high[j])));
        sts(at + i / 128 * 512 + q * 256 + m * 64 + c * 16, words);
    } else {
        const Words2 words{{low_high(high[0], high[1]), low_high(high[2], high[3])}};
        sts(at + i / 128 * 256 + q * 128 + m / 2 * 64 + c * 16 + m % 2 * 8, words);
    }
}

/// Puts activations of `octets` octets from column `col` on into shared memory. Loads are issued several at a time: what they wait for is
/// memory that the kernel before wrote.
template <class E> FB_DEVICE void stage(uint32_t at, const GemvArgs& a, uint32_t col, uint32_t end_col, uint32_t octets) {
    constexpr int AHEAD = 8;
    const uint32_t stride = staged_stride<E>(octets), width = octets * 32, all = a.batch * width;
    // Loads of four stay inside a row and aligned.
    const bool fours = a.x_stride % 4 == 0 && end_col % 4 == 0;
    uint32_t n = 0, k = thread_x();  // token, and four columns of it
    FB_UNROLL_1
    for (uint32_t first = thread_x(); first < all; first += AHEAD * threads_x()) {
        float v[AHEAD][4] = {};
        uint32_t to[AHEAD], column[AHEAD];
        FB_UNROLL
        for (int j = 0; j < AHEAD; j++) {
            while (k >= width) k -= width, n++;
            to[j] = at + n * stride, column[j] = 4 * k;
            const float* x = a.x + (size_t)n * a.x_stride + col + 4 * k;
            if (n < a.batch) {
                if (fours) {
                    if (col + 4 * k < end_col) {
                        const Floats4 f = ldg((const Floats4*)x);
                        FB_UNROLL
                        for (int i = 0; i < 4; i++) v[j][i] = f.v[i];
                    }
                } else {
                    FB_UNROLL
                    for (uint32_t i = 0; i < 4; i++) v[j][i] = col + 4 * k + i < end_col ? ldg(x + i) : 0.f;
                }
            }
            k += threads_x();
        }
        FB_UNROLL
        for (uint32_t j = 0; j < AHEAD; j++) {
            if (first + j * threads_x() < all) stage_four<E>(to[j], column[j], v[j]);
        }
    }
}

/// Copies one octet of a pair to shared memory; `at` and `from` are this lane's places in it.
template <class E> FB_DEVICE void fetch(uint32_t at, const unsigned char* from, const Segment& s, uint32_t lane) {
    constexpr uint32_t Q = E::Q, rest = Q % 4 * 8;  // lanes that the last bytes take
    FB_UNROLL
    for (uint32_t i = 0; i < Q / 4; i++) cp_async16(at + i * 512, from + i * 512);
    if constexpr (rest != 0) {
        if (lane < rest) cp_async16(at + Q / 4 * 512, from + Q / 4 * 512);
    }
    if constexpr (E::GROUPED) {
        if (lane < 4 * s.scales) cp_async16(at + 128 * Q, from + 128 * Q);
    }
}

/// Slots of a warp's ring of units (`stages` of the host's plan): more where a unit is few bytes.
template <class E> constexpr uint32_t STAGES = E::Q <= 5 ? 4 : E::Q <= 8 ? 3 : 2;

/// Multiplies four tiles (`q`: the first or the last of an octet) of one strip.
template <class E>
FB_DEVICE void multiply_half(float (&acc)[4], const CodesOf<E>& codes, const Words4* b, uint32_t scales_at, int q, const Segment& s,
                             uint32_t lane, Table t) {
    // Of group-wise schemes: tables and scales of both rows.
    Table own[2] = {t, t};
    uint32_t scale[2] = {};
    if constexpr (E::GROUPED) {
        const uint32_t group = ((uint32_t)q * 4 + lane % 4) * s.scales / 8;
        FB_UNROLL
        for (uint32_t r = 0; r < 2; r++) {
            scale[r] = lds<uint16_t>(scales_at + ((lane / 4 * 2 + r) * s.scales + group) * 2);
            own[r] = E::table(t, s.book, scale[r]);
        }
    }
    FB_UNROLL
    for (int m = 0; m < 4; m++) {
        uint32_t even[E::WORDS], odd[E::WORDS];
        E::quad(codes, own[0], q, m, even);
        E::quad(codes, own[1], q, 4 + m, odd);
        if constexpr (E::GROUPED) {
            const auto first = E::factor(scale[0]), second = E::factor(scale[1]);
            FB_UNROLL
            for (int j = 0; j < E::WORDS; j++) even[j] = E::times(even[j], first), odd[j] = E::times(odd[j], second);
        }
        if constexpr (E::WORDS == 4) {
            mma(acc, even[0], odd[0], even[1], odd[1], b[m].w[0], b[m].w[1]);
            mma(acc, even[2], odd[2], even[3], odd[3], b[m].w[2], b[m].w[3]);
        } else {
            mma(acc, even[0], odd[0], even[1], odd[1], b[m / 2].w[m % 2 * 2], b[m / 2].w[m % 2 * 2 + 1]);
        }
    }
}

/// Multiplies one octet of both strips. `at` is this lane's place in it in shared memory, `x_at` that in its activations.
template <class E>
FB_DEVICE void multiply(float (&acc)[2][4], uint32_t at, uint32_t x_at, const Segment& s, uint32_t lane, Table t) {
    constexpr int HALF = E::WORDS == 4 ? 4 : 2;  // vectors of activations of four tiles
    const auto scales_at = [&](uint32_t strip) { return at - lane * 16 + 128 * E::Q + strip * 32 * s.scales; };
    const auto load = [&](CodesOf<E>& codes, uint32_t strip) {
        codes.load_strip(at, strip, lane);
        if constexpr (E::TRELLIS) codes.link(lane);
    };
    // What is kept in registers while the other changes: the codes of both strips, or the activations of the octet.
    if constexpr (E::WORDS == 4 && E::Q <= 16) {
        CodesOf<E> codes[2];
        load(codes[0], 0), load(codes[1], 1);
        FB_UNROLL
        for (int q = 0; q < 2; q++) {
            Words4 b[HALF];
            FB_UNROLL
            for (int i = 0; i < HALF; i++) b[i] = lds<Words4>(x_at + (uint32_t)(q * HALF + i) * 64);
            FB_UNROLL
            for (uint32_t strip = 0; strip < 2; strip++) multiply_half<E>(acc[strip], codes[strip], b, scales_at(strip), q, s, lane, t);
        }
    } else if constexpr (E::WORDS == 4 && E::Q > 20) {
        // Neither finds room.
        FB_UNROLL
        for (uint32_t strip = 0; strip < 2; strip++) {
            CodesOf<E> codes;
            load(codes, strip);
            FB_UNROLL
            for (int q = 0; q < 2; q++) {
                Words4 b[HALF];
                FB_UNROLL
                for (int i = 0; i < HALF; i++) b[i] = lds<Words4>(x_at + (uint32_t)(q * HALF + i) * 64);
                multiply_half<E>(acc[strip], codes, b, scales_at(strip), q, s, lane, t);
            }
        }
    } else {
        Words4 b[2 * HALF];
        FB_UNROLL
        for (int i = 0; i < 2 * HALF; i++) b[i] = lds<Words4>(x_at + (uint32_t)i * 64);
        FB_UNROLL
        for (uint32_t strip = 0; strip < 2; strip++) {
            CodesOf<E> codes;
            load(codes, strip);
            FB_UNROLL
            for (int q = 0; q < 2; q++) multiply_half<E>(acc[strip], codes, b + q * HALF, scales_at(strip), q, s, lane, t);
        }
    }
}

/// The units of one panel and how its blocks share them.
struct Panel {
    uint32_t pairs, blocks, octets, grains, grain;
    FB_DEVICE Panel(const Matrix& w, const Segment& s, uint32_t panel) {
        const uint32_t rest = s.octets - panel * s.width;
        pairs = w.pairs, blocks = s.blocks, octets = rest < s.width ? rest : s.width;
        grain = s.whole ? octets : 1, grains = s.whole ? pairs : pairs * octets;
    }
    /// First unit of a block.
    FB_DEVICE uint32_t start(uint32_t block) const { return block * grains / blocks * grain; }
    /// The block of a unit.
    FB_DEVICE uint32_t block_of(uint32_t unit) const { return ((unit / grain + 1) * blocks - 1) / grains; }
    /// Blocks that share a pair.
    FB_DEVICE uint32_t parts(uint32_t pair) const { return block_of((pair + 1) * octets - 1) - block_of(pair * octets) + 1; }
};

/// Blocks that share a pair, over all panels.
FB_DEVICE uint32_t parts_of(const Matrix& w, uint32_t pair) {
    uint32_t parts = 0;
    for (uint32_t i = 0; i < 2; i++) {
        const Segment& s = w.segments[i];
        if (s.whole) {
            parts += s.panels;
        } else {
            for (uint32_t p = 0; p < s.panels; p++) parts += Panel(w, s, p).parts(pair);
        }
    }
    return parts;
}

/// What a row's sum is multiplied by at the end: its scale, if there is one for the whole row.
FB_DEVICE float scale_of(const GemvArgs& a, uint32_t row) { return a.w.groups == 1 && row < a.w.rows ? ldc(a.w.scales + row) : 1.f; }
FB_DEVICE void emit(const GemvArgs& a, uint32_t row, uint32_t token, float v, float scale) {
    if (row >= a.w.rows) return;
    v *= scale;
    if (a.w.bias) v += ldc(a.w.bias + row);
    float* y = a.y + (size_t)token * a.y_stride + row;
    stg(y, a.accumulate ? ldg(y) + v : v);
}

/// Adds sums of all blocks that share a pair, in the order of the columns, of N tokens from `first` on; a lane takes a row.
template <uint32_t N> FB_DEVICE void join(const GemvArgs& a, uint32_t pair, uint32_t first, uint32_t lane) {
    constexpr uint32_t AHEAD = 32 / N < 8 ? 32 / N : 8;  // loads that are on their way together
    const Segment* s = a.w.segments;
    const float scale = scale_of(a, pair * 32 + lane);
    const auto part = [&](uint32_t slot, uint32_t n) {
        return first + n < a.batch ? ld_fresh(a.partial + (((size_t)slot * a.w.pairs + pair) * 8 + first + n) * 32 + lane) : 0.f;
    };
    float sums[N] = {};
    FB_UNROLL_1
    for (uint32_t i = 0, slots = 0; i < 2; slots += s[i].panels * s[i].slots, i++) {
        FB_UNROLL_1
        for (uint32_t p = 0; p < s[i].panels; p += AHEAD) {
            // Panels whose pairs have one block each are the usual case.
            uint32_t parts[AHEAD];
            float v[AHEAD][N];
            FB_UNROLL
            for (uint32_t k = 0; k < AHEAD; k++) {
                parts[k] = p + k >= s[i].panels ? 0 : s[i].whole ? 1 : Panel(a.w, s[i], p + k).parts(pair);
                FB_UNROLL
                for (uint32_t n = 0; n < N; n++) v[k][n] = parts[k] > 0 ? part(slots + (p + k) * s[i].slots, n) : 0.f;
            }
            FB_UNROLL
            for (uint32_t k = 0; k < AHEAD; k++) {
                FB_UNROLL
                for (uint32_t n = 0; n < N; n++) sums[n] += v[k][n];
                FB_UNROLL_1
                for (uint32_t j = 1; j < parts[k]; j++) {
                    FB_UNROLL
                    for (uint32_t n = 0; n < N; n++) sums[n] += part(slots + (p + k) * s[i].slots + j, n);
                }
            }
        }
    }
    FB_UNROLL
    for (uint32_t n = 0; n < N; n++) {
        if (first + n < a.batch) emit(a, pair * 32 + lane, first + n, sums[n], scale);
    }
}

/// A number known when this is compiled.
template <uint32_t N> struct Count { static constexpr uint32_t count = N; };

/// The product with one segment: `block` of its blocks, whose slots in the workspace begin at `slots`.
template <class E> FB_DEVICE void product(const GemvArgs& a, const Segment& s, uint32_t block, uint32_t slots) {
    const Spread table(s.book);
    const uint32_t lane = thread_x() % 32, warp = thread_x() / 32, g = lane / 4, c = lane % 4;
    const uint32_t number = block / s.blocks, first = number * s.width, bytes = octet_bytes<E>(s);
    block -= number * s.blocks, slots += number * s.slots;
    const Panel panel(a.w, s, number);
    const uint32_t octets = panel.octets, from = panel.start(block), units = panel.start(block + 1) - from;
    const uint32_t warps = threads_x() / 32 < units ? threads_x() / 32 : units;  // that have work
    const auto start = [&](uint32_t w) { return w * units / warps; };
    const auto warp_of = [&](uint32_t unit) { return ((unit + 1) * warps - 1) / units; };
    // Shared memory: table, activations (later the last sums of warps), rings, first sums of warps.
    const uint32_t sum_bytes = 128 * a.batch, stride = staged_stride<E>(octets);
    const uint32_t staged = table_bytes(s.book), lasts = staged;
    const uint32_t x_bytes = a.batch * staged_stride<E>(s.width), last_bytes = threads_x() / 32 * sum_bytes;
    const uint32_t rings = staged + (x_bytes > last_bytes ? x_bytes : last_bytes);
    const uint32_t firsts = rings + threads_x() / 32 * STAGES<E> * bytes;

    uint32_t at = warp < warps ? start(warp) : units, left = warp < warps ? start(warp + 1) - at : 0;
    uint32_t pair = (from + at) / octets, octet = from + at - pair * octets;
    const unsigned char* source = s.codes + ((size_t)pair * s.octets + first + octet) * s.stride + lane * 16;
    const uint32_t ring = rings + warp * STAGES<E> * bytes + lane * 16, ring_end = ring + STAGES<E> * bytes;
    // The slot that is filled next is also, but for the one that is being filled, the oldest.
    uint32_t slot = ring, ahead = left, rest_of_pair = octets - octet;
    const size_t skip = (size_t)(s.octets - octets) * s.stride;
    const auto next = [&]() {
        if (ahead > 0) {
            fetch<E>(slot, source, s, lane);
            ahead--, source += s.stride;
            if (--rest_of_pair == 0) rest_of_pair = octets, source += skip;
        }
        cp_commit();
        slot = slot + bytes == ring_end ? ring : slot + bytes;
    };
    FB_UNROLL
    for (uint32_t i = 0; i + 1 < STAGES<E>; i++) next();
    grid_release();
    if (!E::GROUPED && a.w.groups == 1) {
        const uint32_t row = (from / octets + thread_x()) * 32;
        if (thread_x() * octets < units + octets && row < a.w.rows) prefetch(a.w.scales + row);
    }
    table.store(s.book);
    grid_wait();
    stage<E>(staged, a, s.first_col + first * 128, s.end_col, octets);
    sync_block();

    const Table t = table_of<E>(s.book, lane);
    const uint32_t token = g < a.batch ? g : a.batch - 1, x_first = staged + token * stride + c * 16;
    uint32_t x_at = x_first + octet * X_OCTET<E>;
    const bool grouped = !E::GROUPED && a.w.groups > 1;
    float acc[2][4] = {}, total[2][4] = {};
    const auto flush = [&](float factor0, float factor1, uint32_t strip) {
        FB_UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            total[strip][i] += acc[strip][i] * (i < 2 ? factor0 : factor1);
            acc[strip][i] = 0.f;
        }
    };
    // Whether the matrix falls into one panel: sums of a pair that one block has are then the result.
    const bool alone = a.w.segments[0].panels + a.w.segments[1].panels == 1;
    const auto put = [&](bool result, uint32_t of, uint32_t row, uint32_t n, float v, float scale) {
        if (n >= a.batch) return;
        if (result) {
            emit(a, of * 32 + row, n, v, scale);
        } else {
            const uint32_t own = slots + block - panel.block_of(of * octets);
            stg(a.partial + (((size_t)own * a.w.pairs + of) * 8 + n) * 32 + row, v);
        }
    };
    const auto keep = [&](uint32_t place) {
        FB_UNROLL
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t n = 2 * c + i % 2, row = i / 4 * 16 + 2 * g + i % 4 / 2;
            if (n < a.batch) sts<float>(place + n * 128 + row * 4, total[i / 4][i % 4]);
        }
    };
    bool open = false;  // the last pair's sums are still in registers
    FB_UNROLL_1
    while (left > 0) {
        // Octets of one pair and, where several columns share a scale, of one group.
        uint32_t stretch = octets - octet < left ? octets - octet : left;
        const uint32_t which = grouped ? ((first + octet) * 128 + s.first_col) / a.w.group : 0;
        if (grouped) {
            const uint32_t rest = ((which + 1) * a.w.group - s.first_col) / 128 - first - octet;
            stretch = rest < stretch ? rest : stretch;
        }
        left -= stretch, at += stretch, octet += stretch;
        FB_UNROLL_1
        do {
            cp_wait<(int)STAGES<E> - 2>();
            sync_warp();
            next();
            multiply<E>(acc, slot, x_at, s, lane, t);
            x_at += X_OCTET<E>;
        } while (--stretch > 0);
        const bool end = octet == octets;
        if (grouped) {
            FB_UNROLL
            for (uint32_t strip = 0; strip < 2; strip++) {
                const uint32_t row = pair * 32 + strip * 16 + 2 * g;
                const auto scale = [&](uint32_t r) { return r < a.w.rows ? ldc(a.w.scales + (size_t)r * a.w.groups + which) : 0.f; };
                flush(scale(row) * s.factor, scale(row + 1) * s.factor, strip);
            }
        } else {
            const float factor = E::GROUPED ? s.factor * a.w.gain : s.factor;
            flush(factor, factor, 0);
            flush(factor, factor, 1);
        }
        if (!end && left > 0) continue;
        // A pair of this warp alone, or the end of one that warps before it began.
        const uint32_t begin = pair * octets < from ? 0 : pair * octets - from;
        const bool own = warp_of(begin) == warp && (end || at == units);
        if (own) {
            const bool result = alone && end && pair * octets >= from;
            FB_UNROLL
            for (uint32_t i = 0; i < 8; i++) {
                const uint32_t row = i / 4 * 16 + 2 * g + i % 4 / 2;
                put(result, pair, row, 2 * c + i % 2, total[i / 4][i % 4], result ? scale_of(a, pair * 32 + row) : 1.f);
            }
        } else if (left > 0) {
            keep(firsts + warp * sum_bytes);
        } else {
            open = true;
        }
        if (left > 0) {
            FB_UNROLL
            for (uint32_t i = 0; i < 8; i++) total[i / 4][i % 4] = 0.f;
            pair++, octet = 0, x_at = x_first;
        }
    }
    sync_block();
    if (open) keep(lasts + warp * sum_bytes);
    sync_block();
    // Pair by pair: sums of the warps that share it. A warp takes a token where there are few pairs, else all of them at a time.
    const uint32_t pair_first = from / octets, pairs = units == 0 ? 0 : (from + units - 1) / octets - pair_first + 1;
    const bool few = pairs * a.batch <= 2 * (threads_x() / 32);
    const uint32_t shares = few ? a.batch : 1;
    const auto sum = [&](auto tokens, uint32_t of, uint32_t n0) {
        constexpr uint32_t N = decltype(tokens)::count;
        const uint32_t begin = of * octets < from ? 0 : of * octets - from;
        const uint32_t whole_end = (of + 1) * octets - from, end = whole_end < units ? whole_end : units;
        const uint32_t low = warp_of(begin), high = warp_of(end - 1);
        if (low == high) return;
        const bool result = alone && end - begin == octets;
        const float scale = result ? scale_of(a, of * 32 + lane) : 1.f;
        const auto at = [&](uint32_t place, uint32_t w, uint32_t n) {
            return n0 + n < a.batch ? lds<float>(place + w * sum_bytes + (n0 + n) * 128 + lane * 4) : 0.f;
        };
        float v[N] = {};
        FB_UNROLL_4
        for (uint32_t w = low; w < high; w++) {
            FB_UNROLL
            for (uint32_t n = 0; n < N; n++) v[n] += at(lasts, w, n);
        }
        // The last of them may have gone on with the next pair.
        const uint32_t place = start(high + 1) == end ? lasts : firsts;
        FB_UNROLL
        for (uint32_t n = 0; n < N; n++) put(result, of, lane, n0 + n, v[n] + at(place, high, n), scale);
    };
    for (uint32_t i = warp; i < pairs * shares; i += threads_x() / 32) {
        if (few) {
            sum(Count<1>{}, pair_first + i / shares, i % shares);
        } else {
            sum(Count<8>{}, pair_first + i, 0);
        }
    }
    if (alone && s.whole) return;
    // Then of the blocks, by the last one of each pair.
    for (uint32_t base = 0; base < pairs; base += threads_x()) {
        sync_block();
        const uint32_t i = base + thread_x(), of = pair_first + i;
        if (i < pairs) {
            const bool result = alone && of * octets >= from && (of + 1) * octets <= from + units;
            fence();
            const bool last = !result && atomic_inc(a.counters + of) + 1 == parts_of(a.w, of);
            if (last) stg(a.counters + of, 0u);
            sts<uint32_t>(lasts + 4 * thread_x(), last);
        }
        sync_block();
        const uint32_t here = pairs - base < threads_x() ? pairs - base : threads_x();
        for (uint32_t k = warp; k < here * shares; k += threads_x() / 32) {
            const uint32_t in = k / shares;
            if (lds<uint32_t>(lasts + 4 * in) == 0) continue;
            fence();
            if (few) {
                join<1>(a, pair_first + base + in, k % shares, lane);
            } else {
                join<8>(a, pair_first + base + in, 0, lane);
            }
        }
    }
}

template <class A, class B> struct Same { static constexpr bool yes = false; };
template <class A> struct Same<A, A> { static constexpr bool yes = true; };

/// The whole product: `Lo` for the first segment, `Hi` for the second (half-TCQ), otherwise the same.
template <class Lo, class Hi> FB_DEVICE void gemv(const GemvArgs& a) {
    const Segment* s = a.w.segments;
    const uint32_t low = s[0].panels * s[0].blocks;
    if (Same<Lo, Hi>::yes || block_x() < low) {
        product<Lo>(a, s[0], block_x(), 0);
    } else if constexpr (!Same<Lo, Hi>::yes) {
        product<Hi>(a, s[1], block_x() - low, s[0].panels * s[0].slots);
    }
}

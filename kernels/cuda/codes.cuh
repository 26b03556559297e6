// From packed codes to half-precision integers in registers.
//
// Device layout (made by repack.cuh from the canonical tiles of docs/formats.md, a permutation of bytes):
//
//   An *octet* is 8 neighbouring tiles of one strip of 16 rows (128 columns), a *pair* two neighbouring strips. Lane (g, c),
//   g = lane / 4, c = lane % 4, holds rows 2g and 2g + 1 of tiles c and 4 + c: of each tile 8Q contiguous bits of the tape, where
//   Q counts quarters of a bit per weight, together Q / 2 words and for odd Q half a word. A strip's octet is 64Q bytes: the words of
//   all lanes in fours, then two of each lane, one, and a half, as far as Q has them. The rows of a tile follow each other on the tape, so a trellis window that leaves the lane's rows goes on
//   in lane + 4 (the last in the first): one shuffle per octet serves 64 weights, and no bit is stored twice.
//
// Why this order: the k slots of mma.m16n8k16 may be any columns as long as both operands agree, and its rows any rows as long as
// the result is read back alike. So a lane's fragment may be neighbours on the tape, which share their funnel shifts.
//
// Tables live in shared memory with each row repeated over as many banks as room allows (32 for all but the largest):
// lanes then never meet in a bank. Their words are made on the host (fracbit-kernels-cuda, `tables`).
#pragma once
#include "device.cuh"

/// A codebook as the host prepared it: the words of the rows, and how they are spread in shared memory.
struct Book {
    const uint32_t* rows;
    uint32_t log_rows, log_stride, log_copies;
};

/// Where a lane finds its copy of table row 0, and which bits of a shifted index select the row.
struct Table { uint32_t lane, mask; };

/// The 32 bits from bit `p` of a lane's words, of which the caller wants `count`; what lies above is arbitrary.
template <int N> FB_DEVICE uint32_t bits_at(const uint32_t (&w)[N], int p, int count) {
    const int i = p / 32, s = p % 32;
    if (s == 0) return w[i];
    return s + count > 32 ? funnel(w[i], w[i + 1], (uint32_t)s) : w[i] >> s;
}

/// A lane's codes of one octet at Q / 4 bits a weight: 8Q bits of either tile, and for trellises the windows that run past their ends.
template <int Q> struct Codes {
    static constexpr int WHOLE = Q / 2, UNIT = 8 * Q;  // whole words; bits of a tile
    uint32_t w[(Q + 1) / 2];                           // for odd Q the last holds 16 bits, and zeros above
    uint32_t next, tail[2];

    /// From shared memory, where `at` is this lane's place: whole vectors of all lanes follow each other.
    FB_DEVICE void load(uint32_t at, uint32_t lane) {
        FB_UNROLL
        for (int i = 0; i < WHOLE / 4; i++) {
            const Words4 v = lds<Words4>(at + (uint32_t)i * 512);
            FB_UNROLL
            for (int j = 0; j < 4; j++) w[4 * i + j] = v.w[j];
        }
        constexpr int done = WHOLE / 4 * 4;
        if constexpr (WHOLE % 4 >= 2) {
            const Words2 v = lds<Words2>(at + done * 128 - lane * 8);
            w[done] = v.w[0], w[done + 1] = v.w[1];
        }
        if constexpr (WHOLE % 2 == 1) w[WHOLE - 1] = lds<uint32_t>(at + (WHOLE - 1) * 128 - lane * 12);
        if constexpr (Q % 2 == 1) w[WHOLE] = lds<uint16_t>(at + WHOLE * 128 - lane * 14);
    }

    /// The same for one strip of an octet, where `at` is this lane's place in the octet.
    FB_DEVICE void load_strip(uint32_t at, uint32_t strip, uint32_t lane) { load(at + strip * 64 * Q, lane); }

    /// Fetches the 16 bits that follow this lane's rows in either tile.
    FB_DEVICE void link(uint32_t lane) {
        constexpr int i = UNIT / 32, b = UNIT % 32 / 8;  // tile 1 begins at byte b of word i
        uint32_t heads;
        if constexpr (b == 3) {
            heads = prmt(w[0], prmt(w[i], w[i + 1], 0x43), 0x5410);
        } else {
            heads = prmt(w[0], w[i], 0x5410 + b * 0x1100);
        }
        next = shfl(heads, lane + 4);
        tail[0] = half_and<UNIT - 16>(next, 0x5400);
        tail[1] = half_and<2 * UNIT - 16>(next, 0x7600);
    }

    /// The 16 bits from bit `P` (of a byte) on, below the two bytes of `high` that `sel` names.
    template <int P> FB_DEVICE uint32_t half_and(uint32_t high, uint32_t sel) const {
        constexpr int i = P / 32, b = P % 32 / 8;
        if constexpr (b == 3) {
            return prmt(prmt(w[i], w[i + 1], 0x43), high, sel | 0x10);
        } else {
            return prmt(w[i], high, sel | (0x10 + b * 0x11));
        }
    }

    /// The state (16 bits, anything above) that starts at bit `p` of the lane's rows of tile `q`.
    FB_DEVICE uint32_t window(int q, int p) const {
        return p + 16 <= UNIT ? bits_at(w, q * UNIT + p, 16) : tail[q] >> (p - (UNIT - 16));
    }

    /// The same state as a whole word: with its sign extended, or standing in both halves.
    template <bool SIGNED> FB_DEVICE uint32_t state(int q, int p) const {
        const bool inside = p + 16 <= UNIT;
        const int at = q * UNIT + p;
        if (at % 8 != 0) {
            const uint32_t x = window(q, p);
            return SIGNED ? (uint32_t)(int32_t)(int16_t)x : prmt(x, 0, 0x1010);
        }
        // Two bytes of a pair of words, above them the second one's sign or both again; the one past the lane's rows is the next lane's first.
        const uint32_t b = (uint32_t)(at % 32 / 8), n = inside ? b + 1 : 4 + 2 * (uint32_t)q;
        const uint32_t high = !inside ? next : at % 32 > 16 ? w[at / 32 + 1] : w[at / 32];
        return prmt(w[at / 32], high, b | n << 4 | (SIGNED ? (n | 8) * 0x1100 : (b | n << 4) << 8));
    }
};

/// The address of the table row that the `BITS` bits from bit `at` on select, in this lane's copy.
template <int BITS, int LOG_STRIDE, int N> FB_DEVICE uint32_t row_address(const uint32_t (&w)[N], int at, Table t) {
    const int s = at % 32;
    const uint32_t low = w[at / 32];
    if constexpr (BITS == 8 && LOG_STRIDE == 8) return prmt(low, t.lane, 0x5504u | (uint32_t)(s / 8) << 4);
    uint32_t row;  // the index, moved to the place of a row's address in one shift
    if (s + BITS <= 32) {
        row = s >= LOG_STRIDE ? low >> (s - LOG_STRIDE) : low << (LOG_STRIDE - s);
    } else if (s >= LOG_STRIDE) {
        row = funnel(low, w[at / 32 + 1], (uint32_t)(s - LOG_STRIDE));
    } else {
        row = funnel(low, w[at / 32 + 1], (uint32_t)s) << LOG_STRIDE;
    }
    return (row & (((1u << BITS) - 1) << LOG_STRIDE)) | t.lane;
}

// The expanders. `quad` yields weights 4i .. 4i + 3 of the 32 in tile q (16 of row 2g, then 16 of row 2g + 1): two words of two
// weights where the table holds pairs, else four words that hold one weight twice. Q counts quarters of a bit per weight.

/// One weight per state: row = sign and index, the top bits of x (x + c).
template <int Q_> struct Fine {
    static constexpr int Q = Q_, WORDS = 4, LOG_STRIDE = 7, LOG_COPIES = 5;
    static constexpr bool TRELLIS = true, GROUPED = false;
    FB_DEVICE static void quad(const Codes<Q>& codes, Table t, int q, int i, uint32_t (&out)[WORDS]) {
        FB_UNROLL
        for (int j = 0; j < 4; j++) {
            const uint32_t x = codes.window(q, (4 * i + j) * Q / 4);
            out[j] = lookup(((x * (x + FINE_ADD)) & 0xFF80) | t.lane);
        }
    }
    static constexpr uint32_t FINE_ADD = 0x79B5;
};

/// The factors of the `fast` code, by quarters of a bit per weight (FAST_FACTORS of fracbit-format); 0 where it has no such rate.
FB_DEVICE constexpr uint32_t fast_factor(int quarters) {
    switch (quarters) {
        case 4: return 0xE84B7101;
        case 5: return 0x89A3E601;
        case 6: return 0x62F08201;
        case 7: return 0x5D613201;
        case 8: return 0x28B86601;
        case 10: return 0x57CE01;
        case 12: return 0x176601;
        case 14: return 0xB68F01;
        case 16: return 0xD6C401;
        case 18: return 0xE99401;
        case 20: return 0xB05201;
        default: return 0;
    }
}

/// Four weights per state up to 2 bits, two above: bytes of a linear hash, each a row.
///
/// Four are bits 8 to 39 of the product of the state, standing in both halves of a word, with the factor; two are bits 8 to 23 of the product
/// of the signed state.
template <int Q_> struct Fast {
    static constexpr int Q = Q_, WORDS = 4, LOG_STRIDE = 8, LOG_COPIES = 5;
    static constexpr bool TRELLIS = true, GROUPED = false;
    static constexpr uint32_t FACTOR = fast_factor(Q);
    static_assert(FACTOR != 0, "a rate of the code");
    FB_DEVICE static void pair(uint32_t x, Table t, uint32_t& first, uint32_t& second) {
        const uint32_t y = x * FACTOR;
        first = lookup(prmt(y, t.lane, 0x5514));
        second = lookup(prmt(y, t.lane, 0x5524));
    }
    FB_DEVICE static void quad(const Codes<Q>& codes, Table t, int q, int i, uint32_t (&out)[WORDS]) {
        if constexpr (Q <= 8) {
            const uint64_t y = (uint64_t)codes.template state<false>(q, i * Q) * FACTOR;
            const uint32_t low = (uint32_t)y, high = (uint32_t)(y >> 32);
            out[0] = lookup(prmt(low, t.lane, 0x5514));
            out[1] = lookup(prmt(low, t.lane, 0x5524));
            out[2] = lookup(prmt(low, t.lane, 0x5534));
            out[3] = lookup(prmt(high, t.lane, 0x5504));
        } else {
            pair(codes.template state<true>(q, i * Q), t, out[0], out[1]);
            pair(codes.template state<true>(q, (2 * i + 1) * Q / 2), t, out[2], out[3]);
        }
    }
};

/// Two weights per state: the papers' hash x (x + 1), its upper bits a row of pairs, its top bit the sign of the first.
template <int Q_> struct Hyb {
    static constexpr int Q = Q_, WORDS = 2, LOG_COPIES = 0;  // what the size of the table allows
    static constexpr bool TRELLIS = true, GROUPED = false;
    FB_DEVICE static void quad(const Codes<Q>& codes, Table t, int q, int i, uint32_t (&out)[WORDS]) {
        FB_UNROLL
        for (int j = 0; j < 2; j++) {
            const uint32_t x = codes.window(q, (2 * i + j) * Q / 2);
            const uint32_t h = x * (x + 1);
            out[j] = lookup((h & t.mask) | t.lane) ^ (h & 0x8000);
        }
    }
};

/// A vector code, or two scalar codes side by side: 2R bits select a row of two weights.
template <int Q_> struct Pair {
    static constexpr int Q = Q_, WORDS = 2, BITS = Q / 2;
    static constexpr bool TRELLIS = false, GROUPED = false;
    static constexpr int LOG_STRIDE = BITS <= 9 ? 7 : 16 - BITS, LOG_COPIES = LOG_STRIDE - 2;
    FB_DEVICE static void quad(const Codes<Q>& codes, Table t, int q, int i, uint32_t (&out)[WORDS]) {
        FB_UNROLL
        for (int j = 0; j < 2; j++) {
            out[j] = lookup(row_address<BITS, LOG_STRIDE>(codes.w, q * codes.UNIT + (2 * i + j) * BITS, t));
        }
    }
};

/// A scalar code of 8 bits: too wide for pairs.
template <int Q_> struct Single {
    static constexpr int Q = Q_, WORDS = 4, BITS = Q / 4;
    static constexpr bool TRELLIS = false, GROUPED = false;
    static constexpr int LOG_STRIDE = 8, LOG_COPIES = 5;
    FB_DEVICE static void quad(const Codes<Q>& codes, Table t, int q, int i, uint32_t (&out)[WORDS]) {
        FB_UNROLL
        for (int j = 0; j < 4; j++) {
            out[j] = lookup(row_address<BITS, LOG_STRIDE>(codes.w, q * codes.UNIT + (4 * i + j) * BITS, t));
        }
    }
};

/// A lane's codes of one octet of nested scalar codes, of which P bits are read: codes of A bits, and behind those of both strips the
/// further bits, one plane after the other, so that what a precision reads of an octet is one run of bytes.
template <int A, int P> struct NestCodes {
    Codes<4 * A> base;
    Codes<4> planes[P - A];
    FB_DEVICE void load_strip(uint32_t at, uint32_t strip, uint32_t lane) {
        base.load_strip(at, strip, lane);
        FB_UNROLL
        for (uint32_t k = 0; k < P - A; k++) planes[k].load_strip(at + 512 * A + 512 * k, strip, lane);
    }
};

/// Nested scalar codes at P bits, of which A are the coarsest codes. Up to 7 bits rows are pairs: the coarsest codes of both weights, then
/// the bits of each plane. At 8 bits rows are single weights, and a nibble of a plane becomes the bits of four bytes by one multiplication.
template <int A, int P> struct Nest {
    static constexpr int Q = 4 * P, WORDS = P < 8 ? 2 : 4, BITS = P < 8 ? 2 * P : P, BASE = P < 8 ? 2 * A : A;
    static constexpr bool TRELLIS = false, GROUPED = false;
    static constexpr int LOG_STRIDE = P == 8 ? 8 : BITS <= 9 ? 7 : 16 - BITS, LOG_COPIES = P == 8 ? 5 : LOG_STRIDE - 2;
    FB_DEVICE static void quad(const NestCodes<A, P>& codes, Table t, int q, int i, uint32_t (&out)[WORDS]) {
        const int first = q * codes.base.UNIT + 4 * i * A;
        if constexpr (P < 8) {
            FB_UNROLL
            for (int j = 0; j < 2; j++) {
                uint32_t at = row_address<BASE, LOG_STRIDE>(codes.base.w, first + j * BASE, t);
                FB_UNROLL
                for (int k = 0; k < P - A; k++) {
                    const int to = LOG_STRIDE + BASE + 2 * k, from = 4 * i + 2 * j;
                    const uint32_t bits = codes.planes[k].w[q];
                    at |= (to >= from ? bits << (to - from) : bits >> (from - to)) & 3u << to;
                }
                out[j] = lookup(at);
            }
        } else {
            uint32_t bytes = 0;
            FB_UNROLL
            for (int k = 0; k < P - A; k++) {
                const uint32_t nibble = codes.planes[k].w[q] >> (4 * i) & 15;
                bytes |= (nibble * (0x00204081u << (A + k))) & 0x01010101u << (A + k);
            }
            FB_UNROLL
            for (int j = 0; j < 4; j++) {
                const Table own{prmt(bytes, t.lane, 0x5504u | (uint32_t)j << 4), t.mask};
                out[j] = lookup(row_address<BASE, LOG_STRIDE>(codes.base.w, first + j * A, own));
            }
        }
    }
};

/// What an expander loads of an octet.
template <class E> struct Loaded { using Of = Codes<E::Q>; };
template <int A, int P> struct Loaded<Nest<A, P>> { using Of = NestCodes<A, P>; };
template <class E> using CodesOf = typename Loaded<E>::Of;

// Group-wise schemes: words that the scale of their group has yet to multiply. `factor` makes of the 16 bits that an octet has for a row and
// group what `times` takes. LEVELS: what comes out is an integer, and rows have scales as well.

/// Scales that are halves.
struct Scaled {
    static constexpr bool LEVELS = false;
    FB_DEVICE static uint32_t factor(uint32_t half) { return prmt(half, 0, 0x1010); }
    FB_DEVICE static uint32_t times(uint32_t word, uint32_t factor) { return mul_halves(word, factor); }
};

/// Two neighbouring integers by one table for all groups.
template <int Q_> struct Ints : Pair<Q_>, Scaled {
    static constexpr bool GROUPED = true;
    FB_DEVICE static Table table(Table t, const Book&, uint32_t) { return t; }
};

/// Progressive codes: an integer scale and its product with the zero, a byte each, make an int8 weight of a 4-bit code, exactly.
template <int Q_> struct Levels : Pair<Q_> {
    static constexpr bool GROUPED = true, LEVELS = true;
    FB_DEVICE static Table table(Table t, const Book&, uint32_t) { return t; }
    FB_DEVICE static Words2 factor(uint32_t bytes) {
        // A byte below 0x64 is the half 1024 + byte.
        const uint32_t scale = prmt(bytes, 0x64646464, 0x4040), shift = prmt(bytes, 0x64646464, 0x4141);
        return Words2{{sub_halves(scale, 0x64006400), sub_halves(0x64006400, shift)}};
    }
    FB_DEVICE static uint32_t times(uint32_t word, const Words2& factor) { return fma_halves(word, factor.w[0], factor.w[1]); }
};

/// Two neighbouring indices into one of several codebooks, whose number is the lowest bits of the scale: rows are (codebook, indices).
template <int Q_> struct Books : Scaled {
    static constexpr int Q = Q_, WORDS = 2, BITS = Q / 2;
    static constexpr bool TRELLIS = false, GROUPED = true;
    static constexpr int LOG_STRIDE = BITS <= 6 ? 7 : 6, LOG_COPIES = LOG_STRIDE - 2;
    FB_DEVICE static Table table(Table t, const Book& book, uint32_t scale) {
        const uint32_t books = ((1u << book.log_rows) - 1) >> BITS;
        return Table{t.lane | (scale & books) << (BITS + LOG_STRIDE), t.mask};
    }
    FB_DEVICE static void quad(const Codes<Q>& codes, Table t, int q, int i, uint32_t (&out)[WORDS]) {
        FB_UNROLL
        for (int j = 0; j < 2; j++) {
            out[j] = lookup(row_address<BITS, LOG_STRIDE>(codes.w, q * codes.UNIT + (2 * i + j) * BITS, t));
        }
    }
};

/// Integers of 8 bits, which need no table. Repacking has made -128 what it means, -127.
template <int Q_> struct Bytes : Scaled {
    static constexpr int Q = Q_, WORDS = 2, LOG_COPIES = 2;
    static constexpr bool TRELLIS = false, GROUPED = true;
    FB_DEVICE static Table table(Table t, const Book&, uint32_t) { return t; }
    FB_DEVICE static void quad(const Codes<Q>& codes, Table, int q, int i, uint32_t (&out)[WORDS]) {
        // A byte below 0x64 is the half 1024 + byte; with the sign bit turned, the byte is 128 more than it stands for.
        const uint32_t w = codes.w[q * 8 + i] ^ 0x80808080;
        out[0] = sub_halves(prmt(w, 0x64646464, 0x4140), 0x64806480);
        out[1] = sub_halves(prmt(w, 0x64646464, 0x4342), 0x64806480);
    }
};

/// Spreads a codebook over the banks, in two parts: words are asked for first, so that other work fills the time until they come. The
/// caller synchronizes the block afterwards.
struct Spread {
    static constexpr uint32_t AHEAD = 8;
    uint32_t quads, words[AHEAD];
    FB_DEVICE explicit Spread(const Book& book) : quads(1u << (book.log_rows + book.log_copies) >> 2) {
        check_base();
        FB_UNROLL
        for (uint32_t j = 0; j < AHEAD; j++) {
            const uint32_t i = thread_x() + j * threads_x();
            words[j] = i < quads && book.log_copies >= 2 ? ldc(book.rows + (4 * i >> book.log_copies)) : 0;
        }
    }
    FB_DEVICE void store(const Book& book) const {
        const auto put = [&](uint32_t i, uint32_t word) {
            const uint32_t row = 4 * i >> book.log_copies, copy = 4 * i & ((1u << book.log_copies) - 1);
            sts(row << book.log_stride | copy << 2, Words4{{word, word, word, word}});
        };
        if (book.log_copies >= 2) {
            FB_UNROLL
            for (uint32_t j = 0; j < AHEAD; j++) {
                const uint32_t i = thread_x() + j * threads_x();
                if (i < quads) put(i, words[j]);
            }
            for (uint32_t i = thread_x() + AHEAD * threads_x(); i < quads; i += threads_x()) {
                put(i, ldc(book.rows + (4 * i >> book.log_copies)));
            }
        } else {  // rows follow each other
            FB_UNROLL_4
            for (uint32_t i = thread_x(); i < quads; i += threads_x()) {
                Words4 v;
                FB_UNROLL
                for (uint32_t j = 0; j < 4; j++) v.w[j] = ldc(book.rows + ((4 * i + j) >> book.log_copies));
                sts(16 * i, v);
            }
        }
    }
};
template <class E> FB_DEVICE Table table_of(const Book& book, uint32_t lane) {
    const uint32_t copies = 1u << (E::LOG_COPIES > 0 ? (uint32_t)E::LOG_COPIES : book.log_copies);
    return Table{(lane & (copies - 1)) * 4, ((1u << book.log_rows) - 1) << book.log_stride};
}
FB_DEVICE uint32_t table_bytes(const Book& book) { return 1u << (book.log_rows + book.log_stride); }

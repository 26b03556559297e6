// The device operations of ../device.cuh on the host, for tests: slow, checked, deterministic.
//
// A block is a set of fibres, one per thread, run in turn on one stack each. A warp-wide operation publishes its
// operands and gives way until all 32 lanes have done so; `sync_block` does the same for the block. Shared
// memory is an array whose every access is checked for range and alignment and that starts as garbage. Global
// buffers come from `Guarded`: their last 16 bytes end at a page that cannot be touched, and canaries stand on
// both sides. Copies of cp_async16 become visible only when their group was waited for: until then shared memory holds
// garbage, so a missing wait shows.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif
#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <vector>

#define FB_DEVICE inline
#define FB_KERNEL(name, threads, blocks) static void name
#define FB_UNROLL
#define FB_UNROLL_1
#define FB_UNROLL_4
#define FB_WARPGROUPS  // both products run here
#define FB_UNROLL_8

namespace shim {

[[noreturn]] inline void die(const char* what, long a = 0, long b = 0) {
    fprintf(stderr, "shim: %s (%ld, %ld)\n", what, a, b);
    fflush(stderr);
    abort();
}

// Fibres: swapcontext asks the kernel for the signal mask at every switch, five times the cost of all else; a switch of
// our own saves what the calling convention says.
#ifdef __x86_64__
extern "C" void shim_switch(void** from, void* to);
asm(R"(
    .text
    .weak shim_switch
    .type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size shim_switch, . - shim_switch
)");
struct Context {
    void* stack = nullptr;
    /// Begins with `entry` on a stack that ends at `top`.
    void start(char* top, size_t, void (*entry)()) {
        void** at = (void**)((uintptr_t)top & ~(uintptr_t)15) - 2;
        *at = (void*)entry;
        stack = at - 6;
    }
    void go(Context& from) { shim_switch(&from.stack, stack); }
};
#else
struct Context {
    ucontext_t context;
    void start(char* top, size_t size, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = top - size;
        context.uc_stack.ss_size = size;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
    void go(Context& from) { swapcontext(&from.context, &context); }
};
#endif

struct Copy { uint32_t at; unsigned char bytes[16]; };

/// A product of a warpgroup (warpgroup.hpp): its operands as they were when it began.
struct Operands {
    uint64_t a_at, b_at;
    uint32_t n;
    std::vector<uint16_t> a_bits, b_bits;
    std::vector<float> a, b;
};
struct Product { float* d; std::shared_ptr<Operands> operands; };

struct Fibre {
    Context context;
    std::unique_ptr<char[]> stack;
    bool done = false, waited = false;
    uint64_t warp_turn = 0, block_turn = 0;
    std::vector<std::vector<Copy>> groups;  // cp.async, oldest first; the last is open
    // Of warpgroups: finished copies that products do not see yet, products by group, and sums under way with the number of their products.
    std::vector<Copy> landed;
    std::vector<std::vector<Product>> products;
    std::map<float*, std::vector<float>> sums;
    std::map<float*, int> running;
    bool fenced = false;
};

struct Warp { int arrived = 0; uint64_t turn = 0; uint32_t slot[32][8]; };
struct Warpgroup { int arrived = 0; uint64_t turn = 0; std::shared_ptr<Operands> operands; };

struct Block {
    uint32_t x, y, grid_x, grid_y, threads;
    std::vector<unsigned char> shared, shown;  // `shown`: to products of warpgroups
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    uint32_t arrived = 0, current = 0;
    uint64_t turn = 0, progress = 0;
    Context scheduler;
    std::function<void()> body;
};

inline Block*& block() { static Block* b = nullptr; return b; }
inline Fibre& me() { return block()->fibres[block()->current]; }
inline void give_way() {
    Context& mine = me().context;
    block()->scheduler.go(mine);
}

inline void meet_warp() {
    Block& b = *block();
    Warp& w = b.warps[b.current / 32];
    b.progress++;
    if (++w.arrived == 32) { w.arrived = 0; w.turn++; return; }
    for (const uint64_t turn = w.turn; w.turn == turn;) give_way();
}
inline void meet_block() {
    Block& b = *block();
    b.progress++;
    if (++b.arrived == b.threads) { b.arrived = 0; b.turn++; return; }
    for (const uint64_t turn = b.turn; b.turn == turn;) give_way();
}

inline void entry() {
    block()->body();
    Fibre& f = me();
    f.done = true;
    block()->progress++;
    give_way();
}

/// Runs `body` as a grid of `grid_x` x `grid_y` blocks of `threads` threads with `shared` bytes.
inline void launch(uint32_t grid_x, uint32_t grid_y, uint32_t threads, size_t shared, std::function<void()> body) {
    if (threads == 0 || threads % 32 != 0 || threads > 1024) die("threads of a block", threads);
    if (shared > 227 * 1024) die("shared memory of a block", (long)shared);
    constexpr size_t stack = 64 << 10;
    // Blocks and their stacks are kept: most launches of a test are small.
    static Block kept;
    Block& b = kept;
    block() = &b;
    b.grid_x = grid_x, b.grid_y = grid_y, b.threads = threads, b.body = std::move(body);
    while (b.fibres.size() < threads) b.fibres.emplace_back().stack.reset(new char[stack]);
    for (b.y = 0; b.y < grid_y; b.y++) {
        for (b.x = 0; b.x < grid_x; b.x++) {
            b.shared.assign(shared, 0xCD);
            b.shown.clear();
            b.warps.assign(threads / 32, Warp{});
            b.warpgroups.assign(threads / 128, Warpgroup{});
            b.arrived = 0;
            for (uint32_t i = 0; i < threads; i++) {
                Fibre& f = b.fibres[i];
                f.done = f.waited = f.fenced = false;
                f.groups.assign(1, {});
                f.products.assign(1, {});
                f.landed.clear(), f.sums.clear(), f.running.clear();
                f.context.start(f.stack.get() + stack, stack, entry);
            }
            for (uint32_t left = threads; left > 0;) {
                const uint64_t before = b.progress;
                left = 0;
                for (b.current = 0; b.current < threads; b.current++) {
                    Fibre& f = b.fibres[b.current];
                    if (f.done) continue;
                    f.context.go(b.scheduler);
                    left += !f.done;
                }
                if (left > 0 && b.progress == before) die("threads wait for each other: a barrier not all reach", left);
            }
        }
    }
    block() = nullptr;
}

inline unsigned char* shared_at(uint32_t at, size_t size) {
    std::vector<unsigned char>& s = block()->shared;
    if (at % size != 0) die("shared memory: misaligned access", at, (long)size);
    if (at + size > s.size()) die("shared memory: access past the end", at, (long)s.size());
    return s.data() + at;
}

template <class T> inline T* checked(T* p) {
    if ((uintptr_t)p % alignof(T) != 0) die("global memory: misaligned access", (long)(uintptr_t)p, (long)alignof(T));
    return p;
}

template <class T> inline T* waited(T* p) {
    if (!me().waited) die("global memory: access before grid_wait, when the kernel before may still write", (long)(uintptr_t)p);
    return p;
}

/// A global buffer: canaries before and, up to 16 bytes, behind; then a page that cannot be touched.
class Guarded {
  public:
    explicit Guarded(size_t size, unsigned char fill = 0xAB) : size_(size) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        padded_ = (size + 15) / 16 * 16;
        const size_t body = (padded_ + 16 + page - 1) / page * page;
        total_ = body + page;
        base_ = (unsigned char*)mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) die("mmap", (long)total_);
        if (mprotect(base_ + body, page, PROT_NONE) != 0) die("mprotect");
        memset(base_, canary, body);
        data_ = base_ + body - padded_;
        memset(data_, fill, size);
    }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    ~Guarded() { munmap(base_, total_); }
    void check(const char* name) const {
        bool good = true;
        for (const unsigned char* p = base_; p < data_; p++) good &= *p == canary;
        for (const unsigned char* p = data_ + size_; p < data_ + padded_; p++) good &= *p == canary;
        if (!good) { fprintf(stderr, "shim: %s: ", name); die("written outside its buffer", (long)size_); }
    }
    template <class T> T* as() const { return (T*)data_; }
    size_t size() const { return size_; }

  private:
    static constexpr unsigned char canary = 0x5C;
    unsigned char *base_, *data_;
    size_t size_, padded_, total_;
};

}  // namespace shim

FB_DEVICE uint32_t thread_x() { return shim::block()->current; }
FB_DEVICE uint32_t threads_x() { return shim::block()->threads; }
FB_DEVICE uint32_t block_x() { return shim::block()->x; }
FB_DEVICE uint32_t block_y() { return shim::block()->y; }
FB_DEVICE uint32_t blocks_x() { return shim::block()->grid_x; }
FB_DEVICE uint32_t blocks_y() { return shim::block()->grid_y; }
FB_DEVICE void sync_block() { shim::meet_block(); }
FB_DEVICE void sync_warp() { shim::meet_warp(); }
FB_DEVICE void fence() {}

/// Publishes operands to the warp; the lanes may read each other's until the next warp-wide operation ends.
FB_DEVICE shim::Warp& publish(const uint32_t* v, int n) {
    shim::Warp& w = shim::block()->warps[thread_x() / 32];
    memcpy(w.slot[thread_x() % 32], v, 4 * (size_t)n);
    shim::meet_warp();
    return w;
}
FB_DEVICE uint32_t shfl(uint32_t v, uint32_t lane) {
    const uint32_t got = publish(&v, 1).slot[lane % 32][0];
    shim::meet_warp();
    return got;
}
FB_DEVICE uint32_t shfl_xor(uint32_t v, uint32_t mask) { return shfl(v, thread_x() % 32 ^ mask); }

template <class T> FB_DEVICE T lds(uint32_t at) {
    T v;
    memcpy(&v, shim::shared_at(at, sizeof(T)), sizeof(T));
    return v;
}
template <class T> FB_DEVICE void sts(uint32_t at, T v) { memcpy(shim::shared_at(at, sizeof(T)), &v, sizeof(T)); }
FB_DEVICE uint32_t lookup(uint32_t at) { return lds<uint32_t>(at); }
FB_DEVICE void check_base() {}
template <class T> FB_DEVICE T ldc(const T* p) { return *shim::checked(p); }
template <class T> FB_DEVICE T ldg(const T* p) { return *shim::waited(shim::checked(p)); }
template <class T> FB_DEVICE void stg(T* p, T v) { *shim::waited(shim::checked(p)) = v; }
FB_DEVICE float ld_fresh(const float* p) { return *shim::waited(shim::checked(p)); }
FB_DEVICE uint32_t atomic_inc(uint32_t* p) { return (*shim::waited(shim::checked(p)))++; }
FB_DEVICE void grid_wait() { shim::me().waited = true; }
FB_DEVICE void grid_release() {}
FB_DEVICE void prefetch(const void*) {}

FB_DEVICE void pin(const unsigned char*&) {}
FB_DEVICE void cp_async16(uint32_t at, const void* from, bool real = true) {
    shim::Copy c;
    c.at = at;
    if ((uintptr_t)from % 16 != 0) shim::die("cp.async: misaligned source", (long)(uintptr_t)from);
    if (real) memcpy(c.bytes, from, 16); else memset(c.bytes, 0, 16);
    memset(shim::shared_at(at, 16), 0xEE, 16);
    shim::me().groups.back().push_back(c);
}
FB_DEVICE void cp_commit() { shim::me().groups.emplace_back(); }
template <int N> FB_DEVICE void cp_wait() {
    auto& groups = shim::me().groups;
    while (groups.size() > (size_t)N + 1) {
        for (const shim::Copy& c : groups.front()) memcpy(shim::shared_at(c.at, 16), c.bytes, 16), shim::me().landed.push_back(c);
        groups.erase(groups.begin());
    }
}

FB_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t sel) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t d = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t s = sel >> (4 * i) & 15;
        const uint32_t byte = (uint32_t)(bytes >> (8 * (s & 7))) & 255;
        d |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return d;
}
FB_DEVICE uint32_t funnel(uint32_t lo, uint32_t hi, uint32_t shift) {
    return (uint32_t)(((uint64_t)hi << 32 | lo) >> (shift & 31));
}
FB_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
    for (int i = 0; i < 32; i += 8) c += (int32_t)(int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}

FB_DEVICE uint32_t bits_of(float v) { uint32_t b; memcpy(&b, &v, 4); return b; }
FB_DEVICE float float_of(uint32_t b) { float v; memcpy(&v, &b, 4); return v; }
FB_DEVICE float from_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return float_of(sign | 0x7F800000 | fraction << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float v = (float)fraction * 5.9604644775390625e-8f;
    return sign ? -v : v;
}
/// Nearest half, ties to even.
FB_DEVICE uint16_t to_half(float v) {
    const uint32_t b = bits_of(v), sign = b >> 16 & 0x8000, magnitude = b & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return (uint16_t)(sign | 0x7FFF);
    if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // rounds past 65504
    if (magnitude < 0x38800000) {                                   // subnormal: the adder of floats rounds
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3F000000));
    }
    return (uint16_t)(sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}
FB_DEVICE uint32_t mul_halves(uint32_t a, uint32_t b) {
    const auto one = [&](int s) { return (uint32_t)to_half(from_half((uint16_t)(a >> s)) * from_half((uint16_t)(b >> s))) << s; };
    return one(0) | one(16);
}
FB_DEVICE uint32_t sub_halves(uint32_t a, uint32_t b) {
    const auto one = [&](int s) { return (uint32_t)to_half(from_half((uint16_t)(a >> s)) - from_half((uint16_t)(b >> s))) << s; };
    return one(0) | one(16);
}
FB_DEVICE uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
    // A product of halves and its sum with one are exact in double precision but for sums that round to the same half.
    const auto one = [&](int s) {
        const double product = (double)from_half((uint16_t)(a >> s)) * from_half((uint16_t)(b >> s));
        return (uint32_t)to_half((float)(product + from_half((uint16_t)(c >> s)))) << s;
    };
    return one(0) | one(16);
}
FB_DEVICE float fast_exp(float v) { return expf(v); }
FB_DEVICE float power_of_two(float v) { return exp2f(v); }
FB_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
FB_DEVICE uint32_t two_halves(float low, float high) { return (uint32_t)to_half(low) | (uint32_t)to_half(high) << 16; }
FB_DEVICE float fast_div(float a, float b) { return a / b; }
FB_DEVICE float root(float v) { return sqrtf(v); }
FB_DEVICE float mul_rn(float a, float b) { return a * b; }
FB_DEVICE float add_rn(float a, float b) { return a + b; }
FB_DEVICE float div_rn(float a, float b) { return a / b; }

FB_DEVICE void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
    const shim::Warp& w = publish(mine, 6);
    const uint32_t g = thread_x() % 32 / 4, c = thread_x() % 4;
    const auto half = [](uint32_t word, uint32_t i) { return from_half((uint16_t)(word >> (16 * (i % 2)))); };
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t high_row = i / 2, n = 2 * c + i % 2;
        for (uint32_t k = 0; k < 16; k++) {
            const uint32_t part = k / 8, source = k % 8 / 2;
            const float a = half(w.slot[4 * g + source][high_row + 2 * part], k);
            const float b = half(w.slot[4 * n + source][4 + part], k);
            d[i] += a * b;
        }
    }
    shim::meet_warp();
}
FB_DEVICE void mma8(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
    const shim::Warp& w = publish(mine, 6);
    const uint32_t g = thread_x() % 32 / 4, c = thread_x() % 4;
    const auto byte = [](uint32_t word, uint32_t k) { return (int32_t)(int8_t)(word >> (8 * (k % 4))); };
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t high_row = i / 2, n = 2 * c + i % 2;
        for (uint32_t k = 0; k < 32; k++) {
            const uint32_t part = k / 16, source = k % 16 / 4;
            d[i] += byte(w.slot[4 * g + source][high_row + 2 * part], k) * byte(w.slot[4 * n + source][4 + part], k);
        }
    }
    shim::meet_warp();
}
FB_DEVICE void ldmatrix4(uint32_t (&d)[4], uint32_t at) {
    const shim::Warp& w = publish(&at, 1);
    const uint32_t row = thread_x() % 32 / 4, c = thread_x() % 4;
    for (uint32_t m = 0; m < 4; m++) {
        const uint32_t from = w.slot[8 * m + row][0];
        if (from % 16 != 0) shim::die("ldmatrix: misaligned row", from);
        memcpy(&d[m], shim::shared_at(from + 4 * c, 4), 4);
    }
    shim::meet_warp();
}

FB_DEVICE uint32_t min2(uint32_t a, uint32_t b) {
    const uint32_t l = (a & 65535) < (b & 65535) ? a : b, h = a >> 16 < b >> 16 ? a : b;
    return (l & 65535) | (h & 0xFFFF0000u);
}
FB_DEVICE uint32_t max2(uint32_t a, uint32_t b) { return ~min2(~a, ~b); }
FB_DEVICE uint32_t min3_2(uint32_t a, uint32_t b, uint32_t c) { return min2(min2(a, b), c); }
FB_DEVICE uint32_t max3_2(uint32_t a, uint32_t b, uint32_t c) { return max2(max2(a, b), c); }
FB_DEVICE uint32_t add_min2(uint32_t a, uint32_t b, uint32_t c) {
    if ((a & 65535) + (b & 65535) > 65535 || (a >> 16) + (b >> 16) > 65535) shim::die("sum of halves overflows", a, b);
    return min2(a + b, c);
}
FB_DEVICE uint32_t least_of_warp(uint32_t v) {
    for (uint32_t m = 16; m > 0; m /= 2) {
        const uint32_t other = shfl_xor(v, m);
        v = other < v ? other : v;
    }
    return v;
}
FB_DEVICE void shared_min(uint32_t at, uint32_t v) {
    if (v < lds<uint32_t>(at)) sts<uint32_t>(at, v);
}
FB_DEVICE uint32_t hidden(uint32_t v) { return v; }
FB_DEVICE uint32_t fetch(uint32_t at) { return lds<uint32_t>(at); }
FB_DEVICE void put(uint32_t at, uint32_t v) { sts<uint32_t>(at, v); }
FB_DEVICE bool sync_block_or(bool v) {
    static uint64_t last[2];  // barrier that a thread came to with true, plus one
    const uint64_t turn = shim::block()->turn;
    if (v) last[turn % 2] = turn + 1;
    shim::meet_block();
    return last[turn % 2] == turn + 1;
}
FB_DEVICE void ldmatrix4_turned(uint32_t (&d)[4], uint32_t at) {
    const shim::Warp& w = publish(&at, 1);
    const uint32_t column = thread_x() % 32 / 4, c = thread_x() % 4;
    for (uint32_t m = 0; m < 4; m++) {
        d[m] = 0;
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t from = w.slot[8 * m + 2 * c + i][0];
            if (from % 16 != 0) shim::die("ldmatrix: misaligned row", from);
            uint16_t half;
            memcpy(&half, shim::shared_at(from + 2 * column, 2), 2);
            d[m] |= (uint32_t)half << (16 * i);
        }
    }
    shim::meet_warp();
}

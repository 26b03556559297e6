// The operations of ../warpgroup.cuh on the host.
//
// Products read a second image of shared memory, which holds only what `fence_async` showed them. They are computed when waited for: until
// then the sums are no numbers, and an operand that changes meanwhile ends the program.
#pragma once

namespace shim {

/// Threads of a warpgroup come together; the last one runs `last` first.
template <class F> inline Warpgroup& meet_warpgroup(F last) {
    Block& b = *block();
    Warpgroup& w = b.warpgroups[b.current / 128];
    b.progress++;
    if (++w.arrived == 128) { last(w); w.arrived = 0; w.turn++; return w; }
    for (const uint64_t turn = w.turn; w.turn == turn;) give_way();
    return w;
}

/// Rows of 16 halves of the tile that `descriptor` names, from one image of shared memory.
inline std::vector<uint16_t> tile(const std::vector<unsigned char>& image, uint64_t descriptor, uint32_t rows) {
    if (descriptor >> 62 != 1 || descriptor >> 49 & 7) die("descriptor: not rows of 128 bytes in permuted order", (long)(descriptor >> 49));
    const uint32_t start = (uint32_t)(descriptor & 0x3FFF) << 4, eight = (uint32_t)(descriptor >> 32 & 0x3FFF) << 4;
    std::vector<uint16_t> out(16 * rows);
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t k = 0; k < 16; k++) {
            // The hardware permutes by bits 7 to 9 of the address, wherever a tile starts.
            const uint32_t at = start + r / 8 * eight + r % 8 * 128 + 2 * k, permuted = at ^ (at >> 7 & 7) << 4;
            if (permuted + 2 > image.size()) die("descriptor: past the end of shared memory", permuted, (long)image.size());
            memcpy(&out[16 * r + k], image.data() + permuted, 2);
        }
    }
    return out;
}

inline void finish(Product& p) {
    Fibre& f = me();
    const Operands& o = *p.operands;
    const std::vector<unsigned char>& now = block()->shared;
    if (block()->current % 128 == 0 && (tile(now, o.a_at, 64) != o.a_bits || tile(now, o.b_at, o.n) != o.b_bits)) {
        die("an operand of a product changed before the product was waited for", (long)(o.a_at & 0x3FFF), (long)(o.b_at & 0x3FFF));
    }
    std::vector<float>& sums = f.sums[p.d];
    const uint32_t thread = block()->current % 128, g = thread % 32 / 4, c = thread % 4;
    for (uint32_t i = 0; i < o.n / 2; i++) {
        const float* a = &o.a[16 * (thread / 32 * 16 + i / 2 % 2 * 8 + g)];
        const float* b = &o.b[16 * (i / 4 * 8 + 2 * c + i % 2)];
        for (uint32_t k = 0; k < 16; k++) sums[i] += a[k] * b[k];
    }
    if (--f.running[p.d] == 0) {
        memcpy(p.d, sums.data(), 4 * sums.size());
        f.sums.erase(p.d);
        f.running.erase(p.d);
    }
}

}  // namespace shim

FB_DEVICE uint64_t tile_at(uint32_t at) { return TILE_ORDER | at >> 4; }
FB_DEVICE void fence_async() {
    shim::Block& b = *shim::block();
    if (b.shown.empty()) b.shown.assign(b.shared.size(), 0xCD);
    for (const shim::Copy& c : shim::me().landed) memcpy(b.shown.data() + c.at, c.bytes, 16);
    shim::me().landed.clear();
}
FB_DEVICE void wgmma_fence() { shim::me().fenced = true; }
FB_DEVICE void wgmma_commit() { shim::me().products.emplace_back(); }
template <int LEFT> FB_DEVICE void wgmma_wait() {
    auto& groups = shim::me().products;
    while (groups.size() > (size_t)LEFT + 1) {
        for (shim::Product& p : groups.front()) shim::finish(p);
        groups.erase(groups.begin());
    }
}
template <int N> FB_DEVICE void wgmma_finish(float (&)[N]) {
    wgmma_wait<0>();
    shim::me().fenced = false;
}
template <int N> FB_DEVICE void wgmma(float (&d)[N], uint64_t a, uint64_t b) {
    shim::Fibre& f = shim::me();
    if (!f.fenced) shim::die("wgmma without wgmma_fence");
    const auto read = [&](shim::Warpgroup& w) {
        auto o = std::make_shared<shim::Operands>();
        o->a_at = a, o->b_at = b, o->n = 2 * N;
        o->a_bits = shim::tile(shim::block()->shown, a, 64), o->b_bits = shim::tile(shim::block()->shown, b, o->n);
        for (const uint16_t h : o->a_bits) o->a.push_back(from_half(h));
        for (const uint16_t h : o->b_bits) o->b.push_back(from_half(h));
        w.operands = o;
    };
    const std::shared_ptr<shim::Operands> operands = shim::meet_warpgroup(read).operands;
    if (operands->a_at != a || operands->b_at != b) shim::die("threads of a warpgroup name different operands");
    if (f.running[d]++ == 0) {
        f.sums[d].assign(d, d + N);
        for (float& v : d) v = NAN;
    }
    f.products.back().push_back(shim::Product{d, operands});
}

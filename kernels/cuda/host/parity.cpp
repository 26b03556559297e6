// Runs packed-matrix kernels on the host for the tests of fracbit-kernels-cuda.
//
// Reads cases from standard input, answers on standard output, both in little-endian 32-bit words (see `Case`): repack, expand to
// integers, expand to weights, multiply. A fault of a kernel ends the program with a message and no answer.
#include "../repack.cuh"
#include "registry.hpp"

namespace {

void read_exact(void* to, size_t size) {
    if (size > 0 && fread(to, 1, size, stdin) != size) shim::die("case ends early", (long)size);
}
uint32_t word() { uint32_t v; read_exact(&v, 4); return v; }
void answer(const shim::Guarded& b) { fwrite(b.as<char>(), 1, b.size(), stdout); }

template <class A> Instance<A> find(const std::string& name) {
    const auto at = instances<A>().find(name);
    if (at == instances<A>().end()) { fprintf(stderr, "no instance %s\n", name.c_str()); exit(1); }
    return at->second;
}

struct Part {
    std::string dequant;
    uint32_t half_bits, offset, tiles;
    std::unique_ptr<shim::Guarded> codes, rows;
};

std::string name() {
    std::string s(word(), ' ');
    read_exact(s.data(), s.size());
    return s;
}

void run_case() {
    const std::string gemv_name = name();
    GemvArgs a{};
    a.w.rows = word(), a.w.cols = word(), a.w.group = word(), a.w.groups = word(), a.w.pairs = word();
    a.batch = word(), a.accumulate = word();
    const uint32_t warps = word(), gemv_shared = word(), parts = word(), row_bytes = word(), has_bias = word();
    std::vector<Part> all(parts);
    for (uint32_t i = 0; i < parts; i++) {
        Part& p = all[i];
        Segment& s = a.w.segments[i];
        p.dequant = name();
        p.half_bits = word(), p.offset = word(), p.tiles = word();
        s.octets = word(), s.first_col = word(), s.end_col = word(), s.splits = word(), s.per_split = word();
        s.factor = float_of(word());
        s.book.log_rows = word(), s.book.log_stride = word(), s.book.log_copies = word();
        p.rows = std::make_unique<shim::Guarded>(4u << s.book.log_rows);
        read_exact(p.rows->as<char>(), p.rows->size());
        s.book.rows = p.rows->as<uint32_t>();
    }
    const uint32_t strips = (a.w.rows + 15) / 16;
    shim::Guarded canonical((size_t)strips * row_bytes), scales(2u * a.w.rows * a.w.groups);
    shim::Guarded x(4u * a.batch * a.w.cols), bias(has_bias ? 4u * a.w.rows : 0), y(4u * a.batch * a.w.rows, 0);
    read_exact(canonical.as<char>(), canonical.size());
    read_exact(scales.as<char>(), scales.size());
    read_exact(x.as<char>(), x.size());
    read_exact(bias.as<char>(), bias.size());
    read_exact(y.as<char>(), y.size());
    a.w.scales = scales.as<uint16_t>(), a.w.bias = bias.as<float>();
    a.x = x.as<float>(), a.y = y.as<float>();
    a.x_stride = a.w.cols, a.y_stride = a.w.rows;

    shim::Guarded raw(2u * a.w.rows * a.w.cols), weights(raw.size());
    uint32_t splits = 0;
    for (uint32_t i = 0; i < parts; i++) {
        Part& p = all[i];
        Segment& s = a.w.segments[i];
        p.codes = std::make_unique<shim::Guarded>((size_t)a.w.pairs * s.octets * 256 * p.half_bits);
        s.codes = p.codes->as<unsigned char>();
        RepackArgs r{canonical.as<unsigned char>(), p.codes->as<unsigned char>(), p.half_bits, row_bytes, p.offset,
                     strips, p.tiles, a.w.pairs, s.octets};
        shim::launch(2, 1, 64, 0, [&] { repack(r); });
        splits += s.splits;
    }
    for (uint32_t i = 0; i < parts; i++) {
        const size_t shared = table_bytes(a.w.segments[i].book) + 2u * 256 * all[i].half_bits;
        const Instance<DequantArgs> dequant = find<DequantArgs>(all[i].dequant);
        DequantArgs d{a.w, raw.as<uint16_t>(), i, 1};
        shim::launch(2, 1, 64, shared, [&] { dequant(d); });
        d.raw = 0, d.out = weights.as<uint16_t>();
        shim::launch(1, 1, 64, shared, [&] { dequant(d); });
    }
    const uint32_t blocks = (a.w.pairs + warps - 1) / warps;
    shim::Guarded partial(splits > 1 ? 4ull * splits * a.w.pairs * 32 * 8 : 0), counters(4u * blocks, 0);
    a.partial = partial.as<float>(), a.counters = counters.as<uint32_t>();
    const Instance<GemvArgs> product = find<GemvArgs>(gemv_name);
    shim::launch(blocks, splits, 32 * warps, gemv_shared, [&] { product(a); });
    for (uint32_t i = 0; i < blocks; i++) {
        if (counters.as<uint32_t>()[i] != 0) shim::die("counter not reset", i);
    }
    for (Part& p : all) p.codes->check("codes"), p.rows->check("rows");
    canonical.check("canonical"), scales.check("scales"), x.check("x"), bias.check("bias"), y.check("y");
    raw.check("raw"), weights.check("weights"), partial.check("partial"), counters.check("counters");
    answer(raw), answer(weights), answer(y);
}

}  // namespace

int main() {
    for (uint32_t cases = word(); cases > 0; cases--) run_case();
    return 0;
}

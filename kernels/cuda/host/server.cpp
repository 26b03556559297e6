// A device made of the shim, for tests: obeys commands on standard input, answers on standard output.
//
// Commands are little-endian: an operation (u32), then its operands (u64 addresses and sizes, u32 the rest). A fault ends the
// program with a message on standard error.
#include "registry.hpp"

namespace {

void take(void* to, size_t size) {
    if (size > 0 && fread(to, 1, size, stdin) != size) shim::die("command ends early", (long)size);
}
template <class T> T take() { T v; take(&v, sizeof v); return v; }
template <class T> void give(const T& v) { fwrite(&v, sizeof v, 1, stdout); fflush(stdout); }

std::map<uintptr_t, std::unique_ptr<shim::Guarded>>& buffers() {
    static std::map<uintptr_t, std::unique_ptr<shim::Guarded>> all;
    return all;
}
/// `size` bytes at `at`, inside one buffer.
unsigned char* inside(uint64_t at, uint64_t size) {
    auto next = buffers().upper_bound(at);
    if (next == buffers().begin()) shim::die("no buffer at this address", (long)at);
    --next;
    if (at + size > next->first + next->second->size()) shim::die("copy past the end of a buffer", (long)at, (long)size);
    return (unsigned char*)at;
}

void launch() {
    std::string name(take<uint32_t>(), ' ');
    take(name.data(), name.size());
    const uint32_t x = take<uint32_t>(), y = take<uint32_t>(), threads = take<uint32_t>(), shared = take<uint32_t>();
    std::vector<uint64_t> args((take<uint32_t>() + 7) / 8);
    const uint32_t size = take<uint32_t>();
    take(args.data(), size);
    const auto at = instances().find(name);
    if (at == instances().end() || at->second.args != size || threads > at->second.threads) {
        fprintf(stderr, "launch of %s with %u bytes, %u threads: ", name.c_str(), size, threads);
        shim::die("no such instance");
    }
    shim::launch(x, y, threads, shared, [&] { at->second.run(args.data()); });
    for (const auto& [address, buffer] : buffers()) buffer->check(name.c_str());
}

}  // namespace

int main() {
    for (uint32_t op; fread(&op, 4, 1, stdin) == 1;) {
        if (op == 1) {
            auto buffer = std::make_unique<shim::Guarded>(take<uint64_t>());
            const uintptr_t at = (uintptr_t)buffer->as<char>();
            buffers().emplace(at, std::move(buffer));
            give<uint64_t>(at);
        } else if (op == 2) {
            if (buffers().erase(take<uint64_t>()) != 1) shim::die("freed twice");
        } else if (op == 3) {
            const uint64_t at = take<uint64_t>(), size = take<uint64_t>();
            take(inside(at, size), size);
        } else if (op == 4) {
            const uint64_t at = take<uint64_t>(), size = take<uint64_t>();
            fwrite(inside(at, size), 1, size, stdout);
            fflush(stdout);
        } else if (op == 5) {
            launch();
        } else {
            shim::die("unknown command", op);
        }
    }
    return 0;
}

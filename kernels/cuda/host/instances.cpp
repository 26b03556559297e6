// The same unit for the host: instances register themselves by name.
#include "registry.hpp"

#define FB_RUN(name, threads, Args, call) FB_RUN_EARLY(name, threads, Args, grid_wait(); call)
#define FB_RUN_BLOCKS(name, threads, blocks, Args, call) FB_RUN(name, threads, Args, call)
#define FB_RUN_EARLY(name, threads, Args, call)                               \
    static void name##_body(const Args& args) { call; }                      \
    static const bool name##_known = add(#name, threads, sizeof(Args),       \
                                         +[](const void* args) { name##_body(*(const Args*)args); });
#define FB_RUN_EARLY_BLOCKS(name, threads, blocks, Args, call) FB_RUN_EARLY(name, threads, Args, call)
#include "../instances.inc"
#include FB_UNIT

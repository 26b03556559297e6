// One unit of instances as kernels: nvcc -DFB_UNIT="gen/fine.inc" (see `cargo xtask kernels`).
#include "device.cuh"

// Most kernels wait for those before them at once; an FB_RUN_EARLY does so itself, after what does not depend on them.
#define FB_RUN(name, threads, Args, call) FB_RUN_BLOCKS(name, threads, 1, Args, call)
#define FB_RUN_EARLY(name, threads, Args, call) FB_RUN_EARLY_BLOCKS(name, threads, 1, Args, call)
// With registers for so many blocks a multiprocessor.
#define FB_RUN_BLOCKS(name, threads, blocks, Args, call) \
    FB_KERNEL(name, threads, blocks)(const __grid_constant__ Args args) { grid_release(); grid_wait(); call; }
#define FB_RUN_EARLY_BLOCKS(name, threads, blocks, Args, call) \
    FB_KERNEL(name, threads, blocks)(const __grid_constant__ Args args) { call; }
#include "instances.inc"
#include FB_UNIT

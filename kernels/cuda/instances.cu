// One unit of instances as kernels: nvcc -DFB_UNIT="gen/fine.inc" (see `cargo xtask kernels`).
#include "device.cuh"

#define FB_RUN(name, threads, Args, call) \
    FB_KERNEL(name, threads, 1)(const __grid_constant__ Args args) { call; }
#include "instances.inc"
#include FB_UNIT

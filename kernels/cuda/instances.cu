// One unit of generated instances as kernels: nvcc -DFB_UNIT="gen/fine.inc" (see `cargo xtask kernels`).
#include "gemv.cuh"
#include "repack.cuh"

#define FB_GEMV(name, Lo, Hi) \
    FB_KERNEL(name, 256, 1)(const __grid_constant__ GemvArgs args) { gemv<Lo, Hi>(args); }
#define FB_DEQUANT(name, E) \
    FB_KERNEL(name, 256, 1)(const __grid_constant__ DequantArgs args) { dequant<E>(args); }
#include FB_UNIT

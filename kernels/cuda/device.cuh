// Device operations: with warpgroup.cuh the only file that knows whether it is compiled for a GPU or for the host.
//
// Under nvcc every function is one or two instructions. Elsewhere the same names are emulated by host/shim.hpp
// (a thread is a fibre, shared and global memory are checked), so that the kernels themselves hold no `#if`.
#pragma once
#include <stdint.h>

struct alignas(16) Words4 { uint32_t w[4]; };
struct alignas(8) Words2 { uint32_t w[2]; };
struct alignas(16) Floats4 { float v[4]; };
struct alignas(8) Floats2 { float v[2]; };

#ifdef __CUDACC__

#include <cuda_fp16.h>
#define FB_DEVICE __device__ __forceinline__
#define FB_KERNEL(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name
#define FB_UNROLL _Pragma("unroll")
#define FB_UNROLL_1 _Pragma("unroll 1")
#define FB_UNROLL_4 _Pragma("unroll 4")
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FB_WARPGROUPS  // the operations of warpgroup.cuh exist
#endif
#define FB_UNROLL_8 _Pragma("unroll 8")

extern __shared__ __align__(16) unsigned char fb_shared[];

FB_DEVICE uint32_t thread_x() { return threadIdx.x; }
FB_DEVICE uint32_t threads_x() { return blockDim.x; }
FB_DEVICE uint32_t block_x() { return blockIdx.x; }
FB_DEVICE uint32_t block_y() { return blockIdx.y; }
FB_DEVICE uint32_t blocks_x() { return gridDim.x; }
FB_DEVICE uint32_t blocks_y() { return gridDim.y; }
FB_DEVICE void sync_block() { __syncthreads(); }
FB_DEVICE void sync_warp() { __syncwarp(); }
FB_DEVICE void fence() { __threadfence(); }
FB_DEVICE uint32_t shfl(uint32_t v, uint32_t lane) { return __shfl_sync(~0u, v, (int)lane); }
FB_DEVICE uint32_t shfl_xor(uint32_t v, uint32_t mask) { return __shfl_xor_sync(~0u, v, (int)mask); }

/// Shared memory by byte offset.
template <class T> FB_DEVICE T lds(uint32_t at) { return *reinterpret_cast<const T*>(fb_shared + at); }
template <class T> FB_DEVICE void sts(uint32_t at, T v) { *reinterpret_cast<T*>(fb_shared + at) = v; }
/// A word of a table that no thread writes any more.
///
/// From sm_90 on a block's shared memory starts at an address of its cluster, which the compiler adds in every lookup: an instruction per
/// weight. Blocks here are not clustered and start after the 1024 bytes that the system keeps (`check_base` proves it once).
FB_DEVICE uint32_t lookup(uint32_t at) {
#if __CUDA_ARCH__ == 900
    uint32_t v;
    asm("ld.shared.u32 %0, [%1+1024];" : "=r"(v) : "r"(at));
    return v;
#else
    return *reinterpret_cast<const uint32_t*>(fb_shared + at);
#endif
}
FB_DEVICE void check_base() {
#if __CUDA_ARCH__ == 900
    if ((uint32_t)__cvta_generic_to_shared(fb_shared) != 1024) __trap();
#endif
}

/// Global memory.
template <class T> FB_DEVICE T ldg(const T* p) { return *p; }
template <class T> FB_DEVICE void stg(T* p, T v) { *p = v; }
/// Global memory that another block wrote in this launch.
FB_DEVICE float ld_fresh(const float* p) { return __ldcg(p); }
FB_DEVICE uint32_t atomic_inc(uint32_t* p) { return atomicAdd(p, 1u); }
/// Global memory that no kernel of a step writes, and that may therefore be read before `grid_wait`.
template <class T> FB_DEVICE T ldc(const T* p) { return __ldg(p); }
FB_DEVICE Words4 ldc(const Words4* p) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
    return Words4{{v.x, v.y, v.z, v.w}};
}

/// Programmatic dependent launch: on sm_90 the host lets a kernel start while the one before it still runs. `grid_wait` returns when all
/// that was launched before is done and visible: nothing that other kernels write is read before it, nothing at all is written.
/// `grid_release` lets the next kernel start as soon as there is room for its blocks.
FB_DEVICE void grid_wait() {
#if __CUDA_ARCH__ == 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
FB_DEVICE void grid_release() {
#if __CUDA_ARCH__ == 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Brings the 128 bytes around an address nearer.
FB_DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

/// Keeps the compiler from rewriting a pointer that steps through a loop as several.
FB_DEVICE void pin(const unsigned char*& p) { asm("" : "+l"(p)); }

/// Asynchronous copy of 16 bytes from global to shared memory, past the L1 cache.
FB_DEVICE void cp_async16(uint32_t at, const void* from) {
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(fb_shared + at);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// The same, or 16 zeros where the source is not `real` (and not read).
FB_DEVICE void cp_async16(uint32_t at, const void* from, bool real) {
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(fb_shared + at);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16u : 0u) : "memory");
}
FB_DEVICE void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> FB_DEVICE void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

/// Bytes `sel` of (a, b); bit 3 of a selector spreads the sign of its byte.
FB_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t sel) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sel));
    return d;
}
/// The 32 bits at bit `shift` (below 32) of `hi:lo`.
FB_DEVICE uint32_t funnel(uint32_t lo, uint32_t hi, uint32_t shift) { return __funnelshift_r(lo, hi, shift); }
/// c plus the products of the four signed bytes of a and b.
FB_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) { return __dp4a((int32_t)a, (int32_t)b, c); }

/// Products and differences of two halves each.
FB_DEVICE uint32_t mul_halves(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
FB_DEVICE uint32_t sub_halves(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
/// a b + c of two halves each, rounded once.
FB_DEVICE uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/// d += a b for a 16 x 16 half matrix a and a 16 x 8 half matrix b, f32 sums (mma.m16n8k16).
FB_DEVICE void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
/// d += a b for a 16 x 32 matrix a and a 32 x 8 matrix b of signed bytes, exact (mma.m16n8k32): a word has four neighbours.
FB_DEVICE void mma8(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
/// Four 8 x 8 matrices of halves; lane i gives the address of row i % 8 of matrix i / 8.
FB_DEVICE void ldmatrix4(uint32_t (&d)[4], uint32_t at) {
    const uint32_t from = (uint32_t)__cvta_generic_to_shared(fb_shared + at);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(from) : "memory");
}
/// The same, each matrix turned: lane (g, c) gets rows 2c and 2c + 1 of column g.
FB_DEVICE void ldmatrix4_turned(uint32_t (&d)[4], uint32_t at) {
    const uint32_t from = (uint32_t)__cvta_generic_to_shared(fb_shared + at);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(from) : "memory");
}

FB_DEVICE uint16_t to_half(float v) { return __half_as_ushort(__float2half_rn(v)); }
FB_DEVICE float from_half(uint16_t h) { return __half2float(__ushort_as_half(h)); }
FB_DEVICE uint32_t bits_of(float v) { return __float_as_uint(v); }
FB_DEVICE float float_of(uint32_t v) { return __uint_as_float(v); }
FB_DEVICE float fast_exp(float v) { return __expf(v); }
FB_DEVICE float power_of_two(float v) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
    return d;
}
FB_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
/// Two halves in a word, `low` in its lower part.
FB_DEVICE uint32_t two_halves(float low, float high) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
FB_DEVICE float fast_div(float a, float b) { return __fdividef(a, b); }
FB_DEVICE float root(float v) { return sqrtf(v); }
/// Arithmetic that the compiler may not contract.
FB_DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
FB_DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
FB_DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }

/// Pairs of unsigned 16-bit halves: the lesser ones; the lesser of a + b, which should not overflow, and c.
FB_DEVICE uint32_t min2(uint32_t a, uint32_t b) { return __vminu2(a, b); }
FB_DEVICE uint32_t max2(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
FB_DEVICE uint32_t min3_2(uint32_t a, uint32_t b, uint32_t c) { return __vimin3_u16x2(a, b, c); }
FB_DEVICE uint32_t max3_2(uint32_t a, uint32_t b, uint32_t c) { return __vimax3_u16x2(a, b, c); }
FB_DEVICE uint32_t add_min2(uint32_t a, uint32_t b, uint32_t c) { return __viaddmin_u16x2(a, b, c); }
/// As `lookup`, for words that threads write: stays between the barriers around it.
FB_DEVICE uint32_t fetch(uint32_t at) {
#if __CUDA_ARCH__ == 900
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1+1024];" : "=r"(v) : "r"(at));
    return v;
#else
    return lds<uint32_t>(at);
#endif
}
FB_DEVICE void put(uint32_t at, uint32_t v) {
#if __CUDA_ARCH__ == 900
    asm volatile("st.shared.u32 [%0+1024], %1;" ::"r"(at), "r"(v) : "memory");
#else
    sts<uint32_t>(at, v);
#endif
}
/// Keeps the compiler from computing ahead of a loop what follows from `v`, in registers that are not there.
FB_DEVICE uint32_t hidden(uint32_t v) {
    asm volatile("" : "+r"(v));
    return v;
}
FB_DEVICE bool sync_block_or(bool v) { return __syncthreads_or(v) != 0; }
/// The least of a warp.
FB_DEVICE uint32_t least_of_warp(uint32_t v) { return __reduce_min_sync(~0u, v); }
FB_DEVICE void shared_min(uint32_t at, uint32_t v) { atomicMin(reinterpret_cast<uint32_t*>(fb_shared + at), v); }

#else
#include "host/shim.hpp"
#endif

FB_DEVICE float sum_lanes(float v) {
    FB_UNROLL
    for (uint32_t m = 16; m > 0; m /= 2) v += float_of(shfl_xor(bits_of(v), m));
    return v;
}
FB_DEVICE uint32_t low_high(uint16_t low, uint16_t high) { return (uint32_t)low | (uint32_t)high << 16; }

// What mixtures of experts do beside products: logits of the router, inputs in the order of experts, and sums over a token's experts.
#pragma once
#include "device.cuh"

struct RouteArgs {
    const float* x;       // (rows, cols)
    const float* router;  // (experts, cols)
    float* logits;        // (rows, experts)
    uint32_t cols, experts;
};

/// A warp for each expert (from `block_x`) and row (`block_y`), in single precision: which experts a token gets decides its text.
FB_DEVICE void route(const RouteArgs& a) {
    const uint32_t lane = thread_x() % 32, expert = block_x() * (threads_x() / 32) + thread_x() / 32, row = block_y();
    if (expert >= a.experts) return;
    const float *x = a.x + (size_t)row * a.cols, *w = a.router + (size_t)expert * a.cols;
    float sum = 0.f;
    FB_UNROLL_4
    for (uint32_t i = lane; i < a.cols; i += 32) sum += ldg(x + i) * ldc(w + i);
    sum = sum_lanes(sum);
    if (lane == 0) stg(a.logits + (size_t)row * a.experts + expert, sum);
}

struct GatherArgs {
    const float* x;        // (rows, cols)
    const uint32_t* rows;  // (pairs)
    float* out;            // (pairs, cols)
    uint32_t cols, pad;
};

/// Row `rows[p]` of x as row p, for every p (`block_x`).
FB_DEVICE void gather(const GatherArgs& a) {
    const float* from = a.x + (size_t)ldg(a.rows + block_x()) * a.cols;
    float* to = a.out + (size_t)block_x() * a.cols;
    for (uint32_t i = block_y() * threads_x() + thread_x(); i < a.cols; i += blocks_y() * threads_x()) stg(to + i, ldg(from + i));
}

struct CombineArgs {
    const float* x;          // (pairs, cols)
    const uint32_t* places;  // (rows, active): which pair
    const float* weights;    // (rows, active)
    float* out;              // (rows, cols)
    uint32_t cols, active, accumulate, pad;
};
static_assert(sizeof(RouteArgs) == 32 && sizeof(GatherArgs) == 32 && sizeof(CombineArgs) == 48, "arguments");

/// The weighted sum over a token's experts, in their order, for every row (`block_x`).
FB_DEVICE void combine(const CombineArgs& a) {
    const uint32_t row = block_x();
    float* to = a.out + (size_t)row * a.cols;
    for (uint32_t i = block_y() * threads_x() + thread_x(); i < a.cols; i += blocks_y() * threads_x()) {
        float sum = 0.f;
        for (uint32_t k = 0; k < a.active; k++) {
            const uint32_t at = row * a.active + k;
            sum += ldg(a.weights + at) * ldg(a.x + (size_t)ldg(a.places + at) * a.cols + i);
        }
        stg(to + i, a.accumulate ? ldg(to + i) + sum : sum);
    }
}

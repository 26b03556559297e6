// Prompts over a cache of codes: heads are prepared and written, and what the rows see is turned into halves for prompt.cuh.
//
// Blocks of prompt.cuh read each key and value once for every 64 rows and every head of a group: turned into halves there, a code would
// be some tens of times, and its instructions are those of a fourth of the products. Written once it costs some 3 bytes of traffic. Constants
// that keys are stored without come back there, turned to their positions: scores are then those of a cache of 16 bits with these.
#pragma once
#include "attend_few.cuh"

struct HeadsCodesArgs : HeadsArgs {
    HeadTurn turn;
    KeyConstants constants;
};

constexpr uint32_t HEADS_WARPS = 4;

/// As `heads`: a warp takes a head of a row.
template <class Kv> FB_DEVICE void heads_codes(const HeadsCodesArgs& a) {
    const uint32_t warp = thread_x() / 32, head = block_x() * HEADS_WARPS + warp, row = block_y(), sequence = row / a.each;
    const uint32_t all = a.heads + 2 * a.kv_heads, scratch = 1024 * warp;
    if (head >= all) return;
    const uint32_t position = ldg(&a.step->positions[sequence]) + row % a.each;
    const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
    float* x = a.qkv + ((size_t)row * all + head) * a.d;
    const uint32_t kv = (head - a.heads) % a.kv_heads;  // of keys and values
    const float* shift = query || value ? nullptr : key_shift(a.constants, a.d, kv, position);
    float v[8];
    few_head<4>(a, x, query ? a.query_norm : value ? nullptr : a.key_norm, shift, a.turns && !value ? a.turns + (size_t)position * a.d : nullptr,
                scratch, v);
    if (!value) turn_head(a.turn, a.d, scratch, v);
    if (query) {
        const float scale = a.scale * (a.growth ? ldc(a.growth + position) : 1.f);
        FB_UNROLL
        for (uint32_t t = 0; t < 8; t++) {
            const uint32_t i = thread_x() % 32 + 32 * t;
            if (i < a.d) stg(x + i, v[t] * scale);
        }
        return;
    }
    const uint32_t to = cache_row(a.tables + sequence * a.pages, a.kv_heads, kv, position);
    int32_t codes[8];
    if (value) {
        const float scale = round_as(typename Kv::Value{}, v, codes);
        keep_codes<typename Kv::Value>(a.values, a.d, true, to, codes, scale);
    } else {
        const float scale = round_as(typename Kv::Key{}, v, codes);
        keep_codes<typename Kv::Key>(a.keys, a.d, false, to, codes, scale);
    }
}

struct HalveCodesArgs {
    const Step* step;
    const uint16_t* keys;  // the cache
    const uint16_t* values;
    const uint32_t* table;  // pages of the one sequence
    uint16_t* to_keys;      // f16 (pages, kv_heads, PAGE, d), in the order of the sequence
    uint16_t* to_values;
    const float* turns;  // (positions, d) or null, as `heads` has them
    HeadTurn turn;
    KeyConstants constants;
    uint32_t kv_heads, d, window, rows;
};

/// What the key of a position is stored without, as it would lie in the cache; by a warp, in 1024 bytes of its own.
FB_DEVICE void taken_from_key(const HalveCodesArgs& a, const float* shift, uint32_t position, float (&v)[8]) {
    const uint32_t lane = thread_x() % 32, half = a.d / 2, scratch = 1024 * (thread_x() / 32);
    const float* turns = a.turns ? a.turns + (size_t)position * a.d : nullptr;
    float cosine[8], sine[8];
    FB_UNROLL
    for (uint32_t t = 0; t < 8; t++) {
        const uint32_t i = lane + 32 * t, plane = i < half ? i : i - half;
        v[t] = i < a.d ? -ldc(shift + i) : 0.f;
        cosine[t] = turns && i < a.d ? ldc(turns + plane) : 1.f;
        sine[t] = turns && i < a.d ? ldc(turns + half + plane) : 0.f;
    }
    turn_planes(a.d, scratch, cosine, sine, v);
    turn_head(a.turn, a.d, scratch, v);
}

template <class Form, bool WHOLE> FB_DEVICE void halve_block(const HalveCodesArgs& a, bool value, uint32_t held) {
    const uint32_t page = block_x() / a.kv_heads, kv = block_x() % a.kv_heads, lane = thread_x() % 32;
    const CodesInCache block = codes_at<Form>(value ? a.values : a.keys, a.d, value, cache_row(a.table, a.kv_heads, kv, page * PAGE));
    uint16_t* to = (value ? a.to_values : a.to_keys) + (size_t)block_x() * PAGE * a.d;
    for (uint32_t slot = thread_x() / 32; slot < PAGE && page * PAGE + slot < held; slot += threads_x() / 32) {
        const float scale = ldg((const float*)(block.at + PAGE * code_row<Form>(a.d, value)) + slot);
        const auto number = [&](uint32_t i) { return Form::number(ldg(block.at + code_place<Form>(a.d, value, slot, i)), value, i) * scale; };
        if constexpr (WHOLE) {
            if (const float* shift = key_shift(a.constants, a.d, kv, page * PAGE + slot)) {
                float back[8];
                taken_from_key(a, shift, page * PAGE + slot, back);
                FB_UNROLL
                for (uint32_t t = 0; t < 8; t++) {
                    const uint32_t i = lane + 32 * t;
                    if (i < a.d) stg(to + slot * a.d + i, to_half(number(i) + back[t]));
                }
                continue;
            }
        }
        for (uint32_t i = lane; i < a.d; i += 32) stg(to + slot * a.d + i, to_half(number(i)));
    }
}

/// A block takes keys (along y: values) of a head on a page, if some row sees it; keys WHOLE or as they are stored.
template <class Kv, bool WHOLE> FB_DEVICE void halve_codes(const HalveCodesArgs& a) {
    const uint32_t first = block_x() / a.kv_heads * PAGE, position = ldg(&a.step->positions[0]), held = position + a.rows;
    if (first >= held || (a.window > 0 && first + PAGE - 1 + a.window <= position)) return;
    if (block_y() == 1) halve_block<typename Kv::Value, false>(a, true, held);
    else halve_block<typename Kv::Key, WHOLE>(a, false, held);
}

static_assert(sizeof(HeadsCodesArgs) == 176 && sizeof(HalveCodesArgs) == 144, "arguments");

// From the canonical tiles to the device layout (see codes.cuh): a permutation of bytes, run once when a matrix is loaded.
#pragma once
#include "device.cuh"

struct RepackArgs {
    const unsigned char* from;  // canonical codes of the whole matrix
    unsigned char* to;          // one segment: (pair, octet, strip, 128 H bytes)
    uint32_t half_bits;         // H
    uint32_t row_bytes;         // of one canonical row of tiles
    uint32_t offset;            // of the segment inside such a row
    uint32_t strips, tiles;     // rows of tiles; tile columns of the segment
    uint32_t pairs, octets;
    uint32_t integers;          // bytes are integers, of which -128 means -127
};

/// One thread moves two bytes at a time: a lane's share of a tile is an even number of bytes.
FB_DEVICE void repack(const RepackArgs& a) {
    const uint32_t h = a.half_bits, lane_bytes = 4 * h, strip_bytes = 128 * h, tile_bytes = 16 * h;
    const uint64_t total = (uint64_t)a.pairs * a.octets * 2 * strip_bytes / 2;
    for (uint64_t i = (uint64_t)block_x() * threads_x() + thread_x(); i < total; i += (uint64_t)blocks_x() * threads_x()) {
        const uint32_t at = (uint32_t)(i % (strip_bytes / 2)) * 2;
        const uint64_t rest = i / (strip_bytes / 2);
        const uint32_t strip_in_pair = (uint32_t)(rest % 2), octet = (uint32_t)(rest / 2 % a.octets);
        const uint32_t strip = (uint32_t)(rest / 2 / a.octets) * 2 + strip_in_pair;
        // Place `at` of the strip: which lane, and which byte of its 2R words.
        const uint32_t fours = h / 4 * 512, twos = h % 4 >= 2 ? 256 : 0;
        uint32_t lane, byte;
        if (at < fours) {
            lane = at % 512 / 16, byte = at / 512 * 16 + at % 16;
        } else if (at < fours + twos) {
            lane = (at - fours) / 8, byte = h / 4 * 16 + (at - fours) % 8;
        } else {
            lane = (at - fours - twos) / 4, byte = lane_bytes - 4 + (at - fours - twos) % 4;
        }
        const uint32_t unit = lane_bytes / 2, q = byte / unit;
        const uint32_t tile = octet * 8 + q * 4 + lane % 4, in_tile = lane / 4 * unit + byte % unit;
        uint16_t v = 0;
        if (strip < a.strips && tile < a.tiles) {
            const unsigned char* p = a.from + (size_t)strip * a.row_bytes + a.offset + (size_t)tile * tile_bytes + in_tile;
            v = (uint16_t)(p[0] | p[1] << 8);
            if (a.integers && p[0] == 0x80) v++;
            if (a.integers && p[1] == 0x80) v += 0x100;
        }
        stg((uint16_t*)a.to + i, v);
    }
}

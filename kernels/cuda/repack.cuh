// From the canonical tiles to the device layout (see codes.cuh): a permutation of bytes, run once
// when a matrix is loaded.
#pragma once
#include "device.cuh"

struct RepackArgs {
    const unsigned char* from;  // canonical codes of the whole matrix
    unsigned char* to;          // one segment: (pair, octet, strip, 64 quarters)
    uint32_t quarters;          // of a bit per weight: a lane's bytes of a tile
    uint32_t row_bytes;         // of one canonical row of tiles
    uint32_t offset;            // of the segment inside such a row
    uint32_t strips, tiles;     // rows of tiles; tile columns of the segment
    uint32_t pairs, octets;
    uint32_t kind;              // of bytes: INTEGERS, PLACES or any other
    uint32_t scales_row;        // of group-wise schemes: scales of a row of an octet, behind its codes; else 0
    uint32_t rows, group, groups;
    const uint16_t* scales;     // (rows, groups)
    uint32_t stride;            // bytes from octet to octet
    uint32_t pad;
};
static_assert(sizeof(RepackArgs) == 80, "arguments");

/// Bytes are integers, of which -128 means -127.
constexpr uint32_t INTEGERS = 1;
/// Bytes of a tile are in the order (place, row), of additive codebooks: a lane gets those of its
/// first row, then of its second.
constexpr uint32_t PLACES = 2;

/// One thread moves two bytes of a lane at a time, which odd rates may have from two tiles.
FB_DEVICE void repack(const RepackArgs& a) {
    const uint32_t unit = a.quarters, words = unit / 2, strip_bytes = 64 * unit, tile_bytes = 8 * unit;
    const uint64_t total = (uint64_t)a.pairs * a.octets * 2 * strip_bytes / 2;
    for (uint64_t i = (uint64_t)block_x() * threads_x() + thread_x(); i < total; i += (uint64_t)blocks_x() * threads_x()) {
        const uint32_t at = (uint32_t)(i % (strip_bytes / 2)) * 2;
        const uint64_t rest = i / (strip_bytes / 2);
        const uint32_t strip_in_pair = (uint32_t)(rest % 2), octet = (uint32_t)(rest / 2 % a.octets);
        const uint32_t strip = (uint32_t)(rest / 2 / a.octets) * 2 + strip_in_pair;
        // Place `at` of the strip: which lane, and which of its bytes.
        const uint32_t fours = words / 4 * 512, twos = fours + words % 4 / 2 * 256, ones = words * 128;
        uint32_t lane, byte;
        if (at < fours) {
            lane = at % 512 / 16, byte = at / 512 * 16 + at % 16;
        } else if (at < twos) {
            lane = (at - fours) / 8, byte = words / 4 * 16 + (at - fours) % 8;
        } else if (at < ones) {
            lane = (at - twos) / 4, byte = words * 4 - 4 + at % 4;
        } else {
            lane = (at - ones) / 2, byte = words * 4;
        }
        uint32_t v = 0;
        FB_UNROLL
        for (uint32_t k = 0; k < 2; k++) {
            const uint32_t q = (byte + k) / unit;
            const uint32_t tile = octet * 8 + q * 4 + lane % 4, own = byte + k - q * unit;
            const uint32_t row = own / words, place = own - row * words;
            const uint32_t in_tile = a.kind == PLACES ? place * 16 + lane / 4 * 2 + row : lane / 4 * unit + own;
            if (strip < a.strips && tile < a.tiles) {
                const uint32_t b = ldg(a.from + (size_t)strip * a.row_bytes + a.offset + (size_t)tile * tile_bytes + in_tile);
                v |= (a.kind == INTEGERS && b == 0x80 ? 0x81 : b) << (8 * k);
            }
        }
        stg((uint16_t*)(a.to + rest / 2 * a.stride + strip_in_pair * strip_bytes + at), (uint16_t)v);
    }
    // A scale for every 128 / scales_row columns of each row.
    const uint64_t scales = (uint64_t)a.pairs * a.octets * 32 * a.scales_row;
    for (uint64_t i = (uint64_t)block_x() * threads_x() + thread_x(); i < scales; i += (uint64_t)blocks_x() * threads_x()) {
        const uint32_t in_octet = (uint32_t)(i % (32 * a.scales_row));
        const uint64_t item = i / (32 * a.scales_row);
        const uint32_t row = (uint32_t)(item / a.octets) * 32 + in_octet / a.scales_row;
        const uint32_t col = (uint32_t)(item % a.octets) * 128 + in_octet % a.scales_row * (128 / a.scales_row);
        const uint32_t group = a.groups == 1 ? 0 : col / a.group;
        const uint16_t v = row < a.rows && group < a.groups ? ldg(a.scales + (size_t)row * a.groups + group) : (uint16_t)0;
        stg((uint16_t*)(a.to + item * a.stride + 2 * strip_bytes) + in_octet, v);
    }
}

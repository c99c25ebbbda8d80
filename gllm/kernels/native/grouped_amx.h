// Products of weights of few bits by AMX: a group of up to 32 inputs per tile product, whose sums are scaled
// by vectors.
//
// A tile product could sum 64 bytes of the inner dimension, but scales belong to at most 32: tiles are half
// filled. For 16 rows, 16 outputs and 32 inputs vectors take 4 instructions per row (convert, two products,
// add) instead of about 14 with dot products. Integer sums are exact, and numbers are rounded as everywhere.
#pragma once

#include "amx.h"

#ifdef GLLM_AMX

#include "grouped_codes.h"
#include "unrolled.h"

namespace gllm::amx {

static_assert(LANES == TILE);

// Up to TILE quantized rows. Numbers of rows behind the last one are read and not used.
struct RowTile {
    int64_t height;       // rows
    const int8_t* codes;  // [blocks, height, BLOCK]
    const float* scales;  // [blocks, height]
    const float* totals;  // [blocks, parts, height]
};

// to [blocks, BLOCK / QUAD, GROUPED_PANEL, QUAD]: codes without zero.
template <int WIDTH>
inline void unpack(const uint32_t* words, int64_t blocks, int32_t zero, const Table& table, int8_t* to) {
    constexpr int64_t AHEAD = 4096;
    const __m512i subtracted = _mm512_set1_epi8(static_cast<char>(zero));
    for (; blocks-- > 0; words += BLOCK_WORDS<WIDTH> * GROUPED_PANEL) {
        for (int64_t line = 0; line < BLOCK_WORDS<WIDTH> * GROUPED_PANEL * 4; line += ROW_BYTES)
            __builtin_prefetch(reinterpret_cast<const char*>(words) + AHEAD + line, 0, 2);
        for (int half = 0; half < 2; ++half)
            unrolled<HALF_QUADS>([&](auto quad) {
                unrolled<GROUPED_PANEL / LANES>([&](auto v) {
                    const Words codes = unpacked<WIDTH>(words + v * LANES, half, quad, table);
                    _mm512_storeu_si512(to, _mm512_sub_epi8((__m512i)codes, subtracted));
                    to += ROW_BYTES;
                });
            });
    }
}

// Register 0 or 1 = the sums of TILE rows and TILE outputs over a group; x: rows BLOCK bytes apart.
template <int REGISTER>
inline void multiply_group(const int8_t* x, const int8_t* weights) {
    constexpr int64_t WEIGHT_ROW = GROUPED_PANEL * QUAD;
    if constexpr (REGISTER == 0) {
        _tile_zero(0);
        _tile_loadd(4, x, BLOCK);
        _tile_loadd(6, weights, WEIGHT_ROW);
        _tile_dpbssd(0, 4, 6);
    } else {
        _tile_zero(1);
        _tile_loadd(5, x, BLOCK);
        _tile_loadd(7, weights, WEIGHT_ROW);
        _tile_dpbssd(1, 5, 7);
    }
}

// to [TILE, TILE] = register 0 or 1.
template <int REGISTER>
inline void store_group(int32_t* to) {
    if constexpr (REGISTER == 0)
        _tile_stored(0, to, ROW_BYTES);
    else
        _tile_stored(1, to, ROW_BYTES);
}

// Add products to sums [TILE, GROUPED_PANEL], of which LANES columns are computed.
// weights: as of `unpack`; scales [blocks, PARTS, GROUPED_PANEL]; both from the first of these outputs on.
template <int PARTS>
inline void multiply_groups(const RowTile& rows, const int8_t* weights, const float* scales, int64_t blocks,
                            float* to) {
    constexpr int64_t WEIGHTS = BLOCK * GROUPED_PANEL / PARTS;
    alignas(64) int32_t whole[2][TILE * TILE];
    const int64_t groups = blocks * PARTS;
    Vector sums[TILE];
    unrolled<TILE>([&](auto r) { sums[r] = load(to + r * GROUPED_PANEL); });
    const auto multiply = [&](auto turn, int64_t group) __attribute__((always_inline)) {
        if (group >= groups) return;
        const int64_t part = group % PARTS * (BLOCK / PARTS);
        multiply_group<turn>(rows.codes + group / PARTS * rows.height * BLOCK + part, weights + group * WEIGHTS);
    };
    // The sums of a group are scaled while those of the next one are stored and those of the one after it are
    // made: a store waits for its product, and would keep the processor from looking further ahead.
    const auto add = [&](auto turn, int64_t group) __attribute__((always_inline)) {
        multiply(turn, group + 2);
        if (group + 1 < groups) store_group<1 - turn>(whole[1 - turn]);
        finish_stores();
        const Vector scale = load(scales + group * GROUPED_PANEL);
        const float* row_scales = rows.scales + group / PARTS * rows.height;
        unrolled<TILE>([&](auto r) {
            const Integers sum = *reinterpret_cast<const Integers*>(whole[turn] + r * TILE);
            sums[r] += __builtin_convertvector(sum, Vector) * (scale * row_scales[r]);
        });
        finish_stores();
    };
    const std::integral_constant<int, 0> even;
    const std::integral_constant<int, 1> odd;
    finish_stores();
    multiply(even, 0);
    multiply(odd, 1);
    store_group<0>(whole[0]);
    for (int64_t group = 0; group < groups; group += 2) {
        add(even, group);
        if (group + 1 < groups) add(odd, group + 1);
    }
    unrolled<TILE>([&](auto r) { store(to + r * GROUPED_PANEL, sums[r]); });
}

// Subtract minimums [blocks, PARTS, GROUPED_PANEL] times the totals of rows from sums, as above.
template <int PARTS>
inline void subtract_minimums(const RowTile& rows, const float* minimums, int64_t blocks, float* to) {
    const float* totals = rows.totals;
    Vector sums[TILE];
    unrolled<TILE>([&](auto r) { sums[r] = load(to + r * GROUPED_PANEL); });
    for (int64_t left = blocks * PARTS; left-- > 0; minimums += GROUPED_PANEL, totals += rows.height) {
        const Vector least = load(minimums);
        unrolled<TILE>([&](auto r) { sums[r] -= least * totals[r]; });
    }
    unrolled<TILE>([&](auto r) { store(to + r * GROUPED_PANEL, sums[r]); });
}

}  // namespace gllm::amx

#endif

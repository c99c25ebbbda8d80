// C = A B, or C += A B, for small matrices that were packed for it.
//
// Owns the inner loops and the form of packed numbers. A *unit* is what one step along the inner
// dimension takes: one float, or two neighbouring bfloat16 where the processor multiplies those.
#pragma once

#include "simd.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace gllm {

// Rows and vectors of a tile, so that its sums fit into the registers.
#if defined(__AVX512F__)
constexpr int TILE = 6, WIDE = 4;
#elif defined(__AVX__)
constexpr int TILE = 6, WIDE = 1;
#else
constexpr int TILE = 2, WIDE = 1;
#endif

template <class T>
struct Packing {
    using Unit = float;
    static constexpr int PER_UNIT = 1;
};

inline Vector multiply_add(Vector sum, float a, const float* b) { return sum + a * load(b); }
inline Vector multiply_add(Vector sum, bfloat16 a, const bfloat16* b) {
    return sum + to_float(a) * load(b);
}

#ifdef __AVX512BF16__
template <>
struct Packing<bfloat16> {
    using Unit = uint32_t;
    static constexpr int PER_UNIT = 2;
};

inline Vector multiply_add(Vector sum, uint32_t a, const uint32_t* b) {
    const auto left = (__m512bh)_mm512_set1_epi32(static_cast<int>(a));
    const auto right = (__m512bh)_mm512_loadu_si512(b);
    return (Vector)_mm512_dpbf16_ps((__m512)sum, left, right);
}
#endif

// ROWS rows and VECTORS * LANES columns of C; inner: units.
template <int ROWS, int VECTORS, class Unit>
inline void multiply_tile(const Unit* a, int64_t a_row, const Unit* b, int64_t b_row, float* c,
                          int64_t c_row, int64_t inner, bool add) {
    Vector sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            sums[r][v] = add ? load(c + r * c_row + v * LANES) : Vector{};
    for (int64_t k = 0; k < inner; ++k)
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v)
                sums[r][v] = multiply_add(sums[r][v], a[r * a_row + k], b + k * b_row + v * LANES);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(c + r * c_row + v * LANES, sums[r][v]);
}

template <int VECTORS, class Unit>
inline void multiply_columns(const Unit* a, int64_t a_row, const Unit* b, int64_t b_row, float* c,
                             int64_t c_row, int64_t rows, int64_t inner, bool add) {
    int64_t r = 0;
    for (; r + TILE <= rows; r += TILE)
        multiply_tile<TILE, VECTORS>(a + r * a_row, a_row, b, b_row, c + r * c_row, c_row, inner, add);
    for (; r + 2 <= rows; r += 2)
        multiply_tile<2, VECTORS>(a + r * a_row, a_row, b, b_row, c + r * c_row, c_row, inner, add);
    for (; r < rows; ++r)
        multiply_tile<1, VECTORS>(a + r * a_row, a_row, b, b_row, c + r * c_row, c_row, inner, add);
}

// a [rows, inner], b [inner, columns], c [rows, columns]; columns: a multiple of LANES.
template <class Unit>
inline void multiply(const Unit* a, int64_t a_row, const Unit* b, int64_t b_row, float* c,
                     int64_t c_row, int64_t rows, int64_t columns, int64_t inner, bool add) {
    int64_t n = 0;
    for (; n + WIDE * LANES <= columns; n += WIDE * LANES)
        multiply_columns<WIDE>(a, a_row, b + n, b_row, c + n, c_row, rows, inner, add);
    for (; n < columns; n += LANES)
        multiply_columns<1>(a, a_row, b + n, b_row, c + n, c_row, rows, inner, add);
}

}  // namespace gllm

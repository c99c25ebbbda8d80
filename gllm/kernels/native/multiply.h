// C = A B, or C += A B, for small packed matrices.
//
// A *unit* is one step along the inner dimension: one float, or two neighbouring bfloat16 where the
// processor multiplies those.
#pragma once

#include <utility>

#include "simd.h"

namespace gllm {

// Rows and vectors of a tile, so that its sums fit into the registers; few rows take more vectors.
#if defined(__AVX512F__)
constexpr int TALL = 14, TALL_VECTORS = 2, FLAT = 6, FLAT_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int TALL = 6, TALL_VECTORS = 2, FLAT = 3, FLAT_VECTORS = 4;
#elif defined(__aarch64__)
constexpr int TALL = 6, TALL_VECTORS = 4, FLAT = 3, FLAT_VECTORS = 8;
#else
constexpr int TALL = 3, TALL_VECTORS = 4, FLAT = 1, FLAT_VECTORS = 8;
#endif

// Numbers of 16 bits are floats in units, unless the processor multiplies them itself.
template <class T>
struct Packing {
    using Unit = float;
    static constexpr int PER_UNIT = 1;
};

// LANES units of B, as they are multiplied: one register.
inline Vector load_operand(const float* b) { return load(b); }
inline Vector load_operand(const bfloat16* b) { return load(b); }
inline Vector load_operand(const float16* b) { return load(b); }
inline Vector multiply_add(Vector sum, float a, Vector b) { return sum + a * b; }

#ifdef __AVX512BF16__
template <>
struct Packing<bfloat16> {
    using Unit = uint32_t;
    static constexpr int PER_UNIT = 2;
};

inline __m512i load_operand(const uint32_t* b) { return _mm512_loadu_si512(b); }
inline Vector multiply_add(Vector sum, uint32_t a, __m512i b) {
    const auto left = (__m512bh)_mm512_set1_epi32(static_cast<int>(a));
    return (Vector)_mm512_dpbf16_ps((__m512)sum, left, (__m512bh)b);
}
#endif

// LANES units from numbers as they are in memory.
template <class T>
inline Vector load_units(const T* from) {
    if constexpr (Packing<T>::PER_UNIT == 1)
        return load(from);
    else
        return load(reinterpret_cast<const float*>(from));
}

// What will be needed soon, asked for row by row while something else is computed: many requests at
// once would hold up the loads behind them.
class Wanted {
  public:
    Wanted() = default;
    Wanted(const char* const* rows, int64_t count, int64_t bytes)
        : row(rows), end(rows + count), size(bytes) {}

    void step() {
        if (row == end) return;
        for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch(*row + byte, 0, 2);
        ++row;
    }

  private:
    const char *const *row = nullptr, *const *end = nullptr;
    int64_t size = 0;
};

// ROWS rows and VECTORS * LANES columns of C; inner: units.
template <int ROWS, int VECTORS, class Unit>
inline void multiply_tile(const Unit* a, int64_t a_row, const Unit* b, int64_t b_row, float* c,
                          int64_t c_row, int64_t inner, bool add, Wanted& wanted) {
    Vector sums[ROWS][VECTORS];
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            sums[r][v] = add ? load(c + r * c_row + v * LANES) : Vector{};
    for (int64_t k = 0; k < inner; ++k) {
        wanted.step();
        decltype(load_operand(b)) operands[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) operands[v] = load_operand(b + k * b_row + v * LANES);
#pragma GCC unroll 32
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                sums[r][v] = multiply_add(sums[r][v], a[r * a_row + k], operands[v]);
    }
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(c + r * c_row + v * LANES, sums[r][v]);
}

template <class Unit>
using TileOf = void (*)(const Unit*, int64_t, const Unit*, int64_t, float*, int64_t, int64_t, bool,
                        Wanted&);

// By rows.
template <int VECTORS, class Unit, int... ROWS>
inline TileOf<Unit> tile_of(int64_t rows, std::integer_sequence<int, ROWS...>) {
    static constexpr TileOf<Unit> all[] = {multiply_tile<ROWS + 1, VECTORS, Unit>...};
    return all[rows - 1];
}

// From column `n` on as far as VECTORS go; returns where they end. Tiles are of like heights.
template <int HEIGHT, int VECTORS, class Unit>
inline int64_t multiply_columns(const Unit* a, int64_t a_row, const Unit* b, int64_t b_row, float* c,
                                int64_t c_row, int64_t rows, int64_t columns, int64_t n,
                                int64_t inner, bool add, Wanted& wanted) {
    const int64_t tiles = (rows + HEIGHT - 1) / HEIGHT;
    for (; n + VECTORS * LANES <= columns; n += VECTORS * LANES)
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
            tile_of<VECTORS, Unit>(count, std::make_integer_sequence<int, HEIGHT>())(
                a + first * a_row, a_row, b + n, b_row, c + first * c_row + n, c_row, inner, add,
                wanted);
        }
    return n;
}

// a [rows, inner], b [inner, columns], c [rows, columns]; columns: a multiple of LANES. Meanwhile
// what is wanted is fetched, as far as it gets.
template <class Unit>
inline void multiply(const Unit* a, int64_t a_row, const Unit* b, int64_t b_row, float* c,
                     int64_t c_row, int64_t rows, int64_t columns, int64_t inner, bool add,
                     Wanted wanted) {
    int64_t n = 0;
    if (rows <= FLAT)
        n = multiply_columns<FLAT, FLAT_VECTORS>(a, a_row, b, b_row, c, c_row, rows, columns, n,
                                                 inner, add, wanted);
    n = multiply_columns<TALL, TALL_VECTORS>(a, a_row, b, b_row, c, c_row, rows, columns, n, inner,
                                             add, wanted);
    multiply_columns<TALL, 1>(a, a_row, b, b_row, c, c_row, rows, columns, n, inner, add, wanted);
}

}  // namespace gllm

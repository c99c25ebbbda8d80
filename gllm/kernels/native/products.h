// Products of the small matrices of attention: by vectors, or by AMX if the build has it.
//
// Callers pad their matrices as described below.
#pragma once

#include "amx.h"
#include "multiply.h"

namespace gllm {

// Products of one thread, as `multiply` in multiply.h.
template <class Unit>
class Products {
  public:
    static constexpr int64_t INNER = 1;  // inner is a multiple of it
    // Rows that a and c have memory for.
    static int64_t padded(int64_t rows) { return rows; }

    void multiply(const Unit* a, int64_t a_row, const Unit* b, int64_t b_row, float* c, int64_t c_row,
                  int64_t rows, int64_t columns, int64_t inner, bool add, Wanted wanted) {
        gllm::multiply(a, a_row, b, b_row, c, c_row, rows, columns, inner, add, wanted);
    }
};

#ifdef GLLM_AMX
template <>
class Products<uint32_t> {
  public:
    static constexpr int64_t INNER = amx::TILE;
    static int64_t padded(int64_t rows) {
        return rows <= amx::TILE ? rows : (rows + amx::TILE - 1) / amx::TILE * amx::TILE;
    }

    void multiply(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, float* c,
                  int64_t c_row, int64_t rows, int64_t columns, int64_t inner, bool add,
                  Wanted wanted) {
        registers.shape(std::min(rows, amx::TILE));
        const amx::Strides strides{a_row * 4, amx::ROW_BYTES, b_row * 4};
        const auto prefetch = [&](int64_t) {
            for (int64_t unit = 0; unit < amx::TILE; ++unit) wanted.step();
        };
        for (int64_t r = 0; r < rows; r += 2 * amx::TILE)
            for (int64_t n = 0; n < columns; n += 2 * amx::TILE) {
                const auto run = tile_of<std::decay_t<decltype(prefetch)>>(rows - r, columns - n);
                const char* upper = reinterpret_cast<const char*>(a + r * a_row);
                const char* first = reinterpret_cast<const char*>(b + n);
                const char* both[] = {first, first + amx::ROW_BYTES};
                run(upper, upper + amx::TILE * strides.a_row, both, strides, inner / amx::TILE,
                    c + r * c_row + n, c_row, add, prefetch);
            }
    }

  private:
    amx::Registers registers;

    // The product of one or two tiles of rows and of columns, by how many are left.
    template <class Prefetch>
    static amx::Multiply<Prefetch> tile_of(int64_t rows_left, int64_t columns_left) {
        const bool is_tall = rows_left > amx::TILE;
        if (columns_left > amx::TILE)
            return is_tall ? amx::multiply<2, 2, Prefetch> : amx::multiply<1, 2, Prefetch>;
        return is_tall ? amx::multiply<2, 1, Prefetch> : amx::multiply<1, 1, Prefetch>;
    }
};
#endif

}  // namespace gllm

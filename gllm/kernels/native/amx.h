// Products of matrices by AMX: tiles of up to 16 rows by 64 bytes. Of bfloat16 here, of 8-bit codes in
// grouped_amx.h.
//
// B is stored in units as in multiply.h, two neighbouring bfloat16 each: 16 rows of 16 units are one AMX
// tile. A tile of A has only the rows that exist, so few rows load few bytes. Products are summed in the
// order of the inner dimension, 16 units at a time, so a sum does not depend on other rows.
// Source: Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 1, chapter 18.
#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define GLLM_AMX

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace gllm::amx {

constexpr int64_t TILE = 16;           // rows, and units of a row
constexpr int64_t TILE_UNITS = TILE * TILE;
constexpr int64_t ROW_BYTES = 64;

// The compiler does not know that tile loads read memory.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Tile registers of this thread while the object lives. Registers 0 and 1 are C of the upper rows
// beside two tiles of columns, 2 and 3 C of the lower rows, 4 and 5 A, 6 and 7 B.
class Registers {
  public:
    Registers() = default;
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
    ~Registers() { if (rows[0]) _tile_release(); }

    // Rows of the upper and of the lower tiles, from 1 to TILE. inner: bytes of a row of A, and four
    // times the rows of B.
    void shape(int64_t upper, int64_t lower = TILE, int64_t inner = ROW_BYTES) {
        if (rows[0] == upper && rows[1] == lower && rows[2] == inner / 4) return;
        rows[0] = upper, rows[1] = lower, rows[2] = inner / 4;
        struct alignas(64) {
            uint8_t palette = 1, first_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; ++i) {
            const bool is_upper = i < 2 || i == 4, is_lower = i == 2 || i == 3 || i == 5;
            config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? inner : ROW_BYTES);
            config.rows[i] = static_cast<uint8_t>(is_upper ? upper : is_lower ? lower : inner / 4);
        }
        finish_stores();
        _tile_loadconfig(&config);
    }

  private:
    int64_t rows[3] = {};  // upper, lower, of B
};

// Bytes from row to row of A and B, and from tile to tile of A along the inner dimension. A tile of
// B comes after TILE rows of it.
struct Strides {
    int64_t a_row, a_tile, b_row;
};

// C [upper rows + lower rows, COLUMNS * TILE] += A B, or = where `add` is false; c_row: floats from
// row to row. ROWS: 1 where there are upper rows only. b: for each tile of columns. Before each of
// `steps` tiles of the inner dimension `prefetch(step)` is called.
template <int ROWS, int COLUMNS, class Prefetch>
inline void multiply(const char* upper, const char* lower, const char* const* b, Strides stride,
                     int64_t steps, float* c, int64_t c_row, bool add, const Prefetch& prefetch) {
    const int64_t c_bytes = c_row * 4;
    float* const c_lower = c + TILE * c_row;
    finish_stores();
    if (add) {
        _tile_loadd(0, c, c_bytes);
        if constexpr (COLUMNS == 2) _tile_loadd(1, c + TILE, c_bytes);
        if constexpr (ROWS == 2) _tile_loadd(2, c_lower, c_bytes);
        if constexpr (ROWS == 2 && COLUMNS == 2) _tile_loadd(3, c_lower + TILE, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step) {
        prefetch(step);
        const int64_t a_at = step * stride.a_tile, b_at = step * TILE * stride.b_row;
        _tile_loadd(6, b[0] + b_at, stride.b_row);
        _tile_loadd(4, upper + a_at, stride.a_row);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (COLUMNS == 2) {
            _tile_loadd(7, b[1] + b_at, stride.b_row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (ROWS == 2) {
            _tile_loadd(5, lower + a_at, stride.a_row);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (COLUMNS == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_bytes);
    if constexpr (COLUMNS == 2) _tile_stored(1, c + TILE, c_bytes);
    if constexpr (ROWS == 2) _tile_stored(2, c_lower, c_bytes);
    if constexpr (ROWS == 2 && COLUMNS == 2) _tile_stored(3, c_lower + TILE, c_bytes);
}

template <class Prefetch>
using Multiply = void (*)(const char*, const char*, const char* const*, Strides, int64_t, float*, int64_t,
                          bool, const Prefetch&);

}  // namespace gllm::amx

#endif

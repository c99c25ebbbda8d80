// Layout of packed weights, read by linear.cpp and written by pack.cpp.
//
// A panel is [units, PANEL]; a unit is one step along the inputs.
#pragma once

#include <algorithm>
#include <type_traits>

#include "multiply.h"

namespace gllm {

constexpr int64_t PANEL = 16;  // outputs, as in linear.py
constexpr int PANEL_VECTORS = PANEL / LANES;
constexpr int MOST_TURNED = 32;

inline int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// One step along the inputs. Weights stay as small as they are in memory; inputs, and weights that
// stay in the caches, are units as in multiply.h.
template <class T>
struct Step {
    using Unit = typename Packing<T>::Unit;
    static constexpr int64_t PER = Packing<T>::PER_UNIT;
    static constexpr bool WIDENED = PER == 1 && !std::is_same_v<T, float>;
    using Weight = std::conditional_t<WIDENED, T, Unit>;
};

// The first `count` of LANES units.
template <class T>
Vector load_units(const T* from, int64_t count) {
    if (count >= LANES) return load_units(from);
    T some[LANES * Step<T>::PER] = {};
    std::copy(from, from + count * Step<T>::PER, some);
    return load_units(some);
}

// x [rows, depth units], of MOST_TURNED rows at most, to [depth, rows]; rows of `to` are written in
// order, each up to a vector beyond it.
template <class T, class Unit>
void turn(const T* x, int64_t x_row, int64_t rows, int64_t depth, Unit* to) {
    static_assert(sizeof(Unit) == sizeof(float));
    Vector blocks[MOST_TURNED / LANES][LANES] = {};
    for (int64_t k = 0; k < depth; k += LANES) {
        const int64_t some = std::min<int64_t>(depth - k, LANES);
        for (int64_t r = 0; r < rows; ++r)
            blocks[r / LANES][r % LANES] = load_units(x + r * x_row + k * Step<T>::PER, some);
        for (int64_t first = 0; first < rows; first += LANES) transpose(blocks[first / LANES]);
        for (int64_t i = 0; i < some; ++i, to += rows)
            for (int64_t first = 0; first < rows; first += LANES)
                std::memcpy(to + first, &blocks[first / LANES][i], sizeof(Vector));
    }
}

}  // namespace gllm

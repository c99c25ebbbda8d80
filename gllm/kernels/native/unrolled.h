// Loops unrolled at compile time, so that the arrays they index can stay in registers.
//
// The compiler unrolls loops of this size too late for that, or not at all.
#pragma once

#include <type_traits>

namespace gllm {

// f(0), ..., f(COUNT - 1), each number known when compiling.
template <int COUNT, class F>
__attribute__((always_inline)) inline void unrolled(const F& f) {
    if constexpr (COUNT > 0) {
        unrolled<COUNT - 1>(f);
        f(std::integral_constant<int, COUNT - 1>{});
    }
}

}  // namespace gllm

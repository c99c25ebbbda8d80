// Numbers on activations of 8 bits, for weights of 8 bits (int8.cpp) and of fewer (grouped.cpp).
#pragma once

#include <cstdint>

namespace gllm {

constexpr float LARGEST = 127.0f;             // code of the largest number that shares a scale
constexpr float SMALLEST = 7.52316385e-37f;   // 2^-120: if all are below it, they count as zeros
constexpr int64_t ROW_CHUNK = 192;            // rows of a task
constexpr int64_t QUANTIZED_ALONE = 1 << 14;  // elements from which on threads are worth waking

// Write the heads [heads, dim] of a token to slot `slot` of a cache [slots, heads, dim + 4 bytes]: codes of 8
// bits, then their scale (int8.cpp).
template <class T>
void store_codes(const T* x, int64_t heads, int64_t dim, void* cache, int64_t slot);

}  // namespace gllm

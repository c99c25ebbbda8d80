// Numbers on activations of 8 bits, for weights of 8 bits (int8.cpp) and of fewer (grouped.cpp).
#pragma once

#include <cstdint>

#include "simd.h"

namespace gllm {

constexpr float LARGEST = 127.0f;             // code of the largest number that shares a scale
constexpr float SMALLEST = 7.52316385e-37f;   // 2^-120: if all are below it, they count as zeros
constexpr int64_t ROW_CHUNK = 192;            // rows of a task
constexpr int64_t QUANTIZED_ALONE = 1 << 14;  // elements from which on threads are worth waking

typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1)));

#if defined(__SSE2__) && !defined(__AVX512F__)
inline Bytes first_bytes(__m128i all) {
    Bytes bytes;
    std::memcpy(&bytes, &all, sizeof(bytes));
    return bytes;
}
#endif

// The lowest byte of each word.
inline Bytes low_bytes(Words words) {
#if defined(__AVX512F__)
    return (Bytes)_mm512_cvtepi32_epi8((__m512i)words);
#elif defined(__SSE2__)
    const auto halves = narrowed(words & 0xff);
    __m128i wide{};
    std::memcpy(&wide, &halves, sizeof(halves));
    wide = _mm_packus_epi16(wide, wide);
    return first_bytes(wide);
#else
    return __builtin_convertvector(words, Bytes);
#endif
}

// The largest word. Of magnitudes as bits: what is not finite is larger than all that is.
inline uint32_t largest_word(Words words) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)words);
#else
    uint32_t most = words[0];
    for (int lane = 1; lane < LANES; ++lane) most = words[lane] > most ? words[lane] : most;
    return most;
#endif
}

// Write the heads [heads, dim] of a token to slot `slot` of a cache [slots, heads, dim + 4 bytes]: codes of 8
// bits, then their scale (int8.cpp).
template <class T>
void store_codes(const T* x, int64_t heads, int64_t dim, void* cache, int64_t slot);

}  // namespace gllm

// Products of 8-bit numbers, summed over four neighbouring inputs for 16 outputs at once.
//
// Owns what depends on the instruction set. Every way gives the same sums: none saturates.
#pragma once

#include "simd.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace gllm {

constexpr int64_t GROUP = 4;   // inputs that are multiplied and summed at once
constexpr int64_t PANEL = 64;  // outputs whose weights lie together, group by group
constexpr int32_t ZERO = 128;  // the code of an activation of 0

typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1)));

// The lowest byte of each word.
inline Bytes low_bytes(Words words) {
#ifdef __AVX512F__
    return (Bytes)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)words);
#else
    return __builtin_convertvector(__builtin_convertvector(words, Halves), Bytes);
#endif
}

// SUMS_BIASED: codes are multiplied as they are, ZERO included.
// ROWS, VECTORS: of a tile, so that its sums fit into the registers.
#if defined(__AVX512VNNI__)

constexpr bool SUMS_BIASED = true;
constexpr int ROWS = 6, VECTORS = 4;
using Sums = __m512i;
using Weights = __m512i;

struct Codes {
    __m512i codes;
    explicit Codes(const uint8_t* from) : codes(_mm512_set1_epi32(as_word(from))) {}
    static int32_t as_word(const uint8_t* from) {
        int32_t word;
        std::memcpy(&word, from, sizeof(word));
        return word;
    }
};

inline Sums load_sums(const int32_t* from) { return _mm512_loadu_si512(from); }
inline void store(int32_t* to, Sums sums) { _mm512_storeu_si512(to, sums); }
inline Weights load_weights(const int8_t* from) {
    Weights weights = _mm512_loadu_si512(from);
    // Else the compiler has them read again for every row.
    asm("" : "+v"(weights));
    return weights;
}
inline Sums dot(Sums sums, const Codes& x, Weights weights) {
    return _mm512_dpbusd_epi32(sums, x.codes, weights);
}

#elif defined(__AVX2__)

constexpr bool SUMS_BIASED = false;
constexpr int ROWS = 2, VECTORS = 2;

struct Sums {
    __m256i low, high;
};
using Weights = Sums;

struct Codes {
    __m256i number, size;
    explicit Codes(const uint8_t* from) {
        int32_t word;
        std::memcpy(&word, from, sizeof(word));
        number = _mm256_xor_si256(_mm256_set1_epi32(word), _mm256_set1_epi8(-ZERO));
        size = _mm256_abs_epi8(number);
    }
};

inline Sums load_sums(const int32_t* from) {
    const auto* half = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1)};
}
inline void store(int32_t* to, Sums sums) {
    auto* half = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(half, sums.low);
    _mm256_storeu_si256(half + 1, sums.high);
}
inline Weights load_weights(const int8_t* from) {
    return load_sums(reinterpret_cast<const int32_t*>(from));
}
// |x| * (w with the sign of x): at most 2 * 127^2 for a pair, which 16 bits hold.
inline __m256i dot(__m256i sums, const Codes& x, __m256i weights) {
    const __m256i pairs = _mm256_maddubs_epi16(x.size, _mm256_sign_epi8(weights, x.number));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Sums dot(Sums sums, const Codes& x, Weights weights) {
    return {dot(sums.low, x, weights.low), dot(sums.high, x, weights.high)};
}

#else

constexpr bool SUMS_BIASED = false;
constexpr int ROWS = 2, VECTORS = 1;

struct Sums {
    int32_t lanes[LANES];
};
using Weights = const int8_t*;

struct Codes {
    int32_t numbers[GROUP];
    explicit Codes(const uint8_t* from) {
        for (int64_t i = 0; i < GROUP; ++i) numbers[i] = from[i] - ZERO;
    }
};

inline Sums load_sums(const int32_t* from) {
    Sums sums;
    std::memcpy(&sums, from, sizeof(sums));
    return sums;
}
inline void store(int32_t* to, const Sums& sums) { std::memcpy(to, &sums, sizeof(sums)); }
inline Weights load_weights(const int8_t* from) { return from; }
inline Sums dot(Sums sums, const Codes& x, Weights weights) {
    for (int lane = 0; lane < LANES; ++lane)
        for (int64_t i = 0; i < GROUP; ++i)
            sums.lanes[lane] += x.numbers[i] * weights[lane * GROUP + i];
    return sums;
}

#endif

}  // namespace gllm

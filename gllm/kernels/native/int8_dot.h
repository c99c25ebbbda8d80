// Dot products of 8-bit numbers over four neighbouring inputs, for LANES outputs at once.
//
// There is one implementation per instruction set. All give the same sums: none saturates.
#pragma once

#include "eight_bits.h"

namespace gllm {

constexpr int64_t GROUP = 4;   // inputs that are multiplied and summed at once
constexpr int64_t PANEL = 64;  // outputs whose weights lie together, group by group
constexpr int32_t ZERO = 128;  // the code of an activation of 0

// The codes of a group.
inline int32_t word_of(const uint8_t* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof(word));
    return word;
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
    explicit Codes(const uint8_t* from) : codes(_mm512_set1_epi32(word_of(from))) {}
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

#elif defined(__AVX512BW__)

constexpr bool SUMS_BIASED = false;
constexpr int ROWS = 5, VECTORS = 4;
using Sums = __m512i;
using Weights = __m512i;

struct Codes {
    __m512i size;
    __mmask64 negative;
    explicit Codes(const uint8_t* from) {
        const auto number =
            _mm512_xor_si512(_mm512_set1_epi32(word_of(from)), _mm512_set1_epi8(-ZERO));
        negative = _mm512_movepi8_mask(number);
        size = _mm512_abs_epi8(number);
    }
};

inline Sums load_sums(const int32_t* from) { return _mm512_loadu_si512(from); }
inline void store(int32_t* to, Sums sums) { _mm512_storeu_si512(to, sums); }
inline Weights load_weights(const int8_t* from) { return _mm512_loadu_si512(from); }
// |x| * (w with the sign of x): at most 2 * 127^2 for a pair, which 16 bits hold.
inline Sums dot(Sums sums, const Codes& x, Weights weights) {
    const auto turned =
        _mm512_mask_sub_epi8(weights, x.negative, _mm512_setzero_si512(), weights);
    const auto pairs = _mm512_maddubs_epi16(x.size, turned);
    return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}

#elif defined(__AVX2__)

constexpr bool SUMS_BIASED = false;
constexpr int ROWS = 4, VECTORS = 2;
using Sums = __m256i;
using Weights = __m256i;

struct Codes {
    __m256i number, size;
    explicit Codes(const uint8_t* from) {
        number = _mm256_xor_si256(_mm256_set1_epi32(word_of(from)), _mm256_set1_epi8(-ZERO));
        size = _mm256_abs_epi8(number);
    }
};

inline Sums load_sums(const int32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline void store(int32_t* to, Sums sums) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), sums);
}
inline Weights load_weights(const int8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
// As above.
inline Sums dot(Sums sums, const Codes& x, Weights weights) {
    const auto pairs = _mm256_maddubs_epi16(x.size, _mm256_sign_epi8(weights, x.number));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#elif defined(__SSE2__)

constexpr bool SUMS_BIASED = false;
constexpr int ROWS = 4, VECTORS = 1;

// Of the first two inputs, and of the other two, in turns.
struct Sums {
    __m128i low, high;
};
struct Weights {
    __m128i low, high;
};

struct Codes {
    __m128i numbers;
    explicit Codes(const uint8_t* from) {
        const __m128i codes = _mm_unpacklo_epi8(_mm_set1_epi32(word_of(from)), _mm_setzero_si128());
        numbers = _mm_sub_epi16(codes, _mm_set1_epi16(ZERO));
    }
};

// Sums come apart no more once they are whole: they begin in the even places.
inline Sums load_sums(const int32_t* from) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i none = _mm_setzero_si128();
    return {_mm_unpacklo_epi32(all, none), _mm_unpackhi_epi32(all, none)};
}
inline void store(int32_t* to, const Sums& sums) {
    const __m128 low = _mm_castsi128_ps(sums.low), high = _mm_castsi128_ps(sums.high);
    const __m128i even = _mm_castps_si128(_mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)));
    const __m128i odd = _mm_castps_si128(_mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_add_epi32(even, odd));
}
inline Weights load_weights(const int8_t* from) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i sign = _mm_cmpgt_epi8(_mm_setzero_si128(), all);
    return {_mm_unpacklo_epi8(all, sign), _mm_unpackhi_epi8(all, sign)};
}
inline Sums dot(const Sums& sums, const Codes& x, const Weights& weights) {
    return {_mm_add_epi32(sums.low, _mm_madd_epi16(x.numbers, weights.low)),
            _mm_add_epi32(sums.high, _mm_madd_epi16(x.numbers, weights.high))};
}

#else

constexpr bool SUMS_BIASED = false;
constexpr int ROWS = 4, VECTORS = 2;

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

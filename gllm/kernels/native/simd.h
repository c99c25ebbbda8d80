// Vectors of the width of the instruction set, and the dtypes float32, bfloat16 and float16.
//
// A vector fills one register: 64 bytes with AVX-512, 32 with AVX2, 16 with SSE and NEON. Wider vectors
// would live on the stack.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gllm {

#if defined(__AVX512F__)
#define GLLM_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define GLLM_VECTOR_BYTES 32
#else
#define GLLM_VECTOR_BYTES 16
#endif

constexpr int LANES = GLLM_VECTOR_BYTES / 4;
typedef float Vector __attribute__((vector_size(GLLM_VECTOR_BYTES), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(GLLM_VECTOR_BYTES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(GLLM_VECTOR_BYTES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(GLLM_VECTOR_BYTES / 2), aligned(2)));

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };  // as in library.py

// Call f with a number of the type that `dtype` names.
template <class F>
inline void with_dtype(int32_t dtype, const F& f) {
    if (dtype == BFLOAT16)
        f(bfloat16{});
    else if (dtype == FLOAT16)
        f(float16{});
    else
        f(float{});
}

template <class To, class From>
inline To as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

inline Vector broadcast(float value) { return Vector{} + value; }

// 16-bit numbers to words and back. Words have to fit.
inline Words widened(Halves halves) {
#if defined(__AVX512F__)
    return __builtin_convertvector(halves, Words);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)halves);
#elif defined(__SSE2__)
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&halves));
    return (Words)_mm_unpacklo_epi16(low, _mm_setzero_si128());
#else
    return __builtin_convertvector(halves, Words);
#endif
}
inline Halves narrowed(Words words) {
#if defined(__AVX512F__)
    return __builtin_convertvector(words, Halves);
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_packus_epi32((__m256i)words, (__m256i)words);
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
#elif defined(__SSE2__)
    // Only signed words can be packed: the sign is what was the highest of 16 bits.
    const __m128i wide = _mm_srai_epi32(_mm_slli_epi32((__m128i)words, 16), 16);
    Halves halves;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(&halves), _mm_packs_epi32(wide, wide));
    return halves;
#else
    return __builtin_convertvector(words, Halves);
#endif
}
inline Halves load_halves(const void* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    return halves;
}

inline Words chosen(Integers condition, Words yes, Words no) {
    const Words mask = as<Words>(condition);
    return (yes & mask) | (no & ~mask);
}

// Without conversions in hardware; subnormal ones are exact too, whatever the processor's mode.
// Source: Giesen, "Half to float done quick" (2012), and its inverse.
inline Vector float16_to_float(Words halves) {
    const Words magnitude = (halves & 0x7fff) << 13, exponent = magnitude & (0x7c00u << 13);
    const Words moved = magnitude + ((127u - 15u) << 23);
    const Words infinite = moved + ((128u - 16u) << 23);
    const Vector smallest = as<Vector>(Words{} + (113u << 23));
    const Words subnormal = as<Words>(as<Vector>(moved + (1u << 23)) - smallest);
    const Words finite = chosen(as<Integers>(exponent) == 0, subnormal, moved);
    const Words bits =
        chosen(as<Integers>(exponent) == static_cast<int32_t>(0x7c00u << 13), infinite, finite);
    return as<Vector>(bits | (halves & 0x8000) << 16);
}
inline Words float_to_float16(Vector value) {
    const Words bits = as<Words>(value), magnitude = bits & 0x7fffffff;
    const Integers size = as<Integers>(magnitude);
    const Words rounded = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 leaves multiples of the least float16 in the low bits.
    const Words half = Words{} + (126u << 23);
    const Words subnormal = as<Words>(as<Vector>(magnitude) + as<Vector>(half)) - half;
    const Words finite = chosen(size < (113 << 23), subnormal, rounded);
    const Words special = chosen(size > 0x7f800000, Words{} + 0x7e00, Words{} + 0x7c00);
    return chosen(size < (143 << 23), finite, special) | (bits >> 16 & 0x8000);
}

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline Vector load(const bfloat16* from) {
    return as<Vector>(widened(load_halves(from)) << 16);
}
inline Vector load(const float16* from) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtph_ps((__m256i)load_halves(from));
#elif defined(__F16C__)
    return (Vector)_mm256_cvtph_ps((__m128i)load_halves(from));
#else
    return float16_to_float(widened(load_halves(from)));
#endif
}

// Integers become the same numbers.
inline Vector load(const int8_t* from) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
    SignedBytes bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(__builtin_convertvector(bytes, Integers), Vector);
#endif
}

// Stores round to nearest, ties to even; what is not a number stays so.
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
// Below 2^-126 it may become 0.
inline void store(bfloat16* to, Vector value) {
#ifdef __AVX512BF16__
    const auto halves = _mm512_cvtneps_pbh((__m512)value);
#else
    const Words bits = as<Words>(value);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves halves = narrowed(chosen(value == value, rounded, Words{} + 0x7fc0));
#endif
    std::memcpy(to, &halves, sizeof(halves));
}
inline void store(float16* to, Vector value) {
#if defined(__AVX512F__)
    const auto halves = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    const auto halves = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
    const Halves halves = narrowed(float_to_float16(value));
#endif
    std::memcpy(to, &halves, sizeof(halves));
}

inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) {
    return as<float>(static_cast<uint32_t>(value.bits) << 16);
}
inline float to_float(float16 value) {
#ifdef __F16C__
    return _cvtsh_ss(value.bits);
#else
    return float16_to_float(Words{} + static_cast<uint32_t>(value.bits))[0];
#endif
}
inline void assign(float& to, float value) { to = value; }
inline void assign(bfloat16& to, float value) {
    const uint32_t bits = as<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = value == value ? static_cast<uint16_t>(rounded) : 0x7fc0;
}
inline void assign(float16& to, float value) {
#ifdef __F16C__
    to.bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    to.bits = static_cast<uint16_t>(float_to_float16(broadcast(value))[0]);
#endif
}

#ifdef __AVX512F__
inline float sum(Vector value) { return _mm512_reduce_add_ps((__m512)value); }
inline float largest(Vector value) { return _mm512_reduce_max_ps((__m512)value); }
#else
inline float sum(Vector value) {
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += value[lane];
    return total;
}
inline float largest(Vector value) {
    float most = value[0];
    for (int lane = 1; lane < LANES; ++lane) most = value[lane] > most ? value[lane] : most;
    return most;
}
#endif

// Numbers of one in the low halves of words, those of the other in the high ones.
inline Vector interleaved(const bfloat16* low, const bfloat16* high) {
    return as<Vector>(widened(load_halves(low)) | widened(load_halves(high)) << 16);
}

// LANES rows become columns: blocks of 1, 2, 4, 8 change places across the diagonal.
inline void transpose(Vector* rows) {
#ifdef __clang__
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < i; ++j) {
            const float below = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = below;
        }
#else
    Words lane{};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) lane[i] = static_cast<uint32_t>(i);
#pragma GCC unroll 4
    for (int size = 1; size < LANES; size *= 2) {
        const Words is_high = as<Words>((lane & static_cast<uint32_t>(size)) != 0) & 1;
        const Words low = lane + is_high * static_cast<uint32_t>(LANES - size);
        const Words high = lane + is_high * static_cast<uint32_t>(LANES) + (1 - is_high) * size;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
            if (!(i & size)) {
                const Vector one = rows[i], other = rows[i + size];
                rows[i] = __builtin_shuffle(one, other, low);
                rows[i + size] = __builtin_shuffle(one, other, high);
            }
    }
#endif
}

// e^x with a relative error of about 2^-23; 0 below -87, where floats have no room for it.
inline Vector exp(Vector x) {
    const Vector low = broadcast(-87.0f), high = broadcast(88.0f);
    const Vector inside = x < low ? low : (x > high ? high : x);
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits, from where it moves to the exponent.
    const Vector shifted = inside * 1.44269504f + 12582912.0f;
    const Vector whole = shifted - 12582912.0f;
    const Vector rest = inside - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    const Vector scaled = as<Vector>(as<Integers>(power) + (as<Integers>(shifted) << 23));
    return x < low ? Vector{} : scaled;
}

inline Vector tanh(Vector x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

}  // namespace gllm

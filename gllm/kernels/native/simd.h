// Vectors of 16 floats, and numbers as they are in memory: float and bfloat16.
//
// Owns what depends on the instruction set. The compiler turns a vector into whatever registers the
// target has: one of AVX-512, two of AVX2, four of SSE.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace gllm {

constexpr int LANES = 16;
typedef float Vector __attribute__((vector_size(64), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

struct bfloat16 {
    uint16_t bits;
};

template <class To, class From>
inline To as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

inline Vector broadcast(float value) { return Vector{} + value; }

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline Vector load(const bfloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    return as<Vector>(__builtin_convertvector(halves, Words) << 16);
}
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
// Rounds to nearest, ties to even; what is not a number stays so. Below 2^-126 it may become 0.
inline void store(bfloat16* to, Vector value) {
#ifdef __AVX512BF16__
    const auto halves = _mm512_cvtneps_pbh((__m512)value);
#else
    const Words bits = as<Words>(value);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words chosen = value == value ? rounded : Words{} + 0x7fc0;
    const Halves halves = __builtin_convertvector(chosen, Halves);
#endif
    std::memcpy(to, &halves, sizeof(halves));
}

inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) {
    return as<float>(static_cast<uint32_t>(value.bits) << 16);
}
inline void assign(float& to, float value) { to = value; }
inline void assign(bfloat16& to, float value) {
    const uint32_t bits = as<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = value == value ? static_cast<uint16_t>(rounded) : 0x7fc0;
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
    Halves first, second;
    std::memcpy(&first, low, sizeof(first));
    std::memcpy(&second, high, sizeof(second));
    return as<Vector>(__builtin_convertvector(first, Words) |
                      __builtin_convertvector(second, Words) << 16);
}
inline Vector interleaved(const float* low, const float*) { return load(low); }

// Rows become columns: blocks of 1, 2, 4, 8 change places across the diagonal.
inline void transpose(Vector* rows) {
#ifdef __AVX512F__
    const Words lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int size = 1; size < LANES; size *= 2) {
        const Words is_high = (lane & static_cast<uint32_t>(size)) != 0 ? Words{} + 1 : Words{};
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
#else
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < i; ++j) {
            const float kept = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = kept;
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

// Activation functions, plain and of gated linear layers.
#pragma once

#include "simd.h"

namespace gllm {

enum Activation { NONE, SILU, GELU_TANH, GELU, SIGMOID, SWIGLU_OAI, SOFTPLUS };  // as in library.py

// 1 + erf(x / sqrt(2)), within 1.5e-7. Source: Abramowitz and Stegun, "Handbook of Mathematical
// Functions" (1964), formula 7.1.26 for 1 - erf.
inline Vector one_plus_erf(Vector x) {
    const Vector size = 0.7071067812f * (x < 0.0f ? -x : x);
    const Vector t = 1.0f / (1.0f + 0.3275911f * size);
    Vector power = 1.061405429f * t - 1.453152027f;
    power = power * t + 1.421413741f;
    power = power * t - 0.284496736f;
    power = power * t + 0.254829592f;
    const Vector rest = power * t * exp(-size * size);
    return x < 0.0f ? rest : 2.0f - rest;
}

// log(1 + exp(x)), with the series of the inverse hyperbolic tangent: log(1 + t) = 2 atanh(t / (2 + t)),
// where t is at most 1.
inline Vector softplus(Vector x) {
    const Vector t = exp(x < 0.0f ? x : -x), z = t / (2.0f + t), square = z * z;
    Vector series = square * (1.0f / 13) + 1.0f / 11;
    for (const float term : {1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) series = series * square + term;
    return (x > 0.0f ? x : Vector{}) + 2.0f * z * series;
}

inline Vector activated(Vector x, int32_t kind) {
    if (kind == NONE) return x;
    if (kind == SILU) return x / (1.0f + exp(-x));
    if (kind == SIGMOID) return 1.0f / (1.0f + exp(-x));
    if (kind == SOFTPLUS) return softplus(x);
    if (kind == GELU) return 0.5f * x * one_plus_erf(x);
    return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// Gate and up projection of a gated linear layer, combined. The limit and the factor of SWIGLU_OAI are
// those of activation.py.
inline Vector gated(Vector gate, Vector up, int32_t kind) {
    if (kind != SWIGLU_OAI) return activated(gate, kind) * up;
    gate = gate > 7.0f ? broadcast(7.0f) : gate;
    up = up > 7.0f ? broadcast(7.0f) : up;
    up = up < -7.0f ? broadcast(-7.0f) : up;
    return gate / (1.0f + exp(-1.702f * gate)) * (up + 1.0f);
}

// output [size] = the gate and up projection of a row, combined (elementwise.cpp).
template <class T>
void gate_row(const T* gate, const T* up, T* output, int64_t size, int32_t kind);

}  // namespace gllm

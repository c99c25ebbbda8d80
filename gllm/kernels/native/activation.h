// Activation functions of gated linear layers.
#pragma once

#include "simd.h"

namespace gllm {

enum Activation { NONE, SILU, GELU_TANH };  // as in library.py

inline Vector activated(Vector x, int32_t kind) {
    if (kind == SILU) return x / (1.0f + exp(-x));
    return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

}  // namespace gllm

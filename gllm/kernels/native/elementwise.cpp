// Elementwise operations between the matrix products of a layer, each in one pass over memory.
//
// RMSNorm with the preceding residual addition, rotary embedding with the KV-cache write, and
// activations, plain and gated. Everything is computed in float32; the sources of the formulas are in the
// reference implementations (gllm/kernels).

#include <algorithm>
#include <type_traits>

#include "activation.h"
#include "eight_bits.h"
#include "pool.h"

namespace gllm {

constexpr int64_t PARALLEL = 1 << 14;  // elements from which on threads are worth waking

struct NormArguments {
    void* hidden;        // [rows, size]; delta is added to it
    const void* delta;   // [rows, size], or null
    const void* weight;  // [size], floats where float_weight, else as hidden
    void* output;        // [rows, size]
    int64_t rows, size;
    float eps;
    int32_t float_weight, dtype, threads;
};

struct RotaryArguments {
    void* qkv;             // [tokens, heads + 2 kv_heads, head_dim], row elements between tokens; queries
                           // are rotated in place
    const float* cosine;   // [tokens, dim / 2]
    const float* sine;     // [tokens, dim / 2]
    const void* query_norm;  // [head_dim], or null: RMSNorm before the rotation; see float_weight
    const void* key_norm;
    // [slots, kv_heads, head_dim]; with int8_cache, codes with the scale of each head behind them
    void* keys;
    void* values;
    const int64_t* slots;  // [tokens]
    int64_t tokens, heads, kv_heads, head_dim, dim, row;
    float eps;
    int32_t interleaved, float_weight, int8_cache, dtype, threads;
};

struct GateArguments {
    const void* gate;  // [rows, size], gate_row elements between rows
    const void* up;    // [rows, size], up_row elements between rows
    void* output;      // [rows, size]
    int64_t rows, size, gate_row, up_row;
    int32_t activation, dtype, threads;
};

struct ActivateArguments {
    const void* input;  // [rows, size]
    void* output;       // [rows, size]
    int64_t rows, size;
    int32_t activation, dtype, threads;
};

namespace {

template <class T>
float mean_square(const T* x, int64_t size) {
    Vector squares{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Vector value = load(x + i);
        squares += value * value;
    }
    float total = sum(squares);
    for (; i < size; ++i) total += to_float(x[i]) * to_float(x[i]);
    return total / static_cast<float>(size);
}

template <class T, class W>
void scale(const T* x, const W* weight, float factor, T* to, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(x + i) * factor * load(weight + i));
    for (; i < size; ++i) assign(to[i], to_float(x[i]) * factor * to_float(weight[i]));
}

template <class T>
void add_to(T* x, const T* delta, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) + load(delta + i));
    for (; i < size; ++i) assign(x[i], to_float(x[i]) + to_float(delta[i]));
}

template <class T, class W>
void add_rms_norm(const NormArguments& a) {
    share_loop(a.threads, a.rows, a.rows * a.size >= PARALLEL, [&](int64_t row) {
        T* hidden = static_cast<T*>(a.hidden) + row * a.size;
        if (a.delta) add_to(hidden, static_cast<const T*>(a.delta) + row * a.size, a.size);
        const float factor = 1.0f / std::sqrt(mean_square(hidden, a.size) + a.eps);
        T* output = static_cast<T*>(a.output) + row * a.size;
        scale(hidden, static_cast<const W*>(a.weight), factor, output, a.size);
    });
}

// The first `dim` elements of a head by the angles of its token.
template <class T>
void rotate(T* head, const float* cosine, const float* sine, int64_t dim, bool interleaved) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    if (!interleaved)
        for (; i + LANES <= half; i += LANES) {
            const Vector first = load(head + i), second = load(head + half + i);
            const Vector c = load(cosine + i), s = load(sine + i);
            store(head + i, first * c - second * s);
            store(head + half + i, second * c + first * s);
        }
    for (; i < half; ++i) {
        T& one = head[interleaved ? 2 * i : i];
        T& other = head[interleaved ? 2 * i + 1 : half + i];
        const float first = to_float(one), second = to_float(other);
        assign(one, first * cosine[i] - second * sine[i]);
        assign(other, second * cosine[i] + first * sine[i]);
    }
}

template <class T, class W>
void norm_and_rotate(T* head, const void* norm, const RotaryArguments& a, int64_t token) {
    if (norm) {
        const float factor = 1.0f / std::sqrt(mean_square(head, a.head_dim) + a.eps);
        scale(head, static_cast<const W*>(norm), factor, head, a.head_dim);
    }
    const int64_t angles = token * (a.dim / 2);
    if (a.dim) rotate(head, a.cosine + angles, a.sine + angles, a.dim, a.interleaved);
}

template <class T, class W>
void rotate_and_store(const RotaryArguments& a) {
    const int64_t size = (a.heads + 2 * a.kv_heads) * a.head_dim, wide = a.kv_heads * a.head_dim;
    share_loop(a.threads, a.tokens, a.tokens * size >= PARALLEL, [&](int64_t token) {
        T* head = static_cast<T*>(a.qkv) + token * a.row;
        for (int64_t i = 0; i < a.heads; ++i, head += a.head_dim)
            norm_and_rotate<T, W>(head, a.query_norm, a, token);
        T* keys = head;
        for (int64_t i = 0; i < a.kv_heads; ++i, head += a.head_dim)
            norm_and_rotate<T, W>(head, a.key_norm, a, token);
        if (a.int8_cache) {
            store_codes(keys, a.kv_heads, a.head_dim, a.keys, a.slots[token]);
            store_codes(head, a.kv_heads, a.head_dim, a.values, a.slots[token]);
            return;
        }
        std::copy(keys, head, static_cast<T*>(a.keys) + a.slots[token] * wide);
        std::copy(head, head + wide, static_cast<T*>(a.values) + a.slots[token] * wide);
    });
}

template <class T>
void gate(const GateArguments& a) {
    share_loop(a.threads, a.rows, a.rows * a.size >= PARALLEL, [&](int64_t row) {
        gate_row(static_cast<const T*>(a.gate) + row * a.gate_row, static_cast<const T*>(a.up) + row * a.up_row,
                 static_cast<T*>(a.output) + row * a.size, a.size, a.activation);
    });
}

template <class T>
void activate(const ActivateArguments& a) {
    share_loop(a.threads, a.rows, a.rows * a.size >= PARALLEL, [&](int64_t row) {
        const T* input = static_cast<const T*>(a.input) + row * a.size;
        T* output = static_cast<T*>(a.output) + row * a.size;
        int64_t i = 0;
        for (; i + LANES <= a.size; i += LANES) store(output + i, activated(load(input + i), a.activation));
        for (; i < a.size; ++i)
            assign(output[i], activated(broadcast(to_float(input[i])), a.activation)[0]);
    });
}

}  // namespace

template <class T>
void gate_row(const T* gate, const T* up, T* output, int64_t size, int32_t kind) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(output + i, gated(load(gate + i), load(up + i), kind));
    for (; i < size; ++i) {
        const Vector first = broadcast(to_float(gate[i])), second = broadcast(to_float(up[i]));
        assign(output[i], gated(first, second, kind)[0]);
    }
}

template void gate_row(const float*, const float*, float*, int64_t, int32_t);
template void gate_row(const bfloat16*, const bfloat16*, bfloat16*, int64_t, int32_t);
template void gate_row(const float16*, const float16*, float16*, int64_t, int32_t);

}  // namespace gllm

extern "C" {
#pragma GCC visibility push(default)

void gllm_add_rms_norm(const gllm::NormArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) {
        using T = decltype(type);
        a->float_weight ? gllm::add_rms_norm<T, float>(*a) : gllm::add_rms_norm<T, T>(*a);
    });
}

void gllm_rotate_and_store(const gllm::RotaryArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) {
        using T = decltype(type);
        a->float_weight ? gllm::rotate_and_store<T, float>(*a) : gllm::rotate_and_store<T, T>(*a);
    });
}

void gllm_gate(const gllm::GateArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::gate<decltype(type)>(*a); });
}

void gllm_activate(const gllm::ActivateArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::activate<decltype(type)>(*a); });
}
#pragma GCC visibility pop
}

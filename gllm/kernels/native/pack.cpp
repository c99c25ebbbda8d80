// Packing of weights into panels (panels.h), and unpacking of single rows.

#include "panels.h"
#include "pool.h"

namespace gllm {

struct PackArguments {
    void* packed;        // whole panels
    const void* weight;  // [outputs, inputs]
    int64_t inputs, outputs;
    int32_t step, dtype, threads;  // step: 2 where every second panel is another weight's
};

struct UnpackArguments {
    void* output;  // [rows, inputs]
    const void* packed;
    const int64_t* chosen;  // [rows]: outputs
    int64_t rows, inputs;
    int32_t dtype, threads;
};

namespace {

template <class T>
void pack(const PackArguments& a) {
    using Weight = typename Step<T>::Weight;
    constexpr int64_t PER = Step<T>::PER, RUN = 64;
    const int64_t panels = blocks_of(a.outputs, PANEL), row = a.inputs / PER * PER;
    share_loop(a.threads, panels, true, [&](int64_t panel) {
        T* to = static_cast<T*>(a.packed) + panel * a.step * PANEL * row;
        const int64_t count = std::min(PANEL, a.outputs - panel * PANEL);
        const T* weight = static_cast<const T*>(a.weight) + panel * PANEL * row;
        if constexpr (!Step<T>::WIDENED)
            if (count == PANEL) {
                turn(weight, row, PANEL, row / PER, reinterpret_cast<Weight*>(to));
                return;
            }
        if (count < PANEL) std::fill(to, to + PANEL * row, T{});
        for (int64_t k = 0; k < row; k += RUN)
            for (int64_t column = 0; column < count; ++column) {
                const T* from = weight + column * row;
                for (int64_t i = k; i < std::min(k + RUN, row); ++i)
                    to[(i / PER * PANEL + column) * PER + i % PER] = from[i];
            }
    });
}

template <class T>
void unpack(const UnpackArguments& a) {
    constexpr int64_t PER = Step<T>::PER;
    share_loop(a.threads, a.rows, a.rows > 64, [&](int64_t r) {
        const int64_t panel = a.chosen[r] / PANEL, column = a.chosen[r] % PANEL;
        const T* from = static_cast<const T*>(a.packed) + panel * PANEL * a.inputs + column * PER;
        T* to = static_cast<T*>(a.output) + r * a.inputs;
        for (int64_t i = 0; i < a.inputs; ++i) to[i] = from[i / PER * PANEL * PER + i % PER];
    });
}

}  // namespace
}  // namespace gllm

extern "C" {
#pragma GCC visibility push(default)

void gllm_pack(const gllm::PackArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::pack<decltype(type)>(*a); });
}
void gllm_unpack(const gllm::UnpackArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::unpack<decltype(type)>(*a); });
}
#pragma GCC visibility pop
}

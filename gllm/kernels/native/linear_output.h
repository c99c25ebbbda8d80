// Arguments of linear layers, and the conversion of sums to outputs with bias and activation.
#pragma once

#include <algorithm>

#include "activation.h"
#include "panels.h"

namespace gllm {

struct LinearArguments {
    void* output;        // [rows, outputs], floats where float_output, else as input
    const void* input;   // [rows, inputs], rows input_row elements apart
    const void* weight;  // packed
    const void* bias;    // [outputs] as input, or null; twice as many where gated: gates first
    int64_t rows, inputs, outputs, input_row;
    int32_t gate;  // Activation: NONE where nothing is gated
    int32_t float_output, dtype, threads;
};

// One weight per head: output[:, head] = input[:, head] weight[head]^T.
struct HeadLinearArguments {
    void* output;        // [rows, heads, outputs], output_row and output_head elements apart
    const void* input;   // [rows, heads, inputs], input_row and input_head elements apart
    const void* weight;  // packed, those of heads weight_head elements apart
    int64_t rows, heads, inputs, outputs;
    int64_t input_row, input_head, output_row, output_head, weight_head;
    int32_t dtype, threads;
};

template <class T>
class LinearOutput {
  public:
    // output_row: elements between rows of the output.
    LinearOutput(const LinearArguments& given, int64_t output_row) : a(given), output_row(output_row) {}

    // sums [rows, count, PANEL].
    void write(int64_t row, int64_t rows, int64_t panel, int64_t count, const float* sums) const {
        const int64_t column = panel * PANEL, width = std::min(count * PANEL, a.outputs - column);
        const T* bias = a.bias ? static_cast<const T*>(a.bias) + column : nullptr;
        for (int64_t r = 0; r < rows; ++r, sums += count * PANEL) {
            const int64_t to = (row + r) * output_row + column;
            if (a.float_output)
                write_row(static_cast<float*>(a.output) + to, sums, bias, width);
            else
                write_row(static_cast<T*>(a.output) + to, sums, bias, width);
        }
    }

    // Sums of two panels, rows of each so many floats apart.
    void write_gated(int64_t row, int64_t rows, int64_t panel, const float* gates, const float* others,
                     int64_t apart) const {
        const int64_t column = panel / 2 * PANEL, width = std::min(PANEL, a.outputs - column);
        const T* bias = a.bias ? static_cast<const T*>(a.bias) + column : nullptr;
        float numbers[2 * PANEL] = {};
        if (bias)
            for (int64_t i = 0; i < width; ++i) {
                numbers[i] = to_float(bias[i]);
                numbers[PANEL + i] = to_float(bias[a.outputs + i]);
            }
        for (int64_t r = 0; r < rows; ++r, gates += apart, others += apart) {
            T* to = static_cast<T*>(a.output) + (row + r) * output_row + column;
            for (int64_t i = 0; i < width; i += LANES) {
                const Vector gate = load(gates + i) + load(numbers + i);
                const Vector up = load(others + i) + load(numbers + PANEL + i);
                const Vector product = gated(gate, up, a.gate);
                if (i + LANES <= width)
                    store(to + i, product);
                else
                    for (int64_t j = i; j < width; ++j) assign(to[j], product[j - i]);
            }
        }
    }

  private:
    const LinearArguments& a;
    const int64_t output_row;

    template <class To>
    static void write_row(To* to, const float* sums, const T* bias, int64_t count) {
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const Vector sum = load(sums + i);
            store(to + i, bias ? sum + load(bias + i) : sum);
        }
        for (; i < count; ++i) assign(to[i], bias ? sums[i] + to_float(bias[i]) : sums[i]);
    }
};

}  // namespace gllm

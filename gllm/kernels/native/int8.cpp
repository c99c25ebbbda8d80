// Linear layers with 8-bit weights: quantize rows of activations to codes and a scale each, multiply
// the codes by packed 8-bit weights, and scale the sums.
//
// Each panel of weights is read from memory once, while the next one is prefetched. Floats are rounded
// as in the reference implementation (gllm/kernels/linear_int8.py).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

// A product that is rounded before it is added to is part of the definition.
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "eight_bits.h"
#include "int8_dot.h"
#include "pool.h"
#include "unrolled.h"

namespace gllm {

struct QuantizeArguments {
    const void* x;   // [rows, size]
    uint8_t* codes;  // [rows, size rounded up to GROUP]; null: only `magnitudes` is written
    float* scales;   // [rows]
    int64_t rows, size;
    int32_t dtype, threads;
    // [rows]: largest magnitude of each row. Read if there are codes, unless it is null: then x may
    // be a part of its rows.
    float* magnitudes;
};

struct Int8Arguments {
    const void* x;           // [rows, inputs]
    const int8_t* weights;   // [panels, groups, PANEL, GROUP]
    const float* scales;     // [panels * PANEL]
    const int32_t* offsets;  // [panels * PANEL]: what sums begin at where they are biased
    const void* bias;        // [outputs], or null
    void* output;            // [rows, outputs]
    int64_t rows, inputs, outputs;
    int32_t dtype, float_output, threads;
    float* magnitudes;  // as in QuantizeArguments
};

namespace {

// The largest magnitude, as bits: what is not finite is larger than all that is.
template <class T>
uint32_t largest_bits(const T* x, int64_t size) {
    Words most{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Words bits = as<Words>(load(x + i)) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    uint32_t result = largest_word(most);
    for (; i < size; ++i) result = std::max(result, as<uint32_t>(to_float(x[i])) & 0x7fffffff);
    return result;
}

int64_t padded(int64_t size) { return (size + GROUP - 1) / GROUP * GROUP; }

// Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
// bits: of the largest magnitude of the row.
template <class T>
void quantize_row(const T* x, int64_t size, uint32_t bits, uint8_t* codes, float* scale) {
    const float most = as<float>(bits);
    const bool finite = bits < 0x7f800000, counts = finite && most >= SMALLEST;
    *scale = finite ? most / LARGEST : NAN;
    std::fill(codes + (counts ? size : 0), codes + padded(size), ZERO);
    if (!counts) return;
    const float inverse = LARGEST / most;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Words shifted = as<Words>(load(x + i) * inverse + 12582912.0f);
        const Bytes made = low_bytes(shifted) + static_cast<uint8_t>(ZERO);
        std::memcpy(codes + i, &made, sizeof(made));
    }
    for (; i < size; ++i) {
        const float product = to_float(x[i]) * inverse;
        codes[i] = static_cast<uint8_t>(as<uint32_t>(product + 12582912.0f) + ZERO);
    }
}

// Codes without offset and padding.
template <class T>
void quantize_head(const T* x, int64_t size, int8_t* codes) {
    const uint32_t bits = largest_bits(x, size);
    const float most = as<float>(bits);
    const bool finite = bits < 0x7f800000;
    const float scale = finite ? most / LARGEST : NAN;
    std::memcpy(codes + size, &scale, sizeof(scale));
    if (!finite || most < SMALLEST) {
        std::fill(codes, codes + size, 0);
        return;
    }
    const float inverse = LARGEST / most;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Bytes low = low_bytes(as<Words>(load(x + i) * inverse + 12582912.0f));
        std::memcpy(codes + i, &low, sizeof(low));
    }
    for (; i < size; ++i)
        codes[i] = static_cast<int8_t>(as<uint32_t>(to_float(x[i]) * inverse + 12582912.0f));
}

template <class T>
void quantize(const QuantizeArguments& a) {
    const T* x = static_cast<const T*>(a.x);
    share_loop(a.threads, a.rows, a.rows * a.size >= QUANTIZED_ALONE, [&](int64_t row) {
        const T* from = x + row * a.size;
        const bool known = a.codes && a.magnitudes;
        const uint32_t bits = known ? as<uint32_t>(a.magnitudes[row]) : largest_bits(from, a.size);
        if (a.codes)
            quantize_row(from, a.size, bits, a.codes + row * padded(a.size), a.scales + row);
        else
            a.magnitudes[row] = bits < 0x7f800000 ? as<float>(bits) : INFINITY;
    });
}

// Weights to fetch while others are multiplied: LINES cache lines for each group of inputs.
template <int LINES>
struct Fetch {
    const int8_t* next;
    void operator()(int64_t group) const {
        for (int line = 0; line < LINES; ++line)
            __builtin_prefetch(next + (group * PANEL * GROUP) + line * 64, 0, 2);
    }
};

// to [HEIGHT, PANEL]: sums of VECTORS * LANES outputs; codes: rows `row` bytes apart; weights: of a
// panel, from the first of these outputs on; start [VECTORS * LANES].
template <int HEIGHT, class Fetching>
inline void multiply_tile(const uint8_t* codes, int64_t row, const int8_t* weights, int64_t groups,
                          const int32_t* start, int32_t* to, Fetching fetch) {
    Sums sums[HEIGHT * VECTORS];
    unrolled<HEIGHT * VECTORS>([&](auto i) { sums[i] = load_sums(start + i % VECTORS * LANES); });
    for (int64_t group = 0; group < groups; ++group) {
        const int8_t* at = weights + group * PANEL * GROUP;
        fetch(group);
        Weights w[VECTORS];
        unrolled<VECTORS>([&](auto v) { w[v] = load_weights(at + v * LANES * GROUP); });
        unrolled<HEIGHT>([&](auto r) {
            const Codes x(codes + r * row + group * GROUP);
            unrolled<VECTORS>([&](auto v) {
                sums[r * VECTORS + v] = dot(sums[r * VECTORS + v], x, w[v]);
            });
        });
    }
    unrolled<HEIGHT * VECTORS>([&](auto i) {
        store(to + i / VECTORS * PANEL + i % VECTORS * LANES, sums[i]);
    });
}

class Product {
  public:
    Product(const Int8Arguments& given, const uint8_t* codes, const float* scales)
        : a(given), codes(codes), row_scales(scales), row_bytes(padded(a.inputs)),
          panel_bytes(row_bytes * PANEL), panels((a.outputs + PANEL - 1) / PANEL),
          chunks((a.rows + ROW_CHUNK - 1) / ROW_CHUNK) {}

    // All tasks, a panel after the other.
    template <class T, class Out>
    void run() const {
        share_loop(a.threads, panels * chunks, true, [&](int64_t task) {
            const int64_t panel = task / chunks, first = task % chunks * ROW_CHUNK;
            multiply_panel<T, Out>(panel, first, std::min(a.rows - first, ROW_CHUNK));
        });
    }

  private:
    const Int8Arguments& a;
    const uint8_t* codes;
    const float* row_scales;
    const int64_t row_bytes, panel_bytes, panels, chunks;

    template <class T, class Out>
    void multiply_panel(int64_t panel, int64_t first, int64_t rows) const {
        int32_t sums[ROWS * PANEL];
        const int64_t tiles = (rows + ROWS - 1) / ROWS;
        // Tiles share the lines of the next panel; a single one keeps memory busy by itself.
        const int lines = panel + 1 == panels || tiles == 1 ? 0 : tiles < 4 ? 2 : 1;
        for (int64_t tile = 0, row = first; tile < tiles; ++tile) {
            const int64_t left = tiles - tile, line = tile * lines;
            const int height = static_cast<int>((first + rows - row + left - 1) / left);
            multiply_rows<ROWS>(height, row, panel, line < 4 ? lines : 0, line, sums);
            for (int r = 0; r < height; ++r, ++row) write<T, Out>(row, panel, sums + r * PANEL);
        }
    }

    template <int HEIGHT>
    void multiply_rows(int height, int64_t row, int64_t panel, int lines, int64_t line,
                       int32_t* sums) const {
        if constexpr (HEIGHT > 1)
            if (height < HEIGHT)
                return multiply_rows<HEIGHT - 1>(height, row, panel, lines, line, sums);
        const int8_t* next = a.weights + (panel + 1) * panel_bytes + line * 64;
        if (lines == 2)
            multiply_columns<HEIGHT>(row, panel, Fetch<2>{next}, sums);
        else if (lines == 1)
            multiply_columns<HEIGHT>(row, panel, Fetch<1>{next}, sums);
        else
            multiply_columns<HEIGHT>(row, panel, Fetch<0>{next}, sums);
    }

    template <int HEIGHT, class Fetching>
    void multiply_columns(int64_t row, int64_t panel, Fetching fetch, int32_t* sums) const {
        static constexpr int32_t none[PANEL] = {};
        const uint8_t* rows = codes + row * row_bytes;
        const int64_t groups = row_bytes / GROUP;
        const int8_t* weights = a.weights + panel * panel_bytes;
        const int32_t* start = SUMS_BIASED ? a.offsets + panel * PANEL : none;
        constexpr int64_t STEP = VECTORS * LANES;
        multiply_tile<HEIGHT>(rows, row_bytes, weights, groups, start, sums, fetch);
        for (int64_t n = STEP; n < PANEL; n += STEP)
            multiply_tile<HEIGHT>(rows, row_bytes, weights + n * GROUP, groups, start + n,
                                  sums + n, Fetch<0>{});
    }

    // Sums [PANEL] of a row, as numbers.
    template <class T, class Out>
    void write(int64_t row, int64_t panel, const int32_t* sums) const {
        const int64_t first = panel * PANEL, count = std::min(a.outputs - first, PANEL);
        const T* bias = a.bias ? static_cast<const T*>(a.bias) + first : nullptr;
        Out* to = static_cast<Out*>(a.output) + row * a.outputs + first;
        const float scale = row_scales[row];
        const float* scales = a.scales + first;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            Integers whole;
            std::memcpy(&whole, sums + i, sizeof(whole));
            Vector value = __builtin_convertvector(whole, Vector) * (scale * load(scales + i));
            if (bias) value += load(bias + i);
            store(to + i, value);
        }
        for (; i < count; ++i) {
            const float value = static_cast<float>(sums[i]) * (scale * scales[i]);
            assign(to[i], bias ? value + to_float(bias[i]) : value);
        }
    }
};

template <class T, class Out>
void linear(const Int8Arguments& a) {
    const std::unique_ptr<uint8_t[]> codes(new uint8_t[a.rows * padded(a.inputs)]);
    const std::unique_ptr<float[]> scales(new float[a.rows]);
    const Product product(a, codes.get(), scales.get());
    quantize<T>({a.x, codes.get(), scales.get(), a.rows, a.inputs, a.dtype, a.threads, a.magnitudes});
    product.run<T, Out>();
}

}  // namespace

template <class T>
void store_codes(const T* x, int64_t heads, int64_t dim, void* cache, int64_t slot) {
    const int64_t stride = dim + static_cast<int64_t>(sizeof(float));
    int8_t* to = static_cast<int8_t*>(cache) + slot * heads * stride;
    for (int64_t head = 0; head < heads; ++head)
        quantize_head(x + head * dim, dim, to + head * stride);
}

template void store_codes(const float*, int64_t, int64_t, void*, int64_t);
template void store_codes(const bfloat16*, int64_t, int64_t, void*, int64_t);
template void store_codes(const float16*, int64_t, int64_t, void*, int64_t);

}  // namespace gllm

extern "C" {
#pragma GCC visibility push(default)

void gllm_quantize_rows(const gllm::QuantizeArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::quantize<decltype(type)>(*a); });
}

void gllm_linear_int8(const gllm::Int8Arguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) {
        using T = decltype(type);
        a->float_output ? gllm::linear<T, float>(*a) : gllm::linear<T, T>(*a);
    });
}
#pragma GCC visibility pop
}

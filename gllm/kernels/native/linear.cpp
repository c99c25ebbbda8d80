// Products with weights that were packed for them: y = x W^T + b, or act(x G^T + b) (x U^T + c).
//
// Owns the order in which weights, inputs and sums pass through the caches. A weight is packed into
// panels of PANEL outputs; a panel is [units, PANEL]. For few rows the weights are read from memory
// once, one panel after the other; for many rows blocks of inputs and of panels stay in the second
// cache. Panels of gates and of what they gate take turns, so that both sums are at hand at once.
// Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), section 4.

#include <algorithm>
#include <vector>

#include "activation.h"
#include "multiply.h"

namespace gllm {

constexpr int64_t PANEL = LANES;
constexpr int64_t ROWS = 140;    // of inputs, and
constexpr int64_t DEPTH = 896;   // units of two panels: so many stay in the second cache
constexpr int64_t AHEAD = 256;   // vectors of weights fetched before they are needed
constexpr int TURNED_ROWS = 14;  // from which on addresses of rows do not fit into the registers

// Rows of a tile so that its sums fit into the registers, beside one panel and beside two.
#if defined(__AVX512F__)
constexpr int ALONE = 28, IN_PAIRS = 14;
#elif defined(__AVX__)
constexpr int ALONE = 6, IN_PAIRS = 3;
#else
constexpr int ALONE = 2, IN_PAIRS = 1;
#endif

struct LinearArguments {
    void* output;        // [rows, outputs], floats where float_output, else as input
    const void* input;   // [rows, inputs], rows input_row elements apart
    const void* weight;  // packed
    const void* bias;    // [outputs] as input, or null; twice as many where gated: gates first
    int64_t rows, inputs, outputs, input_row;
    int32_t gate;  // Activation: NONE where nothing is gated
    int32_t float_output, is_bfloat16, threads;
};

struct PackArguments {
    void* packed;        // whole panels
    const void* weight;  // [outputs, inputs]
    int64_t inputs, outputs;
    int32_t step, is_bfloat16, threads;  // step: 2 where every second panel is another weight's
};

struct UnpackArguments {
    void* output;  // [rows, inputs]
    const void* packed;
    const int64_t* chosen;  // [rows]: outputs
    int64_t rows, inputs;
    int32_t is_bfloat16, threads;
};

namespace {

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// What one step along the inputs takes: as in multiply.h, but weights stay as small as they are.
template <class T>
struct Step {
    using Unit = T;
    static constexpr int64_t PER = 1;
};
#ifdef __AVX512BF16__
template <>
struct Step<bfloat16> {
    using Unit = Packing<bfloat16>::Unit;
    static constexpr int64_t PER = Packing<bfloat16>::PER_UNIT;
};
#endif

// x [R, depth] times P panels, each [depth, PANEL] and panel_size units apart; sums [R, P, PANEL] are
// added to. Weights that STREAM by are fetched ahead, over the end of the panel; many rows beside
// them are turned, [depth, R].
template <int R, int P, bool STREAM, class Unit>
void multiply_tile(const Unit* x, int64_t x_row, const Unit* panel, int64_t panel_size,
                   int64_t depth, float* sums) {
    constexpr bool TURNED = STREAM && R >= TURNED_ROWS;
    Vector kept[R][P];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) kept[r][p] = load(sums + (r * P + p) * PANEL);
    for (int64_t k = 0; k < depth; ++k, x += TURNED ? R : 1, panel += PANEL) {
        if (STREAM) __builtin_prefetch(panel + AHEAD * PANEL, 0, 2);
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p)
                kept[r][p] =
                    multiply_add(kept[r][p], x[TURNED ? r : r * x_row], panel + p * panel_size);
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) store(sums + (r * P + p) * PANEL, kept[r][p]);
}

template <class Unit>
using Multiply = void (*)(const Unit*, int64_t, const Unit*, int64_t, int64_t, float*);

// By rows of the tile.
template <int P, bool STREAM, class Unit, int... R>
Multiply<Unit> multiply_of(int64_t rows, std::integer_sequence<int, R...>) {
    constexpr Multiply<Unit> all[] = {multiply_tile<R + 1, P, STREAM, Unit>...};
    return all[rows - 1];
}

// x [rows, depth] to [depth, rows]; rows of `to` are written in order, each up to a vector beyond it.
template <class Unit>
void turn(const Unit* x, int64_t x_row, int64_t rows, int64_t depth, Unit* to) {
    static_assert(sizeof(Unit) == sizeof(float));
    Vector blocks[2][LANES] = {};
    for (int64_t k = 0; k < depth; k += LANES) {
        const int64_t some = std::min<int64_t>(depth - k, LANES);
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(&blocks[r / LANES][r % LANES], x + r * x_row + k, some * sizeof(Unit));
        for (int64_t first = 0; first < rows; first += LANES) transpose(blocks[first / LANES]);
        for (int64_t i = 0; i < some; ++i, to += rows)
            for (int64_t first = 0; first < rows; first += LANES)
                std::memcpy(to + first, &blocks[first / LANES][i], sizeof(Vector));
    }
}

template <class T>
class Linear {
    using Unit = typename Step<T>::Unit;
    static constexpr int64_t PER = Step<T>::PER;

  public:
    explicit Linear(const LinearArguments& given)
        : a(given), weight(static_cast<const Unit*>(given.weight)), units(a.inputs / PER),
          panels(blocks_of(a.outputs, PANEL) * (a.gate ? 2 : 1)), few(a.rows <= ALONE) {}

    void run() const {
        if (a.rows == 0) return;
        const int64_t row_blocks = few ? 1 : blocks_of(a.rows, ROWS);
        const int64_t fair = blocks_of(panels * row_blocks, 4 * a.threads);
        const int64_t most = few ? panels : 8, step = few && !a.gate ? 1 : 2;
        const int64_t group = blocks_of(std::min(fair, most), step) * step;
        const int64_t groups = blocks_of(panels, group);
#pragma omp parallel num_threads(a.threads)
        {
            std::vector<Unit> turned;
            if constexpr (ALONE >= TURNED_ROWS)
                if (few && a.rows >= TURNED_ROWS) {
                    turned.resize(a.rows * units + LANES);
                    turn(row_at(0, 0), a.input_row / PER, a.rows, units, turned.data());
                }
            std::vector<float> sums(std::min(a.rows, ROWS) * PANEL * (few ? step : group));
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < row_blocks * groups; ++task) {
                const int64_t row = task / groups * ROWS, panel = task % groups * group;
                const int64_t end = std::min(panel + group, panels);
                if (few)
                    stream(turned.empty() ? row_at(0, 0) : turned.data(), panel, end, sums.data());
                else
                    block(row, std::min(ROWS, a.rows - row), panel, end, sums.data());
            }
        }
    }

  private:
    const LinearArguments& a;
    const Unit* weight;
    const int64_t units, panels;
    const bool few;

    const Unit* row_at(int64_t row, int64_t unit) const {
        return reinterpret_cast<const Unit*>(static_cast<const T*>(a.input) + row * a.input_row) + unit;
    }

    // All rows at once, so that weights pass by once.
    void stream(const Unit* x, int64_t panel, int64_t end, float* sums) const {
        constexpr std::make_integer_sequence<int, ALONE> heights{};
        const auto multiply = multiply_of<1, true, Unit>(a.rows, heights);
        for (; panel < end; ++panel) {
            const Unit* now = weight + panel * units * PANEL;
            const bool is_gated = a.gate && panel % 2;
            float* to = sums + (is_gated ? a.rows * PANEL : 0);
            std::fill(to, to + a.rows * PANEL, 0.0f);
            multiply(x, a.input_row / PER, now, 0, units, to);
            if (is_gated)
                write_gated(0, a.rows, panel - 1, sums, to, PANEL);
            else if (!a.gate)
                write(0, a.rows, panel, 1, sums);
        }
    }

    void block(int64_t row, int64_t rows, int64_t panel, int64_t end, float* sums) const {
        std::fill(sums, sums + rows * PANEL * 2 * blocks_of(end - panel, 2), 0.0f);
        const int64_t tiles = blocks_of(rows, IN_PAIRS);
        const int64_t deep = blocks_of(units, blocks_of(units, DEPTH));
        for (int64_t begin = 0; begin < units; begin += deep)
            for (int64_t p = panel; p < end; p += 2)
                tiles_of(row, rows, tiles, begin, deep, p, sums + (p - panel) * rows * PANEL);
        for (int64_t p = panel; p < end; p += 2) {
            const float* both = sums + (p - panel) * rows * PANEL;
            if (a.gate)
                write_gated(row, rows, p, both, both + PANEL, 2 * PANEL);
            else
                write(row, rows, p, 2, both);
        }
    }

    // All rows by two panels, or the one left.
    void tiles_of(int64_t row, int64_t rows, int64_t tiles, int64_t begin, int64_t deep, int64_t panel,
                  float* sums) const {
        const int64_t depth = std::min(deep, units - begin), size = units * PANEL;
        const Unit* now = weight + panel * size + begin * PANEL;
        // Behind the last panel there is nothing to read: the other half of the sums is not used.
        const int64_t apart = panel + 1 < panels ? size : 0;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
            multiply_of<2, false, Unit>(last - first, std::make_integer_sequence<int, IN_PAIRS>())(
                row_at(row + first, begin), a.input_row / PER, now, apart, depth,
                sums + first * 2 * PANEL);
        }
    }

    // sums [rows, count, PANEL].
    void write(int64_t row, int64_t rows, int64_t panel, int64_t count, const float* sums) const {
        const int64_t column = panel * PANEL, width = std::min(count * PANEL, a.outputs - column);
        const T* bias = a.bias ? static_cast<const T*>(a.bias) + column : nullptr;
        for (int64_t r = 0; r < rows; ++r, sums += count * PANEL) {
            const int64_t to = (row + r) * a.outputs + column;
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
        const Vector first = load(numbers), second = load(numbers + PANEL);
        for (int64_t r = 0; r < rows; ++r, gates += apart, others += apart) {
            T* to = static_cast<T*>(a.output) + (row + r) * a.outputs + column;
            const Vector made = activated(load(gates) + first, a.gate) * (load(others) + second);
            if (width == PANEL)
                store(to, made);
            else
                for (int64_t i = 0; i < width; ++i) assign(to[i], made[i]);
        }
    }

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

template <class T>
void pack(const PackArguments& a) {
    using Unit = typename Step<T>::Unit;
    constexpr int64_t PER = Step<T>::PER, RUN = 64;
    const int64_t panels = blocks_of(a.outputs, PANEL), row = a.inputs / PER * PER;
#pragma omp parallel for num_threads(a.threads)
    for (int64_t panel = 0; panel < panels; ++panel) {
        T* to = static_cast<T*>(a.packed) + panel * a.step * PANEL * row;
        const int64_t count = std::min(PANEL, a.outputs - panel * PANEL);
        const T* weight = static_cast<const T*>(a.weight) + panel * PANEL * row;
        if constexpr (sizeof(Unit) == sizeof(float))
            if (count == PANEL) {
                turn(reinterpret_cast<const Unit*>(weight), row / PER, PANEL, row / PER,
                     reinterpret_cast<Unit*>(to));
                continue;
            }
        if (count < PANEL) std::fill(to, to + PANEL * row, T{});
        for (int64_t k = 0; k < row; k += RUN)
            for (int64_t column = 0; column < count; ++column) {
                const T* from = weight + column * row;
                for (int64_t i = k; i < std::min(k + RUN, row); ++i)
                    to[(i / PER * PANEL + column) * PER + i % PER] = from[i];
            }
    }
}

template <class T>
void unpack(const UnpackArguments& a) {
    constexpr int64_t PER = Step<T>::PER;
#pragma omp parallel for num_threads(a.threads) if (a.rows > 64)
    for (int64_t r = 0; r < a.rows; ++r) {
        const int64_t panel = a.chosen[r] / PANEL, column = a.chosen[r] % PANEL;
        const T* from = static_cast<const T*>(a.packed) + panel * PANEL * a.inputs + column * PER;
        T* to = static_cast<T*>(a.output) + r * a.inputs;
        for (int64_t i = 0; i < a.inputs; ++i) to[i] = from[i / PER * PANEL * PER + i % PER];
    }
}

}  // namespace
}  // namespace gllm

extern "C" {

void gllm_linear(const gllm::LinearArguments* a) {
    a->is_bfloat16 ? gllm::Linear<gllm::bfloat16>(*a).run() : gllm::Linear<float>(*a).run();
}
void gllm_pack(const gllm::PackArguments* a) {
    a->is_bfloat16 ? gllm::pack<gllm::bfloat16>(*a) : gllm::pack<float>(*a);
}
void gllm_unpack(const gllm::UnpackArguments* a) {
    a->is_bfloat16 ? gllm::unpack<gllm::bfloat16>(*a) : gllm::unpack<float>(*a);
}
}

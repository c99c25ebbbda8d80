// Linear layers with packed weights: y = x W^T + b, or act(x G^T + b) (x U^T + c), or one W per head.
//
// A weight is packed into panels of PANEL outputs; a panel is [units, PANEL]. For few rows the weights
// are read from memory once, panel by panel; for many rows, blocks of inputs and of panels stay in the
// L2 cache. Panels of the gate and of the up projection alternate, so that both sums are available
// together. Every output is summed over its inputs in order, for any number of rows.
// Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), section 4.

#include <algorithm>

#include "linear_amx.h"
#include "linear_output.h"
#include "pool.h"
#include "scratch.h"

namespace gllm {

constexpr int64_t AHEAD = 256;   // units of weights fetched before they are needed
constexpr int TURNED_ROWS = 14;  // from which on addresses of rows do not fit into the registers

// ALONE: rows of a tile beside one panel. IN_BLOCKS: rows of a tile beside SIDE panels. Their sums
// fit into the registers.
// ROWS: of inputs, and DEPTH: units of SIDE panels; so many stay in the caches.
#if defined(__AVX512F__)
constexpr int ALONE = 28, IN_BLOCKS = 14, SIDE = 2;
constexpr int64_t ROWS = 140, DEPTH = 512;
#elif defined(__AVX2__)
constexpr int ALONE = 6, IN_BLOCKS = 6, SIDE = 1;
constexpr int64_t ROWS = 96, DEPTH = 256;
#elif defined(__aarch64__)
constexpr int ALONE = 6, IN_BLOCKS = 6, SIDE = 1;
constexpr int64_t ROWS = 96, DEPTH = 256;
#else
constexpr int ALONE = 3, IN_BLOCKS = 3, SIDE = 1;
constexpr int64_t ROWS = 96, DEPTH = 256;
#endif
constexpr int64_t MOST_PANELS = 16;  // of a block

namespace {

// x [R, depth], or where it is TURNED [depth, R], times P panels, each [depth, PANEL] and panel_size
// units apart; sums [R, P, PANEL] are added to, rows of them sums_row apart. Of `ahead` a cache line
// is fetched in every step, where it is not null.
template <int R, int P, bool TURNED, class Unit, class Weight>
void multiply_tile(const Unit* x, int64_t x_row, const Weight* panel, int64_t panel_size,
                   int64_t depth, float* sums, int64_t sums_row, const char* ahead) {
    constexpr int VECTORS = P * PANEL_VECTORS;
    Vector kept[R][VECTORS];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) kept[r][v] = load(sums + r * sums_row + v * LANES);
    for (int64_t k = 0; k < depth; ++k, x += TURNED ? R : 1, panel += PANEL) {
        if (ahead) __builtin_prefetch(ahead, 0, 2), ahead += PANEL * sizeof(Weight);
        decltype(load_operand(panel)) operands[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            operands[v] = load_operand(panel + v / PANEL_VECTORS * panel_size +
                                       v % PANEL_VECTORS * LANES);
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                kept[r][v] = multiply_add(kept[r][v], x[TURNED ? r : r * x_row], operands[v]);
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(sums + r * sums_row + v * LANES, kept[r][v]);
}

template <class Unit, class Weight>
using Multiply = void (*)(const Unit*, int64_t, const Weight*, int64_t, int64_t, float*, int64_t,
                          const char*);

// By rows of the tile.
template <int P, bool ALL_TURNED, class Unit, class Weight, int... R>
Multiply<Unit, Weight> multiply_of(int64_t rows, std::integer_sequence<int, R...>) {
    constexpr Multiply<Unit, Weight> all[] = {
        multiply_tile<R + 1, P, ALL_TURNED || R + 1 >= TURNED_ROWS, Unit, Weight>...};
    return all[rows - 1];
}

// Memory of a thread.
template <class Unit>
struct Scratch {
    Memory<Unit> inputs, weights;
    Memory<float> sums;
};

template <class T>
class Linear {
    using Unit = typename Step<T>::Unit;
    using Weight = typename Step<T>::Weight;
    static constexpr int64_t PER = Step<T>::PER;
    static constexpr bool WIDENED = Step<T>::WIDENED;

  public:
    Linear(const LinearArguments& given, int64_t output_row)
        : a(given), output(given, output_row), weight(static_cast<const Weight*>(given.weight)), units(a.inputs / PER),
          panels(blocks_of(a.outputs, PANEL) * (a.gate ? 2 : 1)), few(a.rows <= ALONE) {}

    void run() const {
        if (a.rows == 0) return;
        const int64_t row_blocks = few ? 1 : blocks_of(a.rows, ROWS);
        // Some tasks for each thread, as others may be busy; inputs are turned anew for each.
        const int64_t tasks = a.threads == 1 ? 1 : (few ? 4 : 2) * a.threads;
        const int64_t fair = blocks_of(panels * row_blocks, tasks);
        const int64_t most = few ? panels : MOST_PANELS, step = few && !a.gate ? 1 : 2;
        const int64_t group = blocks_of(std::min(fair, most), step) * step;
        const int64_t groups = blocks_of(panels, group);
        share(a.threads, row_blocks * groups, [&](Tasks& tasks) {
            int64_t task;
            if (!tasks.claim(task)) return;
            Scratch<Unit> s;
            const Unit* inputs = few ? all_inputs(s) : nullptr;
            s.sums.resize(std::min(a.rows, ROWS) * PANEL * (few ? step : group));
            do {
                const int64_t row = task / groups * ROWS, panel = task % groups * group;
                const int64_t end = std::min(panel + group, panels);
                if (few)
                    stream(inputs, panel, end, s.sums.data());
                else
                    block(row, std::min(ROWS, a.rows - row), panel, end, s);
            } while (tasks.claim(task));
        });
    }

  private:
    const LinearArguments& a;
    const LinearOutput<T> output;
    const Weight* weight;
    const int64_t units, panels;
    const bool few;

    const T* row_at(int64_t row, int64_t unit) const {
        return static_cast<const T*>(a.input) + row * a.input_row + unit * PER;
    }

    // The few rows as `stream` takes them.
    const Unit* all_inputs(Scratch<Unit>& s) const {
        if (a.rows >= TURNED_ROWS) {
            s.inputs.resize(a.rows * units + LANES);
            turn(row_at(0, 0), a.input_row, a.rows, units, s.inputs.data());
        } else if constexpr (WIDENED) {
            const int64_t wide = inputs_row();
            s.inputs.resize(a.rows * wide);
            for (int64_t r = 0; r < a.rows; ++r)
                for (int64_t k = 0; k < units; k += LANES)
                    store(&s.inputs[r * wide + k], load_units(row_at(r, k), units - k));
        } else {
            return reinterpret_cast<const Unit*>(row_at(0, 0));
        }
        return s.inputs.data();
    }

    // Units between rows that are not turned.
    int64_t inputs_row() const {
        return WIDENED ? blocks_of(units, LANES) * LANES : a.input_row / PER;
    }

    // All rows at once, so that weights pass by once; they are fetched over the end of the panel.
    void stream(const Unit* x, int64_t panel, int64_t end, float* sums) const {
        constexpr std::make_integer_sequence<int, ALONE> heights{};
        const auto multiply = multiply_of<1, false, Unit, Weight>(a.rows, heights);
        for (; panel < end; ++panel) {
            const Weight* now = weight + panel * units * PANEL;
            const bool is_gated = a.gate && panel % 2;
            float* to = sums + (is_gated ? a.rows * PANEL : 0);
            std::fill(to, to + a.rows * PANEL, 0.0f);
            multiply(x, inputs_row(), now, 0, units, to, PANEL,
                     reinterpret_cast<const char*>(now + AHEAD * PANEL));
            if (is_gated)
                output.write_gated(0, a.rows, panel - 1, sums, to, PANEL);
            else if (!a.gate)
                output.write(0, a.rows, panel, 1, sums);
        }
    }

    void block(int64_t row, int64_t rows, int64_t panel, int64_t end, Scratch<Unit>& s) const {
        float* sums = s.sums.data();
        std::fill(sums, sums + rows * PANEL * 2 * blocks_of(end - panel, 2), 0.0f);
        const int64_t deep = blocks_of(units, blocks_of(units, DEPTH));
        s.inputs.resize(rows * deep + LANES);
        if (WIDENED) s.weights.resize(SIDE * deep * PANEL);
        for (int64_t begin = 0; begin < units; begin += deep) {
            const int64_t depth = std::min(deep, units - begin);
            turn_tiles(row, rows, begin, depth, s.inputs.data());
            for (int64_t p = panel; p < end; p += SIDE)
                tiles_of(rows, begin, depth, p, p + SIDE < end, s,
                         sums + (p - panel) / 2 * 2 * rows * PANEL + (p - panel) % 2 * PANEL);
        }
        for (int64_t p = panel; p < end; p += 2) {
            const float* both = sums + (p - panel) * rows * PANEL;
            if (a.gate)
                output.write_gated(row, rows, p, both, both + PANEL, 2 * PANEL);
            else
                output.write(row, rows, p, 2, both);
        }
    }

    // Tiles of inputs, each [depth, its rows].
    void turn_tiles(int64_t row, int64_t rows, int64_t begin, int64_t depth, Unit* to) const {
        const int64_t tiles = blocks_of(rows, IN_BLOCKS);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
            turn(row_at(row + first, begin), a.input_row, last - first, depth, to + first * depth);
        }
    }

    // All rows by SIDE panels, or the one left; meanwhile those behind are fetched, if there are more.
    void tiles_of(int64_t rows, int64_t begin, int64_t depth, int64_t panel, bool more,
                  Scratch<Unit>& s, float* sums) const {
        constexpr std::make_integer_sequence<int, IN_BLOCKS> heights{};
        const int64_t size = units * PANEL, tiles = blocks_of(rows, IN_BLOCKS);
        const Weight* now = weight + panel * size + begin * PANEL;
        const char* ahead = more ? reinterpret_cast<const char*>(now + SIDE * size) : nullptr;
        const Unit* panels_now;
        // Behind the last panel there is nothing to read: the other half of the sums is not used.
        int64_t apart = panel + 1 < panels ? size : 0;
        if constexpr (WIDENED) {
            for (int64_t i = 0; i < depth * PANEL; i += LANES) store(&s.weights[i], load(now + i));
            static_assert(SIDE == 1 || PANEL == LANES);
            if (SIDE == 2)
                for (int64_t i = 0; i < depth * PANEL; i += LANES)
                    store(&s.weights[depth * PANEL + i], load(now + apart + i));
            panels_now = s.weights.data();
            apart = depth * PANEL;
        } else {
            panels_now = now;
        }
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
            multiply_of<SIDE, true, Unit, Unit>(last - first, heights)(
                s.inputs.data() + first * depth, 0, panels_now, apart, depth,
                sums + first * 2 * PANEL, 2 * PANEL, tile < SIDE ? ahead : nullptr);
            if (ahead) ahead += size * sizeof(Weight);
        }
    }
};

template <class T>
void run_linear(const LinearArguments& a, int64_t output_row) {
#ifdef GLLM_AMX
    if constexpr (std::is_same_v<T, bfloat16>) return AmxLinear(a, output_row).run();
#endif
    Linear<T>(a, output_row).run();
}

template <class T>
void run_heads(const HeadLinearArguments& a) {
    // Few heads are computed one after the other, by all threads.
    const int32_t teams = a.heads < a.threads ? 1 : a.threads, members = a.threads / teams;
    share_loop(teams, a.heads, true, [&](int64_t head) {
        LinearArguments one{};
        one.output = static_cast<T*>(a.output) + head * a.output_head;
        one.input = static_cast<const T*>(a.input) + head * a.input_head;
        one.weight = static_cast<const T*>(a.weight) + head * a.weight_head;
        one.rows = a.rows, one.inputs = a.inputs, one.outputs = a.outputs, one.input_row = a.input_row;
        one.dtype = a.dtype, one.threads = members;
        run_linear<T>(one, a.output_row);
    });
}

}  // namespace
}  // namespace gllm

extern "C" {
#pragma GCC visibility push(default)

void gllm_linear(const gllm::LinearArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::run_linear<decltype(type)>(*a, a->outputs); });
}
void gllm_linear_heads(const gllm::HeadLinearArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::run_heads<decltype(type)>(*a); });
}
#pragma GCC visibility pop
}

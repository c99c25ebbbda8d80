// Linear layers of bfloat16 by AMX.
//
// Up to FEW rows are copied into tiles once, and panels stream by, two at a time, each read from memory
// once. More rows are processed in blocks: DEPTH units of ROWS rows and of two panels are multiplied
// while they are in the caches, with sums in memory between one DEPTH and the next. The last tile along
// the inputs may be partly filled: inputs and weights are copied and padded with zeros.
#pragma once

#include "amx.h"

#ifdef GLLM_AMX

#include "linear_output.h"
#include "pool.h"
#include "scratch.h"

namespace gllm {

class AmxLinear {
  public:
    AmxLinear(const LinearArguments& given, int64_t output_row)
        : a(given), output(given, output_row), weight(static_cast<const uint32_t*>(a.weight)),
          units(a.inputs / 2), tiles(blocks_of(units, TILE)),
          panels(blocks_of(a.outputs, PANEL) * (a.gate ? 2 : 1)) {}

    void run() const {
        if (a.rows == 0) return;
        const bool is_few = a.rows <= FEW;
        const int64_t row_blocks = is_few ? 1 : blocks_of(a.rows, ROWS);
        // Some tasks for each thread, as others may be busy.
        const int64_t tasks = a.threads == 1 ? 1 : 4 * a.threads;
        const int64_t fair = blocks_of(panels * row_blocks, tasks);
        const int64_t group = blocks_of(std::min(fair, MOST_PANELS), 2) * 2;
        const int64_t groups = blocks_of(panels, group);
        share(a.threads, row_blocks * groups, [&](Tasks& tasks) {
            int64_t task;
            if (!tasks.claim(task)) return;
            amx::Registers registers;
            registers.shape(is_few ? std::min(a.rows, TILE) : TILE,
                            is_few && a.rows > TILE ? a.rows - TILE : TILE);
            Memory<uint32_t> inputs;
            Memory<float> sums;
            int64_t copied = -1;
            do {
                const int64_t row = task / groups * ROWS, panel = task % groups * group;
                const int64_t rows = std::min(ROWS, a.rows - row);
                if (row != copied) copy_inputs(row, rows, is_few ? std::min(rows, TILE) : TILE, inputs);
                copied = row;
                const int64_t end = std::min(panel + group, panels);
                if (is_few)
                    stream(inputs.data(), panel, end, sums);
                else
                    block(row, rows, panel, end, inputs.data(), sums);
            } while (tasks.claim(task));
        });
    }

  private:
    static constexpr int64_t TILE = amx::TILE, FEW = 2 * TILE;
    static constexpr int64_t ROWS = 256, DEPTH = 512, MOST_PANELS = 32, WRITTEN_ROWS = 8;
    static constexpr int64_t AHEAD = 16;  // tiles of a panel fetched before they are needed
    static constexpr int64_t TILE_BYTES = amx::TILE_UNITS * 4;

    const LinearArguments& a;
    const LinearOutput<bfloat16> output;
    const uint32_t* weight;
    const int64_t units, tiles, panels;

    // Rows to [tiles of rows, tiles of units, height, TILE]. Rows behind the last one stay as they are:
    // their sums are not used.
    void copy_inputs(int64_t row, int64_t rows, int64_t height, Memory<uint32_t>& to) const {
        to.resize(blocks_of(rows, TILE) * tiles * height * TILE);
        const auto* from = static_cast<const bfloat16*>(a.input) + row * a.input_row;
        for (int64_t r = 0; r < rows; ++r, from += a.input_row) {
            uint32_t* tile = &to[(r / TILE * tiles * height + r % TILE) * TILE];
            int64_t k = 0;
            for (; k + TILE <= units; k += TILE, tile += height * TILE)
                std::memcpy(tile, from + 2 * k, amx::ROW_BYTES);
            if (k == units) continue;
            std::memset(tile, 0, amx::ROW_BYTES);
            std::memcpy(tile, from + 2 * k, (units - k) * 4);
        }
    }

    // All rows at once, so that weights pass by once; they are fetched over the end of the panel.
    void stream(const uint32_t* inputs, int64_t panel, int64_t end, Memory<float>& sums) const {
        const int64_t size = units * PANEL * 4, height = std::min(a.rows, TILE);
        sums.resize(a.rows * 2 * PANEL);
        for (; panel < end; panel += 2) {
            const Weights now = weights_of(panel, 0, units);
            const auto prefetch = [&](int64_t step) {
                // Behind the end of this panel the one after the next comes.
                const int64_t at = (step + AHEAD) * TILE_BYTES;
                const int64_t skip = step + AHEAD < now.steps ? 0 : size;
                for (const char* from : now.panels) fetch(from + at + skip, TILE);
            };
            multiply(inputs, a.rows, height, now, sums.data(), false, prefetch);
            write(0, a.rows, panel, sums.data());
        }
    }

    void block(int64_t row, int64_t rows, int64_t panel, int64_t end, const uint32_t* inputs,
               Memory<float>& sums) const {
        const int64_t pair_sums = blocks_of(rows, TILE) * TILE * 2 * PANEL;
        sums.resize(blocks_of(end - panel, 2) * pair_sums);
        for (int64_t begin = 0; begin < units; begin += DEPTH) {
            const int64_t depth = std::min(DEPTH, units - begin);
            float* to = sums.data();
            for (int64_t p = panel; p < end; p += 2, to += pair_sums)
                strips(inputs + begin * TILE, rows, weights_of(p, begin, depth), to, begin > 0, p + 2 < end);
        }
        // Few rows at a time: the rows of the output are on pages of their own.
        for (int64_t first = 0; first < rows; first += WRITTEN_ROWS)
            for (int64_t p = panel; p < end; p += 2)
                write(row + first, std::min(WRITTEN_ROWS, rows - first), p,
                      sums.data() + (p - panel) / 2 * pair_sums + first * 2 * PANEL);
    }

    // A part of two panels, or twice of the last one.
    struct Weights {
        const char* panels[2];
        int64_t steps, rest;  // whole tiles; units behind them
    };

    Weights weights_of(int64_t panel, int64_t begin, int64_t depth) const {
        const uint32_t* first = weight + (panel * units + begin) * PANEL;
        // Behind the last panel there is nothing to read: the other half of the sums is not used.
        const uint32_t* second = first + (panel + 1 < panels ? units * PANEL : 0);
        return {{reinterpret_cast<const char*>(first), reinterpret_cast<const char*>(second)},
                depth / TILE,
                depth % TILE};
    }

    // All rows, two tiles of them at a time; meanwhile the same part of the next two panels is fetched.
    void strips(const uint32_t* inputs, int64_t rows, const Weights& now, float* sums, bool add,
                bool has_next) const {
        const int64_t count = blocks_of(rows, 2 * TILE), next = 2 * units * PANEL * 4;
        const int64_t lines = blocks_of(TILE, count);
        for (int64_t strip = 0; strip < count; ++strip) {
            const int64_t first = strip * 2 * TILE;
            const auto prefetch = [&](int64_t step) {
                if (!has_next) return;
                const int64_t at = next + (strip * now.steps + step) * lines * amx::ROW_BYTES;
                for (const char* from : now.panels) fetch(from + at, lines);
            };
            multiply(inputs + first * tiles * TILE, std::min(2 * TILE, rows - first), TILE, now,
                     sums + first * 2 * PANEL, add, prefetch);
        }
    }

    static void fetch(const char* from, int64_t lines) {
        for (int64_t line = 0; line < lines; ++line)
            __builtin_prefetch(from + line * amx::ROW_BYTES, 0, 2);
    }

    // One or two tiles of rows, each stored with `height` of them, by both panels; sums [rows, 2, PANEL].
    template <class Prefetch>
    void multiply(const uint32_t* inputs, int64_t rows, int64_t height, const Weights& now, float* sums,
                  bool add, const Prefetch& prefetch) const {
        const amx::Strides strides{amx::ROW_BYTES, height * amx::ROW_BYTES, amx::ROW_BYTES};
        const char* upper = reinterpret_cast<const char*>(inputs);
        const char* lower = upper + tiles * strides.a_tile;
        const auto run = rows > TILE ? amx::multiply<2, 2, Prefetch> : amx::multiply<1, 2, Prefetch>;
        if (now.steps)
            run(upper, lower, now.panels, strides, now.steps, sums, 2 * PANEL, add, prefetch);
        if (!now.rest) return;
        alignas(64) uint32_t padded[2][amx::TILE_UNITS] = {};
        const char* ends[2];
        for (int i = 0; i < 2; ++i) {
            std::memcpy(padded[i], now.panels[i] + now.steps * TILE_BYTES, now.rest * amx::ROW_BYTES);
            ends[i] = reinterpret_cast<const char*>(padded[i]);
        }
        const int64_t behind = now.steps * strides.a_tile;
        const auto multiply_rest = rows > TILE ? amx::multiply<2, 2, Nothing> : amx::multiply<1, 2, Nothing>;
        multiply_rest(upper + behind, lower + behind, ends, strides, 1, sums, 2 * PANEL,
                      add || now.steps, Nothing{});
    }

    struct Nothing {
        void operator()(int64_t) const {}
    };

    void write(int64_t row, int64_t rows, int64_t panel, const float* sums) const {
        if (a.gate)
            output.write_gated(row, rows, panel, sums, sums + PANEL, 2 * PANEL);
        else
            output.write(row, rows, panel, 2, sums);
    }
};

}  // namespace gllm

#endif

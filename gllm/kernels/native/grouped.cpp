// Linear layers with weights of few bits: integers in groups with a scale and a minimum. Activations are
// quantized to 8 bits in blocks of 32 inputs; products of a group are summed in integers.
//
// Weights stay packed in memory; a panel's are read once for up to ROW_CHUNK rows. The sum of each output
// is made group by group, whatever the number of rows, and rounded as in the reference implementation
// (gllm/kernels/grouped_panels.py). Enough rows to fill a tile for AMX are multiplied by it where the build
// has it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

// A product that is rounded before it is added to is part of the definition.
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "activation.h"
#include "grouped_codes.h"
#include "grouped_amx.h"
#include "eight_bits.h"
#include "pool.h"
#include "scratch.h"
#include "unrolled.h"

namespace gllm {

enum ScaleKind { FLOAT32_SCALE, BFLOAT16_SCALE, FLOAT16_SCALE, CODED_SCALE };

// Numbers [panels, groups, PANEL] of a kind; those of kind CODED_SCALE are int8 and multiplied by units.
struct GroupScales {
    const void* numbers;
    const float16* units;      // [panels, groups / groups_per_unit, PANEL], or null
    int64_t groups_per_unit;   // 0 without units
    int64_t kind;              // ScaleKind
};

struct GroupedArguments {
    const uint32_t* codes;  // [panels, blocks, BLOCK_WORDS, PANEL]
    const uint8_t* table;   // [16], or null
    GroupScales scales, minimums;  // minimums.numbers: null without
    const void* x;     // [rows, inputs]
    const void* bias;  // [outputs], or null
    void* output;      // [rows, outputs], or half as many where gated: output_row elements apart
    int64_t rows, inputs, outputs, output_row;
    int64_t group;  // inputs per scale: 16, or a multiple of BLOCK
    int32_t width;  // bits of a code: 4, 6, 8
    int32_t zero;   // is subtracted from codes
    // Activation: NONE where nothing is gated. Else the first half of the outputs are gates, the second one what
    // they are multiplied by, whole panels each; the output has the numbers' type.
    int32_t gate;
    int32_t dtype, float_output, threads;
    const int64_t* order;  // [inputs]: the input that each column of codes multiplies, or null: its own
};

struct GroupedRowsArguments {
    const uint32_t* codes;
    const uint8_t* table;
    GroupScales scales, minimums;
    const int64_t* chosen;  // [rows]: outputs, of which the weights are wanted
    void* output;           // [rows, inputs]
    int64_t rows, inputs, group;
    int32_t width, zero, dtype, threads;
};

namespace {

constexpr int64_t PANEL = GROUPED_PANEL;

int64_t blocks_of(int64_t inputs) { return (inputs + BLOCK - 1) / BLOCK; }

// Rows and vectors of tiles, whose sums fit into the registers.
#if defined(__AVX512F__)
constexpr int VECTORS = 2;
constexpr int64_t HEIGHTS[] = {6, 4, 3, 2, 1};
#else
constexpr int VECTORS = 1;
constexpr int64_t HEIGHTS[] = {4, 3, 2, 1};
#endif

// Most rows of a tile for AMX, the fewest for which it is faster than tiles of vectors (it takes as long as with
// TALL rows), and numbers that are read behind the last row of one.
#ifdef GLLM_AMX
constexpr int64_t TALL = amx::TILE, LEAST_TALL = 14, READ_BEYOND = amx::TILE;
#else
constexpr int64_t TALL = HEIGHTS[0], LEAST_TALL = TALL + 1, READ_BEYOND = 0;
#endif

// The rows of the largest tile: TALL, or HEIGHTS[0] if codes without zero do not fit into 8 bits with a sign.
int64_t tallest_tile(const GroupedArguments& a) {
    int32_t least = 0, most = (1 << a.width) - 1;
    if (a.table) {
        least = *std::min_element(a.table, a.table + 16);
        most = *std::max_element(a.table, a.table + 16);
    }
    return least - a.zero >= INT8_MIN && most - a.zero <= INT8_MAX ? TALL : HEIGHTS[0];
}

// Rows of the tile that begins with a row, of which `left` are left.
int64_t tile_height(int64_t left, int64_t tallest) {
    if (tallest > HEIGHTS[0] && left >= LEAST_TALL) return std::min(left, tallest);
    const int64_t* height = HEIGHTS;
    while (*height > left) ++height;
    return *height;
}

// Parts of a block, each with a sum of its own.
int64_t parts_of(int64_t group) { return group < BLOCK ? BLOCK / group : 1; }

constexpr int64_t PIECE = 8;     // blocks whose scales are converted at once
constexpr int64_t LONG_PIECE = 32;  // the same if many rows share them

// Activations in blocks, those of the rows of a tile side by side.
struct QuantizedRows {
    int64_t blocks, parts;
    int64_t tallest;         // rows of the largest tile
    bool has_totals;         // totals of tiles for AMX, which are computed without starts
    Memory<int32_t> codes;   // of each tile [blocks, quads, rows], or [blocks, rows, quads] for AMX: four codes
    Memory<float> scales;    // of each tile [blocks, rows]
    Memory<int32_t> starts;  // of each tile [blocks, parts, rows]: -zero times the sum of the codes
    Memory<float> totals;    // of each tile [blocks, parts, rows]: the sum times the scale

    template <class T>
    QuantizedRows(const GroupedArguments& a, const T* x)
        : blocks(blocks_of(a.inputs)), parts(parts_of(a.group)), tallest(tallest_tile(a)),
          has_totals(a.minimums.numbers != nullptr) {
        const int64_t rows = a.rows, inputs = a.inputs;
        codes.resize(rows * blocks * (BLOCK / QUAD));
        scales.resize(rows * blocks + READ_BEYOND);
        starts.resize(rows * blocks * parts);
        totals.resize(rows * blocks * parts + READ_BEYOND);
        struct RowSpan {
            int64_t first, height;
        };
        std::vector<RowSpan> tiles;
        for (int64_t chunk = 0; chunk < rows; chunk += ROW_CHUNK)
            for (int64_t first = chunk, end = std::min(chunk + ROW_CHUNK, rows); first < end;) {
                tiles.push_back({first, tile_height(end - first, tallest)});
                first += tiles.back().height;
            }
        // The codes of a tile are written in their order: lines that several rows share are fetched once.
        const int64_t spans = (blocks + LONG_PIECE - 1) / LONG_PIECE;
        const int64_t count = static_cast<int64_t>(tiles.size()) * spans;
        share_loop(a.threads, count, rows * inputs >= QUANTIZED_ALONE, [&](int64_t task) {
            const auto [tile, height] = tiles[task / spans];
            const int64_t begin = task % spans * LONG_PIECE;
            for (int64_t block = begin; block < std::min(begin + LONG_PIECE, blocks); ++block)
                for (int64_t row = tile; row < tile + height; ++row) {
                    const int64_t first = block * BLOCK, left = std::min(inputs - first, BLOCK);
                    float numbers[BLOCK] = {};
                    if (a.order)
                        for (int64_t i = 0; i < left; ++i)
                            numbers[i] = to_float(x[row * inputs + a.order[first + i]]);
                    else
                        convert(x + row * inputs + first, left, numbers);
                    quantize(numbers, row, block, tile, height, a.zero);
                }
        });
    }

  private:
    template <class T>
    static void convert(const T* x, int64_t count, float* numbers) {
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(numbers + i, load(x + i));
        for (; i < count; ++i) numbers[i] = to_float(x[i]);
    }

    void quantize(const float* numbers, int64_t row, int64_t block, int64_t tile, int64_t height, int32_t zero) {
        constexpr int VECTORS_OF_BLOCK = BLOCK / LANES;
        Words most{};
        unrolled<VECTORS_OF_BLOCK>([&](auto v) {
            const Words size = as<Words>(load(numbers + v * LANES)) & 0x7fffffff;
            most = size > most ? size : most;
        });
        const uint32_t bits = largest_word(most);
        const float largest = as<float>(bits);
        const bool finite = bits < 0x7f800000, counts = finite && largest >= SMALLEST;
        const float scale = finite ? largest / LARGEST : NAN;
        const float inverse = counts ? LARGEST / largest : 0.0f;
        const int64_t at = tile * blocks + block * height, place = at + row - tile;
        scales[place] = scale;
        Integers whole[VECTORS_OF_BLOCK];
        int8_t bytes[BLOCK];
        unrolled<VECTORS_OF_BLOCK>([&](auto v) {
            // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
            const Vector number = counts ? load(numbers + v * LANES) : Vector{};
            const Words made = as<Words>(number * inverse + 12582912.0f) - 0x4b400000u;
            whole[v] = (Integers)made;
            const Bytes low = low_bytes(made);
            std::memcpy(bytes + v * LANES, &low, sizeof(low));
        });
        int32_t* to = codes.data() + at * (BLOCK / QUAD);
        if (height > HEIGHTS[0]) {
            std::memcpy(to + (row - tile) * (BLOCK / QUAD), bytes, BLOCK);
            if (!has_totals) return;
        } else {
            for (int64_t i = 0; i < BLOCK / QUAD; ++i)
                std::memcpy(to + row - tile + i * height, bytes + i * QUAD, QUAD);
        }
        for (int64_t part = 0, size = VECTORS_OF_BLOCK / parts; part < parts; ++part) {
            Integers all{};
            for (int64_t v = part * size; v < (part + 1) * size; ++v) all += whole[v];
            const float sum_of_codes = sum(__builtin_convertvector(all, Vector));
            const int64_t where = at * parts + part * height + row - tile;
            starts[where] = -zero * static_cast<int32_t>(sum_of_codes);
            totals[where] = sum_of_codes * scale;
        }
    }
};

template <class F>
void with_numbers(const GroupScales& s, const F& f) {
    if (s.kind == FLOAT32_SCALE) return f(static_cast<const float*>(s.numbers));
    if (s.kind == BFLOAT16_SCALE) return f(static_cast<const bfloat16*>(s.numbers));
    if (s.kind == FLOAT16_SCALE) return f(static_cast<const float16*>(s.numbers));
    f(static_cast<const int8_t*>(s.numbers));
}

// Numbers of groups [begin, end) of a panel that has `groups`, times their units, to [end - begin, PANEL].
// The same of the next panel are fetched.
void read_scales(const GroupScales& s, int64_t panel, int64_t groups, int64_t begin, int64_t end, float* to) {
    with_numbers(s, [&](auto* numbers) {
        numbers += (panel * groups + begin) * PANEL;
        const int64_t count = (end - begin) * PANEL;
        for (int64_t i = 0; i < count; i += 64 / sizeof(*numbers))
            __builtin_prefetch(numbers + groups * PANEL + i, 0, 2);
        if (!s.units) {
            for (int64_t i = 0; i < count; i += LANES) store(to + i, load(numbers + i));
            return;
        }
        const float16* units = s.units + panel * groups / s.groups_per_unit * PANEL;
        for (int64_t group = begin; group < end;) {
            const int64_t unit = group / s.groups_per_unit;
            const int64_t last = std::min(end, (unit + 1) * s.groups_per_unit);
            for (int64_t first = 0; first < PANEL; first += LANES) {
                const Vector factor = load(units + unit * PANEL + first);
                for (int64_t i = (group - begin) * PANEL; i < (last - begin) * PANEL; i += PANEL)
                    store(to + i + first, load(numbers + i + first) * factor);
            }
            group = last;
        }
    });
}

// Blocks [begin, end) of a row of weights.
struct Span {
    int64_t begin, end;
};

// to [blocks of the span * parts, PANEL]: the same, those of groups of several blocks once for each block.
void spread(const GroupScales& s, int64_t panel, int64_t inputs, int64_t group, int64_t parts, Span span,
            float* to) {
    const int64_t part = BLOCK / parts, repeated = group / part;
    const int64_t all = (blocks_of(inputs) * BLOCK + group - 1) / group;
    const int64_t first = span.begin * parts / repeated, count = (span.end - span.begin) * parts;
    read_scales(s, panel, all, first, (span.end * parts + repeated - 1) / repeated, to);
    if (repeated > 1)
        for (int64_t i = count; i-- > 0;) {
            const int64_t from = (span.begin * parts + i) / repeated - first;
            std::memmove(to + i * PANEL, to + from * PANEL, PANEL * sizeof(float));
        }
}

// Sums of one panel and some rows, as numbers.
struct Tile {
    const GroupedArguments& a;
    const QuantizedRows& x;
    Table table;
    int64_t panel;
    float* sums;  // [rows, PANEL]
#ifdef GLLM_AMX
    amx::Registers* registers;
    const int8_t* weights;  // of the span that is multiplied, as amx::unpack makes them
#endif
};

constexpr int64_t AHEAD = 4096;  // bytes from the weights that are multiplied to those that are fetched

// VECTORS * LANES sums from `first` on, of HEIGHT rows.
template <int HEIGHT>
inline void load_sums(const Tile& tile, int64_t first, Vector* sums) {
    unrolled<HEIGHT * VECTORS>([&](auto i) {
        sums[i] = load(tile.sums + i / VECTORS * PANEL + first + i % VECTORS * LANES);
    });
}

template <int HEIGHT>
inline void store_sums(const Tile& tile, int64_t first, const Vector* sums) {
    unrolled<HEIGHT * VECTORS>([&](auto i) {
        store(tile.sums + i / VECTORS * PANEL + first + i % VECTORS * LANES, sums[i]);
    });
}

// The minimums of a span times the activations' totals, off the sums.
template <int PARTS, int HEIGHT>
void subtract(const Tile& tile, int64_t row, int64_t first, Span span, const float* minimums) {
    const float* totals = tile.x.totals.data() + (row * tile.x.blocks + span.begin * HEIGHT) * PARTS;
    Vector sums[HEIGHT * VECTORS];
    load_sums<HEIGHT>(tile, first, sums);
    minimums += first;
    for (int64_t left = (span.end - span.begin) * PARTS; left-- > 0; minimums += PANEL, totals += HEIGHT)
        unrolled<VECTORS>([&](auto v) {
            const Vector least = load(minimums + v * LANES);
            unrolled<HEIGHT>([&](auto r) { sums[r * VECTORS + v] -= least * totals[r]; });
        });
    store_sums<HEIGHT>(tile, first, sums);
}

// VECTORS * LANES outputs from `first` on, of HEIGHT rows from `row` on: adds the products of a span.
template <int WIDTH, int PARTS, int HEIGHT>
__attribute__((noinline)) void multiply_tile(const Tile& tile, int64_t row, int64_t first, Span span,
                                             const float* scales) {
    constexpr int64_t WORDS = BLOCK_WORDS<WIDTH> * PANEL;
    const QuantizedRows& x = tile.x;
    const int64_t block = row * x.blocks + span.begin * HEIGHT;
    const Table table = tile.table;
    const uint32_t* words = tile.a.codes + (tile.panel * x.blocks + span.begin) * WORDS + first;
    const int32_t* codes = x.codes.data() + block * (BLOCK / QUAD);
    const float* row_scales = x.scales.data() + block;
    const int32_t* starts = x.starts.data() + block * PARTS;
    scales += first;
    Vector sums[HEIGHT * VECTORS];
    load_sums<HEIGHT>(tile, first, sums);
    for (int64_t left = span.end - span.begin; left-- > 0; words += WORDS, row_scales += HEIGHT)
        for (int part = 0; part < PARTS; ++part, scales += PANEL, starts += HEIGHT) {
            // Few rows wait for memory: ask for what comes next.
            if constexpr (HEIGHT <= 4)
                unrolled<WORDS * 4 / 64 / PARTS>([&](auto line) {
                    __builtin_prefetch(reinterpret_cast<const char*>(words - first) + AHEAD +
                                       (part * (WORDS * 4 / 64 / PARTS) + line) * 64, 0, 2);
                });
            Integers whole[HEIGHT * VECTORS];
            unrolled<HEIGHT * VECTORS>([&](auto i) { whole[i] = Integers{} + starts[i / VECTORS]; });
            for (int half = part; half < (PARTS == 1 ? 2 : part + 1); ++half)
                unrolled<HALF_QUADS>([&](auto quad) {
                    Words w[VECTORS];
                    unrolled<VECTORS>([&](auto v) {
                        w[v] = unpacked<WIDTH>(words + v * LANES, half, quad, table);
                    });
                    unrolled<HEIGHT>([&](auto r) {
                        unrolled<VECTORS>([&](auto v) {
                            auto& sum = whole[r * VECTORS + v];
                            sum = dot<WIDTH>(sum, w[v], codes[quad * HEIGHT + r]);
                        });
                    });
                    if (quad + 1 == HALF_QUADS) codes += HALF_QUADS * HEIGHT;
                });
            unrolled<HEIGHT * VECTORS>([&](auto i) {
                const Vector number = __builtin_convertvector(whole[i], Vector);
                const Vector scale = load(scales + i % VECTORS * LANES);
                sums[i] += number * (scale * row_scales[i / VECTORS]);
            });
        }
    store_sums<HEIGHT>(tile, first, sums);
}

// `rows` rows, one of the heights of a tile; scales, or minimums if those are to be subtracted.
template <int WIDTH, int PARTS, int HEIGHT, int... LOWER>
void multiply_rows(const Tile& tile, int64_t row, int64_t rows, Span span, const float* scales,
                   const float* minimums) {
    if constexpr (sizeof...(LOWER) > 0)
        if (rows < HEIGHT)
            return multiply_rows<WIDTH, PARTS, LOWER...>(tile, row, rows, span, scales, minimums);
    for (int64_t first = 0; first < PANEL; first += VECTORS * LANES) {
        if (scales) multiply_tile<WIDTH, PARTS, HEIGHT>(tile, row, first, span, scales);
        if (minimums) subtract<PARTS, HEIGHT>(tile, row, first, span, minimums);
    }
}

#ifdef GLLM_AMX
// The same for `rows` rows of a tile for AMX.
template <int PARTS>
void multiply_tall(const Tile& tile, int64_t row, int64_t rows, Span span, const float* scales,
                   const float* minimums) {
    const QuantizedRows& x = tile.x;
    const int64_t block = row * x.blocks + span.begin * rows, blocks = span.end - span.begin;
    const amx::RowTile quantized{rows, reinterpret_cast<const int8_t*>(x.codes.data() + block * (BLOCK / QUAD)),
                                     x.scales.data() + block, x.totals.data() + block * PARTS};
    tile.registers->shape(rows, rows, BLOCK / PARTS);
    for (int64_t first = 0; first < PANEL; first += LANES) {
        float* sums = tile.sums + first;
        if (scales)
            amx::multiply_groups<PARTS>(quantized, tile.weights + first * QUAD, scales + first, blocks, sums);
        if (minimums) amx::subtract_minimums<PARTS>(quantized, minimums + first, blocks, sums);
    }
}
#endif

using MultiplyRows = void (*)(const Tile&, int64_t, int64_t, Span, const float*, const float*);

#if defined(__AVX512F__)
template <int WIDTH, int PARTS>
constexpr MultiplyRows MULTIPLY = multiply_rows<WIDTH, PARTS, 6, 4, 3, 2, 1>;
#else
template <int WIDTH, int PARTS>
constexpr MultiplyRows MULTIPLY = multiply_rows<WIDTH, PARTS, 4, 3, 2, 1>;
#endif

// Call f with the layout's numbers known when compiling: WIDTH, and parts of a block with a scale.
template <class F>
void with_layout(int32_t width, bool is_looked_up, int64_t group, const F& f) {
    const auto with_parts = [&](auto bits) {
        group < BLOCK ? f(bits, std::integral_constant<int, 2>{}) : f(bits, std::integral_constant<int, 1>{});
    };
    if (is_looked_up)
        with_parts(std::integral_constant<int, LOOKED_UP>{});
    else if (width == 4)
        with_parts(std::integral_constant<int, 4>{});
    else if (width == 6)
        with_parts(std::integral_constant<int, 6>{});
    else
        with_parts(std::integral_constant<int, 8>{});
}

// Kernels of a layout: for tiles of vectors, and for those of AMX with the weights that they multiply.
struct Kernels {
    MultiplyRows multiply = nullptr;
#ifdef GLLM_AMX
    MultiplyRows multiply_tall = nullptr;
    decltype(&amx::unpack<4>) unpack = nullptr;
    int64_t words = 0;  // of a block and a panel
#endif

    Kernels(int32_t width, bool is_looked_up, int64_t group) {
        with_layout(width, is_looked_up, group, [&](auto bits, auto parts) {
            multiply = MULTIPLY<bits, parts>;
#ifdef GLLM_AMX
            multiply_tall = gllm::multiply_tall<parts>;
            unpack = amx::unpack<bits>;
            words = BLOCK_WORDS<bits> * PANEL;
#endif
        });
    }
};

// Tasks go through all panels with some rows before they come to the next ones: these rows stay in the caches.
class GroupedProduct {
  public:
    GroupedProduct(const GroupedArguments& given, const QuantizedRows& rows)
        : a(given), x(rows), kernels(a.width, a.table, a.group), halves(a.gate == NONE ? 1 : 2),
          panels((a.outputs / halves + PANEL - 1) / PANEL), chunks((a.rows + ROW_CHUNK - 1) / ROW_CHUNK),
          most(std::max<int64_t>(1, std::min(MOST_PANELS, halves * panels * chunks / (4 * a.threads)) / halves)) {
        if (a.table) table = Table(a.table);
    }

    template <class T, class Out>
    void run() const {
        const int64_t groups = (panels + most - 1) / most;
        share_loop(a.threads, groups * chunks, true, [&](int64_t task) {
            const int64_t panel = task % groups * most, first = task / groups * ROW_CHUNK;
            multiply_panels<T, Out>(panel, std::min(panel + most, panels), first, std::min(a.rows - first, ROW_CHUNK));
        });
    }

  private:
    static constexpr int64_t MOST_PANELS = 8;

    const GroupedArguments& a;
    const QuantizedRows& x;
    const Kernels kernels;
    const int64_t halves;          // 2 where gated
    const int64_t panels, chunks;  // panels of a half
    const int64_t most;            // panels of a task, of each half
    Table table;

    template <class T, class Out>
    void multiply_panels(int64_t panel, int64_t end, int64_t first, int64_t rows) const {
        static thread_local Memory<float> sums;
        const int64_t size = (rows + READ_BEYOND) * PANEL, count = end - panel;
        sums.assign(halves * count * size, 0.0f);
        for (int64_t i = 0; i < halves * count; ++i)
            multiply_panel(i / count * panels + panel + i % count, first, rows, sums.data() + i * size);
        const auto write_half = [&](int64_t half, int64_t r, auto* to) {
            for (int64_t i = 0; i < count; ++i)
                write<T>(half * panels + panel + i, sums.data() + (half * count + i) * size + r * PANEL,
                         to + i * PANEL);
        };
        // Row by row: the rows of the output are on pages of their own.
        for (int64_t r = 0; r < rows; ++r) {
            Out* to = static_cast<Out*>(a.output) + (first + r) * a.output_row + panel * PANEL;
            if (halves == 1) {
                write_half(0, r, to);
            } else if constexpr (std::is_same_v<T, Out>) {
                T numbers[2][MOST_PANELS / 2 * PANEL];
                write_half(0, r, numbers[0]);
                write_half(1, r, numbers[1]);
                gate_row(numbers[0], numbers[1], to, count * PANEL, a.gate);
            }
        }
    }

    // sums [rows, PANEL]: of some rows and a panel, at zero.
    void multiply_panel(int64_t panel, int64_t first, int64_t rows, float* sums) const {
        static thread_local Memory<float> scales;
        // Few rows are multiplied at the speed of memory: what belongs together is read together.
        const int64_t piece = tile_height(rows, x.tallest) == rows ? PIECE : LONG_PIECE;
        scales.resize(piece * x.parts * PANEL);
        Tile tile{a, x, table, panel, sums};
#ifdef GLLM_AMX
        static thread_local Memory<int8_t> weights;
        amx::Registers registers;
        const bool has_tall = tile_height(rows, x.tallest) > HEIGHTS[0];
        if (has_tall) weights.resize(piece * BLOCK * PANEL);
        tile.registers = &registers;
        tile.weights = weights.data();
#endif
        each_piece(a.scales, panel, piece, scales.data(), [&](Span span) {
#ifdef GLLM_AMX
            if (has_tall)
                kernels.unpack(a.codes + (panel * x.blocks + span.begin) * kernels.words, span.end - span.begin,
                               a.zero, table, weights.data());
#endif
            multiply_tiles(tile, first, rows, span, scales.data(), nullptr);
        });
        if (a.minimums.numbers)
            each_piece(a.minimums, panel, piece, scales.data(), [&](Span span) {
                multiply_tiles(tile, first, rows, span, nullptr, scales.data());
            });
    }

    // All tiles of some rows, of which `tile` is the first.
    void multiply_tiles(Tile tile, int64_t first, int64_t rows, Span span, const float* scales,
                        const float* minimums) const {
        for (int64_t left = rows; left > 0;) {
            const int64_t height = tile_height(left, x.tallest);
            const MultiplyRows multiply = multiply_of(height);
            multiply(tile, first + rows - left, height, span, scales, minimums);
            tile.sums += height * PANEL;
            left -= height;
        }
    }

    MultiplyRows multiply_of([[maybe_unused]] int64_t height) const {
#ifdef GLLM_AMX
        if (height > HEIGHTS[0]) return kernels.multiply_tall;
#endif
        return kernels.multiply;
    }

    // Call f with each piece of a row, of which `to` has the scales.
    template <class F>
    void each_piece(const GroupScales& s, int64_t panel, int64_t size, float* to, const F& f) const {
        for (int64_t begin = 0; begin < x.blocks; begin += size) {
            const Span span{begin, std::min(begin + size, x.blocks)};
            spread(s, panel, a.inputs, a.group, x.parts, span, to);
            f(span);
        }
    }

    template <class T, class Out>
    void write(int64_t panel, const float* sums, Out* to) const {
        const int64_t first = panel * PANEL, count = std::min(a.outputs - first, PANEL);
        const T* bias = a.bias ? static_cast<const T*>(a.bias) + first : nullptr;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const Vector sum = load(sums + i);
            store(to + i, bias ? sum + load(bias + i) : sum);
        }
        for (; i < count; ++i) assign(to[i], bias ? sums[i] + to_float(bias[i]) : sums[i]);
    }
};

// Weights of chosen outputs as numbers.
template <class T>
void read_rows(const GroupedRowsArguments& a) {
    with_layout(a.width, a.table, a.group, [&](auto width, auto) {
        const Table table = a.table ? Table(a.table) : Table();
        const int64_t blocks = blocks_of(a.inputs), words = BLOCK_WORDS<width> * PANEL;
        const int64_t groups = (blocks * BLOCK + a.group - 1) / a.group;
        Memory<float> scales, minimums;
        scales.resize(groups * PANEL);
        minimums.assign(groups * PANEL, 0.0f);
        for (int64_t row = 0; row < a.rows; ++row) {
            const int64_t panel = a.chosen[row] / PANEL, output = a.chosen[row] % PANEL;
            const int64_t first = output / LANES * LANES, lane = output - first;
            read_scales(a.scales, panel, groups, 0, groups, scales.data());
            if (a.minimums.numbers) read_scales(a.minimums, panel, groups, 0, groups, minimums.data());
            const uint32_t* from = a.codes + panel * blocks * words + first;
            T* to = static_cast<T*>(a.output) + row * a.inputs;
            for (int64_t begin = 0; begin < a.inputs; begin += QUAD) {
                const int64_t quad = begin / QUAD, group = begin / a.group * PANEL + output;
                const uint32_t word = unpacked<width>(from + begin / BLOCK * words,
                                                      static_cast<int>(quad / HALF_QUADS % 2),
                                                      static_cast<int>(quad % HALF_QUADS), table)[lane];
                for (int64_t i = begin; i < std::min(begin + QUAD, a.inputs); ++i) {
                    const int code = static_cast<int>(word >> 8 * (i - begin) & 0xff) - a.zero;
                    assign(to[i], static_cast<float>(code) * scales[group] - minimums[group]);
                }
            }
        }
    });
}

template <class T, class Out>
void linear_grouped(const GroupedArguments& a) {
    const QuantizedRows rows(a, static_cast<const T*>(a.x));
    GroupedProduct(a, rows).run<T, Out>();
}

}  // namespace
}  // namespace gllm

extern "C" {
#pragma GCC visibility push(default)

void gllm_linear_grouped(const gllm::GroupedArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) {
        using T = decltype(type);
        a->float_output ? gllm::linear_grouped<T, float>(*a) : gllm::linear_grouped<T, T>(*a);
    });
}

void gllm_read_grouped(const gllm::GroupedRowsArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::read_rows<decltype(type)>(*a); });
}
#pragma GCC visibility pop
}

// Recurrent layers: causal depthwise convolution and linear recurrences over states in slots.
//
// Each token updates the state of its sequence, one after the other, in decodes and prefill chunks alike:
// results do not depend on how a prompt is divided into chunks, nor on the other sequences of the step.
// Sequences, heads and columns of a state are independent; threads divide them. Everything is computed in
// float32. The sources of the formulas are in the reference implementations (gllm/kernels).

#include <algorithm>
#include <cmath>

#include "activation.h"
#include "pool.h"
#include "scratch.h"

namespace gllm {

// Rows of a batch and the slots of their states, as in state_plan.py.
struct Segment {
    int32_t first, rows, source, destination;
};

struct StatePlan {
    const Segment* segments;
    const int32_t* groups;  // [num_groups + 1]: first segment of each sequence
    int64_t num_groups;
};

struct ConvolutionArguments {
    StatePlan plan;
    const void* input;    // [tokens, channels], input_row elements between tokens
    const float* weight;  // [size, channels], that of the current token last
    const float* bias;    // [channels], or null
    float* state;         // [slots, size - 1, channels]: the last inputs, oldest first
    void* output;         // [tokens, channels]
    int64_t channels, size, input_row;
    int32_t activation, dtype, threads;
};

struct RecurrenceArguments {
    StatePlan plan;
    const void* query;   // [tokens, key_heads, key_dim]
    const void* key;     // [tokens, key_heads, key_dim]
    const void* value;   // [tokens, heads, value_dim]
    const void* step;    // [tokens, heads] or [tokens, heads, key_dim]: before the bias and softplus
    const void* beta;    // [tokens, heads] before the sigmoid, or null: without the delta rule
    const float* rate;   // [heads]: logarithm of the decay per unit of the step, negative
    const float* bias;   // of the step, [heads] or [heads, key_dim]
    const float* skip;   // [heads]: share of the value in the output, or null
    float* state;        // [slots, heads, key_dim, value_dim]
    void* output;        // [tokens, heads, value_dim]
    int64_t heads, key_heads, key_dim, value_dim;
    int64_t query_row, key_row, value_row, step_row, beta_row;  // elements between tokens
    float min_step, max_step, query_scale;
    float decay_bound;    // of the logarithm of the decay, negative; 0: the decay is exp(rate * step)
    int32_t normalizes;   // queries and keys are scaled to length 1
    int32_t step_per_key;  // a step for each element of the key
    int32_t dtype, threads;
};

struct ScanArguments {
    StatePlan plan;
    const void* value;  // [tokens, channels]
    const void* step;   // [tokens, channels]: before the bias and softplus
    const void* key;    // [tokens, size]
    const void* query;  // [tokens, size]
    const float* rate;  // [size, channels]: logarithm of the decay per unit of the step, negative
    const float* bias;  // [channels], of the step
    const float* skip;  // [channels]: share of the value in the output
    float* state;       // [slots, size, channels]
    void* output;       // [tokens, channels]
    int64_t channels, size;
    int64_t value_row, step_row, key_row, query_row;  // elements between tokens
    int32_t dtype, threads;
};

struct GatedNormArguments {
    const void* input;   // [tokens, groups, size]
    const void* gate;    // [tokens, groups, size], gate_row elements between tokens
    const void* weight;  // [weight_groups, size], floats where float_weight, else as input
    void* output;        // [tokens, groups, size]
    int64_t rows;        // tokens * groups
    int64_t groups, weight_groups, size, gate_row;
    float eps;
    int32_t gates_first;  // the gate is applied before the norm
    int32_t activation, float_weight, dtype, threads;
};

namespace {

constexpr int64_t CHANNELS = 256;     // of a convolution per task
constexpr int64_t TILE = 8;           // tokens whose queries, keys and steps are prepared together
constexpr int WIDTH = 2;              // vectors of a block of columns: the block stays in the L1 cache
constexpr int64_t COLUMNS = WIDTH * LANES;
constexpr int CHAINS = 4;             // independent sums of a column, as additions take several cycles
constexpr float EPSILON = 1e-6f;      // added to the squared length of queries and keys

template <class T>
struct ConvolutionTask {
    const ConvolutionArguments& a;
    const int64_t begin, end;  // channels

    const T* input(const Segment& segment, int64_t token) const {
        return static_cast<const T*>(a.input) + (segment.first + token) * a.input_row;
    }
    float* state(int32_t slot, int64_t index) const {
        return a.state + (slot * (a.size - 1) + index) * a.channels;
    }

    // Call f(k, row) for each filter element with the inputs of the token that it weighs, as numbers of the
    // batch or of the state; inputs before the sequence are zero.
    template <class F>
    void for_each_row(const Segment& segment, int64_t token, const F& f) const {
        for (int64_t k = 0; k < a.size; ++k) {
            const int64_t at = token + k - a.size + 1;
            if (at >= 0)
                f(k, input(segment, at));
            else if (segment.source >= 0)
                f(k, static_cast<const float*>(state(segment.source, a.size - 1 + at)));
        }
    }

    void write_outputs(const Segment& segment, float* sums) const {
        for (int64_t token = 0; token < segment.rows; ++token) {
            const int64_t size = end - begin;
            if (a.bias)
                std::copy(a.bias + begin, a.bias + end, sums);
            else
                std::fill(sums, sums + size, 0.0f);
            for_each_row(segment, token, [&](int64_t k, const auto* row) {
                const float* weight = a.weight + k * a.channels + begin;
                row += begin;
                int64_t i = 0;
                for (; i + LANES <= size; i += LANES)
                    store(sums + i, gllm::load(sums + i) + gllm::load(weight + i) * gllm::load(row + i));
                for (; i < size; ++i) sums[i] += weight[i] * to_float(row[i]);
            });
            T* output = static_cast<T*>(a.output) + (segment.first + token) * a.channels + begin;
            int64_t i = 0;
            for (; i + LANES <= size; i += LANES) store(output + i, activated(gllm::load(sums + i), a.activation));
            for (; i < size; ++i) assign(output[i], activated(broadcast(sums[i]), a.activation)[0]);
        }
    }

    // Rows are written from the oldest on: where both slots are the same, no row is read afterwards.
    void write_state(const Segment& segment) const {
        for (int64_t index = 0; index < a.size - 1; ++index) {
            const int64_t at = segment.rows - (a.size - 1) + index;
            float* to = state(segment.destination, index);
            if (at < 0) {
                if (segment.source < 0)
                    std::fill(to + begin, to + end, 0.0f);
                else {
                    const float* from = state(segment.source, a.size - 1 + at);
                    std::copy(from + begin, from + end, to + begin);
                }
                continue;
            }
            const T* row = input(segment, at);
            int64_t i = begin;
            for (; i + LANES <= end; i += LANES) store(to + i, gllm::load(row + i));
            for (; i < end; ++i) to[i] = to_float(row[i]);
        }
    }
};

template <class T>
void convolve(const ConvolutionArguments& a) {
    const int64_t blocks = (a.channels + CHANNELS - 1) / CHANNELS;
    share_loop(a.threads, a.plan.num_groups * blocks, true, [&](int64_t task) {
        const int64_t group = task / blocks, begin = task % blocks * CHANNELS;
        const ConvolutionTask<T> part{a, begin, std::min(begin + CHANNELS, a.channels)};
        alignas(64) float sums[CHANNELS];
        for (int32_t i = a.plan.groups[group]; i < a.plan.groups[group + 1]; ++i) {
            part.write_outputs(a.plan.segments[i], sums);
            part.write_state(a.plan.segments[i]);
        }
    });
}

// Queries, keys, decays and update rates of up to TILE tokens of a head; keys are padded with zeros.
struct Tile {
    float *query, *key, *decay, *decayed_key;  // [TILE, padded key_dim]
    float rate[TILE];                          // of the update: beta, or the step
};

// Copy a row to floats; the scale is that of its length if `normalizes`.
template <class T>
void copy_scaled(const T* from, float* to, int64_t size, bool normalizes, float factor) {
    Vector squares{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Vector value = load(from + i);
        squares += value * value;
        store(to + i, value);
    }
    float total = sum(squares);
    for (; i < size; ++i) {
        to[i] = to_float(from[i]);
        total += to[i] * to[i];
    }
    if (normalizes) factor /= std::sqrt(total + EPSILON);
    for (i = 0; i + LANES <= size; i += LANES) store(to + i, load(to + i) * factor);
    for (; i < size; ++i) to[i] *= factor;
}

template <class T>
struct RecurrenceTask {
    const RecurrenceArguments& a;
    const int64_t head, padded;  // padded: key_dim, rounded up to CHAINS
    Tile& tile;
    float* block;  // [padded, COLUMNS]: a block of columns of the state

    template <class Number>
    const Number* at(const void* tensor, int64_t token, int64_t row, int64_t offset) const {
        return static_cast<const Number*>(tensor) + token * row + offset;
    }

    float step_of(float x, float bias) const {
        return std::min(std::max(softplus(broadcast(x + bias))[0], a.min_step), a.max_step);
    }

    float decay_of(float rate, float x, float bias) const {
        if (a.decay_bound < 0.0f) return std::exp(a.decay_bound / (1.0f + std::exp(rate * (x + bias))));
        return std::exp(rate * step_of(x, bias));
    }

    void prepare(int64_t first, int64_t tokens) {
        const int64_t key_head = head / (a.heads / a.key_heads), offset = key_head * a.key_dim;
        const float rate = a.rate[head];
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t token = first + t;
            float* query = tile.query + t * padded;
            float* key = tile.key + t * padded;
            float* decay = tile.decay + t * padded;
            copy_scaled(at<T>(a.query, token, a.query_row, offset), query, a.key_dim, a.normalizes, a.query_scale);
            copy_scaled(at<T>(a.key, token, a.key_row, offset), key, a.key_dim, a.normalizes, 1.0f);
            if (a.step_per_key) {
                const T* steps = at<T>(a.step, token, a.step_row, head * a.key_dim);
                for (int64_t i = 0; i < a.key_dim; ++i)
                    decay[i] = decay_of(rate, to_float(steps[i]), a.bias[head * a.key_dim + i]);
            } else {
                const float step = step_of(to_float(*at<T>(a.step, token, a.step_row, head)), a.bias[head]);
                const float all = decay_of(rate, to_float(*at<T>(a.step, token, a.step_row, head)), a.bias[head]);
                std::fill(decay, decay + a.key_dim, all);
                tile.rate[t] = step;
            }
            if (!a.beta) continue;
            tile.rate[t] = 1.0f / (1.0f + std::exp(-to_float(*at<T>(a.beta, token, a.beta_row, head))));
            float* decayed = tile.decayed_key + t * padded;
            for (int64_t i = 0; i < a.key_dim; ++i) decayed[i] = key[i] * decay[i];
        }
    }

    void load_block(int32_t slot, int64_t column, int64_t width) {
        if (slot < 0) {
            std::fill(block, block + padded * COLUMNS, 0.0f);
            return;
        }
        const float* from = a.state + (slot * a.heads + head) * a.key_dim * a.value_dim + column;
        for (int64_t i = 0; i < a.key_dim; ++i) {
            // The rows of the next block are far apart.
            for (int64_t j = COLUMNS; j < 2 * COLUMNS; j += 16) __builtin_prefetch(from + i * a.value_dim + j);
            std::copy(from + i * a.value_dim, from + i * a.value_dim + width, block + i * COLUMNS);
            std::fill(block + i * COLUMNS + width, block + (i + 1) * COLUMNS, 0.0f);
        }
        std::fill(block + a.key_dim * COLUMNS, block + padded * COLUMNS, 0.0f);
    }

    void store_block(int32_t slot, int64_t column, int64_t width) const {
        float* to = a.state + (slot * a.heads + head) * a.key_dim * a.value_dim + column;
        for (int64_t i = 0; i < a.key_dim; ++i)
            std::copy(block + i * COLUMNS, block + i * COLUMNS + width, to + i * a.value_dim);
    }

    // Weighted sum of the rows of the block, each chain over every CHAINS-th row.
    void weigh_rows(const float* weights, Vector* result) const {
        Vector sums[CHAINS][WIDTH]{};
        for (int64_t i = 0; i < padded; i += CHAINS)
            for (int chain = 0; chain < CHAINS; ++chain)
                for (int c = 0; c < WIDTH; ++c)
                    sums[chain][c] += weights[i + chain] * load(block + (i + chain) * COLUMNS + c * LANES);
        add_chains(sums, result);
    }

    static void add_chains(const Vector (&sums)[CHAINS][WIDTH], Vector* result) {
        for (int c = 0; c < WIDTH; ++c) result[c] = (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
    }

    // Update the block by one token and write its outputs.
    void update(int64_t t, int64_t token, int64_t column, int64_t width) {
        alignas(64) float values[COLUMNS]{};
        const T* value = at<T>(a.value, token, a.value_row, head * a.value_dim + column);
        for (int64_t i = 0; i < width; ++i) values[i] = to_float(value[i]);
        Vector change[WIDTH], recalled[WIDTH]{};
        if (a.beta) weigh_rows(tile.decayed_key + t * padded, recalled);
        for (int c = 0; c < WIDTH; ++c) change[c] = (load(values + c * LANES) - recalled[c]) * tile.rate[t];
        const float *key = tile.key + t * padded, *query = tile.query + t * padded;
        const float* decay = tile.decay + t * padded;
        Vector sums[CHAINS][WIDTH]{}, result[WIDTH];
        for (int64_t i = 0; i < padded; i += CHAINS)
            for (int chain = 0; chain < CHAINS; ++chain)
                for (int c = 0; c < WIDTH; ++c) {
                    float* row = block + (i + chain) * COLUMNS + c * LANES;
                    const Vector state = load(row) * decay[i + chain] + key[i + chain] * change[c];
                    store(row, state);
                    sums[chain][c] += state * query[i + chain];
                }
        add_chains(sums, result);
        for (int c = 0; c < WIDTH; ++c) {
            if (a.skip) result[c] += a.skip[head] * load(values + c * LANES);
            store(values + c * LANES, result[c]);
        }
        T* output = static_cast<T*>(a.output) + (token * a.heads + head) * a.value_dim + column;
        for (int64_t i = 0; i < width; ++i) assign(output[i], values[i]);
    }

    void run(const Segment& segment, int64_t begin, int64_t end) {
        int32_t source = segment.source;
        int64_t done = 0;
        do {
            const int64_t tokens = std::min(TILE, segment.rows - done), first = segment.first + done;
            prepare(first, tokens);
            for (int64_t column = begin; column < end; column += COLUMNS) {
                const int64_t width = std::min(COLUMNS, end - column);
                load_block(source, column, width);
                for (int64_t t = 0; t < tokens; ++t) update(t, first + t, column, width);
                store_block(segment.destination, column, width);
            }
            source = segment.destination;
            done += tokens;
        } while (done < segment.rows);
    }
};

template <class T>
void recur(const RecurrenceArguments& a) {
    const int64_t padded = (a.key_dim + CHAINS - 1) / CHAINS * CHAINS;
    const int64_t blocks = (a.value_dim + COLUMNS - 1) / COLUMNS, pairs = a.plan.num_groups * a.heads;
    // Columns are divided only where there are too few heads: each part prepares its tokens again.
    const int64_t parts = std::min(blocks, std::max<int64_t>(1, 2 * a.threads / std::max<int64_t>(pairs, 1)));
    share(a.threads, pairs * parts, [&](Tasks& tasks) {
        static thread_local Memory<float> memory;
        const int64_t arrays = 4 * TILE * padded;
        memory.resize(arrays + padded * COLUMNS);
        std::fill(memory.begin(), memory.begin() + arrays, 0.0f);
        Tile tile;
        float* next = memory.data();
        for (float** array : {&tile.query, &tile.key, &tile.decay, &tile.decayed_key}) {
            *array = next;
            next += TILE * padded;
        }
        for (int64_t task; tasks.claim(task);) {
            const int64_t pair = task / parts, part = task % parts, group = pair / a.heads;
            RecurrenceTask<T> work{a, pair % a.heads, padded, tile, next};
            const int64_t begin = blocks * part / parts * COLUMNS;
            const int64_t end = std::min(blocks * (part + 1) / parts * COLUMNS, a.value_dim);
            for (int32_t i = a.plan.groups[group]; i < a.plan.groups[group + 1]; ++i)
                work.run(a.plan.segments[i], begin, end);
        }
    });
}

// Update COLUMNS channels of a state by the tokens of a segment; those beyond the last channel are zero.
template <class T>
struct ScanTask {
    const ScanArguments& a;
    const int64_t begin, width;
    float *block, *rate;  // [size, COLUMNS]
    float *bias, *skip;   // [COLUMNS]

    template <class From>
    void copy(const From* from, float* to) const {
        for (int64_t i = 0; i < width; ++i) to[i] = to_float(from[i]);
        std::fill(to + width, to + COLUMNS, 0.0f);
    }

    void prepare() const {
        for (int64_t n = 0; n < a.size; ++n) copy(a.rate + n * a.channels + begin, rate + n * COLUMNS);
        copy(a.bias + begin, bias);
        copy(a.skip + begin, skip);
    }

    float* state(int32_t slot, int64_t n) const { return a.state + (slot * a.size + n) * a.channels + begin; }

    const T* row(const void* tensor, int64_t token, int64_t size) const {
        return static_cast<const T*>(tensor) + token * size;
    }

    void update(int64_t token) const {
        alignas(64) float values[COLUMNS], steps[COLUMNS];
        copy(row(a.value, token, a.value_row) + begin, values);
        copy(row(a.step, token, a.step_row) + begin, steps);
        const T *key = row(a.key, token, a.key_row), *query = row(a.query, token, a.query_row);
        Vector step[WIDTH], change[WIDTH], result[WIDTH];
        for (int c = 0; c < WIDTH; ++c) {
            const Vector value = load(values + c * LANES);
            step[c] = softplus(load(steps + c * LANES) + load(bias + c * LANES));
            change[c] = value * step[c];
            result[c] = value * load(skip + c * LANES);
        }
        for (int64_t n = 0; n < a.size; ++n) {
            const float by = to_float(key[n]), read = to_float(query[n]);
            for (int c = 0; c < WIDTH; ++c) {
                const int64_t at = n * COLUMNS + c * LANES;
                const Vector next = load(block + at) * exp(load(rate + at) * step[c]) + change[c] * by;
                store(block + at, next);
                result[c] += next * read;
            }
        }
        for (int c = 0; c < WIDTH; ++c) store(values + c * LANES, result[c]);
        T* output = static_cast<T*>(a.output) + token * a.channels + begin;
        for (int64_t i = 0; i < width; ++i) assign(output[i], values[i]);
    }

    void run(const Segment& segment) const {
        for (int64_t n = 0; n < a.size; ++n) {
            if (segment.source < 0)
                std::fill(block + n * COLUMNS, block + (n + 1) * COLUMNS, 0.0f);
            else
                copy(state(segment.source, n), block + n * COLUMNS);
        }
        for (int64_t t = 0; t < segment.rows; ++t) update(segment.first + t);
        for (int64_t n = 0; n < a.size; ++n)
            std::copy(block + n * COLUMNS, block + n * COLUMNS + width, state(segment.destination, n));
    }
};

template <class T>
void scan(const ScanArguments& a) {
    const int64_t blocks = (a.channels + COLUMNS - 1) / COLUMNS;
    share(a.threads, a.plan.num_groups * blocks, [&](Tasks& tasks) {
        static thread_local Memory<float> memory;
        memory.resize((2 * a.size + 2) * COLUMNS);
        float *block = memory.data(), *rate = block + a.size * COLUMNS, *bias = rate + a.size * COLUMNS;
        for (int64_t task; tasks.claim(task);) {
            const int64_t group = task / blocks, begin = task % blocks * COLUMNS;
            const int64_t width = std::min(COLUMNS, a.channels - begin);
            const ScanTask<T> work{a, begin, width, block, rate, bias, bias + COLUMNS};
            work.prepare();
            for (int32_t i = a.plan.groups[group]; i < a.plan.groups[group + 1]; ++i)
                work.run(a.plan.segments[i]);
        }
    });
}

template <class T, class W>
void gated_norm(const GatedNormArguments& a) {
    share_loop(a.threads, a.rows, a.rows * a.size >= 1 << 14, [&](int64_t row) {
        const int64_t group = row % a.groups;
        const T* input = static_cast<const T*>(a.input) + row * a.size;
        const T* gate = static_cast<const T*>(a.gate) + row / a.groups * a.gate_row + group * a.size;
        const W* weight = static_cast<const W*>(a.weight) + group % a.weight_groups * a.size;
        T* output = static_cast<T*>(a.output) + row * a.size;
        const auto gated = [&](Vector x, Vector by, bool is_now) {
            return is_now ? x * activated(by, a.activation) : x;
        };
        Vector squares{};
        float total = 0.0f;
        int64_t i = 0;
        for (; i + LANES <= a.size; i += LANES) {
            const Vector value = gated(load(input + i), load(gate + i), a.gates_first);
            squares += value * value;
        }
        for (; i < a.size; ++i) {
            const Vector by = broadcast(to_float(gate[i]));
            const float value = gated(broadcast(to_float(input[i])), by, a.gates_first)[0];
            total += value * value;
        }
        const float factor = 1.0f / std::sqrt((sum(squares) + total) / static_cast<float>(a.size) + a.eps);
        for (i = 0; i + LANES <= a.size; i += LANES)
            store(output + i, gated(load(input + i) * factor * load(weight + i), load(gate + i), true));
        for (; i < a.size; ++i) {
            const Vector value = broadcast(to_float(input[i])) * factor * to_float(weight[i]);
            assign(output[i], gated(value, broadcast(to_float(gate[i])), true)[0]);
        }
    });
}

}  // namespace
}  // namespace gllm

extern "C" {
#pragma GCC visibility push(default)

void gllm_convolve(const gllm::ConvolutionArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::convolve<decltype(type)>(*a); });
}

void gllm_recur(const gllm::RecurrenceArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::recur<decltype(type)>(*a); });
}

void gllm_scan(const gllm::ScanArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::scan<decltype(type)>(*a); });
}

void gllm_gated_norm(const gllm::GatedNormArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) {
        using T = decltype(type);
        a->float_weight ? gllm::gated_norm<T, float>(*a) : gllm::gated_norm<T, T>(*a);
    });
}
#pragma GCC visibility pop
}

// Attention over a paged KV cache, for decodes and prefill chunks.
//
// A tile holds the queries of the heads that share a KV head, for as many tokens as fit. It visits the
// context in blocks of KEYS keys with an online softmax. Source: Dao et al., "FlashAttention" (2022),
// algorithm 1; Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "products.h"
#include "scratch.h"

namespace gllm {

constexpr int64_t KEYS = 128;       // of a block
constexpr int64_t TILE_ROWS = 112;  // queries of a tile, over all heads that share keys

struct AttentionArguments {
    void* output;                // [tokens, heads, value_dim]
    const void* query;           // [tokens, heads, key_dim], tokens query_row elements apart
    const void* keys;            // [slots, kv_heads, key_dim], slots key_row elements apart
    const void* values;          // [slots, kv_heads, value_dim], slots value_row elements apart
    // With int8_cache, keys and values are codes; the float behind a head's codes is their scale.
    const int64_t* block_table;  // [rows, table_row]
    const int64_t* query_start;  // [rows + 1]
    const int64_t* context_len;  // [rows]
    const float* slopes;         // [heads], or null
    int64_t rows, table_row, block_size;
    int64_t heads, kv_heads, key_dim, value_dim;
    int64_t query_row, key_row, value_row;
    int64_t window;  // of the latest keys; below 0: of chunks of that many keys; 0: all
    float scale, softcap;  // softcap 0: none
    int32_t dtype, int8_cache, threads;
    const float* sinks;  // [heads], or null: scores of a further key, whose value is zero
};

namespace {

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Where the keys and values of a block are.
struct Block {
    const char *keys[KEYS], *values[KEYS];
    int64_t count = 0;
};

// What one thread keeps from tile to tile.
template <class Unit>
struct Scratch {
    Block block, coming;
    Memory<Unit> queries, keys, values, weights;
    Memory<float> scores, sums, most;
    // With codes only: scales of the block, and numbers of LANES rows of codes.
    float key_scales[KEYS], value_scales[KEYS];
    Memory<std::conditional_t<std::is_same_v<Unit, float>, float, bfloat16>> numbers;
    Memory<Vector> total;
    Products<Unit> products;
};

struct Tile {
    int64_t row, kv_head, first, tokens;  // first: token of the row
    int64_t position, begin, end;         // of the first token; of the keys it sees
};

// Where the positions of a sequence are in the cache, one after the other.
class Slots {
  public:
    Slots(const int64_t* table, int64_t block_size, int64_t position)
        : block(table + position / block_size), offset(position % block_size), size(block_size) {}

    int64_t next() {
        const int64_t slot = *block * size + offset;
        if (++offset == size) ++block, offset = 0;
        return slot;
    }

  private:
    const int64_t* block;
    int64_t offset, size;
};

// T: queries and outputs; Cached: keys and values, T or int8_t.
template <class T, class Cached>
class Attention {
    using Unit = typename Packing<T>::Unit;
    static constexpr int64_t PER = Packing<T>::PER_UNIT;
    // Keys of a block are filled up to a multiple of it.
    static constexpr int64_t STEP = std::max<int64_t>(LANES, Products<Unit>::INNER * PER);
    static constexpr bool CODES = !std::is_same_v<Cached, T>;
    static constexpr int64_t SCALE = CODES ? sizeof(float) : 0;  // elements behind a head

  public:
    explicit Attention(const AttentionArguments& given)
        : a(given), group(a.heads / a.kv_heads),
          units(rounded_up((a.key_dim + PER - 1) / PER, Products<Unit>::INNER)),
          width(rounded_up(a.value_dim, LANES)) {}

    void run() {
        const int64_t most = std::max<int64_t>(TILE_ROWS / group, 1);
        std::vector<Tile> tiles;
        for (int64_t row = 0; row < a.rows; ++row) {
            const int64_t count = a.query_start[row + 1] - a.query_start[row];
            for (int64_t first = 0; first < count; first += most)
                for (int64_t head = 0; head < a.kv_heads; ++head)
                    tiles.push_back(tile_of(row, head, first, std::min(most, count - first)));
        }
        // The costliest ones, at the end of chunks, first.
        std::reverse(tiles.begin(), tiles.end());
        const int64_t count = static_cast<int64_t>(tiles.size());
        share(a.threads, count, [&](Tasks& tasks) {
            Scratch<Unit> scratch;
            for (int64_t i; tasks.claim(i);)
                attend(tiles[i], tiles[std::min(i + a.threads, count - 1)], scratch);
        });
    }

  private:
    const AttentionArguments& a;
    const int64_t group, units, width;

    // Position of the first key that the query at a position sees.
    int64_t oldest_visible(int64_t position) const {
        if (a.window < 0) return position / -a.window * -a.window;
        return a.window ? std::max<int64_t>(position - a.window + 1, 0) : 0;
    }

    Tile tile_of(int64_t row, int64_t head, int64_t first, int64_t tokens) const {
        const int64_t row_tokens = a.query_start[row + 1] - a.query_start[row];
        const int64_t position = a.context_len[row] - row_tokens + first;
        // Blocks begin at multiples of KEYS, so that a query's sums do not depend on its tile.
        const int64_t begin = oldest_visible(position) / KEYS * KEYS;
        return {row, head, first, tokens, position, begin, position + tokens};
    }

    // next: what this thread may get after this tile.
    void attend(const Tile& tile, const Tile& next, Scratch<Unit>& s) const {
        const int64_t rows = tile.tokens * group;
        const int64_t padded = s.products.padded(rows);
        s.queries.assign(padded * units, Unit{});
        s.keys.resize(units * KEYS);
        s.values.resize(KEYS / PER * width);
        s.weights.resize(padded * KEYS / PER);
        s.scores.resize(padded * KEYS);
        s.sums.assign(padded * width, 0.0f);
        s.most.assign(rows, -INFINITY);
        s.total.assign(rows, Vector{});
        if constexpr (CODES) s.numbers.resize(LANES * std::max(a.key_dim, a.value_dim));
        if (a.sinks)
            for (int64_t r = 0; r < rows; ++r) {
                s.most[r] = a.sinks[tile.kv_head * group + r % group];
                s.total[r][0] = 1.0f;
            }
        pack_queries(tile, s.queries.data());
        locate(tile, tile.begin, s.block);
        for (int64_t key = tile.begin; key < tile.end; key += KEYS) {
            const int64_t count = s.block.count, wide = rounded_up(count, STEP);
            if (key + KEYS < tile.end)
                locate(tile, key + KEYS, s.coming);
            else
                locate(next, next.begin, s.coming);
            pack(s.block, s);
            if constexpr (CODES) {
                read_scales(s.block.keys, s.block.count, a.key_dim, s.key_scales);
                read_scales(s.block.values, s.block.count, a.value_dim, s.value_scales);
            }
            s.products.multiply(s.queries.data(), units, s.keys.data(), KEYS, s.scores.data(), KEYS,
                              rows, wide, units, false,
                              Wanted(s.coming.keys, s.coming.count, head_bytes(a.key_dim)));
            for (int64_t r = 0; r < rows; ++r)
                weigh(tile, r, tile.position + r / group, key, count, s);
            s.products.multiply(s.weights.data(), KEYS / PER, s.values.data(), width, s.sums.data(),
                              width, rows, width, wide / PER, true,
                              Wanted(s.coming.values, s.coming.count, head_bytes(a.value_dim)));
            std::swap(s.block, s.coming);
        }
        write(tile, s);
    }

    // Scores of a query against a block become weights; what was summed before is scaled to them.
    void weigh(const Tile& tile, int64_t r, int64_t position, int64_t key, int64_t count,
               Scratch<Unit>& s) const {
        float* scores = s.scores.data() + r * KEYS;
        const int64_t wide = rounded_up(count, STEP);
        if constexpr (CODES)
            for (int64_t j = 0; j < wide; j += LANES)
                store(scores + j, load(scores + j) * load(s.key_scales + j));
        const bool bent = a.softcap != 0 || a.slopes;
        if (bent) bend(scores, wide, tile.kv_head * group + r % group, key - position);
        const float scale = bent ? 1.0f : a.scale;
        const int64_t low = std::max<int64_t>(oldest_visible(position) - key, 0);
        const int64_t high = std::min(count, position + 1 - key);
        Vector most = broadcast(-INFINITY);
        for (int64_t j = 0; j < wide; j += LANES) {
            if (j < low || j + LANES > high)
                for (int64_t i = j; i < j + LANES; ++i)
                    if (i < low || i >= high) scores[i] = -INFINITY;
            const Vector score = load(scores + j);
            most = score > most ? score : most;
        }
        const float before = s.most[r], now = std::max(before, largest(most) * scale);
        Unit* weights = s.weights.data() + r * (KEYS / PER);
        if (now == -INFINITY) {
            std::fill(weights, weights + KEYS / PER, Unit{});
            return;
        }
        Vector total{};
        for (int64_t j = 0; j < wide; j += LANES) {
            const Vector weight = exp(load(scores + j) * scale - now);
            total += weight;
            Stored* to = reinterpret_cast<Stored*>(weights) + j;
            if constexpr (CODES)
                store(to, weight * load(s.value_scales + j));
            else
                store(to, weight);
        }
        if (now != before) {
            const float kept = std::exp(before - now);
            float* sums = s.sums.data() + r * width;
            for (int64_t d = 0; d < width; d += LANES) store(sums + d, load(sums + d) * kept);
            s.total[r] *= kept;
            s.most[r] = now;
        }
        s.total[r] += total;
    }

    // Scale scores of keys from `distance` behind the query on, bend them, add what distance costs.
    void bend(float* scores, int64_t count, int64_t head, int64_t distance) const {
        const float slope = a.slopes ? a.slopes[head] : 0.0f;
        for (int64_t j = 0; j < count; j += LANES) {
            Vector score = load(scores + j) * a.scale;
            if (a.softcap != 0) score = a.softcap * tanh(score / a.softcap);
            if (a.slopes)
                for (int lane = 0; lane < LANES; ++lane)
                    score[lane] += slope * static_cast<float>(distance + j + lane);
            store(scores + j, score);
        }
    }

    // Elements as units hold them.
    using Stored = std::conditional_t<PER == 1, float, bfloat16>;

    template <class Element>
    static void put(Stored& to, Element value) {
        if constexpr (std::is_same_v<Stored, Element>)
            to = value;
        else
            to = to_float(value);
    }

    void pack_queries(const Tile& tile, Unit* units_of) const {
        const T* query = static_cast<const T*>(a.query);
        for (int64_t r = 0; r < tile.tokens * group; ++r) {
            const int64_t token = a.query_start[tile.row] + tile.first + r / group;
            const int64_t head = tile.kv_head * group + r % group;
            const T* from = query + token * a.query_row + head * a.key_dim;
            Stored* to = reinterpret_cast<Stored*>(units_of + r * units);
            if constexpr (std::is_same_v<Stored, T>)
                std::copy(from, from + a.key_dim, to);
            else
                for (int64_t d = 0; d < a.key_dim; ++d) put(to[d], from[d]);
        }
    }

    void locate(const Tile& tile, int64_t first, Block& block) const {
        const Cached* keys = static_cast<const Cached*>(a.keys) + tile.kv_head * (a.key_dim + SCALE);
        const Cached* values =
            static_cast<const Cached*>(a.values) + tile.kv_head * (a.value_dim + SCALE);
        Slots slots(a.block_table + tile.row * a.table_row, a.block_size, first);
        block.count = std::min(KEYS, tile.end - first);
        for (int64_t i = 0; i < block.count; ++i) {
            const int64_t slot = slots.next();
            block.keys[i] = reinterpret_cast<const char*>(keys + slot * a.key_row);
            block.values[i] = reinterpret_cast<const char*>(values + slot * a.value_row);
        }
    }

    // keys [units, KEYS] and values [KEYS / PER, width], both zero behind what there is, as far as
    // vectors reach.
    void pack(const Block& block, Scratch<Unit>& s) const {
        Unit *keys = s.keys.data(), *values = s.values.data();
        const bool ragged = block.count % STEP != 0;
        if (ragged || units * PER != a.key_dim) std::fill(keys, keys + units * KEYS, Unit{});
        if (ragged || width != a.value_dim)
            std::fill(values, values + KEYS / PER * width, Unit{});
        for (int64_t j = 0; j < block.count; j += LANES) {
            const int64_t some = std::min<int64_t>(LANES, block.count - j);
            if constexpr (CODES) {
                const Stored* rows[LANES];
                widen(block.keys + j, some, a.key_dim, s.numbers.data(), rows);
                pack_columns(rows, some, keys + j);
                widen(block.values + j, some, a.value_dim, s.numbers.data(), rows);
                pack_rows(rows, some, values + j / PER * width);
            } else {
                pack_columns(reinterpret_cast<const T* const*>(block.keys + j), some, keys + j);
                pack_rows(reinterpret_cast<const T* const*>(block.values + j), some,
                          values + j / PER * width);
            }
        }
    }

    // Rows of codes become `numbers`, exactly; rows [count]: where each begins there.
    static void widen(const char* const* codes, int64_t count, int64_t dim, Stored* numbers,
                      const Stored** rows) {
        for (int64_t i = 0; i < count; ++i, numbers += dim) {
            const int8_t* from = reinterpret_cast<const int8_t*>(codes[i]);
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(numbers + d, load(from + d));
            for (; d < dim; ++d) assign(numbers[d], from[d]);
            rows[i] = numbers;
        }
    }

    // Bytes of a head's key or value.
    static int64_t head_bytes(int64_t dim) { return (dim + SCALE) * sizeof(Cached); }

    // scales [KEYS]: those behind the codes of some rows, zero after them.
    static void read_scales(const char* const* rows, int64_t count, int64_t dim, float* scales) {
        for (int64_t i = 0; i < count; ++i) std::memcpy(scales + i, rows[i] + dim, sizeof(float));
        std::fill(scales + count, scales + KEYS, 0.0f);
    }

    // Rows of keys become columns [units, KEYS].
    template <class Element>
    void pack_columns(const Element* const* rows, int64_t count, Unit* columns) const {
        int64_t unit = 0;
        if (count == LANES)
            for (; (unit + LANES) * PER <= a.key_dim; unit += LANES) {
                Vector block[LANES];
                for (int64_t i = 0; i < LANES; ++i) block[i] = load_units(rows[i] + unit * PER);
                transpose(block);
                for (int64_t i = 0; i < LANES; ++i)
                    std::memcpy(columns + (unit + i) * KEYS, &block[i], sizeof(Vector));
            }
        for (; unit < units; ++unit)
            for (int64_t i = 0; i < count; ++i)
                for (int64_t d = unit * PER; d < std::min((unit + 1) * PER, a.key_dim); ++d)
                    put(reinterpret_cast<Stored*>(columns + unit * KEYS + i)[d % PER], rows[i][d]);
    }

    // Rows of values stay rows; where a unit holds two numbers, they come from neighbours.
    template <class Element>
    void pack_rows(const Element* const* rows, int64_t count, Unit* packed) const {
        for (int64_t i = 0; i < count; i += PER, packed += width) {
            int64_t d = 0;
            if (i + PER <= count)
                for (; d + LANES <= a.value_dim; d += LANES) {
                    const Vector both = neighbours(rows[i] + d, rows[i + PER - 1] + d);
                    std::memcpy(packed + d, &both, sizeof(both));
                }
            for (; d < a.value_dim; ++d)
                for (int64_t j = 0; j < std::min(PER, count - i); ++j)
                    put(reinterpret_cast<Stored*>(packed + d)[j], rows[i + j][d]);
        }
    }

    template <class Element>
    static Vector neighbours(const Element* first, const Element* second) {
        if constexpr (PER == 1)
            return load(first);
        else
            return interleaved(first, second);
    }

    void write(const Tile& tile, const Scratch<Unit>& s) const {
        T* output = static_cast<T*>(a.output);
        for (int64_t r = 0; r < tile.tokens * group; ++r) {
            const int64_t token = a.query_start[tile.row] + tile.first + r / group;
            const int64_t head = tile.kv_head * group + r % group;
            T* to = output + (token * a.heads + head) * a.value_dim;
            const float* sums = s.sums.data() + r * width;
            const float share = 1.0f / sum(s.total[r]);
            int64_t d = 0;
            for (; d + LANES <= a.value_dim; d += LANES) store(to + d, load(sums + d) * share);
            for (; d < a.value_dim; ++d) assign(to[d], sums[d] * share);
        }
    }
};

}  // namespace
}  // namespace gllm

extern "C" __attribute__((visibility("default"))) void gllm_attention(const gllm::AttentionArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) {
        using T = decltype(type);
        a->int8_cache ? gllm::Attention<T, int8_t>(*a).run() : gllm::Attention<T, T>(*a).run();
    });
}

// Codes of few bits over four neighbouring inputs, for LANES outputs at once: unpacked, multiplied and
// summed. There is one product per instruction set; all give the same sums, none saturates.
#pragma once

#include "simd.h"

namespace gllm {

constexpr int64_t QUAD = 4;            // inputs that are multiplied and summed at once
constexpr int64_t BLOCK = 32;          // inputs whose codes lie together
constexpr int64_t HALF_QUADS = 4;      // quads of half a block
constexpr int64_t GROUPED_PANEL = 32;  // outputs whose weights lie together, block by block

static_assert(GROUPED_PANEL % LANES == 0);

// Words of a block, for each of the outputs of a panel. Word p has quad p in its low nibbles and quad
// p + HALF_QUADS in the high ones. With 6 bits two words follow: pair i of bits of word j belongs to
// quad 2 j + i % 2 of half i / 2. With 8 bits each word is a quad.
template <int WIDTH>
constexpr int64_t BLOCK_WORDS = WIDTH == 4 ? 4 : WIDTH == 6 ? 6 : 8;

// LOOKED_UP: 4 bits that choose from a table of 16 codes.
constexpr int LOOKED_UP = 5;
template <>
constexpr int64_t BLOCK_WORDS<LOOKED_UP> = 4;

inline Words load_words(const uint32_t* from) { return *reinterpret_cast<const Words*>(from); }

// The table of a product with WIDTH LOOKED_UP, in each 16 bytes of a vector.
struct Table {
    Words bytes{};

    Table() = default;
    explicit Table(const uint8_t* from) {
        for (int at = 0; at < GLLM_VECTOR_BYTES; at += 16)
            std::memcpy(reinterpret_cast<char*>(&bytes) + at, from, 16);
    }

    // Of four codes in each word.
    Words operator()(Words codes) const {
#if defined(__AVX512BW__)
        return (Words)_mm512_shuffle_epi8((__m512i)bytes, (__m512i)codes);
#elif defined(__AVX2__)
        return (Words)_mm256_shuffle_epi8((__m256i)bytes, (__m256i)codes);
#else
        uint8_t table[sizeof(Words)], all[sizeof(Words)];
        std::memcpy(table, &bytes, sizeof(bytes));
        std::memcpy(all, &codes, sizeof(codes));
        for (uint8_t& code : all) code = table[code];
        std::memcpy(&codes, all, sizeof(codes));
        return codes;
#endif
    }
};

// Quad `quad` of half `half` of a block, one byte for each of its inputs; words: of LANES outputs.
template <int WIDTH>
inline Words unpacked(const uint32_t* words, int half, int quad, const Table& table) {
    if constexpr (WIDTH == 8) {
        return load_words(words + (half * HALF_QUADS + quad) * GROUPED_PANEL);
    } else {
        const Words both = load_words(words + quad * GROUPED_PANEL);
        const Words low = both >> 4 * half & 0x0f0f0f0f;
        if constexpr (WIDTH == LOOKED_UP) return table(low);
        if constexpr (WIDTH == 6) {
            const Words high = load_words(words + (HALF_QUADS + quad / 2) * GROUPED_PANEL);
            return low | (high >> (2 * (2 * half + quad % 2)) & 0x03030303) << 4;
        }
        return low;
    }
}

// Products of neighbouring 16-bit numbers, summed in pairs.
#if defined(__AVX512BW__)
inline Integers pair_sums(Words a, Words b) {
    return (Integers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
inline Words odd_numbers(Words codes) { return (Words)_mm512_srai_epi16((__m512i)codes, 8); }
inline Words even_numbers(Words codes) {
    return odd_numbers((Words)_mm512_slli_epi16((__m512i)codes, 8));
}
#elif defined(__AVX2__)
inline Integers pair_sums(Words a, Words b) {
    return (Integers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
inline Words odd_numbers(Words codes) { return (Words)_mm256_srai_epi16((__m256i)codes, 8); }
inline Words even_numbers(Words codes) {
    return odd_numbers((Words)_mm256_slli_epi16((__m256i)codes, 8));
}
#elif defined(__SSE2__)
inline Integers pair_sums(Words a, Words b) {
    return (Integers)_mm_madd_epi16((__m128i)a, (__m128i)b);
}
inline Words odd_numbers(Words codes) { return (Words)_mm_srai_epi16((__m128i)codes, 8); }
inline Words even_numbers(Words codes) {
    return odd_numbers((Words)_mm_slli_epi16((__m128i)codes, 8));
}
#endif

// sums + the products of codes, unsigned, by an activation's signed codes of the quad.
template <int WIDTH>
inline Integers dot(Integers sums, Words weights, int32_t word) {
    const Words x = Words{} + static_cast<uint32_t>(word);
#if defined(__AVX512VNNI__)
    return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__SSE2__)
#if defined(__AVX2__)
    // Below 8 bits, pairs of products fit into 16 bits.
    if constexpr (WIDTH == 4 || WIDTH == 6) {
#if defined(__AVX512BW__)
        const Words pairs = (Words)_mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
#else
        const Words pairs = (Words)_mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
#endif
        return sums + pair_sums(pairs, Words{} + 0x00010001u);
    }
#endif
    return sums + pair_sums(weights & 0x00ff00ff, even_numbers(x)) +
           pair_sums(weights >> 8 & 0x00ff00ff, odd_numbers(x));
#else
    for (int i = 0; i < QUAD; ++i)
        sums += (Integers)(weights >> 8 * i & 0xff) * static_cast<int8_t>(word >> 8 * i);
    return sums;
#endif
}

}  // namespace gllm

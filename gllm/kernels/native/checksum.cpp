// Checksums of KV blocks, by which a later process recognizes the blocks that a dead one has completed.

#include <cstdint>
#include <cstring>

namespace gllm {

struct ChecksumArguments {
    uint64_t* checksums;         // [num_blocks]
    const int64_t* slots;        // [num_slots]: written slots of the cache
    const uint64_t* addresses;   // [num_tensors]: of block 0 in each tensor
    const int64_t* block_bytes;  // [num_tensors]: bytes from one block to the next
    int64_t num_slots, num_tensors, num_blocks, block_size;
};

namespace {

constexpr uint64_t STEP = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio, odd

// Sum of the words and of the products of their keyed halves: no word is without effect, wherever it is.
uint64_t sum_words(const char* from, int64_t num_bytes, uint64_t& key) {
    uint64_t sum = 0;
    const int64_t num_words = num_bytes / 8;
    const uint64_t first = key;
    for (int64_t i = 0; i < num_words; ++i) {
        uint64_t word;
        std::memcpy(&word, from + 8 * i, 8);
        const uint64_t mixed = word ^ (first + STEP * static_cast<uint64_t>(i));
        sum += word + static_cast<uint64_t>(static_cast<uint32_t>(mixed)) * (mixed >> 32);
    }
    key += STEP * static_cast<uint64_t>(num_words);
    if (const int64_t rest = num_bytes % 8) {
        uint64_t word = 0;
        std::memcpy(&word, from + 8 * num_words, rest);
        const uint64_t mixed = word ^ key;
        sum += word + static_cast<uint64_t>(static_cast<uint32_t>(mixed)) * (mixed >> 32);
        key += STEP;
    }
    return sum;
}

}  // namespace
}  // namespace gllm

// Store the checksum of each block whose last slot is listed; 0 is stored as 1.
extern "C" __attribute__((visibility("default"))) void gllm_checksum_blocks(const gllm::ChecksumArguments* a) {
    for (int64_t s = 0; s < a->num_slots; ++s) {
        const int64_t block = a->slots[s] / a->block_size;
        if (a->slots[s] % a->block_size != a->block_size - 1 || block >= a->num_blocks) continue;
        uint64_t key = gllm::STEP, sum = 0;
        for (int64_t t = 0; t < a->num_tensors; ++t) {
            const char* from = reinterpret_cast<const char*>(a->addresses[t]) + block * a->block_bytes[t];
            sum += gllm::sum_words(from, a->block_bytes[t], key);
        }
        a->checksums[block] = sum ? sum : 1;
    }
}

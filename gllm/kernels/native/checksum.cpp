// Checksums of KV blocks, by which a later process recognizes the blocks that a dead one has completed.

#include <cstdint>
#include <cstring>

namespace gllm {

struct ChecksumArguments {
    uint64_t* checksums;        // [num_blocks]: of the first slots of each block
    int64_t* counts;            // [num_blocks]: how many slots these are
    const int64_t* slots;       // [num_slots]: written slots of the cache
    const uint64_t* addresses;  // [num_tensors]: of block 0 in each tensor
    const int64_t* slot_bytes;  // [num_tensors]: bytes from one slot to the next
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

// The share of some slots in the checksum of their block: those of all of its slots add up to it.
uint64_t sum_slots(const ChecksumArguments* a, int64_t block, int64_t begin, int64_t end) {
    uint64_t sum = 0, first_key = STEP;
    for (int64_t t = 0; t < a->num_tensors; ++t) {
        const int64_t num_bytes = a->slot_bytes[t];
        const uint64_t slot_keys = STEP * static_cast<uint64_t>((num_bytes + 7) / 8);
        const char* from =
            reinterpret_cast<const char*>(a->addresses[t]) + (block * a->block_size + begin) * num_bytes;
        uint64_t key = first_key + slot_keys * static_cast<uint64_t>(begin);
        if (num_bytes % 8) {
            for (int64_t slot = begin; slot < end; ++slot, from += num_bytes) sum += sum_words(from, num_bytes, key);
        } else {
            sum += sum_words(from, (end - begin) * num_bytes, key);
        }
        first_key += slot_keys * static_cast<uint64_t>(a->block_size);
    }
    return sum;
}

}  // namespace
}  // namespace gllm

// Extend the checksums of blocks by the slots that a step has written. Where these do not follow those that have been
// counted, the slots before them are read again.
extern "C" __attribute__((visibility("default"))) void gllm_checksum_blocks(const gllm::ChecksumArguments* a) {
    for (int64_t s = 0; s < a->num_slots;) {
        const int64_t block = a->slots[s] / a->block_size, begin = a->slots[s] % a->block_size;
        int64_t end = begin;
        do {
            ++s, ++end;
        } while (s < a->num_slots && end < a->block_size && a->slots[s] == a->slots[s - 1] + 1);
        if (block >= a->num_blocks) continue;
        const bool follows = begin && a->counts[block] == begin;
        const uint64_t before = follows ? a->checksums[block] : 0;
        a->checksums[block] = before + gllm::sum_slots(a, block, follows ? begin : 0, end);
        a->counts[block] = end;
    }
}

// Sums and maxima over the ranks of a stage, in memory that their processes share.
//
// Each rank has several places in that memory. It writes its part into one of them, then waits at a barrier
// until every rank has done so, and adds all parts itself, in the order of the ranks: all ranks compute the
// same bits. One barrier per sum suffices: a place is written again only after a later barrier, which no rank
// reaches before it has read the place.

#include <algorithm>

#include "futex.h"
#include "pool.h"
#include "simd.h"

namespace gllm {

constexpr int64_t SPAN = 2048;       // elements that a thread adds at once
constexpr int64_t PARALLEL = 1 << 16;  // elements of all ranks from which on threads are worth waking
constexpr int MAX_RANKS = 64;
constexpr int PLACES = 5;
constexpr time_t LOOK_SECONDS = 1;  // longest sleep: a rank that dies while it cancels rings for nobody

enum Closed { OPEN, CANCELLED, MISMATCH };            // as in shared_region.py
enum Collective { ACQUIRE, SUM, MAXIMUM };            // further ones in shared_region.py

// Shared by all ranks; written by its own rank only, except the doorbell. As in library.py.
struct alignas(128) RankSyncState {
    std::atomic<uint32_t> sequence;     // number of collectives for which the rank's part is complete
    std::atomic<uint32_t> is_sleeping;  // whether the rank waits at its doorbell
    std::atomic<uint32_t> doorbell;     // futex; increased by those who wake the rank
    uint32_t unused;
    std::atomic<uint64_t> tags[2];  // what the rank computes in its last two collectives
};
static_assert(sizeof(RankSyncState) == 128 && std::atomic<uint64_t>::is_always_lock_free);

// One rank's view of a group. As in library.py.
struct RankGroup {
    RankSyncState* lines;                // [size]
    std::atomic<uint32_t>* closed;  // shared by all groups of the stage: Closed
    char* parts;                    // place p of rank r begins at r * rank_bytes + offsets[p]
    int64_t rank_bytes;
    int64_t offsets[PLACES];
    int32_t rank, size;
    uint32_t sequence;  // number of collectives that this rank has begun
    uint32_t spin_ns;   // nanoseconds to wait before the rank sleeps
    uint32_t used[PLACES];  // sequence in which each place was read last
};

struct BarrierArguments {
    RankGroup* group;
    uint64_t tag;       // what the ranks compute: the same on all of them
    int32_t place;      // that is read after the barrier
    int32_t is_acquire;  // only to write to the place: no barrier where there was one since its last use
};

struct ReduceArguments {
    RankGroup* group;
    const void* part;  // [rows, width]: the place itself, or memory that is copied to it
    const void* bias;  // [width], or null
    void* output;      // [rows, width]
    int64_t rows, width;
    int32_t place, collective;
    int32_t float_part, float_bias;  // whether they are floats, else as output
    int32_t dtype, threads;
};

struct CancelArguments {
    RankGroup* group;
};

namespace {

void ring(RankSyncState& line) {
    line.doorbell.fetch_add(1);
    futex(line.doorbell, FUTEX_WAKE, INT_MAX, nullptr);
}

// Give a reason to end, unless there is one, and wake the ranks of this group.
void close(const RankGroup& group, uint32_t reason) {
    uint32_t open = OPEN;
    group.closed->compare_exchange_strong(open, reason);
    for (int rank = 0; rank < group.size; ++rank) ring(group.lines[rank]);
}

bool have_arrived(const RankGroup& group) {
    for (int rank = 0; rank < group.size; ++rank)
        if (static_cast<int32_t>(group.lines[rank].sequence.load() - group.sequence) < 0) return false;
    return true;
}

bool is_over(const RankGroup& group) { return have_arrived(group) || group.closed->load() != OPEN; }

// Wait until all ranks have arrived or the group is closed.
void wait(const RankGroup& group) {
    if (spin([&] { return is_over(group); }, group.spin_ns)) return;
    const timespec longest{LOOK_SECONDS, 0};
    RankSyncState& line = group.lines[group.rank];
    line.is_sleeping.store(1);
    for (;;) {
        // Read first: whoever arrives after the look at the others rings, and the futex does not sleep.
        const uint32_t bell = line.doorbell.load();
        if (is_over(group)) break;
        futex(line.doorbell, FUTEX_WAIT, bell, &longest);
    }
    line.is_sleeping.store(0);
}

// Return whether all ranks have arrived with the same tag; else the group is closed.
bool barrier(RankGroup& group, int place, uint64_t tag) {
    if (group.closed->load() != OPEN) return false;
    const uint32_t number = ++group.sequence;
    RankSyncState& line = group.lines[group.rank];
    line.tags[number & 1].store(tag, std::memory_order_relaxed);
    line.sequence.store(number);
    for (int rank = 0; rank < group.size; ++rank)
        if (rank != group.rank && group.lines[rank].is_sleeping.load()) ring(group.lines[rank]);
    wait(group);
    if (!have_arrived(group)) return false;
    group.used[place] = number;
    for (int rank = 0; rank < group.size; ++rank)
        if (group.lines[rank].tags[number & 1].load(std::memory_order_relaxed) != tag) {
            close(group, MISMATCH);
            return false;
        }
    return true;
}

// Wait until no rank reads a place any more. All ranks have the same history, so all of them wait or none.
bool acquire(RankGroup& group, int place) {
    return group.used[place] != group.sequence || barrier(group, place, ACQUIRE);
}

float* place_of(const RankGroup& group, int rank, int place) {
    return reinterpret_cast<float*>(group.parts + rank * group.rank_bytes + group.offsets[place]);
}

template <class T>
void copy_part(const T* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; ++i) to[i] = to_float(from[i]);
}

struct Sum {
    template <class N>
    static N combine(N total, N part) { return total + part; }
};
struct Maximum {
    static Vector combine(Vector total, Vector part) {
        return as<Vector>(chosen((total > part) | (total != total), as<Words>(total), as<Words>(part)));
    }
    static float combine(float total, float part) {
        return total > part || total != total ? total : part;
    }
};

// output[i] = the parts' [i], combined by rank, + bias[i].
template <class Operation, class T, class B>
void combine(const float* const* parts, int size, int64_t begin, int64_t count, const B* bias, T* output) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Vector total = load(parts[0] + begin + i);
        for (int rank = 1; rank < size; ++rank)
            total = Operation::combine(total, load(parts[rank] + begin + i));
        store(output + i, bias ? total + load(bias + i) : total);
    }
    for (; i < count; ++i) {
        float total = parts[0][begin + i];
        for (int rank = 1; rank < size; ++rank) total = Operation::combine(total, parts[rank][begin + i]);
        assign(output[i], bias ? total + to_float(bias[i]) : total);
    }
}

template <class Operation, class T, class B>
void combine_all(const ReduceArguments& a) {
    const RankGroup& group = *a.group;
    const float* parts[MAX_RANKS];
    for (int rank = 0; rank < group.size; ++rank) parts[rank] = place_of(group, rank, a.place);
    const int64_t rows = a.bias ? a.rows : 1, width = a.bias ? a.width : a.rows * a.width;
    const int64_t spans = (width + SPAN - 1) / SPAN;
    share_loop(a.threads, rows * spans, rows * width * group.size >= PARALLEL, [&](int64_t span) {
        const int64_t row = span / spans, column = span % spans * SPAN;
        const B* bias = a.bias ? static_cast<const B*>(a.bias) + column : nullptr;
        T* output = static_cast<T*>(a.output) + row * width + column;
        const int64_t count = std::min(SPAN, width - column);
        combine<Operation>(parts, group.size, row * width + column, count, bias, output);
    });
}

template <class T>
void reduce(const ReduceArguments& a) {
    RankGroup& group = *a.group;
    float* place = place_of(group, group.rank, a.place);
    if (a.part != place) {
        if (!acquire(group, a.place)) return;
        if (a.float_part)
            copy_part(static_cast<const float*>(a.part), place, a.rows * a.width);
        else
            copy_part(static_cast<const T*>(a.part), place, a.rows * a.width);
    }
    const uint64_t kind = static_cast<uint64_t>(a.collective) << 60 | static_cast<uint64_t>(a.place) << 56;
    if (!barrier(group, a.place, kind | static_cast<uint64_t>(a.rows) << 28 | static_cast<uint64_t>(a.width)))
        return;
    if (a.collective == MAXIMUM)
        combine_all<Maximum, T, T>(a);
    else if (a.float_bias)
        combine_all<Sum, T, float>(a);
    else
        combine_all<Sum, T, T>(a);
}

}  // namespace
}  // namespace gllm

extern "C" {
#pragma GCC visibility push(default)

void gllm_reduce(const gllm::ReduceArguments* a) {
    gllm::with_dtype(a->dtype, [&](auto type) { gllm::reduce<decltype(type)>(*a); });
}

void gllm_barrier(const gllm::BarrierArguments* a) {
    if (a->is_acquire)
        gllm::acquire(*a->group, a->place);
    else
        gllm::barrier(*a->group, a->place, a->tag);
}

void gllm_cancel(const gllm::CancelArguments* a) { gllm::close(*a->group, gllm::CANCELLED); }
#pragma GCC visibility pop
}

// Threads that share the work of a kernel.
//
// A kernel divides its work into tasks, which its threads claim one after the other. The calling thread
// claims tasks as well, and never waits for a helper that has not begun: on a busy machine, where the
// kernel runs helpers late, it does the work itself. Which thread computes a task changes no result.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace gllm {

// Tasks 0 .. count - 1, each of which one thread claims.
class Tasks {
  public:
    explicit Tasks(int64_t count) : count(count) {}

    // Claim a task; return whether there was one.
    bool claim(int64_t& task) {
        task = next.fetch_add(1, std::memory_order_relaxed);
        return task < count;
    }

  private:
    std::atomic<int64_t> next{0};
    const int64_t count;
};

// Call work(context) in this thread, and meanwhile in at most `helpers` others, each at most once.
// Returns when all calls have returned.
void run_with_helpers(int helpers, void (*work)(void*), void* context);

// Call body(tasks) in up to `threads` threads, which claim `count` tasks.
template <class Body>
void share(int threads, int64_t count, Body body) {
    Tasks tasks(count);
    const auto work = [&] { body(tasks); };
    const int64_t useful = std::min<int64_t>(threads, count);
    if (useful < 2) return work();
    using Work = decltype(work);
    run_with_helpers(static_cast<int>(useful - 1), [](void* context) { (*static_cast<Work*>(context))(); },
                     const_cast<void*>(static_cast<const void*>(&work)));
}

// Call body(i) for i = 0 .. count - 1, in `threads` threads if that is worth it, else in this one.
template <class Body>
void share_loop(int threads, int64_t count, bool is_worth_it, Body body) {
    // Some ranges for each thread, as others may be busy.
    const int64_t ranges = is_worth_it && threads > 1 ? std::min<int64_t>(4 * threads, count) : 1;
    share(threads, ranges, [&](Tasks& tasks) {
        for (int64_t range; tasks.claim(range);)
            for (int64_t i = count * range / ranges; i < count * (range + 1) / ranges; ++i) body(i);
    });
}

}  // namespace gllm

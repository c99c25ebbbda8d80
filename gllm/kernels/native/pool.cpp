// The helpers of each thread that calls kernels.
//
// A helper that finds no work spins for SPIN_NS, because the next kernel of a step is near, and then
// sleeps. Where other programs keep the cores busy, a helper may lose its core in the middle of a task,
// and the caller has to wait for it. Where such waits cost more than the helpers gain, the caller does
// without as many helpers as were late, for a time that grows while that recurs.

#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <memory>
#include <vector>

#include "futex.h"

namespace gllm {
namespace {

constexpr int64_t SPIN_NS = 50'000;
constexpr int64_t WINDOW_NS = 20'000'000;     // time in regions by which helpers are judged
constexpr double TOLERANCE = 0.6;             // share of the helpers' gain that waits may cost
constexpr int64_t FIRST_PAUSE_NS = 50'000'000, LONGEST_PAUSE_NS = 3'200'000'000;
constexpr int64_t RECALLED_PAUSES = 8;        // helpers that have slept are soon given a core, at first
constexpr uint32_t OPEN = 1u << 31;           // helpers may join

std::atomic<uint32_t> num_forks{0};  // a child has none of its parent's threads

class Pool;

struct Helper {
    Pool* pool;
    int index;
    pthread_t thread;
};

// The helpers of one thread.
class Pool {
  public:
    ~Pool() {
        if (forks != num_forks.load()) abandon();
        is_stopping.store(true);
        announce();
        for (auto& helper : all) pthread_join(helper->thread, nullptr);
    }

    void run(int helpers, void (*given_work)(void*), void* given_context) {
        const int64_t begin = nanoseconds();
        helpers = std::min(helpers, grow(helpers));
        if (begin < paused_until) helpers -= num_late;
        if (helpers <= 0) return given_work(given_context);
        work = given_work, context = given_context;
        wanted.store(helpers, std::memory_order_relaxed);
        state.store(OPEN, std::memory_order_release);
        announce();
        given_work(given_context);
        const int64_t end = nanoseconds();
        // From here on nobody joins.
        const int inside = static_cast<int>(state.fetch_and(~OPEN) & ~OPEN);
        if (inside && !spin([&] { return state.load() == 0; }, SPIN_NS)) sleep();
        judge(begin, end, inside, helpers);
    }

  private:
    void (*work)(void*) = nullptr;
    void* context = nullptr;
    alignas(128) std::atomic<uint32_t> number{0};  // of regions; helpers sleep on it
    std::atomic<uint32_t> has_sleepers{0};
    std::atomic<int> wanted{0};
    std::atomic<bool> is_stopping{false};
    alignas(128) std::atomic<uint32_t> state{0};  // OPEN, and the number of helpers at work; the caller sleeps on it
    std::atomic<uint32_t> is_caller_asleep{0};
    alignas(128) std::vector<std::unique_ptr<Helper>> all;
    uint32_t forks = num_forks.load();
    int num_late = 0;  // helpers to do without until paused_until
    int64_t paused_until = 0, pause_ns = 0;
    int64_t worked_ns = 0, waited_ns = 0;  // in regions, since helpers were judged last
    int late_now = 0;                      // most helpers that were late at once in that time

    void announce() {
        number.fetch_add(1);
        if (has_sleepers.load() && has_sleepers.exchange(0)) futex(number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr);
    }

    // Wait in the kernel until no helper is at work.
    void sleep() {
        is_caller_asleep.store(1);
        for (uint32_t now; (now = state.load()) != 0;) futex(state, FUTEX_WAIT_PRIVATE, now, nullptr);
        is_caller_asleep.store(0);
    }

    // Do without late helpers for a while if their lateness costs what they gain.
    void judge(int64_t begin, int64_t end, int inside, int helpers) {
        const int64_t now = inside ? nanoseconds() : end;
        worked_ns += end - begin, waited_ns += now - end;
        if (inside) late_now = std::max(late_now, inside);
        if (worked_ns + waited_ns < WINDOW_NS) return;
        const double gain = helpers / (helpers + 1.0);
        if (waited_ns > TOLERANCE * gain * (worked_ns + waited_ns)) {
            const bool recurs = now - paused_until < RECALLED_PAUSES * pause_ns;
            pause_ns = recurs ? std::min(2 * pause_ns, LONGEST_PAUSE_NS) : FIRST_PAUSE_NS;
            paused_until = now + pause_ns;
            num_late = recurs ? num_late + late_now : late_now;
        }
        worked_ns = waited_ns = 0, late_now = 0;
    }

    // Start helpers that are missing; return their number.
    int grow(int helpers) {
        if (forks != num_forks.load()) abandon();
        if (helpers <= static_cast<int>(all.size())) return helpers;
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        while (static_cast<int>(all.size()) < helpers) {
            auto helper = std::make_unique<Helper>(Helper{this, static_cast<int>(all.size()), {}});
            if (pthread_create(&helper->thread, nullptr, begin_helper, helper.get())) break;
            pthread_setname_np(helper->thread, "gllm-kernels");
            all.push_back(std::move(helper));
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return static_cast<int>(all.size());
    }

    void abandon() {
        for (auto& helper : all) helper.release();
        all.clear();
        forks = num_forks.load();
        state.store(0);
    }

    static void* begin_helper(void* given) {
        const Helper& helper = *static_cast<Helper*>(given);
        helper.pool->help(helper.index);
        return nullptr;
    }

    void help(int index) {
        for (uint32_t seen = 0;;) {
            const auto has_news = [&] { return number.load() != seen; };
            if (!spin(has_news, SPIN_NS)) {
                has_sleepers.store(1);
                if (!has_news()) futex(number, FUTEX_WAIT_PRIVATE, seen, nullptr);
                continue;
            }
            seen = number.load();
            if (is_stopping.load()) return;
            uint32_t now = state.load();
            while (now & OPEN)
                if (state.compare_exchange_weak(now, now + 1)) {
                    if (index < wanted.load(std::memory_order_relaxed)) work(context);
                    // The caller may be gone from the region as soon as the state is 0.
                    if (state.fetch_sub(1) == 1 && is_caller_asleep.load())
                        futex(state, FUTEX_WAKE_PRIVATE, 1, nullptr);
                    break;
                }
        }
    }
};

Pool& own_pool() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { ++num_forks; });
    static_cast<void>(registered);
    thread_local Pool pool;
    return pool;
}

}  // namespace

void run_with_helpers(int helpers, void (*work)(void*), void* context) {
    own_pool().run(helpers, work, context);
}

}  // namespace gllm

// Waiting for a word of memory: bounded spinning, then sleep in the kernel.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace gllm {

constexpr int PAUSES = 16;  // pauses between two looks at the clock

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

inline long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

// Spin until a condition holds, for so many nanoseconds; return whether it does.
template <class Condition>
bool spin(Condition holds, int64_t limit_ns) {
    const int64_t end = nanoseconds() + limit_ns;
    do {
        for (int i = 0; i < PAUSES; ++i) {
            if (holds()) return true;
            pause();
        }
    } while (nanoseconds() < end);
    return holds();
}

}  // namespace gllm

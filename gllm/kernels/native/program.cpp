// Execution of a recorded list of kernel calls (program.py) in one call from Python.

#include <cstdint>

namespace gllm {

struct Call {
    void (*function)(const void*);
    const void* arguments;
};

}  // namespace gllm

extern "C" __attribute__((visibility("default"))) void gllm_run(const gllm::Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i) calls[i].function(calls[i].arguments);
}

// Digest of the sources of this library, by which builds.py notices an old one.
extern "C" __attribute__((visibility("default"))) const char* gllm_sources() { return GLLM_SOURCES; }

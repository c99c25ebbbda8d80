// Many calls at a stroke.
//
// Owns nothing: what is called with what was recorded before (program.py).

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

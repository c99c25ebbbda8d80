// Scratch memory per thread, aligned to cache lines: a vector across two lines takes two loads.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace gllm {

template <class T>
struct Aligned {
    using value_type = T;
    Aligned() = default;
    template <class Other>
    Aligned(const Aligned<Other>&) {}

    T* allocate(std::size_t count) {
        return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64}));
    }
    void deallocate(T* memory, std::size_t) { ::operator delete(memory, std::align_val_t{64}); }

    // `resize` leaves new numbers as they are.
    template <class Other>
    void construct(Other* at) { ::new (static_cast<void*>(at)) Other; }
    template <class Other, class Value>
    void construct(Other* at, const Value& value) { ::new (static_cast<void*>(at)) Other(value); }

    template <class Other>
    bool operator==(const Aligned<Other>&) const { return true; }
    template <class Other>
    bool operator!=(const Aligned<Other>&) const { return false; }
};

// Begins at a cache line; not set by `resize`.
template <class T>
using Memory = std::vector<T, Aligned<T>>;

}  // namespace gllm

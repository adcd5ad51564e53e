// Vectors of the width for which this translation unit is compiled.
//
// All headers of a kernels_*.cc use an unnamed namespace and no std:: templates, because the same
// code is compiled once per instruction set. If the linker shared a function between them, that
// function might run instructions that this CPU lacks.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define UNISONO_INLINE [[gnu::always_inline]] inline

namespace unisono::kernels {
namespace {

#if defined(__AVX512F__)
constexpr size_t vector_bytes = 64;
#elif defined(__AVX2__)
constexpr size_t vector_bytes = 32;
#else
constexpr size_t vector_bytes = 16;  // SSE2, NEON, or the compiler's emulation
#endif

template <class T>
struct VectorOf {
    typedef T type __attribute__((vector_size(vector_bytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class T>
constexpr size_t lanes = vector_bytes / sizeof(T);

template <size_t bytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
    using type = uint8_t;
};
template <>
struct UnsignedOf<2> {
    using type = uint16_t;
};
template <>
struct UnsignedOf<4> {
    using type = uint32_t;
};
template <>
struct UnsignedOf<8> {
    using type = uint64_t;
};

template <class T>
constexpr bool is_float = false;
template <>
constexpr bool is_float<float> = true;
template <>
constexpr bool is_float<double> = true;

// The type in which additions and multiplications of T wrap around. For floats, this is T itself.
template <class T, bool floating = is_float<T>>
struct WrappingOf {
    using type = T;
};
template <class T>
struct WrappingOf<T, false> {
    using type = typename UnsignedOf<sizeof(T)>::type;
};
template <class T>
using Wrapping = Vector<typename WrappingOf<T>::type>;

template <class V>
UNISONO_INLINE V load_vector(const uint8_t* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
UNISONO_INLINE void store_vector(uint8_t* to, V v) {
    __builtin_memcpy(to, &v, sizeof v);
}

}  // namespace
}  // namespace unisono::kernels

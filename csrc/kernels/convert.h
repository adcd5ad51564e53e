// Conversions between 16- or 8-bit floats and float32, and products of elements and a factor.
//
// Each class named ...Run converts consecutive elements of one type by two static functions.
// `widened` reads as many elements as a vector has floats, and returns them as floats. `narrow`
// rounds the floats of a vector and writes as many elements.
#pragma once

#include "kernels/float8.h"
#include "kernels/operators.h"
#include "kernels/table.h"

namespace unisono::kernels {
namespace {

typedef uint8_t Quarters __attribute__((vector_size(vector_bytes / 4)));

struct Bfloat16Run {
    static constexpr size_t elem_bytes = 2;
    UNISONO_INLINE static Floats widened(const uint8_t* from) {
        return (Floats)(__builtin_convertvector(load_vector<Halves>(from), Words) << 16);
    }
    UNISONO_INLINE static void narrow(uint8_t* to, Floats f) {
        store_vector(to, __builtin_convertvector(Bfloat16::rounded(f) >> 16, Halves));
    }
};

struct Float16Run {
    static constexpr size_t elem_bytes = 2;
#if defined(__F16C__) || defined(__ARM_NEON)
    UNISONO_INLINE static Floats widened(const uint8_t* from) {
        return NativeFloat16::widened(load_vector<Halves>(from));
    }
    UNISONO_INLINE static void narrow(uint8_t* to, Floats f) {
        store_vector(to, NativeFloat16::narrowed(with_one_nan<float>(f)));
    }
#else
    UNISONO_INLINE static Floats widened(const uint8_t* from) {
        const Words w = __builtin_convertvector(load_vector<Halves>(from), Words);
        const Floats f = PortableFloat16::widened(w);
        return f != f ? (Floats)((Words)f | 0x400000u) : f;  // a quiet NaN, as CPUs convert
    }
    UNISONO_INLINE static void narrow(uint8_t* to, Floats f) {
        const Words h = PortableFloat16::narrowed(with_one_nan<float>(f));
        store_vector(to, __builtin_convertvector(h, Halves));
    }
#endif
};

template <class Codec>
struct Float8Run {
    static constexpr size_t elem_bytes = 1;
    UNISONO_INLINE static Floats widened(const uint8_t* from) {
        const Quarters bytes = load_vector<Quarters>(from);
#if defined(__F16C__) || defined(__ARM_NEON)
        const Halves upper = __builtin_convertvector(bytes, Halves) << 8;
        const Floats f = Codec::widened(Codec::to_half(upper));
#else
        const Floats f = Codec::widened(__builtin_convertvector(bytes, Words) << 24);
#endif
        const Words sign = (Words)f & 0x80000000u;
        return f != f ? (Floats)(sign | quiet_nan<float>) : f;
    }
    UNISONO_INLINE static void narrow(uint8_t* to, Floats f) {
#if defined(__F16C__) || defined(__ARM_NEON)
        const Halves upper = Codec::from_half(Codec::narrowed(f));
        store_vector(to, __builtin_convertvector(upper >> 8, Quarters));
#else
        store_vector(to, __builtin_convertvector(Codec::narrowed(f), Quarters));
#endif
    }
};

// Calls whole(at) for each full step in `count`, then partial(at, rest) for the remaining elements.
template <class Whole, class Partial>
UNISONO_INLINE void for_each_vector(size_t count, size_t step, Whole whole, Partial partial) {
    size_t at = 0;
    for (; count - at >= step; at += step) whole(at);
    if (at != count) partial(at, count - at);
}

template <class Run, bool has_factor>
UNISONO_INLINE void widen_run(float* dst, const uint8_t* src, size_t count, Floats factor) {
    const auto one = [&](const uint8_t* from) {
        const Floats f = Run::widened(from);
        return has_factor ? with_one_nan<float>(f * factor) : f;
    };
    for_each_vector(
        count, lanes<float>,
        [&](size_t at) {
            store_vector(reinterpret_cast<uint8_t*>(dst + at), one(src + at * Run::elem_bytes));
        },
        [&](size_t at, size_t rest) {
            uint8_t buffer[lanes<float> * Run::elem_bytes] = {};
            __builtin_memcpy(buffer, src + at * Run::elem_bytes, rest * Run::elem_bytes);
            const Floats f = one(buffer);
            __builtin_memcpy(dst + at, &f, rest * sizeof(float));
        });
}

template <class Run>
void widen(float* dst, const uint8_t* src, size_t count, const float* factor) {
    if (factor == nullptr) return widen_run<Run, false>(dst, src, count, Floats{});
    widen_run<Run, true>(dst, src, count, Floats{} + *factor);
}

template <class Run>
void narrow(uint8_t* dst, const float* src, size_t count) {
    for_each_vector(
        count, lanes<float>,
        [&](size_t at) {
            const auto* from = reinterpret_cast<const uint8_t*>(src + at);
            Run::narrow(dst + at * Run::elem_bytes, load_vector<Floats>(from));
        },
        [&](size_t at, size_t rest) {
            Floats f{};
            uint8_t buffer[lanes<float> * Run::elem_bytes];
            __builtin_memcpy(&f, src + at, rest * sizeof(float));
            Run::narrow(buffer, f);
            __builtin_memcpy(dst + at * Run::elem_bytes, buffer, rest * Run::elem_bytes);
        });
}

// Multiplies in float32 and rounds the product to the element's type.
template <class Run>
void scale_narrow(uint8_t* dst, const uint8_t* src, size_t bytes, const uint8_t* factor) {
    constexpr size_t step = lanes<float> * Run::elem_bytes;
    const Floats by = load_vector<Floats>(factor);
    for_each_vector(
        bytes, step, [&](size_t at) { Run::narrow(dst + at, Run::widened(src + at) * by); },
        [&](size_t at, size_t rest) {
            uint8_t buffer[step] = {};
            __builtin_memcpy(buffer, src + at, rest);
            Run::narrow(buffer, Run::widened(buffer) * by);
            __builtin_memcpy(dst + at, buffer, rest);
        });
}

// Multiplies vectors of T by the operator `O`.
template <class T, class O>
void scale_plain(uint8_t* dst, const uint8_t* src, size_t bytes, const uint8_t* factor) {
    using V = Vector<T>;
    const V by = load_vector<V>(factor);
    const auto one = [&](V v) { return O::finish(O::apply(v, by), 0); };
    for_each_vector(
        bytes, vector_bytes,
        [&](size_t at) { store_vector(dst + at, one(load_vector<V>(src + at))); },
        [&](size_t at, size_t rest) {
            V v{};
            __builtin_memcpy(&v, src + at, rest);
            v = one(v);
            __builtin_memcpy(dst + at, &v, rest);
        });
}

template <class Run>
constexpr void add_run(Table& table, DType type) {
    table.conversions[static_cast<size_t>(type)] = {widen<Run>, narrow<Run>};
    table.scales[static_cast<size_t>(type)] = scale_narrow<Run>;
}

template <class T>
constexpr void add_scale(Table& table, DType type) {
    table.scales[static_cast<size_t>(type)] = scale_plain<T, Prod<T>>;
}

// Enters all conversions into the table, and the products with a factor for all types that support
// them.
constexpr void add_conversions(Table& table) {
    add_run<Float16Run>(table, DType::float16);
    add_run<Bfloat16Run>(table, DType::bfloat16);
    add_run<Float8Run<Float8E4m3fn>>(table, DType::float8_e4m3fn);
    add_run<Float8Run<Float8E5m2>>(table, DType::float8_e5m2);
    add_scale<float>(table, DType::float32);
    add_scale<double>(table, DType::float64);
    add_scale<uint8_t>(table, DType::int8);
    add_scale<uint8_t>(table, DType::uint8);
    add_scale<uint16_t>(table, DType::int16);
    add_scale<uint16_t>(table, DType::uint16);
    add_scale<uint32_t>(table, DType::int32);
    add_scale<uint32_t>(table, DType::uint32);
    add_scale<uint64_t>(table, DType::int64);
    add_scale<uint64_t>(table, DType::uint64);
    table.scales[static_cast<size_t>(DType::complex64)] =
        scale_plain<float, ComplexProd<float, int32_t>>;
    table.scales[static_cast<size_t>(DType::complex128)] =
        scale_plain<double, ComplexProd<double, int64_t>>;
}

}  // namespace
}  // namespace unisono::kernels

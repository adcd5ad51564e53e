// The reference for the kernels: reductions one element at a time, written for clarity.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/types.h"

namespace unisono::oracle {

// A 16- or 8-bit float with `fraction` stored fraction bits. Bits is the unsigned integer type of
// the same size. Without infinities, only the largest magnitude is a NaN, and larger values
// saturate.
template <class Bits_, int fraction, bool has_infinity = true>
struct Narrow {
    using Bits = Bits_;
    static constexpr int width = 8 * sizeof(Bits);
    static constexpr int bias = (1 << (width - 2 - fraction)) - 1;
    static constexpr int magnitudes = (1 << (width - 1)) - 1;  // mask of all bits except the sign
    static constexpr int largest =
        has_infinity ? magnitudes >> fraction << fraction : magnitudes - 1;
    Bits bits;

    int magnitude() const { return bits & magnitudes; }
    bool is_negative() const { return bits >> (width - 1) != 0; }
    bool is_nan() const { return magnitude() > largest; }

    float widened() const {
        const int exponent = magnitude() >> fraction;
        const int rest = magnitude() & ((1 << fraction) - 1);
        float value;
        if (is_nan()) {
            value = NAN;
        } else if (has_infinity && magnitude() == largest) {
            value = INFINITY;
        } else if (exponent == 0) {
            value = std::ldexp(static_cast<float>(rest), 1 - bias - fraction);
        } else {
            value =
                std::ldexp(static_cast<float>(rest + (1 << fraction)), exponent - bias - fraction);
        }
        return std::copysign(value, is_negative() ? -1.0F : 1.0F);
    }

    // Rounds to nearest, ties to even (the rounding mode of std::nearbyint).
    static Narrow rounded(float value) {
        constexpr int quiet = magnitudes >> fraction << fraction | 1 << (fraction - 1);
        if (std::isnan(value)) return {static_cast<Bits>(width == 8 ? magnitudes : quiet)};
        const int sign = std::signbit(value) ? 1 << (width - 1) : 0;
        const double magnitude = std::fabs(static_cast<double>(value));
        if (std::isinf(magnitude)) return {static_cast<Bits>(sign | largest)};
        int exponent = 1 - bias;
        if (magnitude != 0 && std::ilogb(magnitude) > exponent) exponent = std::ilogb(magnitude);
        // The magnitude in units of the last place. A carry into the next exponent gives the
        // correct bits.
        const double scaled = std::ldexp(magnitude, fraction - exponent);
        const auto units = static_cast<int64_t>(std::nearbyint(scaled));
        const int64_t encoded = units + (static_cast<int64_t>(exponent + bias - 1) << fraction);
        return {static_cast<Bits>(sign | (encoded > largest ? largest : encoded))};
    }
};
using Float16 = Narrow<uint16_t, 10>;
using Bfloat16 = Narrow<uint16_t, 7>;
using Float8E4m3fn = Narrow<uint8_t, 3, false>;
using Float8E5m2 = Narrow<uint8_t, 2>;

// A value and its index.
template <class T, class Index>
struct Pair {
    T value;
    Index index;
};

template <class T>
constexpr bool is_narrow = false;
template <class Bits, int fraction, bool has_infinity>
constexpr bool is_narrow<Narrow<Bits, fraction, has_infinity>> = true;
template <class T>
constexpr bool is_complex_type =
    std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;

// Returns the pair that minloc or maxloc keeps.
template <class T, class Index>
Pair<T, Index> better(ReduceOp op, Pair<T, Index> a, Pair<T, Index> b) {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a.value == b.value || (a_nan && b_nan)) return b.index < a.index ? b : a;
    if (a_nan || b_nan) return a_nan ? a : b;
    return (op == ReduceOp::minloc ? b.value < a.value : b.value > a.value) ? b : a;
}

// Returns `a op b` for the accumulator types.
template <class A>
A combine(ReduceOp op, A a, A b) {
    if constexpr (is_complex_type<A>) {
        if (op == ReduceOp::prod) {
            return {a.real() * b.real() - a.imag() * b.imag(),
                    a.real() * b.imag() + a.imag() * b.real()};
        }
        return {a.real() + b.real(), a.imag() + b.imag()};
    } else if constexpr (std::is_same_v<A, bool>) {
        switch (op) {
            case ReduceOp::sum:
            case ReduceOp::max:
            case ReduceOp::bor:
            case ReduceOp::lor:
                return a || b;
            case ReduceOp::bxor:
            case ReduceOp::lxor:
                return a != b;
            default:
                return a && b;
        }
    } else {
        if (op == ReduceOp::min) return a < b || a != a ? a : b;
        if (op == ReduceOp::max) return a > b || a != a ? a : b;
        if constexpr (std::is_integral_v<A>) {
            using Wide = std::make_unsigned_t<std::common_type_t<A, unsigned>>;
            const auto x = static_cast<Wide>(a), y = static_cast<Wide>(b);
            switch (op) {
                case ReduceOp::prod:
                    return static_cast<A>(x * y);
                case ReduceOp::band:
                    return static_cast<A>(x & y);
                case ReduceOp::bor:
                    return static_cast<A>(x | y);
                case ReduceOp::bxor:
                    return static_cast<A>(x ^ y);
                default:
                    return static_cast<A>(x + y);
            }
        } else {
            return op == ReduceOp::prod ? a * b : a + b;
        }
    }
}

template <class A>
A divided(A a, uint32_t divisor) {
    if constexpr (is_complex_type<A>) {
        using Part = typename A::value_type;
        return {a.real() / static_cast<Part>(divisor), a.imag() / static_cast<Part>(divisor)};
    } else if constexpr (std::is_integral_v<A> && std::is_signed_v<A>) {
        return static_cast<A>(static_cast<int64_t>(a) / static_cast<int64_t>(divisor));
    } else if constexpr (std::is_integral_v<A>) {
        return static_cast<A>(a / divisor);
    } else {
        return a / static_cast<A>(divisor);
    }
}

inline bool is_arithmetic(ReduceOp op) {
    return op == ReduceOp::sum || op == ReduceOp::premul_sum || op == ReduceOp::prod ||
           op == ReduceOp::avg;
}

// Replaces each part that is a NaN by the quiet NaN without sign and payload.
template <class A>
A with_one_nan(A a) {
    if constexpr (is_complex_type<A>) {
        return {with_one_nan(a.real()), with_one_nan(a.imag())};
    } else {
        return a != a ? static_cast<A>(NAN) : a;
    }
}

template <class T>
T element(const void* src, size_t i) {
    T value;
    std::memcpy(static_cast<void*>(&value), static_cast<const char*>(src) + i * sizeof(T),
                sizeof(T));
    return value;
}

// Computes dst[i] as the reduction of srcs[...][i]. `Load` and `Save` convert between T and the
// accumulator.
template <class T, class Load, class Save>
void fold(ReduceOp op, void* dst, const void* const* srcs, size_t nsrc, size_t count,
          uint32_t divisor, Load load, Save save) {
    for (size_t i = 0; i < count; ++i) {
        auto acc = load(element<T>(srcs[0], i));
        for (size_t s = 1; s < nsrc; ++s) acc = combine(op, acc, load(element<T>(srcs[s], i)));
        if (divisor != 0) acc = divided(acc, divisor);
        if (is_arithmetic(op) && (nsrc > 1 || divisor != 0)) acc = with_one_nan(acc);
        const T result = save(acc);
        std::memcpy(static_cast<char*>(dst) + i * sizeof(T), static_cast<const void*>(&result),
                    sizeof(T));
    }
}

// Reduces elements as truth values.
template <class T>
void reduce_truth(ReduceOp op, void* dst, const void* const* srcs, size_t nsrc, size_t count) {
    fold<T>(
        op, dst, srcs, nsrc, count, 0, [](T v) { return v != 0; },
        [](bool v) { return static_cast<T>(v); });
}

template <class T, class Index>
void reduce_pairs(ReduceOp op, void* dst, const void* const* srcs, size_t nsrc, size_t count) {
    using P = Pair<T, Index>;
    for (size_t i = 0; i < count; ++i) {
        P acc = element<P>(srcs[0], i);
        for (size_t s = 1; s < nsrc; ++s) acc = better(op, acc, element<P>(srcs[s], i));
        std::memcpy(static_cast<char*>(dst) + i * sizeof(P), &acc, sizeof(P));
    }
}

template <class T>
void reduce(ReduceOp op, void* dst, const void* const* srcs, size_t nsrc, size_t count,
            uint32_t divisor) {
    if constexpr (std::is_integral_v<T>) {
        if (is_logical(op)) return reduce_truth<T>(op, dst, srcs, nsrc, count);
    }
    if constexpr (is_narrow<T>) {
        if (op == ReduceOp::min || op == ReduceOp::max) {
            for (size_t i = 0; i < count; ++i) {
                T acc = element<T>(srcs[0], i);
                for (size_t s = 1; s < nsrc; ++s) {
                    const T b = element<T>(srcs[s], i);
                    const bool before = op == ReduceOp::min ? acc.widened() < b.widened()
                                                            : acc.widened() > b.widened();
                    if (!before && !acc.is_nan()) acc = b;
                }
                std::memcpy(static_cast<char*>(dst) + i * sizeof(T), &acc, sizeof(T));
            }
            return;
        }
        if (nsrc == 1 && divisor == 0) {
            std::memcpy(dst, srcs[0], count * sizeof(T));
            return;
        }
        fold<T>(op, dst, srcs, nsrc, count, divisor, [](T v) { return v.widened(); }, T::rounded);
    } else {
        fold<T>(op, dst, srcs, nsrc, count, divisor, [](T v) { return v; }, [](T v) { return v; });
    }
}

inline void reduce(DType type, ReduceOp op, void* dst, const void* const* srcs, size_t nsrc,
                   size_t count, uint32_t divisor) {
    if (count == 0) return;
    switch (type) {
        case DType::float32:
            return reduce<float>(op, dst, srcs, nsrc, count, divisor);
        case DType::float64:
            return reduce<double>(op, dst, srcs, nsrc, count, divisor);
        case DType::float16:
            return reduce<Float16>(op, dst, srcs, nsrc, count, divisor);
        case DType::bfloat16:
            return reduce<Bfloat16>(op, dst, srcs, nsrc, count, divisor);
        case DType::int8:
            return reduce<int8_t>(op, dst, srcs, nsrc, count, divisor);
        case DType::uint8:
            return reduce<uint8_t>(op, dst, srcs, nsrc, count, divisor);
        case DType::int16:
            return reduce<int16_t>(op, dst, srcs, nsrc, count, divisor);
        case DType::uint16:
            return reduce<uint16_t>(op, dst, srcs, nsrc, count, divisor);
        case DType::int32:
            return reduce<int32_t>(op, dst, srcs, nsrc, count, divisor);
        case DType::uint32:
            return reduce<uint32_t>(op, dst, srcs, nsrc, count, divisor);
        case DType::int64:
            return reduce<int64_t>(op, dst, srcs, nsrc, count, divisor);
        case DType::uint64:
            return reduce<uint64_t>(op, dst, srcs, nsrc, count, divisor);
        case DType::boolean:
            return reduce_truth<uint8_t>(op, dst, srcs, nsrc, count);
        case DType::complex64:
            return reduce<std::complex<float>>(op, dst, srcs, nsrc, count, divisor);
        case DType::complex128:
            return reduce<std::complex<double>>(op, dst, srcs, nsrc, count, divisor);
        case DType::float8_e4m3fn:
            return reduce<Float8E4m3fn>(op, dst, srcs, nsrc, count, divisor);
        case DType::float8_e5m2:
            return reduce<Float8E5m2>(op, dst, srcs, nsrc, count, divisor);
        case DType::float32_int32:
            return reduce_pairs<float, int32_t>(op, dst, srcs, nsrc, count);
        case DType::float64_int64:
            return reduce_pairs<double, int64_t>(op, dst, srcs, nsrc, count);
        case DType::int32_int32:
            return reduce_pairs<int32_t, int32_t>(op, dst, srcs, nsrc, count);
        case DType::int64_int64:
            return reduce_pairs<int64_t, int64_t>(op, dst, srcs, nsrc, count);
    }
}

}  // namespace unisono::oracle

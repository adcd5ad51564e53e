// Reductions one element at a time, written for clarity: what the kernels are compared with.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../types.h"

namespace unisono::oracle {

// A 16-bit float with `fraction` stored fraction bits.
template <int fraction>
struct Narrow {
    static constexpr int bias = (1 << (14 - fraction)) - 1;
    static constexpr uint16_t infinity = static_cast<uint16_t>(0x7FFF >> fraction << fraction);
    uint16_t bits;

    bool is_nan() const { return (bits & 0x7FFF) > infinity; }

    float widened() const {
        const int exponent = (bits & 0x7FFF) >> fraction;
        const int rest = bits & ((1 << fraction) - 1);
        float magnitude;
        if ((bits & 0x7FFF) >= infinity) {
            magnitude = rest != 0 ? NAN : INFINITY;
        } else if (exponent == 0) {
            magnitude = std::ldexp(static_cast<float>(rest), 1 - bias - fraction);
        } else {
            magnitude =
                std::ldexp(static_cast<float>(rest + (1 << fraction)), exponent - bias - fraction);
        }
        return std::copysign(magnitude, (bits & 0x8000) != 0 ? -1.0F : 1.0F);
    }

    // Nearest, ties to even (the rounding mode of std::nearbyint).
    static Narrow rounded(float value) {
        if (std::isnan(value)) return {static_cast<uint16_t>(infinity | 1 << (fraction - 1))};
        const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
        const double magnitude = std::fabs(static_cast<double>(value));
        if (std::isinf(magnitude)) return {static_cast<uint16_t>(sign | infinity)};
        int exponent = 1 - bias;
        if (magnitude != 0 && std::ilogb(magnitude) > exponent) exponent = std::ilogb(magnitude);
        // In units of the last place; a carry into the next exponent encodes itself.
        const double scaled = std::ldexp(magnitude, fraction - exponent);
        const auto units = static_cast<int64_t>(std::nearbyint(scaled));
        const int64_t encoded = units + (static_cast<int64_t>(exponent + bias - 1) << fraction);
        return {static_cast<uint16_t>(sign | (encoded > infinity ? infinity : encoded))};
    }
};
using Float16 = Narrow<10>;
using Bfloat16 = Narrow<7>;

template <class T>
constexpr bool is_narrow = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;
template <class T>
constexpr bool is_complex_type =
    std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;

// a op b for the types an accumulator can have.
template <class A>
A combine(ReduceOp op, A a, A b) {
    if constexpr (is_complex_type<A>) {
        if (op == ReduceOp::prod) {
            return {a.real() * b.real() - a.imag() * b.imag(),
                    a.real() * b.imag() + a.imag() * b.real()};
        }
        return {a.real() + b.real(), a.imag() + b.imag()};
    } else if constexpr (std::is_same_v<A, bool>) {
        if (op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor) return a || b;
        return op == ReduceOp::bxor ? a != b : a && b;
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

template <class T>
T element(const void* src, size_t i) {
    T value;
    std::memcpy(static_cast<void*>(&value), static_cast<const char*>(src) + i * sizeof(T),
                sizeof(T));
    return value;
}

// dst[i] = fold of srcs[...][i]; `Load` and `Save` convert between T and the accumulator.
template <class T, class Load, class Save>
void fold(ReduceOp op, void* dst, const void* const* srcs, size_t nsrc, size_t count,
          uint32_t divisor, Load load, Save save) {
    for (size_t i = 0; i < count; ++i) {
        auto acc = load(element<T>(srcs[0], i));
        for (size_t s = 1; s < nsrc; ++s) acc = combine(op, acc, load(element<T>(srcs[s], i)));
        if (divisor != 0) acc = divided(acc, divisor);
        const T result = save(acc);
        std::memcpy(static_cast<char*>(dst) + i * sizeof(T), static_cast<const void*>(&result),
                    sizeof(T));
    }
}

template <class T>
void reduce(ReduceOp op, void* dst, const void* const* srcs, size_t nsrc, size_t count,
            uint32_t divisor) {
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

inline void reduce_bool(ReduceOp op, void* dst, const void* const* srcs, size_t nsrc,
                        size_t count) {
    fold<uint8_t>(
        op, dst, srcs, nsrc, count, 0, [](uint8_t v) { return v != 0; },
        [](bool v) { return static_cast<uint8_t>(v); });
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
            return reduce_bool(op, dst, srcs, nsrc, count);
        case DType::complex64:
            return reduce<std::complex<float>>(op, dst, srcs, nsrc, count, divisor);
        case DType::complex128:
            return reduce<std::complex<double>>(op, dst, srcs, nsrc, count, divisor);
    }
}

// Whether element i is the same result: the same bits, or for arithmetic on floats (whose NaNs'
// sign and payload depend on the machine) a NaN on both sides. bfloat16 has one NaN.
inline bool same(DType type, ReduceOp op, const void* a, const void* b, size_t part) {
    const bool arithmetic = op == ReduceOp::sum || op == ReduceOp::prod || op == ReduceOp::avg;
    const auto both = [&]<class T>(T) {
        const T x = element<T>(a, part), y = element<T>(b, part);
        return std::memcmp(&x, &y, sizeof(T)) == 0 || (arithmetic && x != x && y != y);
    };
    switch (type) {
        case DType::float32:
        case DType::complex64:
            return both(0.0F);
        case DType::float64:
        case DType::complex128:
            return both(0.0);
        case DType::float16: {
            const Float16 x = element<Float16>(a, part), y = element<Float16>(b, part);
            const bool quiet = (x.bits & y.bits & 0x0200) != 0;
            return x.bits == y.bits || (arithmetic && quiet && x.is_nan() && y.is_nan());
        }
        default:
            return element<uint8_t>(a, part) == element<uint8_t>(b, part);
    }
}

// Units same() compares in: parts of complex numbers, bytes of integers.
inline size_t part_bytes(DType type) {
    switch (type) {
        case DType::float32:
        case DType::complex64:
            return 4;
        case DType::float64:
        case DType::complex128:
            return 8;
        case DType::float16:
            return 2;
        default:
            return 1;
    }
}

}  // namespace unisono::oracle

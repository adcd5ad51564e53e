// Reduction operators on vectors. `apply` folds b into the accumulator a. `finish` computes the
// result from the accumulator. For sums, products and averages, `scaled` is `finish` without the
// replacement of NaNs.
#pragma once

#include "kernels/vectors.h"

namespace unisono::kernels {
namespace {

struct Unscaled {
    template <class V>
    UNISONO_INLINE static V finish(V a, uint32_t) {
        return a;
    }
};

// The bits of the quiet NaN without sign and payload.
template <class T>
constexpr typename UnsignedOf<sizeof(T)>::type quiet_nan =
    sizeof(T) == 4 ? 0x7FC00000u : 0x7FF8000000000000u;

// Replaces every NaN by one NaN. The sum of two NaNs is one of them, and which one depends on the
// order of operands. Compilers choose that order differently in the body of a vector loop and at
// its ends.
template <class T>
UNISONO_INLINE Vector<T> with_one_nan(Vector<T> a) {
    if constexpr (is_float<T>) {
        using Bits = typename UnsignedOf<sizeof(T)>::type;
        return a != a ? (Vector<T>)(Vector<Bits>{} + quiet_nan<T>) : a;
    }
    return a;
}

template <class T>
struct Arithmetic {
    UNISONO_INLINE static Vector<T> scaled(Vector<T> a, uint32_t) { return a; }
    UNISONO_INLINE static Vector<T> finish(Vector<T> a, uint32_t) { return with_one_nan<T>(a); }
};

template <class T>
struct Sum : Arithmetic<T> {
    UNISONO_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) {
        return (Vector<T>)((Wrapping<T>)a + (Wrapping<T>)b);
    }
};

template <class T>
struct Prod : Arithmetic<T> {
    UNISONO_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) {
        return (Vector<T>)((Wrapping<T>)a * (Wrapping<T>)b);
    }
};

template <class T>
struct Min : Unscaled {
    UNISONO_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) {
        const auto chosen = a < b ? a : b;
        if constexpr (is_float<T>) return a != a ? a : chosen;
        return chosen;
    }
};

template <class T>
struct Max : Unscaled {
    UNISONO_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) {
        const auto chosen = a > b ? a : b;
        if constexpr (is_float<T>) return a != a ? a : chosen;
        return chosen;
    }
};

// The type in which a quotient of T is computed. Truncation of this quotient to T is exact.
template <class T, size_t bytes = sizeof(T)>
struct QuotientOf {
    using type = T;
};
template <class T>
struct QuotientOf<T, 4> {
    using type = double;
};
template <class T>
struct QuotientOf<T, 2> {
    using type = float;
};
template <class T>
struct QuotientOf<T, 1> {
    using type = float;
};

template <class T>
struct Avg {
    UNISONO_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) { return Sum<T>::apply(a, b); }

    UNISONO_INLINE static Vector<T> finish(Vector<T> a, uint32_t divisor) {
        return with_one_nan<T>(scaled(a, divisor));
    }

    UNISONO_INLINE static Vector<T> scaled(Vector<T> a, uint32_t divisor) {
        if constexpr (is_float<T>) {
            return a / (Vector<T>{} + static_cast<T>(divisor));
        } else {
            using Quotient = typename QuotientOf<T>::type;
#if defined(__clang__)  // clang does not vectorise the loop, and GCC not the vectors
            typedef Quotient Wide __attribute__((vector_size(lanes<T> * sizeof(Quotient))));
            const Wide quotient =
                __builtin_convertvector(a, Wide) / (Wide{} + static_cast<Quotient>(divisor));
            return __builtin_convertvector(quotient, Vector<T>);
#else
            Vector<T> out;
            for (size_t i = 0; i < lanes<T>; ++i) {
                out[i] =
                    static_cast<T>(static_cast<Quotient>(a[i]) / static_cast<Quotient>(divisor));
            }
            return out;
#endif
        }
    }
};

struct And : Unscaled {
    template <class V>
    UNISONO_INLINE static V apply(V a, V b) {
        return a & b;
    }
};

struct Or : Unscaled {
    template <class V>
    UNISONO_INLINE static V apply(V a, V b) {
        return a | b;
    }
};

struct Xor : Unscaled {
    template <class V>
    UNISONO_INLINE static V apply(V a, V b) {
        return a ^ b;
    }
};

// Returns the lanes of `v` with the indices `from`.
template <class V, class I>
UNISONO_INLINE V lanes_of(V v, I from) {
#if defined(__clang__)  // clang has no shuffle by a variable vector
    V found;
    for (size_t i = 0; i < sizeof(V) / sizeof(v[0]); ++i) found[i] = v[from[i]];
    return found;
#else
    return __builtin_shuffle(v, from);
#endif
}

// The product (a + bi)(c + di) = (ac - bd) + (ad + bc)i on interleaved parts. T is the type of a
// part, and Index the integer type of the same size.
template <class T, class Index>
struct ComplexProd : Arithmetic<T> {
    UNISONO_INLINE static Vector<T> apply(Vector<T> x, Vector<T> y) {
        Vector<Index> lane, odd;
        for (size_t i = 0; i < lanes<T>; ++i) {
            lane[i] = static_cast<Index>(i);
            odd[i] = static_cast<Index>(i % 2);
        }
        const Vector<T> real = lanes_of(x, lane - odd);
        const Vector<T> imaginary = lanes_of(x, lane - odd + 1);
        const Vector<T> direct = real * y;
        const Vector<T> crossed = imaginary * lanes_of(y, lane ^ 1);
        return odd != 0 ? direct + crossed : direct - crossed;
    }
};

// Compares 16- and 8-bit floats in integer arithmetic, so that a selected input keeps its bits. T
// is the signed integer type of the same size. A magnitude above `largest` is a NaN.
template <class T, T largest>
struct NarrowOrder : Unscaled {
    using V = Vector<T>;

    UNISONO_INLINE static V magnitude(V a) {
        return a & (V{} + static_cast<T>(~(T{1} << sign_bit)));
    }
    UNISONO_INLINE static V is_nan(V a) { return magnitude(a) > largest; }

    // Returns integers in the order of the floats; both zeros become 0.
    UNISONO_INLINE static V key(V a) {
        const V sign = a < 0;
        return (magnitude(a) ^ sign) - sign;
    }

  private:
    static constexpr int sign_bit = 8 * sizeof(T) - 1;
};

template <class T, T largest>
struct NarrowMin : NarrowOrder<T, largest> {
    using Order = NarrowOrder<T, largest>;
    using V = typename Order::V;
    UNISONO_INLINE static V apply(V a, V b) {
        const V less = (Order::key(a) < Order::key(b)) & ~Order::is_nan(b);
        return (less | Order::is_nan(a)) != 0 ? a : b;
    }
};

template <class T, T largest>
struct NarrowMax : NarrowOrder<T, largest> {
    using Order = NarrowOrder<T, largest>;
    using V = typename Order::V;
    UNISONO_INLINE static V apply(V a, V b) {
        const V greater = (Order::key(a) > Order::key(b)) & ~Order::is_nan(b);
        return (greater | Order::is_nan(a)) != 0 ? a : b;
    }
};

// The largest magnitude that is not a NaN. It is infinity, if the type has infinities.
constexpr int16_t float16_largest = 0x7C00;
constexpr int16_t bfloat16_largest = 0x7F80;
constexpr int8_t e4m3fn_largest = 0x7E;
constexpr int8_t e5m2_largest = 0x7C;

// Interleaved pairs of a value and an index. T is the type of a value, and Index the signed integer
// type of the same size. b replaces the accumulator if its value is better, or if the values are
// equal and its index is lower. A NaN is better than any number, and equal to any NaN.
template <class T, class Index, bool want_least>
struct MinMaxLoc : Unscaled {
    using V = Vector<T>;
    using I = Vector<Index>;

    UNISONO_INLINE static V apply(V a, V b) {
        I lane, odd;
        for (size_t i = 0; i < lanes<T>; ++i) {
            lane[i] = static_cast<Index>(i);
            odd[i] = static_cast<Index>(i % 2);
        }
        I better = want_least ? b < a : b > a;
        I tied = a == b;
        if constexpr (is_float<T>) {
            const I a_nan = a != a, b_nan = b != b;
            better |= b_nan & ~a_nan;
            tied |= a_nan & b_nan;
        }
        // Only the odd lanes, which hold the indices, are meaningful.
        const I lower = (I)b < (I)a;
        // The even lanes are meaningful; each is used for both lanes of its pair.
        const I take = better | (tied & lanes_of(lower, lane | 1));
        return lanes_of(take, lane - odd) != 0 ? b : a;
    }
};

}  // namespace
}  // namespace unisono::kernels

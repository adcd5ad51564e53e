// Conversions between 8-bit floats and float32 accumulators.
#pragma once

#include "kernels/codecs.h"

namespace unisono::kernels {
namespace {

// Four 8-bit elements per 32-bit lane, widened to float32. Byte k of each lane is in part[k].
struct FloatQuad {
    Floats part[4];
};

// A codec of 8-bit floats. `fraction` is the number of stored fraction bits. With infinities, the
// largest exponent has the meaning of IEEE 754. Without infinities, only the largest magnitude is a
// NaN, and larger values saturate.
template <int fraction, bool has_infinity>
struct PortableFloat8 {
    static constexpr size_t elem_bytes = 1;
    // Only one vector at a time, because the conversion needs many registers.
    static constexpr size_t unroll = 1;
    using Acc = FloatQuad;

    UNISONO_INLINE static Acc load(const uint8_t* from) {
        const Words w = load_vector<Words>(from);
        return {{widened(w << 24), widened(w << 16), widened(w << 8), widened(w)}};
    }

    UNISONO_INLINE static void store(uint8_t* to, Acc a) {
        store_vector(to, narrowed(a.part[0]) | (narrowed(a.part[1]) << 8) |
                             (narrowed(a.part[2]) << 16) | (narrowed(a.part[3]) << 24));
    }

    template <class O>
    UNISONO_INLINE static Acc apply(Acc a, Acc b) {
        for (size_t k = 0; k < 4; ++k) a.part[k] = O::apply(a.part[k], b.part[k]);
        return a;
    }
    template <class O>
    UNISONO_INLINE static Acc finish(Acc a, uint32_t divisor) {
        for (size_t k = 0; k < 4; ++k) a.part[k] = O::scaled(a.part[k], divisor);
        return a;
    }

    static constexpr int bias = (1 << (6 - fraction)) - 1;
    static constexpr int dropped = 23 - fraction;  // number of fraction bits that only float32 has
    static constexpr uint32_t largest = has_infinity ? 0x7Fu >> fraction << fraction : 0x7Eu;
    // Difference between the exponent biases, shifted to the exponent bits.
    static constexpr uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23;
    static constexpr uint32_t least_normal = rebias + (1u << 23);

    // Widens the element in the highest byte of each lane; ignores the other bytes.
    UNISONO_INLINE static Floats widened(Words w) {
        const Words magnitude = (w & 0x7F000000u) >> (24 - dropped);
        const SignedWords m = (SignedWords)magnitude;
        const Words normal = magnitude + rebias;
        // Converts a subnormal element: puts its bits into the fraction of the least normal number
        // of the type, then subtracts that number. The subtraction normalises the float32.
        const Words least = Words{} + least_normal;
        const Words subnormal = (Words)((Floats)(magnitude + least) - (Floats)least);
        const Words finite = m < (1 << 23) ? subnormal : normal;
        const Words special = has_infinity ? normal + rebias : Words{} + 0x7FC00000u;
        constexpr auto first_special = static_cast<int32_t>((largest + !has_infinity) << dropped);
        return (Floats)((m >= first_special ? special : finite) | (w & 0x80000000u));
    }

    // Returns the nearest element, ties to even, in the lowest byte of each lane.
    UNISONO_INLINE static Words narrowed(Floats f) {
        const Words w = (Words)f;
        const Words magnitude = w & 0x7FFFFFFFu;
        const SignedWords m = (SignedWords)magnitude;
        // Changes the exponent bias. The carry out of the dropped bits rounds to even.
        const Words odd = (magnitude >> dropped) & 1u;
        const Words normal = (magnitude - rebias + ((1u << (dropped - 1)) - 1u) + odd) >> dropped;
        // For a subnormal result: the sum with `aligner` has its last bit where a subnormal element
        // has its last bit. So the addition itself rounds to that bit.
        const Words aligner = Words{} + (static_cast<uint32_t>(151 - bias - fraction) << 23);
        const Words subnormal = (Words)((Floats)magnitude + (Floats)aligner) - aligner;
        const SignedWords rounded =
            (SignedWords)(m < static_cast<int32_t>(least_normal) ? subnormal : normal);
        const Words most = Words{} + largest;
        const Words bounded = rounded > (SignedWords)most ? most : (Words)rounded;
        return m > (255 << 23) ? Words{} + 0x7Fu : bounded | ((w >> 24) & 0x80u);
    }
};

#if defined(__F16C__) || defined(__ARM_NEON)
// Converts through float16, which the CPU supports and which represents every 8-bit float. e5m2 is
// the upper half of float16. e4m3fn is shifted right by one bit, and its exponent bias differs by
// 8.
template <int fraction, bool has_infinity>
struct NativeFloat8 : PortableFloat8<fraction, has_infinity> {
    using Base = PortableFloat8<fraction, has_infinity>;
    using Acc = FloatQuad;
    // Only one vector at a time, because it becomes four vectors of floats.
    static constexpr size_t unroll = 1;

    UNISONO_INLINE static Acc load(const uint8_t* from) {
        const Shorts w = load_vector<Shorts>(from);
        const Shorts even = to_half(w << 8), odd = to_half(w);
        return {{widened(NativeFloat16::lower(even)), widened(NativeFloat16::upper(even)),
                 widened(NativeFloat16::lower(odd)), widened(NativeFloat16::upper(odd))}};
    }

    UNISONO_INLINE static void store(uint8_t* to, Acc a) {
        const Shorts even = NativeFloat16::joined(narrowed(a.part[0]), narrowed(a.part[1]));
        const Shorts odd = NativeFloat16::joined(narrowed(a.part[2]), narrowed(a.part[3]));
        store_vector(to, (from_half(even) >> 8) | from_half(odd));
    }

    // Converts the element in the upper byte of each lane to float16; ignores the lower byte.
    template <class V>
    UNISONO_INLINE static V to_half(V w) {
        if constexpr (is_moved) {
            // The shift copies the sign bit to the right and moves the magnitude by one bit. The
            // mask then clears the copied sign. The largest magnitude becomes a NaN.
            const V h = (V)((Signed<V>)w >> 1) & 0xBF80;
            return h | ((V)((h & 0x3F80) == 0x3F80) & 0x7C00);
        }
        return w & 0xFF00;
    }

    // Converts float16 to an element in the upper byte of each lane. The lower byte is 0.
    template <class V>
    UNISONO_INLINE static V from_half(V h) {
        if constexpr (is_moved) return ((h << 1) & 0x7F00) | (h & 0x8000);
        return h & 0xFF00;
    }

    // Converts the result of to_half to float32.
    UNISONO_INLINE static Floats widened(Halves h) {
        const Floats f = NativeFloat16::widened(h);
        return is_moved ? f * 0x1p8F : f;
    }

    // Returns the nearest element, ties to even, as an input for from_half.
    UNISONO_INLINE static Halves narrowed(Floats f) {
        const Words w = (Words)f;
        const Floats bounded = at_most(f);
        const SignedWords least = SignedWords{} + static_cast<int32_t>(Base::least_normal);
        const SignedWords exponent = (SignedWords)bounded & 0x7F800000;
        // The sum with `aligner` has its last bit where an element has its last bit, so the
        // addition itself rounds to that bit. `aligner` is 1.5 times a power of two, so that this
        // holds for numbers of both signs.
        const auto aligner =
            (Floats)((exponent > least ? exponent : least) + ((Base::dropped << 23) | 0x400000));
        Floats rounded = (bounded + aligner) - aligner;
        if constexpr (is_moved) rounded *= 0x1p-8F;
        const auto number = (Floats)((Words)rounded | (w & 0x80000000u));
        return NativeFloat16::narrowed(f != f ? (Floats)(Words{} + nan) : number);
    }

  private:
    template <class V>
    using Signed = decltype((V{} < V{}));

    // Bounds the magnitude of the numbers.
    UNISONO_INLINE static Floats at_most(Floats f) {
#if defined(__AVX512DQ__)
        constexpr int lesser_magnitude = 2;  // the result has the sign of the first operand
        return _mm512_range_ps(f, Floats{} + most, lesser_magnitude);
#elif defined(__AVX__)
        const Floats bound = Floats{} + most;
        return _mm256_max_ps(_mm256_min_ps(f, bound), -bound);
#else
        const Floats low = f < most ? f : Floats{} + most;
        return low > -most ? low : Floats{} - most;
#endif
    }

    static constexpr bool is_moved = !has_infinity;
    static constexpr float most = is_moved ? 448 : 65536;  // 65536 becomes infinity.
    // The float32 bits that become the element 0x7F.
    static constexpr uint32_t nan = is_moved ? 0x3FF00000u : 0x7FE00000u;
};
template <int fraction, bool has_infinity>
using Float8 = NativeFloat8<fraction, has_infinity>;
#else
template <int fraction, bool has_infinity>
using Float8 = PortableFloat8<fraction, has_infinity>;
#endif

using Float8E4m3fn = Float8<3, false>;
using Float8E5m2 = Float8<2, true>;

}  // namespace
}  // namespace unisono::kernels

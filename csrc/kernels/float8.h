// 8-bit floats as float32 accumulators, and back.
#pragma once

#include "codecs.h"

namespace unisono::kernels {
namespace {

// Four 8-bit elements per 32-bit lane, widened to float32: byte k of each lane is in part[k].
struct FloatQuad {
    Floats part[4];
};

// `fraction` is the number of stored fraction bits. With infinities the largest exponent is as in
// IEEE 754; without, only the largest magnitude is a NaN, and what is too large saturates.
template <int fraction, bool has_infinity>
struct Float8 {
    static constexpr size_t elem_bytes = 1;
    static constexpr size_t unroll = 1;  // needs many registers
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
        for (size_t k = 0; k < 4; ++k) a.part[k] = O::finish(a.part[k], divisor);
        return a;
    }

  private:
    static constexpr int bias = (1 << (6 - fraction)) - 1;
    static constexpr int dropped = 23 - fraction;  // fraction bits that float32 has more
    static constexpr uint32_t largest = has_infinity ? 0x7Fu >> fraction << fraction : 0x7Eu;
    // What the exponent of float32 has more, in its place.
    static constexpr uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23;
    static constexpr uint32_t least_normal = rebias + (1u << 23);

    // The element in the highest byte of each lane, whatever the others hold.
    UNISONO_INLINE static Floats widened(Words w) {
        const Words magnitude = (w & 0x7F000000u) >> (24 - dropped);
        const SignedWords m = (SignedWords)magnitude;
        const Words normal = magnitude + rebias;
        // As the fraction of the least normal number, which is then subtracted.
        const Words least = Words{} + least_normal;
        const Words subnormal = (Words)((Floats)(magnitude + least) - (Floats)least);
        const Words finite = m < (1 << 23) ? subnormal : normal;
        const Words special = has_infinity ? normal + rebias : Words{} + 0x7FC00000u;
        constexpr auto first_special = static_cast<int32_t>((largest + !has_infinity) << dropped);
        return (Floats)((m >= first_special ? special : finite) | (w & 0x80000000u));
    }

    // The nearest element, ties to even, in the lowest byte of each lane.
    UNISONO_INLINE static Words narrowed(Floats f) {
        const Words w = (Words)f;
        const Words magnitude = w & 0x7FFFFFFFu;
        const SignedWords m = (SignedWords)magnitude;
        // Rebias, and round to even by carrying out of the dropped bits.
        const Words odd = (magnitude >> dropped) & 1u;
        const Words normal = (magnitude - rebias + ((1u << (dropped - 1)) - 1u) + odd) >> dropped;
        // Adding this makes the adder drop (and round) exactly the bits a subnormal lacks.
        const Words aligner = Words{} + (static_cast<uint32_t>(151 - bias - fraction) << 23);
        const Words subnormal = (Words)((Floats)magnitude + (Floats)aligner) - aligner;
        const SignedWords rounded =
            (SignedWords)(m < static_cast<int32_t>(least_normal) ? subnormal : normal);
        const Words most = Words{} + largest;
        const Words bounded = rounded > (SignedWords)most ? most : (Words)rounded;
        return m > (255 << 23) ? Words{} + 0x7Fu : bounded | ((w >> 24) & 0x80u);
    }
};

using Float8E4m3fn = Float8<3, false>;
using Float8E5m2 = Float8<2, true>;

}  // namespace
}  // namespace unisono::kernels

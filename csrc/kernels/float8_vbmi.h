// Conversions between 8-bit floats and float32 accumulators, with the byte lookups of AVX-512
// (VBMI).
//
// To widen an element, its seven bits without the sign are looked up in two tables, for the low and
// the high byte of the bfloat16. This type is the upper half of float32 and represents every
// element. To round a float32, a large number is added to it, so that the last bits of the sum are
// the digits of the rounded element. So four vectors become bytes without a conversion instruction.
#pragma once

#include "kernels/float8.h"

#if defined(__AVX512VBMI__)
namespace unisono::kernels {
namespace {

// A table of one byte (low or high) of the bfloat16 for each magnitude of an element.
struct ByteTable {
    alignas(64) uint8_t bytes[128];
};

template <int fraction, bool has_infinity>
struct VbmiFloat8 : PortableFloat8<fraction, has_infinity> {
    using Base = PortableFloat8<fraction, has_infinity>;
    // The order of the parts in each half of 128 bits: bytes 0, 2, 4, 6, then bytes 1, 3, 5, 7.
    // Interleaving bytes makes this order, and packing 16-bit lanes undoes it.
    using Acc = FloatQuad;

    UNISONO_INLINE static Acc load(const uint8_t* from) {
        const Words w = load_vector<Words>(from);
        const auto low = (__m512i)looked_up(w, low_bytes);
        const auto high = (__m512i)(looked_up(w, high_bytes) | (w & 0x80808080u));
        const auto first = (Words)_mm512_unpacklo_epi8(low, high);
        const auto second = (Words)_mm512_unpackhi_epi8(low, high);
        return {{(Floats)(first << 16), (Floats)(first & 0xFFFF0000u), (Floats)(second << 16),
                 (Floats)(second & 0xFFFF0000u)}};
    }

    UNISONO_INLINE static void store(uint8_t* to, Acc a) {
        __m512i bytes = _mm512_packus_epi16(pair(a.part[0], a.part[1]), pair(a.part[2], a.part[3]));
        const __mmask16 first = _mm512_cmp_ps_mask(a.part[0], a.part[1], _CMP_UNORD_Q);
        const __mmask16 second = _mm512_cmp_ps_mask(a.part[2], a.part[3], _CMP_UNORD_Q);
        if (__builtin_expect(_kortestz_mask16_u8(first, second) == 0, 0)) {
            const __m512i nan =
                _mm512_packs_epi16(nan_pair(a.part[0], a.part[1]), nan_pair(a.part[2], a.part[3]));
            bytes = select(nan, _mm512_set1_epi8(0x7F), bytes);
        }
        store_vector(to, bytes);
    }

  private:
    // Looks up each byte, without its sign, in the table.
    UNISONO_INLINE static Words looked_up(Words w, const ByteTable& table) {
        return (Words)_mm512_permutex2var_epi8(_mm512_load_si512(table.bytes), (__m512i)w,
                                               _mm512_load_si512(table.bytes + 64));
    }

    // Selects the bits of `a` where `mask` has ones, and the bits of `b` elsewhere.
    UNISONO_INLINE static __m512i select(__m512i mask, __m512i a, __m512i b) {
        return _mm512_ternarylogic_epi32(mask, a, b, 0xCA);
    }

    // Joins the lower halves of 32-bit lanes.
    UNISONO_INLINE static __m512i joined(Words even, Words odd) {
        return _mm512_mask_blend_epi16(0xAAAAAAAAu, (__m512i)even, (__m512i)(odd << 16));
    }

    // Returns the nearest elements, ties to even, in 16-bit lanes.
    UNISONO_INLINE static __m512i pair(Floats even, Floats odd) {
        const Shorts number = (Shorts)joined(digits(even), digits(odd)) - least_digits;
        constexpr int sign_bit = 31 - Base::dropped;
        return select(_mm512_set1_epi16(0x7F), (__m512i)number,
                      (__m512i)(number >> (sign_bit - 7)));
    }

    // Returns a mask with all bits set in the 16-bit lanes that are NaNs.
    UNISONO_INLINE static __m512i nan_pair(Floats even, Floats odd) {
        return joined((Words)(even != even), (Words)(odd != odd));
    }

    // Rounds floats to elements. The lower half of each lane of the result holds the magnitude of
    // the element plus `least_digits`, with the sign above it.
    UNISONO_INLINE static Words digits(Floats f) {
        // The result has the sign of the first operand.
        constexpr int lesser_magnitude = 2, greater_magnitude = 3;
        const Floats number = _mm512_range_ps(f, Floats{} + most, lesser_magnitude);
        const auto power = (Floats)((Words)number & 0xFF800000u);
        const Floats unit =
            _mm512_range_ps(power, (Floats)(Words{} + Base::least_normal), greater_magnitude);
        // The sum is so large that its lowest bits are exactly the digits of an element, and the
        // addition rounds to them.
        const auto sum = (Words)_mm512_fmadd_ps(unit, Floats{} + shift, number);
        return sum + (sum >> Base::dropped);
    }

    static constexpr float most = has_infinity ? 65536 : 448;  // 65536 becomes infinity
    static constexpr float shift = 1u << Base::dropped;
    // The magnitude that digits() returns for 0. It is not 0, because `unit` has at least the
    // exponent of the least normal number.
    static constexpr auto least_digits =
        static_cast<uint16_t>(((Base::least_normal >> 23) + Base::dropped) << fraction);

    // Returns the magnitude as bfloat16.
    static constexpr unsigned widened(unsigned magnitude) {
        constexpr unsigned implied = 1u << fraction;
        if (magnitude > Base::largest) return 0x7FC0;
        if (has_infinity && magnitude == Base::largest) return 0x7F80;
        if (magnitude == 0) return 0;
        unsigned digits = magnitude % implied, exponent = magnitude / implied;
        if (exponent != 0) digits += implied;
        if (exponent == 0) exponent = 1;
        while (digits < implied) {
            digits *= 2;
            --exponent;  // may become negative; the bias is added at the end
        }
        return ((exponent + 127 - Base::bias) << 7) + ((digits - implied) << (7 - fraction));
    }

    static constexpr ByteTable table_of(int shifted) {
        ByteTable table{};
        for (unsigned m = 0; m < 128; ++m)
            table.bytes[m] = static_cast<uint8_t>(widened(m) >> shifted);
        return table;
    }
    static constexpr ByteTable low_bytes = table_of(0);
    static constexpr ByteTable high_bytes = table_of(8);
};

}  // namespace
}  // namespace unisono::kernels
#endif

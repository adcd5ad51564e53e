// Codecs: conversions between elements in memory and accumulators.
//
// A codec handles the memory of one vector. `elem_bytes` is the size of an element. `load` and
// `store` convert; `apply` and `finish` run an operator on accumulators. If `store` produces only
// one kind of NaN, `finish` need not check for NaNs.
#pragma once

#include "kernels/vectors.h"

namespace unisono::kernels {
namespace {

// Codec of elements that are their own accumulators.
template <class T, size_t element_bytes = sizeof(T)>
struct Plain {
    static constexpr size_t elem_bytes = element_bytes;
    static constexpr size_t unroll = 4;
    using Acc = Vector<T>;

    UNISONO_INLINE static Acc load(const uint8_t* from) { return load_vector<Acc>(from); }
    UNISONO_INLINE static void store(uint8_t* to, Acc a) { store_vector(to, a); }
    template <class O>
    UNISONO_INLINE static Acc apply(Acc a, Acc b) {
        return O::apply(a, b);
    }
    template <class O>
    UNISONO_INLINE static Acc finish(Acc a, uint32_t divisor) {
        return O::finish(a, divisor);
    }
};

// Codec of truth values: every element but 0 is true. Results are 0 or 1.
template <class T>
struct Truth : Plain<T> {
    using Acc = Vector<T>;
    UNISONO_INLINE static Acc load(const uint8_t* from) {
        const Acc raw = load_vector<Acc>(from);
        return (Acc)(raw != 0) & 1;
    }
};

using Floats = Vector<float>;
using Words = Vector<uint32_t>;
using SignedWords = Vector<int32_t>;

// Two 16-bit elements per 32-bit lane, widened to float32. Shifts separate even and odd elements
// without a shuffle, so this is fast on every instruction set.
struct FloatPair {
    Floats even, odd;
};

struct PairCodec {
    static constexpr size_t elem_bytes = 2;
    static constexpr size_t unroll = 2;
    using Acc = FloatPair;

    template <class O>
    UNISONO_INLINE static Acc apply(Acc a, Acc b) {
        return {O::apply(a.even, b.even), O::apply(a.odd, b.odd)};
    }
    template <class O>
    UNISONO_INLINE static Acc finish(Acc a, uint32_t divisor) {
        return {O::finish(a.even, divisor), O::finish(a.odd, divisor)};
    }
};

struct Bfloat16 : PairCodec {
    template <class O>
    UNISONO_INLINE static Acc finish(Acc a, uint32_t divisor) {
        return {O::scaled(a.even, divisor), O::scaled(a.odd, divisor)};
    }

    UNISONO_INLINE static Acc load(const uint8_t* from) {
        const Words w = load_vector<Words>(from);
        return {(Floats)(w << 16), (Floats)(w & 0xFFFF0000u)};
    }

    UNISONO_INLINE static void store(uint8_t* to, Acc a) {
        store_vector(to, (rounded(a.even) >> 16) | (rounded(a.odd) & 0xFFFF0000u));
    }

    // Returns the nearest bfloat16, ties to even, in the upper half of each lane.
    UNISONO_INLINE static Words rounded(Floats f) {
        const Words w = (Words)f;
        const Words sum = w + 0x7FFFu + ((w >> 16) & 1u);
        return f != f ? Words{} + 0x7FC00000u : sum;
    }
};

#if defined(__AVX512BF16__)
// bfloat16 by the CPU's conversion. That conversion turns subnormals into zeros and keeps the
// payload of a NaN, so vectors with such elements use the portable code. It packs the even elements
// below the odd elements.
struct NativeBfloat16 : Bfloat16 {
    UNISONO_INLINE static void store(uint8_t* to, Acc a) {
        constexpr int quiet_nan = 0x01, subnormal = 0x20, signaling_nan = 0x80;
        constexpr int special = quiet_nan | subnormal | signaling_nan;
        const __mmask16 even = _mm512_fpclass_ps_mask(a.even, special);
        const __mmask16 odd = _mm512_fpclass_ps_mask(a.odd, special);
        if (__builtin_expect(_kortestz_mask16_u8(even, odd) == 0, 0)) return Bfloat16::store(to, a);
        const auto packed = (Words)_mm512_cvtne2ps_pbh(a.odd, a.even);
        // Written out: clang 22 computes a loop over the lanes at run time.
        constexpr Vector<uint16_t> order = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                            21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                            11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        store_vector(to, _mm512_permutexvar_epi16((__m512i)order, (__m512i)packed));
    }
};
#endif

// float16 by integer arithmetic, for CPUs without conversion instructions.
struct PortableFloat16 : PairCodec {
    // Only one vector at a time, because the conversion needs many registers.
    static constexpr size_t unroll = 1;

    UNISONO_INLINE static Acc load(const uint8_t* from) {
        const Words w = load_vector<Words>(from);
        return {widened(w & 0xFFFFu), widened(w >> 16)};
    }

    UNISONO_INLINE static void store(uint8_t* to, Acc a) {
        store_vector(to, narrowed(a.even) | (narrowed(a.odd) << 16));
    }

    UNISONO_INLINE static Floats widened(Words h) {
        const Words magnitude = h & 0x7FFFu;
        const SignedWords m = (SignedWords)magnitude;
        const Words to_infinity = (Words)(m >= 0x7C00) & ((127u - 15u) << 23);
        const Words normal = (magnitude << 13) + to_infinity + ((127u - 15u) << 23);
        const Words subnormal = (Words)(__builtin_convertvector(m, Floats) * 0x1p-24F);
        return (Floats)((m < 0x0400 ? subnormal : normal) | ((h & 0x8000u) << 16));
    }

    UNISONO_INLINE static Words narrowed(Floats f) {
        const Words w = (Words)f;
        const Words magnitude = w & 0x7FFFFFFFu;
        const Words nan = ((magnitude >> 13) & 0x3FFu) | 0x7E00u;
        // Changes the exponent bias. The carry out of the dropped bits rounds to even.
        const Words normal =
            (magnitude - ((127u - 15u) << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
        // For a subnormal result: the sum with 0.5 has its last bit where a float16 subnormal has
        // its last bit. So the addition itself rounds to that bit.
        const Words half = Words{} + (126u << 23);
        const Words subnormal = (Words)((Floats)magnitude + (Floats)half) - half;
        const SignedWords m = (SignedWords)magnitude;
        const Words small = m < ((127 - 14) << 23) ? subnormal : normal;
        const Words finite = m >= ((127 + 16) << 23) ? Words{} + 0x7C00u : small;
        return (m > (255 << 23) ? nan : finite) | ((w >> 16) & 0x8000u);
    }
};

// Vectors of 16-bit elements. `Shorts` has the width of all vectors; `Halves` has half the width,
// with one element for each float of a vector.
using Shorts = Vector<uint16_t>;
typedef uint16_t Halves __attribute__((vector_size(vector_bytes / 2)));

#if defined(__F16C__) || defined(__ARM_NEON)
// float16 by the CPU's conversions. `even` and `odd` hold the lower and upper half of the vector.
struct NativeFloat16 : PairCodec {
    UNISONO_INLINE static Acc load(const uint8_t* from) {
        return {widened(load_vector<Halves>(from)),
                widened(load_vector<Halves>(from + sizeof(Halves)))};
    }

    UNISONO_INLINE static void store(uint8_t* to, Acc a) {
        store_vector(to, narrowed(a.even));
        store_vector(to + sizeof(Halves), narrowed(a.odd));
    }

#if defined(__AVX512F__)
    UNISONO_INLINE static Floats widened(Halves h) { return _mm512_cvtph_ps((__m256i)h); }
    UNISONO_INLINE static Halves narrowed(Floats f) {
        return (Halves)_mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT);
    }
    UNISONO_INLINE static Halves lower(Shorts v) {
        return (Halves)_mm512_castsi512_si256((__m512i)v);
    }
    UNISONO_INLINE static Halves upper(Shorts v) {
        return (Halves)_mm512_extracti64x4_epi64((__m512i)v, 1);
    }
    UNISONO_INLINE static Shorts joined(Halves low, Halves high) {
        const __m512i wide = _mm512_castsi256_si512((__m256i)low);
        return (Shorts)_mm512_inserti64x4(wide, (__m256i)high, 1);
    }
#elif defined(__F16C__)
    UNISONO_INLINE static Floats widened(Halves h) { return _mm256_cvtph_ps((__m128i)h); }
    UNISONO_INLINE static Halves narrowed(Floats f) {
        return (Halves)_mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT);
    }
    UNISONO_INLINE static Halves lower(Shorts v) {
        return (Halves)_mm256_castsi256_si128((__m256i)v);
    }
    UNISONO_INLINE static Halves upper(Shorts v) {
        return (Halves)_mm256_extracti128_si256((__m256i)v, 1);
    }
    UNISONO_INLINE static Shorts joined(Halves low, Halves high) {
        return (Shorts)_mm256_set_m128i((__m128i)high, (__m128i)low);
    }
#else
    UNISONO_INLINE static Floats widened(Halves h) { return (Floats)vcvt_f32_f16((float16x4_t)h); }
    UNISONO_INLINE static Halves narrowed(Floats f) { return (Halves)vcvt_f16_f32((float32x4_t)f); }
    UNISONO_INLINE static Halves lower(Shorts v) { return (Halves)vget_low_u16((uint16x8_t)v); }
    UNISONO_INLINE static Halves upper(Shorts v) { return (Halves)vget_high_u16((uint16x8_t)v); }
    UNISONO_INLINE static Shorts joined(Halves low, Halves high) {
        return (Shorts)vcombine_u16((uint16x4_t)low, (uint16x4_t)high);
    }
#endif
};
using Float16 = NativeFloat16;
#else
using Float16 = PortableFloat16;
#endif

}  // namespace
}  // namespace unisono::kernels

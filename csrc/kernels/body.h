// Reductions (folds) and copies. This header is compiled once per instruction set.
#pragma once

#include "kernels/codecs.h"
#include "kernels/convert.h"
#include "kernels/float8.h"
#include "kernels/operators.h"
#include "kernels/table.h"

namespace unisono::kernels {
namespace {

// Minimum length of a destination for which alignment saves time.
constexpr size_t align_from_bytes = 1024;

// Folds one block of `unroll` vectors. Reads every source once, at `at`, and writes dst once.
// `fixed` is the number of sources if known at compile time, else 0.
template <class C, class O, size_t fixed, size_t unroll>
UNISONO_INLINE void fold_block(uint8_t* dst, const uint8_t* const* srcs, size_t nsrc, size_t at,
                               uint32_t divisor) {
    typename C::Acc acc[unroll];
#pragma GCC unroll 8
    for (size_t u = 0; u < unroll; ++u) acc[u] = C::load(srcs[0] + at + u * vector_bytes);
    const size_t sources = fixed != 0 ? fixed : nsrc;
#pragma GCC unroll 8
    for (size_t s = 1; s < sources; ++s) {
        const uint8_t* src = srcs[s] + at;
#pragma GCC unroll 8
        for (size_t u = 0; u < unroll; ++u) {
            acc[u] = C::template apply<O>(acc[u], C::load(src + u * vector_bytes));
        }
    }
#pragma GCC unroll 8
    for (size_t u = 0; u < unroll; ++u) {
        C::store(dst + u * vector_bytes, C::template finish<O>(acc[u], divisor));
    }
}

// Folds less than one vector of bytes, through a zero-padded buffer.
template <class C, class O>
[[gnu::noinline]] void fold_partial(uint8_t* dst, const uint8_t* const* srcs, size_t nsrc,
                                    size_t at, size_t bytes, uint32_t divisor) {
    alignas(vector_bytes) uint8_t buffer[vector_bytes] = {};
    __builtin_memcpy(buffer, srcs[0] + at, bytes);
    typename C::Acc acc = C::load(buffer);
    for (size_t s = 1; s < nsrc; ++s) {
        __builtin_memcpy(buffer, srcs[s] + at, bytes);
        acc = C::template apply<O>(acc, C::load(buffer));
    }
    C::store(buffer, C::template finish<O>(acc, divisor));
    __builtin_memcpy(dst, buffer, bytes);
}

template <class C, class O, size_t fixed>
[[gnu::noinline]] void fold_fixed(uint8_t* dst, const uint8_t* const* sources, size_t nsrc,
                                  size_t at, size_t bytes, uint32_t divisor) {
    // Makes a local copy of the pointers. Otherwise the compiler must assume that each store
    // changes the pointers.
    const uint8_t* local[fixed != 0 ? fixed : 1];
    for (size_t s = 0; s < fixed; ++s) local[s] = sources[s];
    const uint8_t* const* srcs = fixed != 0 ? local : sources;

    size_t done = 0;
    const size_t head = -reinterpret_cast<uintptr_t>(dst) % vector_bytes;
    if (bytes >= align_from_bytes && head != 0 && head % C::elem_bytes == 0) {
        fold_partial<C, O>(dst, srcs, nsrc, at, head, divisor);
        done = head;
    }
    constexpr size_t block_bytes = C::unroll * vector_bytes;
    for (; bytes - done >= block_bytes; done += block_bytes) {
        fold_block<C, O, fixed, C::unroll>(dst + done, srcs, nsrc, at + done, divisor);
    }
    for (; bytes - done >= vector_bytes; done += vector_bytes) {
        fold_block<C, O, fixed, 1>(dst + done, srcs, nsrc, at + done, divisor);
    }
    if (done != bytes) {
        fold_partial<C, O>(dst + done, srcs, nsrc, at + done, bytes - done, divisor);
    }
}

template <class C, class O>
void fold(uint8_t* dst, const uint8_t* const* srcs, size_t nsrc, size_t at, size_t bytes,
          uint32_t divisor) {
    // With more than two sources, a number of sources known at compile time saves no time.
    if (nsrc == 2) return fold_fixed<C, O, 2>(dst, srcs, nsrc, at, bytes, divisor);
    return fold_fixed<C, O, 0>(dst, srcs, nsrc, at, bytes, divisor);
}

#if defined(__SSE2__)
UNISONO_INLINE void stream_vector(uint8_t* to, const uint8_t* from) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(to),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

// Copies whole cache lines with streaming stores. The partial lines at both ends are written by
// ordinary (cached) stores.
void stream_copy(uint8_t* dst, const uint8_t* src, size_t bytes) {
    constexpr size_t line_bytes = 64;
    size_t head = -reinterpret_cast<uintptr_t>(dst) % line_bytes;
    if (head > bytes) head = bytes;
    __builtin_memcpy(dst, src, head);
    size_t at = head;
    for (; bytes - at >= line_bytes; at += line_bytes) {
#pragma GCC unroll 4
        for (size_t v = 0; v < line_bytes; v += vector_bytes)
            stream_vector(dst + at + v, src + at + v);
    }
    __builtin_memcpy(dst + at, src + at, bytes - at);
}
#else
void stream_copy(uint8_t* dst, const uint8_t* src, size_t bytes) {
    __builtin_memcpy(dst, src, bytes);
}
#endif

// Copies in cases in which the C library's copy is slow; see dispatch.cc.
void vector_copy(uint8_t* dst, const uint8_t* src, size_t bytes) {
    using V = Vector<uint8_t>;
    constexpr size_t unroll = 4;
    // A store across two cache lines costs twice as much as an aligned store. A load across two
    // lines costs hardly more.
    size_t at = -reinterpret_cast<uintptr_t>(dst) % vector_bytes;
    if (at > bytes) at = bytes;
    __builtin_memcpy(dst, src, at);
    for (; bytes - at >= unroll * vector_bytes; at += unroll * vector_bytes) {
        V block[unroll];
#pragma GCC unroll 4
        for (size_t u = 0; u < unroll; ++u) block[u] = load_vector<V>(src + at + u * vector_bytes);
#pragma GCC unroll 4
        for (size_t u = 0; u < unroll; ++u) store_vector(dst + at + u * vector_bytes, block[u]);
    }
    __builtin_memcpy(dst + at, src + at, bytes - at);
}

template <class T>
constexpr void add_float(Table& table, DType type) {
    table.at(type, ReduceOp::sum) = fold<Plain<T>, Sum<T>>;
    table.at(type, ReduceOp::prod) = fold<Plain<T>, Prod<T>>;
    table.at(type, ReduceOp::min) = fold<Plain<T>, Min<T>>;
    table.at(type, ReduceOp::max) = fold<Plain<T>, Max<T>>;
    table.at(type, ReduceOp::avg) = fold<Plain<T>, Avg<T>>;
}

template <class T, class Index>
constexpr void add_complex(Table& table, DType type) {
    using Codec = Plain<T, 2 * sizeof(T)>;
    table.at(type, ReduceOp::sum) = fold<Plain<T>, Sum<T>>;
    table.at(type, ReduceOp::prod) = fold<Codec, ComplexProd<T, Index>>;
    table.at(type, ReduceOp::avg) = fold<Plain<T>, Avg<T>>;
}

// Enters the kernels for sum, product and average of a 16- or 8-bit float type into the table.
template <class Codec>
constexpr void add_narrow_sums(Table& table, DType type) {
    table.at(type, ReduceOp::sum) = fold<Codec, Sum<float>>;
    table.at(type, ReduceOp::prod) = fold<Codec, Prod<float>>;
    table.at(type, ReduceOp::avg) = fold<Codec, Avg<float>>;
}

template <class T, T largest>
constexpr void add_narrow_order(Table& table, DType type) {
    table.at(type, ReduceOp::min) = fold<Plain<T>, NarrowMin<T, largest>>;
    table.at(type, ReduceOp::max) = fold<Plain<T>, NarrowMax<T, largest>>;
}

template <class T, class Index>
constexpr void add_pair(Table& table, DType type) {
    using Codec = Plain<T, 2 * sizeof(T)>;
    table.at(type, ReduceOp::minloc) = fold<Codec, MinMaxLoc<T, Index, true>>;
    table.at(type, ReduceOp::maxloc) = fold<Codec, MinMaxLoc<T, Index, false>>;
}

template <class T>
constexpr void add_logical(Table& table, DType type) {
    table.at(type, ReduceOp::land) = fold<Truth<T>, And>;
    table.at(type, ReduceOp::lor) = fold<Truth<T>, Or>;
    table.at(type, ReduceOp::lxor) = fold<Truth<T>, Xor>;
}

template <class T>
constexpr void add_integer(Table& table, DType type) {
    // Sums and products do not depend on the sign, so signed and unsigned types share one kernel.
    // Bitwise operations do not depend on the width either, so all types share one kernel.
    using Wrapped = typename UnsignedOf<sizeof(T)>::type;
    table.at(type, ReduceOp::sum) = fold<Plain<Wrapped>, Sum<Wrapped>>;
    table.at(type, ReduceOp::prod) = fold<Plain<Wrapped>, Prod<Wrapped>>;
    table.at(type, ReduceOp::min) = fold<Plain<T>, Min<T>>;
    table.at(type, ReduceOp::max) = fold<Plain<T>, Max<T>>;
    table.at(type, ReduceOp::avg) = fold<Plain<T>, Avg<T>>;
    table.at(type, ReduceOp::band) = fold<Plain<uint8_t>, And>;
    table.at(type, ReduceOp::bor) = fold<Plain<uint8_t>, Or>;
    table.at(type, ReduceOp::bxor) = fold<Plain<uint8_t>, Xor>;
    add_logical<Wrapped>(table, type);
}

// Enters the kernels for booleans into the table. All their reductions are logical operations.
constexpr void add_bool(Table& table, DType type) {
    constexpr ReduceOp either[] = {ReduceOp::sum, ReduceOp::max, ReduceOp::bor};
    constexpr ReduceOp both[] = {ReduceOp::prod, ReduceOp::min, ReduceOp::band};
    add_logical<uint8_t>(table, type);
    for (ReduceOp op : either) table.at(type, op) = table.at(type, ReduceOp::lor);
    for (ReduceOp op : both) table.at(type, op) = table.at(type, ReduceOp::land);
    table.at(type, ReduceOp::bxor) = table.at(type, ReduceOp::lxor);
}

// Returns a table with every supported reduction of every type.
constexpr Table full_table(const char* name) {
    Table table{name, nullptr, stream_copy, vector_copy, {}, {}, {}};
    add_conversions(table);
    add_float<float>(table, DType::float32);
    add_float<double>(table, DType::float64);
    add_narrow_sums<Float16>(table, DType::float16);
    add_narrow_order<int16_t, float16_largest>(table, DType::float16);
    add_narrow_sums<Bfloat16>(table, DType::bfloat16);
    add_narrow_order<int16_t, bfloat16_largest>(table, DType::bfloat16);
    add_narrow_sums<Float8E4m3fn>(table, DType::float8_e4m3fn);
    add_narrow_order<int8_t, e4m3fn_largest>(table, DType::float8_e4m3fn);
    add_narrow_sums<Float8E5m2>(table, DType::float8_e5m2);
    add_narrow_order<int8_t, e5m2_largest>(table, DType::float8_e5m2);
    add_integer<int8_t>(table, DType::int8);
    add_integer<uint8_t>(table, DType::uint8);
    add_integer<int16_t>(table, DType::int16);
    add_integer<uint16_t>(table, DType::uint16);
    add_integer<int32_t>(table, DType::int32);
    add_integer<uint32_t>(table, DType::uint32);
    add_integer<int64_t>(table, DType::int64);
    add_integer<uint64_t>(table, DType::uint64);
    add_bool(table, DType::boolean);
    add_complex<float, int32_t>(table, DType::complex64);
    add_complex<double, int64_t>(table, DType::complex128);
    add_pair<float, int32_t>(table, DType::float32_int32);
    add_pair<double, int64_t>(table, DType::float64_int64);
    add_pair<int32_t, int32_t>(table, DType::int32_int32);
    add_pair<int64_t, int64_t>(table, DType::int64_int64);
    return table;
}

}  // namespace
}  // namespace unisono::kernels

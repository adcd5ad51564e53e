// Reductions, conversions and copies of untyped memory, in the widest vector instructions this CPU
// has.
//
// All functions are thread-safe, allocate nothing, and accept any alignment. Results are the same
// bits on every instruction set, for any alignment and length, and whatever rounding the calling
// thread has set: to nearest even, subnormals kept.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace unisono::kernels {

// How a destination is written: `cached` through the caches, `streaming` past them (non-temporal
// stores, made visible by a fence before the call returns). Where the machine has no such stores,
// `streaming` is `cached`.
enum class Store : uint8_t { cached, streaming };

// dst[i] = srcs[0][i] op srcs[1][i] op ..., left to right, for `count` elements; nsrc >= 1 and
// supports(type, op).
//
// - Sums and products of 16- and 8-bit floats accumulate in float32 and are rounded once, to
//   nearest even. What is too large becomes infinity, in float8_e4m3fn, which has none, 448. A
//   single source that is not scaled is copied.
// - A NaN in a sum, product or average becomes the quiet NaN without sign and payload, in 8 bits
//   0x7F.
// - min and max keep the accumulator `a` over `b` if a < b (a > b) or a is NaN, so NaN wins.
// - minloc and maxloc give the pair of the best value, of equal values (and NaNs) the one with the
//   lowest index, of equal pairs the first; NaN wins.
// - Integers wrap. In land, lor, lxor anything but 0 is true, results are 0 or 1; booleans are
//   bytes that are reduced so whatever the reduction.
// - premul_sum is sum: the contributions were multiplied before.
// - divisor != 0 (op sum or avg): the sum is divided by it, in the type it accumulates in;
//   integers truncate toward zero. With divisor 0, avg is sum: a partial result.
//
// dst2 may be null; otherwise it receives the same bytes while they are hot. dst may be identical
// to one of the sources and may not overlap one partially; dst2 overlaps nothing.
void reduce(DType type, ReduceOp op, void* dst, void* dst2, const void* const* srcs, size_t nsrc,
            size_t count, uint32_t divisor, Store dst_store = Store::cached,
            Store dst2_store = Store::cached);

// The values of 16- or 8-bit floats, which float32 holds exactly; times `factor`, rounded to
// float32, if it is not null. is_narrow_float(type); dst and src do not overlap.
//
// A NaN stays one of its sign: that of float16 quiet with its payload, that of bfloat16 with all
// its bits, of 8 bits quiet without payload. A product that is a NaN is the quiet one without sign.
void widen(DType type, float* dst, const void* src, size_t count, const float* factor = nullptr);

// The nearest 16- or 8-bit floats, as reduce() rounds.
void narrow(DType type, void* dst, const float* src, size_t count);

// dst[i] = src[i] * factor, as in reduce(), rounded once. `factor` is an element, of narrow floats
// a float32. supports(type, premul_sum); dst may be src.
void scale(DType type, void* dst, const void* src, size_t count, const void* factor);

void copy(void* dst, const void* src, size_t bytes, Store store = Store::cached);

// Copies `src` to both destinations, reading it from memory once.
void copy2(void* dst, void* dst2, const void* src, size_t bytes, Store dst_store, Store dst2_store);

// The instruction set in use: "avx512bf16", "avx512", "avx2", "neon" or "baseline".
const char* isa();

}  // namespace unisono::kernels

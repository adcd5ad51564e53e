// Reductions, conversions and copies of untyped memory, with the widest vector instructions of this
// CPU.
//
// All functions are thread-safe, allocate no memory, and accept any alignment. Results have the
// same bits on every instruction set and for any alignment and length. They are rounded to nearest
// even with subnormals kept, whatever mode the calling thread has set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace unisono::kernels {

// The way in which a destination is written. `cached`: by ordinary stores, which fill the caches.
// `streaming`: by non-temporal stores, which bypass the caches; before the function returns, a
// fence makes them visible. On CPUs without such stores, `streaming` equals `cached`.
enum class Store : uint8_t { cached, streaming };

// dst[i] = srcs[0][i] op srcs[1][i] op ..., left to right, for `count` elements. Requires nsrc >= 1
// and supports(type, op).
//
// - Sums and products of 16- and 8-bit floats accumulate in float32 and are rounded once, to
//   nearest even. A value that is too large becomes infinity, or 448 in float8_e4m3fn, which has no
//   infinity. A single source without a divisor is copied.
// - A NaN in a sum, product or average becomes the quiet NaN without sign and payload (0x7F in 8
//   bits).
// - min and max keep the accumulator `a` over `b` if a < b (a > b) or a is NaN. So NaN wins.
// - minloc and maxloc return the pair with the best value. Of equal values (and of NaNs) the lowest
//   index wins; of equal pairs, the first. NaN wins over numbers.
// - Integers wrap. land, lor and lxor treat any value but 0 as true; results are 0 or 1. All
//   reductions of booleans treat their bytes like this.
// - premul_sum is sum, because the contributions are already scaled.
// - divisor != 0 (op sum or avg): divides the sum in the accumulator's type; integers truncate
//   toward zero. With divisor 0, avg is sum: a partial result.
//
// dst2 may be null. Otherwise it receives the same bytes while they are in the cache. dst may be
// equal to one of the sources, but must not overlap one partially. dst2 must not overlap any.
void reduce(DType type, ReduceOp op, void* dst, void* dst2, const void* const* srcs, size_t nsrc,
            size_t count, uint32_t divisor, Store dst_store = Store::cached,
            Store dst2_store = Store::cached);

// Converts 16- or 8-bit floats to float32, which represents them exactly. If `factor` is not null,
// multiplies by it and rounds to float32. Requires is_narrow_float(type); dst and src must not
// overlap.
//
// A NaN keeps its sign. A NaN of float16 becomes quiet and keeps its payload; a NaN of bfloat16
// keeps all its bits; a NaN of 8 bits becomes quiet without payload. A NaN product is the quiet NaN
// without sign.
void widen(DType type, float* dst, const void* src, size_t count, const float* factor = nullptr);

// Converts float32 to the nearest 16- or 8-bit floats; rounds as reduce() does.
void narrow(DType type, void* dst, const float* src, size_t count);

// dst[i] = src[i] * factor, as in reduce(), rounded once. `factor` is an element, or a float32 for
// narrow floats. Requires supports(type, premul_sum); dst may be equal to src.
void scale(DType type, void* dst, const void* src, size_t count, const void* factor);

void copy(void* dst, const void* src, size_t bytes, Store store = Store::cached);

// Copies `src` to both destinations, and reads it from memory once.
void copy2(void* dst, void* dst2, const void* src, size_t bytes, Store dst_store, Store dst2_store);

// Returns the instruction set in use: "avx512bf16", "avx512vbmi", "avx512", "avx2", "neon" or
// "baseline".
const char* isa();

}  // namespace unisono::kernels

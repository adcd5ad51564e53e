// The element types and reductions every layer shares. The values are those of unisono/types.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

enum class DType : uint8_t {
    float32 = 0,
    float64 = 1,
    float16 = 2,
    bfloat16 = 3,
    int8 = 4,
    uint8 = 5,
    int16 = 6,
    uint16 = 7,
    int32 = 8,
    uint32 = 9,
    int64 = 10,
    uint64 = 11,
    boolean = 12,
    complex64 = 13,
    complex128 = 14,
};
inline constexpr size_t num_dtypes = 15;

enum class ReduceOp : uint8_t {
    sum = 0,
    prod = 1,
    min = 2,
    max = 3,
    avg = 4,
    band = 5,
    bor = 6,
    bxor = 7,
};
inline constexpr size_t num_reduce_ops = 8;

// Bytes of one element.
constexpr size_t size_of(DType type) {
    constexpr uint8_t sizes[num_dtypes] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1, 8, 16};
    return sizes[static_cast<size_t>(type)];
}

constexpr bool is_integer(DType type) {
    return type >= DType::int8 && type <= DType::uint64;
}

constexpr bool is_complex(DType type) {
    return type == DType::complex64 || type == DType::complex128;
}

// Bitwise reductions need bits (integers, booleans); complex numbers have no order; the average
// of booleans is not a boolean.
constexpr bool supports(DType type, ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
        case ReduceOp::prod:
            return true;
        case ReduceOp::min:
        case ReduceOp::max:
            return !is_complex(type);
        case ReduceOp::avg:
            return type != DType::boolean;
        case ReduceOp::band:
        case ReduceOp::bor:
        case ReduceOp::bxor:
            return is_integer(type) || type == DType::boolean;
    }
    return false;
}

}  // namespace unisono

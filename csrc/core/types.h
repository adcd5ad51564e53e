// Element types and reductions of all layers. The values are those of unisono/types.py.
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
    float8_e4m3fn = 15,
    float8_e5m2 = 16,
    // Pairs of a value and an index of equal size, for minloc and maxloc.
    float32_int32 = 17,
    float64_int64 = 18,
    int32_int32 = 19,
    int64_int64 = 20,
};
inline constexpr size_t num_dtypes = 21;

enum class ReduceOp : uint8_t {
    sum = 0,
    prod = 1,
    min = 2,
    max = 3,
    avg = 4,
    band = 5,
    bor = 6,
    bxor = 7,
    land = 8,
    lor = 9,
    lxor = 10,
    premul_sum = 11,  // sum of contributions, each scaled before the sum
    minloc = 12,
    maxloc = 13,
};
inline constexpr size_t num_reduce_ops = 14;

// Returns the bytes of one element.
constexpr size_t size_of(DType type) {
    constexpr uint8_t sizes[num_dtypes] = {4, 8, 2, 2,  1, 1, 2, 2,  4, 4, 8,
                                           8, 1, 8, 16, 1, 1, 8, 16, 8, 16};
    return sizes[static_cast<size_t>(type)];
}

constexpr bool is_integer(DType type) {
    return type >= DType::int8 && type <= DType::uint64;
}

constexpr bool is_complex(DType type) {
    return type == DType::complex64 || type == DType::complex128;
}

constexpr bool is_narrow_float(DType type) {
    return type == DType::float16 || type == DType::bfloat16 || type == DType::float8_e4m3fn ||
           type == DType::float8_e5m2;
}

constexpr bool is_pair(DType type) {
    return type >= DType::float32_int32 && type <= DType::int64_int64;
}

constexpr bool is_logical(ReduceOp op) {
    return op == ReduceOp::land || op == ReduceOp::lor || op == ReduceOp::lxor;
}

// Returns true if the reduction is defined for the type. Bitwise and logical reductions need
// integers or booleans, as in MPI. Complex numbers have no order. An average or a scaled sum of
// booleans is not a boolean. minloc and maxloc need pairs.
constexpr bool supports(DType type, ReduceOp op) {
    switch (op) {
        case ReduceOp::minloc:
        case ReduceOp::maxloc:
            return is_pair(type);
        case ReduceOp::sum:
        case ReduceOp::prod:
            return !is_pair(type);
        case ReduceOp::min:
        case ReduceOp::max:
            return !is_pair(type) && !is_complex(type);
        case ReduceOp::avg:
        case ReduceOp::premul_sum:
            return !is_pair(type) && type != DType::boolean;
        case ReduceOp::band:
        case ReduceOp::bor:
        case ReduceOp::bxor:
        case ReduceOp::land:
        case ReduceOp::lor:
        case ReduceOp::lxor:
            return is_integer(type) || type == DType::boolean;
    }
    return false;
}

}  // namespace unisono

// Which overlaps of the input and the output of a call are safe.
#pragma once

#include <cstdint>

#include "core/call.h"

namespace unisono {

struct Range {
    uintptr_t begin;
    uint64_t bytes;
};

// Returns true if the result of `rank` does not overwrite input that is still needed: the ranges
// are apart, or each element is at its own place.
[[nodiscard]] inline bool overlap_is_safe(OpKind op, uint64_t rank, Range in, Range out) noexcept {
    if (in.begin + in.bytes <= out.begin || out.begin + out.bytes <= in.begin) return true;
    switch (op) {
        case OpKind::all_gather:
            return in.begin == out.begin + rank * in.bytes;
        case OpKind::reduce_scatter:
            return out.begin == in.begin + rank * out.bytes;
        case OpKind::all_reduce:
        case OpKind::broadcast:
        case OpKind::reduce:
        case OpKind::scan:
        case OpKind::exscan:
            return in.begin == out.begin;
        default:
            return false;
    }
}

}  // namespace unisono

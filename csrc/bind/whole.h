// Whole numbers among the arguments of a fast path.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

namespace unisono::bind {

// Returns a number of at least 0. Returns nothing for any other object, also for other types of
// numbers, which Python checks. Requires the GIL.
[[nodiscard]] inline std::optional<int64_t> whole(nanobind::handle number) {
    if (!PyLong_CheckExact(number.ptr())) return std::nullopt;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    return overflow != 0 || value < 0 ? std::nullopt : std::optional<int64_t>(value);
}

}  // namespace unisono::bind

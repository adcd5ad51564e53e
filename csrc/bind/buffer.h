// Where an array lies: the buffer protocol without the detours of Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "types.h"

namespace unisono::bind {

struct Located {
    uintptr_t address;
    uint64_t bytes;
    DType dtype;
};

// A contiguous array of a known type; nothing sends the caller the slow way, which copies or
// explains.
[[nodiscard]] std::optional<Located> locate(nanobind::handle array, bool writable);

}  // namespace unisono::bind

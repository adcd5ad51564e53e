// Where arrays lie: addresses, and the buffer protocol without the detours of Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "types.h"

namespace unisono::bind {

using Address = uintptr_t;
using Memory = std::vector<std::pair<Address, uint64_t>>;  // (address, bytes) of each piece

[[nodiscard]] inline std::byte* at(Address address) noexcept {
    return reinterpret_cast<std::byte*>(address);
}

struct Located {
    Address address;
    uint64_t bytes;
    DType dtype;
};

// A contiguous array of a known type; nothing sends the caller the slow way, which copies or
// explains.
[[nodiscard]] std::optional<Located> locate(nanobind::handle array, bool writable);

}  // namespace unisono::bind

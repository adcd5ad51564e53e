// Memory addresses, in the form in which Python passes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace unisono::bind {

using Address = uintptr_t;
using Memory = std::vector<std::pair<Address, uint64_t>>;  // (address, bytes) of each piece

[[nodiscard]] inline std::byte* at(Address address) noexcept {
    return reinterpret_cast<std::byte*>(address);
}

}  // namespace unisono::bind

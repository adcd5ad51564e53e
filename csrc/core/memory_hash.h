// A hash of a part of a block of memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

inline constexpr size_t kHashedPiece = 4096;

// Returns a hash of each `step`-th piece of 4 KiB, from the piece `first` on. Memory that differs
// in one word of these pieces has another hash. Reads 16 bytes in a nanosecond.
[[nodiscard]] uint64_t hash_memory(const std::byte* memory, size_t bytes, uint64_t seed,
                                   size_t first, size_t step) noexcept;

}  // namespace unisono

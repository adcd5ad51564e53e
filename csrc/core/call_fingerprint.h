// The fingerprint of a call: a hash of all values that must be equal on all ranks.
#pragma once

#include <cstdint>

#include "core/call.h"

namespace unisono {

inline constexpr uint64_t kHashMask = (1ULL << 40) - 1;

// Returns a hash of 40 bits. Ranks compare it to detect that their calls differ.
[[nodiscard]] uint64_t fingerprint(const CallArgs& args) noexcept;

}  // namespace unisono

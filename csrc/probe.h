// How far apart two cores are, now: the number without which no measurement here means much.
#pragma once

namespace unisono {

// One-way latency in seconds of a cache line between the first two cores this process may use;
// the median of `samples` ping-pongs. Not a number if there is only one core.
[[nodiscard]] double probe_core_latency_s(unsigned samples);

// Cores this process may use.
[[nodiscard]] unsigned usable_cores() noexcept;

}  // namespace unisono

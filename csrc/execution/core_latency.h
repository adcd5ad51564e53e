// How far apart two cores are, now: the number without which no measurement here means much.
#pragma once

#include <cstdint>

namespace unisono {

// One-way latency in seconds of a cache line between the first two cores this process may use;
// the median of `samples` ping-pongs. Not a number if there is only one core.
[[nodiscard]] double probe_core_latency_s(unsigned samples);

// Cores this process may use.
[[nodiscard]] unsigned usable_cores() noexcept;

// Whether the cores of this CPU sit on a mesh, each with a large cache of its own, as Intel's
// server CPUs have it since Skylake. There a core reads what another has just written at 5 to 6
// GB/s, what went to memory no faster, and what the other has not touched for a while at 12 and
// more (benchmarks/RESULTS.md).
[[nodiscard]] bool meshed_cores() noexcept;

// Size of the last level of cache; an assumption where the system does not tell.
[[nodiscard]] uint64_t last_level_cache_bytes();

// Moves the calling thread to the `index`-th usable core (modulo their number) and lets it go
// again: the kernel may move it, but has no reason to. Uneven starts, such as two ranks on one of
// two cores, cost a factor of ten until the kernel's balancer notices.
void settle_on_core(unsigned index) noexcept;

}  // namespace unisono

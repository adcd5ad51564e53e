// The cores that this process may use: their number, their caches, and the latency between them.
// Also moves threads from core to core.
#pragma once

#include <cstdint>
#include <vector>

namespace unisono {

// Returns the one-way latency in seconds of a cache line between the first two usable cores: the
// median of `samples` ping-pongs. Returns NaN if there is only one core.
[[nodiscard]] double probe_core_latency_s(unsigned samples);

// Returns the number of cores that this process may use.
[[nodiscard]] unsigned usable_cores() noexcept;

// Returns the cores that the calling thread may use.
[[nodiscard]] std::vector<int> usable_core_numbers();

// Returns true if the cores of this CPU form a mesh, each with a large cache of its own. Intel's
// server CPUs since Skylake are built like this. On such a CPU, a core reads data that another core
// has just written at 5 to 6 GB/s. Data in memory is read no faster. Data that the other core has
// not used for some time is read at 12 GB/s or more (benchmarks/RESULTS.md).
[[nodiscard]] bool meshed_cores() noexcept;

// Returns the size of a core's second-level cache, or 0 if the system does not report it.
[[nodiscard]] uint64_t private_cache_bytes() noexcept;

// Returns the size of the last-level cache, or an assumed size if the system does not report it.
[[nodiscard]] uint64_t last_level_cache_bytes();

// Moves the calling thread to the `index`-th usable core (modulo their number), then removes the
// restriction to that core. The kernel may move the thread again, but rarely has a reason. An
// uneven start, such as two ranks on one of two cores, costs a factor of ten until the kernel
// rebalances.
void settle_on_core(unsigned index) noexcept;

// Moves the calling thread to a core, without a lasting restriction. Returns false if it may not
// use the core.
bool go_to_core(int core) noexcept;

// Moves the calling thread away from a core, without a lasting restriction. Returns false if it may
// use no other core.
bool leave_core(int core) noexcept;

}  // namespace unisono

// Chooses the ranks that a sleeping rank checks for liveness, among the ranks of the same host. All
// ranks of a group share the work. Together they check each rank once a round, whether one rank
// sleeps or hundreds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace unisono {

// A range of places in the segment, which wraps around.
struct PeersDue {
    uint32_t first, count;
};

// The time in which each rank is checked once (a round) is 1 ms times the number of ranks, but at
// least 50 ms (the length of a sleep) and at most 250 ms.
inline constexpr uint32_t kLeastRound_ms = 50, kMostRound_ms = 250;

// Takes the ranks whose check is due at `now_us`. The upper half of `turn` is the next place; the
// lower half is the time at which that place became due. If a rank takes a place and stops before
// its check, that check is made one round late. Clocks that differ (time namespaces) cause extra
// checks, never missing checks.
inline PeersDue take_due(std::atomic<uint64_t>& turn, uint32_t ranks, uint32_t now_us) noexcept {
    const uint64_t round_us = uint64_t{std::clamp(ranks, kLeastRound_ms, kMostRound_ms)} * 1000;
    const auto most_us = static_cast<int32_t>(round_us);
    uint64_t seen = turn.load(std::memory_order_relaxed);
    for (;;) {
        const auto next = static_cast<uint32_t>(seen >> 32) % ranks;
        const auto since_us = static_cast<uint32_t>(seen);
        const auto passed_us = static_cast<int32_t>(now_us - since_us);
        uint64_t count = ranks;
        uint32_t until_us = now_us;
        if (passed_us > -most_us && passed_us < most_us) {
            count = static_cast<uint64_t>(std::max(passed_us, 0)) * ranks / round_us;
            if (count == 0) return {0, 0};
            until_us = static_cast<uint32_t>(since_us + count * round_us / ranks);
        }
        const uint64_t then = (next + count) % ranks << 32 | until_us;
        if (turn.compare_exchange_weak(seen, then, std::memory_order_relaxed))
            return {next, static_cast<uint32_t>(count)};
    }
}

}  // namespace unisono

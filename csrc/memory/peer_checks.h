// Which ranks of its host a sleeping rank asks the kernel about. All ranks of a group share the
// work: together they ask about each once a round, be it one that sleeps or hundreds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace unisono {

// Places in the segment, round again after the last.
struct PeersDue {
    uint32_t first, count;
};

// A round takes 50 ms, as long as a sleep; a millisecond a rank where they are more; 250 ms at
// most.
inline constexpr uint32_t kLeastRound_ms = 50, kMostRound_ms = 250;

// Takes those whose turn has come by `now_us`. `turn` is shared: the next place in its upper half,
// the time at which its turn came in its lower half. Who takes a place and is stopped before it has
// asked delays that by a round. Clocks that differ (time namespaces) cost work, never a check.
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

// Chooses how a block is stored: through the caches or past them.
//
// Which is faster depends on where the hypervisor has put the cores, and changes while a program
// runs: a staging slot that the peer's cache still holds costs 4 times as much from a far core. So
// each rank times, once a block, one look at a line that a peer writes and nobody polls. The bits
// of the result are the same either way, so ranks need not agree.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "core/control_words.h"
#include "execution/core_latency.h"
#include "kernels/kernels.h"

namespace unisono {

struct Stores {
    kernels::Store slot = kernels::Store::cached;
    kernels::Store out = kernels::Store::cached;
};

enum class StorePolicy : uint8_t { cached, streaming, adaptive };

// How far the cores of the peers are, as last seen.
class Distance {
  public:
    explicit Distance(uint32_t ranks) : seen_(ranks, 0) {}
    // Shows the others where this rank was when it posted `progress`.
    static void light(RankControl& own, uint64_t progress) noexcept;
    void look(uint32_t rank, const RankControl& peer) noexcept;
    // One look at a line that another core wrote took this long.
    void learn(std::chrono::nanoseconds took) noexcept;
    [[nodiscard]] bool far() const noexcept { return far_; }

  private:
    std::vector<uint64_t> seen_;  // beacons, by rank
    bool far_ = false;
    int evidence_ = 0;  // that cores are far
};

// What the choice depends on, apart from the distance.
struct Traffic {
    uint64_t bytes;       // the caller's larger buffer
    bool folds_in_place;  // what is reduced goes where this rank's own part of it was
};

class StoreRule {
  public:
    // Whether the distance makes a difference: else it need not be looked at.
    [[nodiscard]] static bool asks(StorePolicy policy, const Traffic& traffic) noexcept {
        return policy == StorePolicy::adaptive && traffic.bytes >= kLeastStreamed;
    }
    // `meshed`: a far core reads slots no faster from memory than from the writer's cache.
    explicit StoreRule(uint32_t ranks, uint64_t cache_bytes = last_level_cache_bytes(),
                       bool meshed = meshed_cores()) noexcept
        : ranks_(ranks), cache_bytes_(cache_bytes), meshed_(meshed) {}
    [[nodiscard]] Stores choose(StorePolicy policy, const Traffic& traffic,
                                bool far) const noexcept;

  private:
    static constexpr uint64_t kLeastStreamed = 32 << 10;  // below, streaming loses everywhere
    uint64_t ranks_;
    uint64_t cache_bytes_;  // of the last level
    bool meshed_;
};

}  // namespace unisono

// Chooses between ordinary stores, which fill the caches, and streaming stores, which bypass the
// caches and go to memory.
//
// The faster choice depends on the cores that the hypervisor has assigned, and changes while a
// program runs. To read a staging slot in the cache of a far core takes 4 times as long as in the
// cache of a near core. So each rank measures, once a block, one load of a cache line that a peer
// writes and no rank polls. Both choices give the same bits, so ranks need not agree.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "core/control_words.h"
#include "execution/cpu_cores.h"
#include "kernels/kernels.h"

namespace unisono {

struct Stores {
    kernels::Store slot = kernels::Store::cached;
    kernels::Store out = kernels::Store::cached;
};

enum class StorePolicy : uint8_t { cached, streaming, adaptive };

// The estimated distance to the peers' cores.
class Distance {
  public:
    explicit Distance(uint32_t ranks) : seen_(ranks, 0) {}
    // Publishes the core on which this rank posted `progress`.
    static void publish(RankControl& own, uint64_t progress) noexcept;
    void measure(uint32_t rank, const RankControl& peer) noexcept;
    // Updates the estimate by the duration of one load of a line that another core wrote.
    void learn(std::chrono::nanoseconds took) noexcept;
    [[nodiscard]] bool far() const noexcept { return far_; }

  private:
    std::vector<uint64_t> seen_;  // last beacon of each rank
    bool far_ = false;
    // Grows with each slow load, which suggests far cores, and shrinks with each fast load.
    int evidence_ = 0;
};

// The properties of a call that the choice depends on, besides the distance.
struct Traffic {
    uint64_t bytes;       // Bytes of the caller's input or output, whichever is larger.
    bool folds_in_place;  // The result overwrites this rank's own contribution.
};

class StoreRule {
  public:
    // Returns true if the choice depends on the distance.
    [[nodiscard]] static bool needs_distance(StorePolicy policy, const Traffic& traffic) noexcept {
        return policy == StorePolicy::adaptive && traffic.bytes >= kLeastStreamed;
    }
    // `meshed`: a far core does not read slots faster from memory than from the writer's cache.
    explicit StoreRule(uint32_t ranks, uint64_t cache_bytes = last_level_cache_bytes(),
                       bool meshed = meshed_cores()) noexcept
        : ranks_(ranks), cache_bytes_(cache_bytes), meshed_(meshed) {}
    [[nodiscard]] Stores choose(StorePolicy policy, const Traffic& traffic,
                                bool far) const noexcept;

  private:
    // Minimum bytes of a call for streaming stores. In smaller calls, they are always slower than
    // cached stores.
    static constexpr uint64_t kLeastStreamed = 32 << 10;
    uint64_t ranks_;
    uint64_t cache_bytes_;  // bytes of the last-level cache
    bool meshed_;
};

}  // namespace unisono

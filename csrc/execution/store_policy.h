// Chooses between ordinary stores, which fill the caches, and streaming stores, which bypass the
// caches and go to memory.
//
// The faster choice depends on the cores that the hypervisor has assigned, and changes while a
// program runs. To read a staging slot in the cache of a far core takes 4 times as long as in the
// cache of a near core. So each rank measures at intervals one load of a cache line that a peer
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
    uint64_t bytes = 0;           // Bytes of the caller's input or output, whichever is larger.
    uint64_t staged_bytes = 0;    // Bytes of a block's slots.
    bool folds_in_place = false;  // The result overwrites this rank's own contribution.
};

class StoreRule {
  public:
    // Returns true if the ranks measure the distance in a call with this number: in each call of
    // many bytes, and in some of the others, because a measurement takes a tenth of their time.
    [[nodiscard]] static bool needs_distance(StorePolicy policy, const Traffic& traffic,
                                             uint64_t seq) noexcept {
        return policy == StorePolicy::adaptive && traffic.staged_bytes >= kLeastStreamed &&
               (traffic.bytes >= kManyBytes || seq % kCallsBetween == 0);
    }
    // Returns the number of places from a rank to the peer that it measures in a block. The peers
    // take turns, because a peer on the rank's own core tells nothing.
    [[nodiscard]] static uint64_t measured_step(uint64_t seq, uint64_t block,
                                                uint64_t ranks) noexcept {
        return 1 + (seq / kCallsBetween + block) % (ranks - 1);
    }
    // `meshed`: a far core does not read slots faster from memory than from the writer's cache.
    explicit StoreRule(uint32_t ranks, uint64_t cache_bytes = last_level_cache_bytes(),
                       bool meshed = meshed_cores()) noexcept
        : ranks_(ranks), cache_bytes_(cache_bytes), meshed_(meshed) {}
    [[nodiscard]] Stores choose(StorePolicy policy, const Traffic& traffic,
                                bool far) const noexcept;

  private:
    // Minimum bytes of slots for streaming stores. With far cores, an all_reduce of 16 KiB on two
    // ranks takes 3.4 us with them and 10 us without. They gain nothing in smaller slots.
    static constexpr uint64_t kLeastStreamed = 2 << 10;
    static constexpr uint64_t kManyBytes = 32 << 10;
    static constexpr uint64_t kCallsBetween = 8;
    uint64_t ranks_;
    uint64_t cache_bytes_;  // bytes of the last-level cache
    bool meshed_;
};

}  // namespace unisono

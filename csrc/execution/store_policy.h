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
    uint64_t slot_bytes = 0;      // Bytes of each slot. Equal on all ranks.
    bool folds_in_place = false;  // The result overwrites this rank's own contribution.
};

class StoreRule {
  public:
    // `meshed`: a far core does not read slots faster from memory than from the writer's cache.
    explicit StoreRule(uint32_t ranks, uint64_t cache_bytes = last_level_cache_bytes(),
                       bool meshed = meshed_cores()) noexcept
        : ranks_(ranks), cache_bytes_(cache_bytes), meshed_(meshed) {}
    // Returns true if the choice depends on the distance.
    [[nodiscard]] bool needs_distance(StorePolicy policy, const Traffic& traffic) const noexcept {
        return policy == StorePolicy::adaptive && !meshed_ && traffic.slot_bytes >= kLeastSlot;
    }
    [[nodiscard]] Stores choose(StorePolicy policy, const Traffic& traffic,
                                bool far) const noexcept;

  private:
    // Minimum bytes of a slot for streaming stores. With far cores, an all_reduce of 16 KiB on two
    // ranks takes 3.4 us with them and 10 us without. They gain nothing in smaller slots.
    static constexpr uint64_t kLeastSlot = 2 << 10;
    static constexpr uint64_t kLeastOutput = 32 << 10;
    uint64_t ranks_;
    uint64_t cache_bytes_;  // bytes of the last-level cache
    bool meshed_;
};

// Decides which calls measure the distance, and to which peer. The ranks make the same calls, so
// they measure in the same calls.
class DistanceTurns {
  public:
    // Returns true if a call that needs the distance measures it: each call with large slots, and
    // every eighth call, because a measurement takes a tenth of the time of a small call.
    [[nodiscard]] bool take(uint64_t slot_bytes) noexcept {
        return calls_++ % kCallsBetween == 0 || slot_bytes >= kLargeSlot;
    }
    // Returns the number of places from a rank to the peer that it measures in a block. The peers
    // take turns, because a peer on the rank's own core tells nothing.
    [[nodiscard]] uint64_t step(uint64_t block, uint64_t ranks) const noexcept {
        return 1 + (calls_ / kCallsBetween + block) % (ranks - 1);
    }

  private:
    static constexpr uint64_t kCallsBetween = 8;
    static constexpr uint64_t kLargeSlot = 16 << 10;
    uint64_t calls_ = 0;  // that needed the distance
};

}  // namespace unisono

#include "execution/store_policy.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace unisono {
namespace {

// A look at a line that a near core has just written takes 30 to 70 ns with the clock's own 20, a
// far one's 130 to 240; next to heavy traffic a near one may take as long, but never all of them.
constexpr std::chrono::nanoseconds kFar{100};
constexpr int kNearWeighs = 3;
constexpr int kMostEvidence = 8, kBelievedFar = 6, kBelievedNear = 2;
constexpr uint64_t kCoreBits = 12;

kernels::Store streaming_if(bool streams) noexcept {
    return streams ? kernels::Store::streaming : kernels::Store::cached;
}

}  // namespace

void Distance::light(RankControl& own, uint64_t progress) noexcept {
    const auto core = static_cast<uint64_t>(::sched_getcpu()) % (1 << kCoreBits);
    own.beacon.store(progress << kCoreBits | core, std::memory_order_relaxed);
}

void Distance::look(uint32_t rank, const RankControl& peer) noexcept {
    const auto before = std::chrono::steady_clock::now();
    const uint64_t beacon = peer.beacon.load(std::memory_order_acquire);
    const auto took = std::chrono::steady_clock::now() - before;
    // Unchanged, it came from this core's cache; so it did if the peer shares the core.
    const auto core = static_cast<uint64_t>(::sched_getcpu()) % (1 << kCoreBits);
    if (std::exchange(seen_[rank], beacon) != beacon && beacon % (1 << kCoreBits) != core)
        learn(took);
}

void Distance::learn(std::chrono::nanoseconds took) noexcept {
    evidence_ =
        took > kFar ? std::min(evidence_ + 1, kMostEvidence) : std::max(evidence_ - kNearWeighs, 0);
    if (evidence_ >= kBelievedFar) far_ = true;
    if (evidence_ <= kBelievedNear) far_ = false;
}

// Measured, both ways of each in turns, with 2, 4 and 8 ranks on 2 cores. Slots: near cores read
// them from each other's caches at 40 GB/s, far ones at 11, where memory is better. Output: once
// the buffers of all ranks no longer stay in the cache, storing past it spares reading what is
// overwritten; but a reduction in place has just read those lines, and the cache still has them.
Stores StoreRule::choose(StorePolicy policy, const Traffic& traffic, bool far) const noexcept {
    if (policy == StorePolicy::cached || traffic.bytes < kLeastStreamed) return {};
    if (policy == StorePolicy::streaming) return {.slot = kernels::Store::streaming};
    const bool spills = ranks_ * traffic.bytes >= cache_bytes_ / 2;
    return {.slot = streaming_if(far && !meshed_),
            .out = streaming_if(spills && !traffic.folds_in_place)};
}

}  // namespace unisono

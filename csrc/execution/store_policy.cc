#include "execution/store_policy.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace unisono {
namespace {

// A load of a cache line that a near core has just written takes 30 to 70 ns, including 20 ns for
// the clock. A load from a far core takes 130 to 240 ns. During heavy traffic, some loads from a
// near core are as slow, but never all of them.
constexpr std::chrono::nanoseconds kFar{100};
constexpr int kNearWeighs = 3;
constexpr int kMostEvidence = 8, kBelievedFar = 6, kBelievedNear = 2;
constexpr uint64_t kCoreBits = 12;

kernels::Store streaming_if(bool streams) noexcept {
    return streams ? kernels::Store::streaming : kernels::Store::cached;
}

}  // namespace

void Distance::publish(RankControl& own, uint64_t progress) noexcept {
    const auto core = static_cast<uint64_t>(::sched_getcpu()) % (1 << kCoreBits);
    own.beacon.store(progress << kCoreBits | core, std::memory_order_relaxed);
}

void Distance::measure(uint32_t rank, const RankControl& peer) noexcept {
    const auto before = std::chrono::steady_clock::now();
    const uint64_t beacon = peer.beacon.load(std::memory_order_acquire);
    const auto took = std::chrono::steady_clock::now() - before;
    // Ignores a beacon that came from this core's own cache: an unchanged beacon, or a beacon of a
    // peer on the same core.
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

// Measured with 2, 4 and 8 ranks on 2 cores, both variants in alternation. Near cores read slots
// from each other's caches at 40 GB/s. Far cores reach 11 GB/s, and memory is faster. For the
// output: once the buffers of all ranks exceed the cache, streaming stores save the reads of
// overwritten lines. But a reduction in place has just read those lines, so the cache still has
// them.
Stores StoreRule::choose(StorePolicy policy, const Traffic& traffic, bool far) const noexcept {
    const bool large_slots = traffic.slot_bytes >= kLeastSlot;
    if (policy == StorePolicy::cached) return {};
    if (policy == StorePolicy::streaming) return {.slot = streaming_if(large_slots)};
    const bool spills = traffic.bytes >= kLeastOutput && ranks_ * traffic.bytes >= cache_bytes_ / 2;
    return {.slot = streaming_if(large_slots && far && !meshed_),
            .out = streaming_if(spills && !traffic.folds_in_place)};
}

}  // namespace unisono

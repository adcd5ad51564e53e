#include "tuner.h"

#include <algorithm>
#include <utility>

namespace unisono {
namespace {

// A way is two bits: stream into slots, stream into the caller's output.
constexpr uint8_t kStreamSlot = 1, kStreamOut = 2;

constexpr uint64_t kLeastTuned = 32 << 10;       // below, streaming loses everywhere
constexpr uint64_t kLeastStreamedOut = 4 << 20;  // what stays in the caches is worth keeping there
constexpr uint64_t kSettle = 4;  // blocks until the slots are all written the new way
constexpr uint64_t kMeasured = 8;
constexpr uint64_t kLongCall = 4 * (kSettle + kMeasured);
constexpr size_t kMostRecords = 1024;
constexpr double kForget = 1.05;         // a best time is believed so much less at each call
constexpr double kBetter = 0.95;         // what another way must reach to be chosen
constexpr double kTrialCost = 1.0 / 24;  // of the time, at most, goes into trials
constexpr std::chrono::milliseconds kLeastPause{4};

// Advice in one word: hash (40 bits) | trial (8) | usual (8); bit 7 of trial: there is one.
constexpr uint64_t kHasTrial = 0x80;

uint64_t pack(uint64_t hash, uint8_t usual, uint64_t trial) {
    return hash << 16 | trial << 8 | usual;
}

Stores stores_of(uint8_t way) {
    const auto store = [way](uint8_t bit) {
        return way & bit ? kernels::Store::streaming : kernels::Store::cached;
    };
    return {store(kStreamSlot), store(kStreamOut)};
}

double seconds(std::chrono::steady_clock::duration d) {
    return std::chrono::duration<double>(d).count();
}

}  // namespace

void StoreTuner::begin(StorePlan& plan, StorePolicy policy, uint64_t hash, uint64_t blocks,
                       uint64_t bytes) {
    if (policy != StorePolicy::adaptive || bytes < kLeastTuned) {
        plan.usual = policy == StorePolicy::streaming && bytes >= kLeastTuned ? kStreamSlot : 0;
        return;
    }
    plan.hash = hash;
    plan.blocks = blocks;
    plan.ways = bytes >= kLeastStreamedOut ? kWays : 2;
    const uint64_t advice = group_.advice[hash % kAdvices].load(std::memory_order_relaxed);
    if (advice >> 16 == hash) {
        plan.usual = advice & (kWays - 1);
        const uint64_t trial = advice >> 8 & 0xff;
        if (trial & kHasTrial) {
            plan.trial = trial & (kWays - 1);
            const bool is_long = blocks >= kLongCall;
            plan.trial_begin = is_long ? blocks / 2 : 0;
            plan.trial_end = is_long ? plan.trial_begin + kSettle + kMeasured : blocks;
        }
    }
    if (decides_) plan.started = Clock::now();
}

Stores StoreTuner::at_block(StorePlan& plan, uint64_t block) {
    const bool trying = block >= plan.trial_begin && block < plan.trial_end;
    if (decides_ && plan.trial_end && plan.blocks >= kLongCall) {
        if (block == plan.trial_begin + kSettle) plan.trial_started = Clock::now();
        if (block == plan.trial_end) plan.trial_ended = Clock::now();
    }
    return stores_of(trying ? plan.trial : plan.usual);
}

void StoreTuner::end(StorePlan& plan) {
    if (!decides_ || plan.hash == 0) return;
    const uint64_t hash = std::exchange(plan.hash, 0);  // once a call
    if (records_.size() >= kMostRecords && !records_.contains(hash)) records_.clear();
    Record& record = records_[hash];
    const auto now = Clock::now();
    const auto blocks = static_cast<double>(plan.blocks);
    const double took_s = seconds(now - plan.started);
    if (plan.trial_end == 0) {
        learn(record, plan.usual, took_s / blocks);
    } else {
        const bool is_long = plan.blocks >= kLongCall;
        const double trial_s = is_long ? seconds(plan.trial_ended - plan.trial_started) : took_s;
        const auto measured = is_long ? static_cast<double>(kMeasured) : blocks;
        learn(record, plan.trial, trial_s / measured);
        if (is_long)
            learn(record, plan.usual,
                  (took_s - trial_s * (kSettle + kMeasured) / kMeasured) /
                      (blocks - kSettle - kMeasured));
        const auto pause = std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double>(trial_s / kTrialCost));
        record.next_trial = now + std::max<Clock::duration>(pause, kLeastPause);
    }
    for (uint8_t way = 0; way < plan.ways; ++way) {
        if (record.block_s[way] > 0 && record.block_s[way] < kBetter * record.block_s[record.usual])
            record.usual = way;
    }
    const bool trial = now >= record.next_trial;
    if (trial) {
        do {
            record.next = static_cast<uint8_t>((record.next + 1) % plan.ways);
        } while (record.next == record.usual);
    }
    advise(hash, record, trial, plan);
}

void StoreTuner::learn(Record& record, uint8_t way, double block_s) const noexcept {
    // The least of the recent times: peers that come late make a call long, whatever it stores.
    double& best = record.block_s[way];
    best = best > 0 ? std::min(best * kForget, block_s) : block_s;
}

void StoreTuner::advise(uint64_t hash, const Record& record, bool trial, const StorePlan& plan) {
    const uint64_t word = pack(hash, record.usual, trial ? kHasTrial | record.next : 0);
    auto& place = group_.advice[hash % kAdvices];
    // Written only when it changes: all ranks read this line at every call.
    if (plan.trial_end || trial || place.load(std::memory_order_relaxed) != word)
        place.store(word, std::memory_order_relaxed);
}

}  // namespace unisono

#include "tuner.h"

#include <algorithm>
#include <utility>

namespace unisono {
namespace {

// A way is two bits: stream into slots, stream into the caller's output.
constexpr uint8_t kStreamSlot = 1, kStreamOut = 2;

constexpr uint64_t kLeastTuned = 32 << 10;       // below, streaming loses everywhere
constexpr uint64_t kLeastStreamedOut = 4 << 20;  // what stays in the caches is worth keeping there
constexpr uint64_t kSettle = 3;  // blocks until the slots are all written the new way
constexpr uint64_t kMeasured = 6;
constexpr uint64_t kLongCall = 3 * (kSettle + kMeasured);
constexpr size_t kMostRecords = 1024;
constexpr double kRecency = 0.25;  // how fast a longer time is believed
constexpr uint32_t kSettleCalls = 1;
constexpr uint32_t kTrialCalls = 3;      // of a short call
constexpr double kBetter = 0.95;         // what another way must reach to be chosen
constexpr double kTrialCost = 1.0 / 24;  // of the time, at most, goes into trials
constexpr std::chrono::milliseconds kLeastPause{4};
constexpr double kDrift = 1.5;  // so much slower or faster, and the machine is another one
constexpr std::chrono::milliseconds kDriftPause{50};

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
    const bool is_long = plan.blocks >= kLongCall;
    if (!std::exchange(record.met, true)) return;  // a first call touches fresh memory
    if (is_long) {
        learn_long(record, plan, now);
    } else {
        learn_short(record, plan, now);
    }
    if (record.trial_left == 0) {
        choose(record, plan.ways, now);
        if (untried(record, plan.ways) || now >= record.next_trial) {
            begin_trial(record, plan.ways, is_long ? 1 : kTrialCalls);
        }
    }
    advise(hash, record);
}

// Both ways in one call: the blocks of the trial against the rest.
void StoreTuner::learn_long(Record& record, const StorePlan& plan, Clock::time_point now) {
    const double took_s = seconds(now - plan.started);
    const auto blocks = static_cast<double>(plan.blocks);
    if (plan.trial_end == 0) return learn(record, plan.usual, took_s / blocks);
    const double block_s = seconds(plan.trial_ended - plan.trial_started) / kMeasured;
    const double trial_s = block_s * (kSettle + kMeasured);
    learn(record, plan.trial, block_s);
    learn(record, plan.usual, (took_s - trial_s) / (blocks - kSettle - kMeasured));
    end_trial(record, now, trial_s);
}

// One way a call. The first calls of a way do not count: the slots are still in other caches, and a
// root that runs ahead has not met its readers yet.
void StoreTuner::learn_short(Record& record, const StorePlan& plan, Clock::time_point now) {
    const bool tries = plan.trial_end != 0;
    const uint8_t way = tries ? plan.trial : plan.usual;
    const double took_s = seconds(now - plan.started);
    record.streak = way == record.last ? record.streak + 1 : 0;
    record.last = way;
    if (record.streak >= kSettleCalls)
        learn(record, way, took_s / static_cast<double>(plan.blocks));
    record.spent_s += tries ? took_s : 0;
    if (tries && record.trial_left > 0 && --record.trial_left == 0) {
        end_trial(record, now, record.spent_s);
    }
}

void StoreTuner::begin_trial(Record& record, uint8_t ways, uint32_t calls) noexcept {
    const bool unknown = untried(record, ways);
    do {
        record.next = static_cast<uint8_t>((record.next + 1) % ways);
    } while (record.next == record.usual || (unknown && record.block_s[record.next] > 0));
    record.trial_left = calls;
    record.spent_s = 0;
}

void StoreTuner::end_trial(Record& record, Clock::time_point now, double trial_s) noexcept {
    const std::chrono::duration<double> pause(trial_s / kTrialCost);
    record.trial_left = 0;
    record.next_trial = now + std::max<Clock::duration>(
                                  std::chrono::duration_cast<Clock::duration>(pause), kLeastPause);
}

// What was not tried yet, or was forgotten, is tried before anything else. The usual way is known
// by the time of a trial, for it came first.
bool StoreTuner::untried(const Record& record, uint8_t ways) noexcept {
    for (uint8_t way = 0; way < ways; ++way) {
        if (way != record.usual && record.block_s[way] == 0)
            return record.block_s[record.usual] > 0;
    }
    return false;
}

void StoreTuner::choose(Record& record, uint8_t ways, Clock::time_point now) noexcept {
    const uint8_t before = record.usual;
    for (uint8_t way = 0; way < ways; ++way) {
        const double other_s = record.block_s[way];
        if (other_s > 0 && other_s < kBetter * record.block_s[record.usual]) record.usual = way;
    }
    const double usual_s = record.block_s[record.usual];
    if (record.usual != before || record.expected_s == 0) record.expected_s = usual_s;
    // The cores have been moved: what was learnt about the other ways holds no longer.
    const bool drifted =
        usual_s > kDrift * record.expected_s || usual_s * kDrift < record.expected_s;
    if (!drifted || now < record.next_drift) return;
    record.block_s.fill(0);
    record.block_s[record.usual] = usual_s;
    record.expected_s = usual_s;
    record.next_drift = now + kDriftPause;
}

// Believes a shorter time at once and a longer one slowly: peers that come late, and pages touched
// for the first time, make a call long whatever it stores.
void StoreTuner::learn(Record& record, uint8_t way, double block_s) noexcept {
    double& known = record.block_s[way];
    const bool shorter = known == 0 || block_s < known;
    known = shorter ? block_s : known + kRecency * (std::min(block_s, 2 * known) - known);
}

void StoreTuner::advise(uint64_t hash, const Record& record) noexcept {
    const uint64_t trial = record.trial_left > 0 ? kHasTrial | record.next : 0;
    const uint64_t word = pack(hash, record.usual, trial);
    auto& place = group_.advice[hash % kAdvices];
    // Written only when it changes: all ranks read this line at every call.
    if (place.load(std::memory_order_relaxed) != word) place.store(word, std::memory_order_relaxed);
}

}  // namespace unisono

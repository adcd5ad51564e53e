// Tests of the choice of stores: the rule, and the measurements that indicate that the peers of a
// rank run on far cores.
#include <algorithm>
#include <numeric>
#include <vector>

#include "execution/store_policy.h"
#include "tests/world.h"

namespace {

using namespace unisono;
using namespace unisono::test;
using std::chrono::nanoseconds;

constexpr uint64_t kCache = 32 << 20;
constexpr nanoseconds kNearLook{50}, kFarLook{160};

bool is(const Stores& stores, bool slot_streams, bool out_streams) {
    const auto streams = [](kernels::Store s) { return s == kernels::Store::streaming; };
    return streams(stores.slot) == slot_streams && streams(stores.out) == out_streams;
}

void check_rule(Report& report) {
    const StoreRule rule(2, kCache, false), meshed(2, kCache, true);
    const Traffic small{1024, 1024, false}, middle{1 << 20, 4096, false};
    const Traffic large{64 << 20, 1 << 20, false}, in_place{64 << 20, 1 << 20, true};
    const Traffic unstaged{64 << 20, 128, false};  // the slots hold addresses
    const Traffic crowd{16 << 10, 16 << 10, false};
    const auto near = [](const StoreRule& rule, const Traffic& traffic) {
        return rule.choose(StorePolicy::adaptive, traffic, false);
    };
    const auto far = [](const StoreRule& rule, const Traffic& traffic) {
        return rule.choose(StorePolicy::adaptive, traffic, true);
    };
    report.check(is(far(rule, small), false, false), "small messages stay in the caches");
    report.check(is(near(rule, middle), false, false), "near slots stay in the caches");
    report.check(is(far(rule, middle), true, false), "far slots stream");
    report.check(is(far(meshed, middle), false, false),
                 "far slots do not stream where memory is no faster");
    report.check(is(far(meshed, large), false, true), "large output streams there, too");
    report.check(is(near(rule, large), false, true), "large output streams");
    report.check(is(far(rule, large), true, true), "far and large: both stream");
    report.check(is(near(rule, in_place), false, false), "in-place output stays in the cache");
    report.check(is(far(rule, in_place), true, false),
                 "in-place output stays in the cache with far peers, too");
    report.check(is(far(rule, unstaged), false, true), "slots of addresses stay in the caches");
    report.check(is(near(StoreRule(4096, kCache, false), crowd), false, false),
                 "small output stays in the caches with any number of ranks");
    report.check(is(rule.choose(StorePolicy::cached, large, true), false, false), "cached");
    report.check(is(rule.choose(StorePolicy::streaming, middle, false), true, false), "streaming");
}

// Counts the measurements of each peer in calls of one block, of which every `other`-th is large.
void check_turns(Report& report) {
    constexpr uint64_t kSmall = 4096, kLarge = 1 << 18;
    for (uint64_t ranks = 2; ranks <= 9; ++ranks) {
        for (uint64_t other = 1; other <= 9; ++other) {
            DistanceTurns turns;
            std::vector<int> measured(ranks);
            for (uint64_t call = 0; call < 1000; ++call) {
                if (turns.take(call % other ? kSmall : kLarge)) ++measured.at(turns.step(0, ranks));
            }
            const int least = *std::min_element(measured.begin() + 1, measured.end());
            report.check(least > 10, "every peer has its turn");
            const int all = std::accumulate(measured.begin(), measured.end(), 0);
            report.check(other == 1 ? all == 1000 : all < 600, "most small calls do not measure");
        }
    }
}

void check_need(Report& report) {
    const StoreRule rule(2, kCache, false), meshed(2, kCache, true);
    const Traffic slots{1 << 20, 4096}, addresses{1 << 20, 128};
    report.check(rule.needs_distance(StorePolicy::adaptive, slots), "slots may stream");
    report.check(!rule.needs_distance(StorePolicy::adaptive, addresses) &&
                     !rule.needs_distance(StorePolicy::cached, slots) &&
                     !meshed.needs_distance(StorePolicy::adaptive, slots),
                 "calls whose slots cannot stream do not measure");
}

void check_distance(Report& report) {
    Distance distance(2);
    const auto looks = [&](nanoseconds took, int times) {
        for (int i = 0; i < times; ++i) distance.learn(took);
        return distance.far();
    };
    report.check(!looks(kFarLook, 5), "a few slow reads do not mean far");
    report.check(!looks(kNearLook, 1) && !looks(kFarLook, 3),
                 "a fast read outweighs several slow ones");
    report.check(looks(kFarLook, 8), "only slow reads mean far");
    report.check(looks(kNearLook, 1), "one fast read does not mean near");
    report.check(!looks(kNearLook, 2), "two fast reads mean near");
}

// An unchanged beacon, or a beacon written on this core, does not count as a measurement.
void check_beacon(Report& report) {
    Distance distance(2);
    for (int i = 0; i < 8; ++i) distance.learn(kFarLook);
    RankControl peer;
    const int core = ::sched_getcpu();
    for (uint64_t progress = 1; progress < 100 && ::sched_getcpu() == core; ++progress) {
        Distance::publish(peer, progress);
        for (int i = 0; i < 3; ++i) distance.measure(1, peer);
    }
    report.check(distance.far(), "reads on the writer's own core do not count");
}

}  // namespace

int main() {
    Report report;
    check_rule(report);
    check_turns(report);
    check_need(report);
    check_distance(report);
    check_beacon(report);
    return report.finish();
}

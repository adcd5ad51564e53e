// The choice of stores: what the rule says, and when a rank believes that its peers are far.
#include "../stores.h"
#include "world.h"

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
    const StoreRule roomy(2, 2, kCache, false), crowded(4, 2, kCache, false);
    const StoreRule meshed(2, 2, kCache, true);
    const Traffic small{4096, true, false}, middle{1 << 20, false, false};
    const Traffic gather{64 << 20, true, false}, reduction{64 << 20, false, false};
    const Traffic broadcast{1 << 20, true, true};
    const auto near = [](const StoreRule& rule, const Traffic& traffic) {
        return rule.choose(StorePolicy::adaptive, traffic, false);
    };
    const auto far = [](const StoreRule& rule, const Traffic& traffic) {
        return rule.choose(StorePolicy::adaptive, traffic, true);
    };
    report.check(is(far(crowded, small), false, false), "small messages stay in the caches");
    report.check(is(near(crowded, middle), false, false), "near slots stay in the caches");
    report.check(is(far(roomy, middle), true, false), "far slots stream");
    report.check(is(far(meshed, middle), false, false), "but not where memory is no faster");
    report.check(is(far(meshed, reduction), false, true), "output that spills streams there, too");
    report.check(is(near(roomy, gather), false, true), "output that spills streams");
    report.check(is(near(roomy, reduction), false, false), "a core's own cache keeps its output");
    report.check(is(near(crowded, reduction), false, true), "a shared cache does not");
    report.check(is(far(roomy, reduction), true, true), "far and large: both stream");
    report.check(is(near(crowded, broadcast), true, false), "slots that several read stream");
    report.check(is(near(roomy, broadcast), false, false), "a slot that one reads does not");
    report.check(is(roomy.choose(StorePolicy::cached, gather, true), false, false), "cached");
    report.check(is(roomy.choose(StorePolicy::streaming, middle, false), true, false), "streaming");
}

void check_distance(Report& report) {
    Distance distance(2);
    const auto looks = [&](nanoseconds took, int times) {
        for (int i = 0; i < times; ++i) distance.learn(took);
        return distance.far();
    };
    report.check(!looks(kFarLook, 5), "some long looks are an accident");
    report.check(!looks(kNearLook, 1) && !looks(kFarLook, 3), "a short one outweighs several");
    report.check(looks(kFarLook, 8), "nothing but long looks: far");
    report.check(looks(kNearLook, 1), "one short look is an accident");
    report.check(!looks(kNearLook, 2), "more are not");
}

// A beacon that did not change, or that shone on this very core, says nothing.
void check_beacon(Report& report) {
    Distance distance(2);
    RankControl peer;
    const int core = ::sched_getcpu();
    for (uint64_t progress = 1; progress < 100 && ::sched_getcpu() == core; ++progress) {
        Distance::light(peer, progress);
        for (int i = 0; i < 3; ++i) distance.look(1, peer);
    }
    report.check(!distance.far(), "looks at one's own core");
}

}  // namespace

int main() {
    Report report;
    check_rule(report);
    check_distance(report);
    check_beacon(report);
    return report.finish();
}

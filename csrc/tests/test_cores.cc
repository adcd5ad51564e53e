// Tests of the moves of a thread from core to core.
#include <sched.h>

#include <algorithm>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "core/control_words.h"
#include "execution/core_sharing.h"
#include "execution/cpu_cores.h"
#include "tests/report.h"
#include "tests/world.h"

using namespace unisono;
using namespace unisono::test;

namespace {

constexpr int kTries = 20;  // the kernel may move the thread between two statements

cpu_set_t affinity() {
    cpu_set_t set;
    CPU_ZERO(&set);
    ::sched_getaffinity(0, sizeof set, &set);
    return set;
}

// Returns true if the thread waits on another core after a call on the core of its peer.
bool parts(RankControl& own, int32_t offset) {
    RankControl peer;
    CoreSharing sharing(own);
    const int core = ::sched_getcpu();
    peer.core.store(core + offset, std::memory_order_relaxed);
    sharing.leave(peer);
    return ::sched_getcpu() != core;
}

void check_leaving(Report& report) {
    const cpu_set_t before = affinity();
    int left = 0;
    for (int i = 0; i < kTries; ++i) {
        const int core = ::sched_getcpu();
        left += leave_core(core) && ::sched_getcpu() != core;
    }
    const cpu_set_t after = affinity();
    report.check(CPU_EQUAL(&before, &after), "a move leaves no restriction");
    report.check(left > kTries / 2 || usable_cores() == 1, "the thread leaves its core");
}

void check_only_core(Report& report) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(::sched_getcpu(), &one);
    ::sched_setaffinity(0, sizeof one, &one);
    report.check(!leave_core(::sched_getcpu()), "a thread bound to one core stays");
    const cpu_set_t after = affinity();
    report.check(CPU_EQUAL(&one, &after), "a bound thread stays bound");
}

void check_sharing(Report& report) {
    RankControl own;
    int shared = 0, apart = 0;
    for (int i = 0; i < kTries; ++i) {
        shared += parts(own, 0);
        apart += parts(own, 1);
    }
    report.check(shared > kTries / 2 || usable_cores() == 1, "a rank leaves the core of its peer");
    report.check(apart < kTries / 2, "a rank alone on its core stays");
}

void check_pause(Report& report) {
    RankControl own, peer;
    CoreSharing sharing(own);
    int moves = 0;
    for (int i = 0; i < kTries; ++i) {
        const int core = ::sched_getcpu();
        peer.core.store(core, std::memory_order_relaxed);
        sharing.leave(peer);
        moves += ::sched_getcpu() != core;
    }
    report.check(moves < kTries / 2, "a rank does not move all the time");
}

// Moves ranks until none wants to move. Returns the number of moves.
int settle(std::vector<int>& cores, const std::vector<int>& usable) {
    for (int moves = 0; moves < 1000; ++moves) {
        std::vector<std::pair<size_t, int>> wanted;
        for (size_t place = 0; place < cores.size(); ++place) {
            const int core = emptier_core(cores, place, usable);
            if (core >= 0) wanted.emplace_back(place, core);
        }
        if (wanted.empty()) return moves;
        for (const auto& [place, core] : wanted) cores[place] = core;
    }
    return -1;
}

void check_evenness(Report& report) {
    std::mt19937 random(1);
    for (int round = 0; round < 500; ++round) {
        std::vector<int> usable;
        for (int core = 0; core < 12; ++core)
            if (random() % 2) usable.push_back(core);
        if (usable.empty()) continue;
        std::vector<int> cores(1 + random() % 40), before;
        for (int& core : cores) core = usable[random() % usable.size()];
        before = cores;
        const int moves = settle(cores, usable);
        const auto ranks_on = [&](int core) {
            return static_cast<int>(std::count(cores.begin(), cores.end(), core));
        };
        int fewest = 1 << 30, most = 0, moved = 0;
        for (const int core : usable) {
            fewest = std::min(fewest, ranks_on(core));
            most = std::max(most, ranks_on(core));
        }
        for (size_t place = 0; place < cores.size(); ++place)
            moved += cores[place] != before[place];
        report.check(moves >= 0 && most - fewest <= 1, "ranks occupy the cores evenly");
        report.check(moved == moves, "no rank moves twice");
    }
    report.check(emptier_core(std::vector{-1, -1, -1, 0, 0}, 4, std::vector{0, 1}) == 1,
                 "a rank whose core is unknown occupies none");
    report.check(emptier_core(std::vector{-1, -1, -1, 0}, 2, std::vector{0, 1}) == -1,
                 "a rank whose own core is unknown stays");
    report.check(emptier_core(std::vector{0, 0, 1}, 2, std::vector{0, 1}) == -1,
                 "one rank more on a core is even");
    report.check(emptier_core(std::vector{0, 0}, 1, std::vector<int>{}) == -1,
                 "a rank without a list of cores stays");
}

// Lets the last rank on the first of two cores wait. This core has three of four ranks, or two.
void check_moves(Report& report) {
    std::vector<int> usable = usable_core_numbers();
    if (usable.size() < 2) return;
    usable.resize(2);
    cpu_set_t two;
    CPU_ZERO(&two);
    for (const int core : usable) CPU_SET(core, &two);
    ::sched_setaffinity(0, sizeof two, &two);
    World world(shape_of(4, 2), Mapping::one, 2);
    View view(*world[0].segment, 2, HostRanks::one_host(4));
    int moved = 0, stayed = 0;
    for (int i = 0; i < kTries; ++i) {
        for (const bool even : {false, true}) {
            CoreSharing sharing(view.own());
            for (uint32_t r = 0; r < 4; ++r) {
                const bool second = r == 3 || (even && r == 0);
                view.control(r).core.store(usable[second ? 1 : 0], std::memory_order_relaxed);
            }
            go_to_core(usable[0]);
            sharing.even_out(view);
            if (even)
                stayed += ::sched_getcpu() == usable[0];
            else
                moved += ::sched_getcpu() == usable[1];
        }
    }
    report.check(moved > kTries / 2, "a rank leaves the fullest core");
    report.check(stayed > kTries / 2, "a rank stays if the cores are even");
    report.check(usable_core_numbers() == usable, "a move leaves no restriction");
}

void check_publishing(Report& report) {
    RankControl own;
    CoreSharing sharing(own);
    sharing.enter(0);
    report.check(own.core.load(std::memory_order_relaxed) >= 0, "a rank publishes its core");
    own.core.store(-1, std::memory_order_relaxed);
    sharing.enter(0);
    report.check(own.core.load(std::memory_order_relaxed) == -1, "most calls do not ask for it");
    for (int i = 0; i < 4; ++i) sharing.enter(0);
    report.check(own.core.load(std::memory_order_relaxed) >= 0, "a rank publishes its core again");
}

}  // namespace

int main() {
    Report report;
    check_leaving(report);
    check_sharing(report);
    check_pause(report);
    check_publishing(report);
    check_evenness(report);
    std::thread(check_moves, std::ref(report)).join();
    std::thread(check_only_core, std::ref(report)).join();
    return report.finish();
}

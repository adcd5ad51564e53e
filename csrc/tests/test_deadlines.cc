// Tests random insertions, changes and removals of deadlines. The results must equal those of an
// ordered set.
#include <map>
#include <random>
#include <set>
#include <utility>

#include "simulator/deadlines.h"
#include "tests/report.h"

namespace {

using unisono::simulator::Deadlines;
using unisono::test::Report;

void check_random_changes(Report& report) {
    std::mt19937 random(1);
    for (int trial = 0; trial < 200; ++trial) {
        Deadlines deadlines;
        std::map<int32_t, double> times;
        std::set<std::pair<double, int32_t>> expected;
        for (int i = 0; i < 300; ++i) {
            const auto id = static_cast<int32_t>(random() % 24);
            if (const auto known = times.find(id); known != times.end()) {
                expected.erase({known->second, id});
                times.erase(known);
            }
            if (random() % 4 == 0) {
                deadlines.remove(id);
            } else {
                // Few values, so that times are often equal.
                const double time = static_cast<double>(random() % 12);
                deadlines.set(id, time);
                times[id] = time;
                expected.insert({time, id});
            }
            report.check(deadlines.empty() == expected.empty(), "empty() is wrong");
            if (deadlines.empty() || expected.empty()) continue;
            report.check(deadlines.time() == expected.begin()->first, "the next time is wrong");
            report.check(times.at(deadlines.id()) == deadlines.time(), "the next id is wrong");
        }
    }
}

}  // namespace

int main() {
    Report report;
    check_random_changes(report);
    return report.finish();
}

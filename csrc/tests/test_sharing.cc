// Tests the max-min fair rates of random flows that start and end. The rates must equal those of an
// oracle that computes them from zero by progressive filling.
#include <algorithm>
#include <cmath>
#include <random>

#include "simulator/sharing.h"
#include "tests/report.h"

namespace {

using namespace unisono::simulator;
using unisono::test::Report;

struct Network {
    std::vector<double> capacity;
    std::vector<int32_t> values;
    std::vector<int64_t> starts{0};
    std::vector<double> weights;

    size_t paths() const { return starts.size() - 1; }
    Lists lists() const { return {values, starts}; }
    double weight(size_t hop) const { return weights.empty() ? 1.0 : weights[hop]; }
    void path(std::vector<int32_t> resources) {
        values.insert(values.end(), resources.begin(), resources.end());
        starts.push_back(static_cast<int64_t>(values.size()));
    }
};

Network random_network(std::mt19937& random, bool weighted) {
    const auto draw = [&](int from, int to) {
        return std::uniform_int_distribution<int>(from, to)(random);
    };
    Network net;
    const int resources = draw(1, 9);
    // Few different capacities, so that several resources are often equally loaded.
    for (int i = 0; i < resources; ++i) net.capacity.push_back(draw(1, 4) * 100.0);
    std::vector<int32_t> all(net.capacity.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
    const int paths = draw(1, 14);
    for (int p = 0; p < paths; ++p) {
        std::shuffle(all.begin(), all.end(), random);
        const auto length = std::min<size_t>(all.size(), static_cast<size_t>(draw(1, 4)));
        net.path({all.begin(), all.begin() + static_cast<std::ptrdiff_t>(length)});
    }
    for (size_t i = 0; weighted && i < net.values.size(); ++i)
        net.weights.push_back(draw(1, 4) / 4.0);
    return net;
}

// Returns the rates by progressive filling. All flows grow equally until a resource is used up. The
// flows of this resource stop, and the others continue.
std::vector<double> oracle(const Network& net, const std::vector<int>& flows) {
    std::vector<double> rate(net.paths(), 0.0), left = net.capacity;
    std::vector<bool> grows(net.paths());
    for (size_t p = 0; p < net.paths(); ++p) grows[p] = flows[p] > 0;
    while (std::find(grows.begin(), grows.end(), true) != grows.end()) {
        std::vector<double> wanted(left.size(), 0.0);
        const auto each_hop = [&](auto&& visit) {
            for (size_t p = 0; p < net.paths(); ++p) {
                if (!grows[p]) continue;
                for (auto h = static_cast<size_t>(net.starts[p]);
                     h < static_cast<size_t>(net.starts[p + 1]); ++h)
                    visit(p, static_cast<size_t>(net.values[h]), net.weight(h) * flows[p]);
            }
        };
        each_hop([&](size_t, size_t r, double share) { wanted[r] += share; });
        double step = INFINITY;
        for (size_t r = 0; r < left.size(); ++r)
            if (wanted[r] > 0) step = std::min(step, left[r] / wanted[r]);
        for (size_t p = 0; p < net.paths(); ++p)
            if (grows[p]) rate[p] += step;
        for (size_t r = 0; r < left.size(); ++r) left[r] -= step * wanted[r];
        std::vector<size_t> stopped;
        each_hop([&](size_t p, size_t r, double) {
            if (left[r] <= net.capacity[r] * 1e-9) stopped.push_back(p);
        });
        for (const size_t p : stopped) grows[p] = false;
    }
    return rate;
}

bool close(double a, double b) {
    return std::abs(a - b) <= 1e-7 * std::max(a, b);
}

void compare(Report& report, const Network& net, const Sharing& kept, const std::vector<int>& flows,
             const char* what) {
    const std::vector<double> want = oracle(net, flows);
    Sharing fresh(net.capacity, net.lists(), net.weights);
    for (size_t p = 0; p < net.paths(); ++p)
        if (flows[p] > 0) fresh.change(static_cast<int32_t>(p), flows[p]);
    fresh.settle();
    for (size_t p = 0; p < net.paths(); ++p) {
        const auto path = static_cast<int32_t>(p);
        if (flows[p] == 0) continue;
        report.check(kept.flows(path) == static_cast<uint32_t>(flows[p]), "flows are counted");
        report.check(close(kept.rate(path), want[p]),
                     std::string(what) + ": rates equal the oracle's");
        report.check(close(fresh.rate(path), want[p]),
                     std::string(what) + ": rates of a new Sharing equal the oracle's");
    }
}

// Checks that the reported changes, applied in order, give the current rates.
void follow(Report& report, const Sharing& sharing, std::vector<double>& reported,
            const std::vector<int>& flows) {
    for (const auto& [path, rate] : sharing.changes()) reported[static_cast<size_t>(path)] = rate;
    for (size_t p = 0; p < flows.size(); ++p)
        if (flows[p] > 0)
            report.check(reported[p] == sharing.rate(static_cast<int32_t>(p)),
                         "every change of a rate is reported");
}

void check_random_flows(Report& report, uint32_t seed, bool weighted) {
    std::mt19937 random(seed);
    const Network net = random_network(random, weighted);
    Sharing sharing(net.capacity, net.lists(), net.weights);
    std::vector<int> flows(net.paths(), 0);
    std::vector<double> reported(net.paths(), 0.0);
    for (int step = 0; step < 30; ++step) {
        const auto changes = 1 + random() % 4;  // flows that start or end before rates are updated
        for (uint32_t i = 0; i < changes; ++i) {
            const size_t p = random() % net.paths();
            const int delta = flows[p] > 0 && random() % 2 ? -1 : 1;
            flows[p] += delta;
            sharing.change(static_cast<int32_t>(p), delta);
        }
        sharing.settle();
        follow(report, sharing, reported, flows);
        compare(report, net, sharing, flows, weighted ? "weighted" : "plain");
    }
}

// The textbook example of max-min fairness: two links, one flow over both links, and one more flow
// on each link.
void check_textbook(Report& report) {
    Network net;
    net.capacity = {100, 300};
    net.path({0, 1});
    net.path({0});
    net.path({1});
    Sharing sharing(net.capacity, net.lists(), {});
    for (const int32_t path : {0, 1, 2}) sharing.change(path, 1);
    sharing.settle();
    report.check(close(sharing.rate(0), 50) && close(sharing.rate(1), 50),
                 "both flows of the first link get half");
    report.check(close(sharing.rate(2), 250), "the second link's own flow gets the rest");
    sharing.change(1, -1);
    sharing.settle();
    report.check(close(sharing.rate(0), 100) && close(sharing.rate(2), 200),
                 "rates after a flow has ended");
    sharing.settle();
    report.check(sharing.changes().empty(), "no change without an event");
    sharing.change(2, 1);
    sharing.change(2, -1);
    sharing.settle();
    report.check(sharing.changes().empty(), "no change by a flow that starts and ends at one time");
}

}  // namespace

int main() {
    Report report;
    check_textbook(report);
    for (uint32_t seed = 0; seed < 400; ++seed) check_random_flows(report, seed, seed % 2 != 0);
    return report.finish();
}

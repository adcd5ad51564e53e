// Tests that calls and messages between hosts succeed, with any length, layout, number of streams
// and threads, and with several calls at the same time.
#include <algorithm>
#include <atomic>
#include <random>

#include "tests/calls.h"
#include "tests/host_groups.h"
#include "tests/message_ranks.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

std::string text_of(const Layout& layout, uint32_t streams) {
    std::string text = std::to_string(streams) + " streams,";
    for (const auto& here : layout) text += " " + std::to_string(here.size());
    return text;
}

Step random_step(std::mt19937_64& random, uint32_t ranks) {
    constexpr uint64_t counts[] = {0, 1, 7, 333, 5000, 40000};
    constexpr Kind kinds[] = {Kind::one_shot, Kind::direct, Kind::chain, Kind::broadcast,
                              Kind::all_gather};
    Step step{};
    step.kind = kinds[random() % std::size(kinds)];
    step.count = counts[random() % std::size(counts)];
    step.root = static_cast<uint32_t>(random() % ranks);
    step.block_bytes = step.count > 5000 ? 1 << 17 : 64ULL << random() % 7;
    step.seed = random() % 1000;
    step.in_place = random() % 2 != 0;
    return step;
}

void check_calls(Report& report, const Layout& layout, uint32_t streams, uint64_t seed) {
    Hosts world(layout, streams, 1 << 20);
    std::atomic<int> wrong{0};
    world.run([&](Rank& rank) {
        const uint32_t ranks = rank.members->ranks();
        std::mt19937_64 script(seed), own(seed * 100 + rank.rank);
        std::vector<std::pair<std::unique_ptr<Call>, std::shared_ptr<Job>>> under_way;
        const Outcome outcome = outcome_of([&] {
            for (int i = 0; i < 40; ++i) {
                auto call = std::make_unique<Call>(random_step(script, ranks), rank.rank, ranks);
                auto execution = call->execution();
                constexpr double inlines_s[] = {0, 20e-6, 200e-6};
                auto job =
                    rank.dispatcher->submit(std::move(execution), kLong_s, inlines_s[own() % 3]);
                under_way.emplace_back(std::move(call), std::move(job));
                while (under_way.size() > 3 || (!under_way.empty() && own() % 2 == 0)) {
                    auto [oldest, its] = std::move(under_way.front());
                    under_way.erase(under_way.begin());
                    rank.dispatcher->wait(*its, -1, {});
                    if (!oldest->right()) ++wrong;
                }
            }
            for (auto& [call, job] : under_way) {
                rank.dispatcher->wait(*job, -1, {});
                if (!call->right()) ++wrong;
            }
        });
        report.check(outcome.fault == Fault::none,
                     "calls over " + text_of(layout, streams) + ": " + outcome.text);
    });
    report.check(wrong == 0, "results over " + text_of(layout, streams));
}

// ---- messages

size_t bytes_of(uint64_t seed) {
    constexpr size_t lengths[] = {0, 1, 77, 5000, 300'000};
    return lengths[seed * 7919 % std::size(lengths)];
}

// Each thread of each rank sends to the corresponding threads of all other ranks, on its own host
// and on other hosts. All messages must arrive unchanged.
void check_messages(Report& report, const Layout& layout, uint32_t streams) {
    constexpr uint64_t kMessages = 5;
    Hosts world(layout, streams);
    std::atomic<int> wrong{0};
    world.run([&](Rank& rank) {
        const uint32_t ranks = rank.members->ranks();
        std::vector<std::thread> threads;
        for (uint64_t tag = 0; tag < 2; ++tag) {
            threads.emplace_back([&, tag] {
                const auto outcome =
                    outcome_of([&] { exchange(rank, ranks, tag, kMessages, bytes_of, wrong); });
                report.check(outcome.fault == Fault::none,
                             "messages over " + text_of(layout, streams) + ": " + outcome.text);
            });
        }
        for (auto& thread : threads) thread.join();
    });
    report.check(wrong == 0, "messages over " + text_of(layout, streams));
}

// ---- failures across hosts

void check_left(Report& report) {
    Hosts world({{0}, {1}, {2}}, 2);
    world.run([&](Rank& rank) {
        expect(report, run_step(rank, simple(Kind::direct, 100)), Fault::none, "",
               "the last call of all ranks");
        if (rank.rank == 2) return rank.close();
        const auto outcome = run_step(rank, simple(Kind::direct, 100));
        report.check(outcome.fault == Fault::peer_lost,
                     "rank 2 left before the call: " + outcome.text);
    });
}

void check_failed(Report& report) {
    for (const uint32_t streams : {1U, 3U}) {
        Hosts world({{0}, {1}}, streams);
        world.run([&](Rank& rank) {
            run_step(rank, simple(Kind::direct, 100));
            if (rank.rank == 0) {
                rank.members->record(Fault::aborted, "enough of this");
                return rank.close();
            }
            expect(report, run_step(rank, simple(Kind::direct, 100)), Fault::aborted,
                   "enough of this", "failure on another host");
        });
    }
}

void check_timeout(Report& report) {
    Hosts world({{0}, {1}}, 2);
    world.run([&](Rank& rank) {
        if (rank.rank == 1) return pause(0.3);
        expect(report, run_step(rank, simple(Kind::direct, 100), 0.1), Fault::timeout,
               "rank 1 has not arrived", "a late rank of another host");
    });
}

void check_mismatch(Report& report) {
    Hosts world({{0}, {1}}, 1);
    world.run([&](Rank& rank) {
        const Step step = simple(Kind::direct, rank.rank == 0 ? 100 : 101);
        const auto outcome = run_step(rank, step);
        report.check(outcome.fault == Fault::mismatch, "mismatch: " + outcome.text);
    });
}

// A wait for a message from any source asks the other hosts for their last calls, so that a loss is
// detected in time.
void check_asking_other_hosts(Report& report) {
    Hosts world({{0, 1}, {2}}, 1);
    const auto asked_after = [&world](int32_t source, double seconds) {
        Data data(1);
        p2p::Request request(message(data, source, 1), false);
        world[0].p2p->begin(request, false);
        world[0].p2p->wait(request, kLong_s, seconds, {});
        world[0].p2p->cancel(request);
        return (world[0].members->events().take() & static_cast<uint32_t>(Event::slow_wait)) != 0;
    };
    for (const int32_t source : {1, 2, p2p::kAnySource}) {
        const std::string what = "a wait for a message of " + std::to_string(source);
        report.check(asked_after(source, 0.4), what + " asks the other hosts");
        report.check(!asked_after(source, 0.01), what + " that is short asks no host");
    }
    for (const int32_t source : {1, 2}) {
        Data data(1);
        p2p::Request request(message(data, source, 1), false);
        world[0].p2p->begin(request, false);
        const auto asked = [&](const auto& poll, double after_s) {
            pause(after_s);
            poll();
            return (world[0].members->events().take() & static_cast<uint32_t>(Event::slow_wait)) !=
                   0;
        };
        const auto test = [&] { world[0].p2p->test(request); };
        const auto probe = [&] { world[0].p2p->probe(source, 2); };
        const std::string of = " a message of " + std::to_string(source);
        report.check(!asked(test, 0), "the first test of" + of + " asks no host");
        report.check(asked(test, 0.1), "a repeated test of" + of + " asks the other hosts");
        probe();
        report.check(asked(probe, 0.1), "a repeated probe for" + of + " asks the other hosts");
        world[0].p2p->cancel(request);
    }
}

void check_asking_on_one_host(Report& report) {
    World world(shape_of(2, 2), Mapping::own, 2);
    Data data(1);
    p2p::Request request(message(data, 1, 1), false);
    world[0].p2p->begin(request, false);
    world[0].p2p->wait(request, kLong_s, 0.4, {});
    world[0].p2p->cancel(request);
    report.check(world[0].members->events().take() == 0, "a group of one host asks no other host");
}

}  // namespace

int main() {
    Report report;
    const Layout layouts[] = {
        {{0}, {1}}, {{0, 1}, {2}}, {{2, 0}, {1, 3}}, {{0}, {1}, {2}, {3}}, {{4, 0}, {1, 2, 3}}};
    uint64_t seed = 0;
    for (const Layout& layout : layouts) {
        for (const uint32_t streams : {1U, 3U}) {
            check_calls(report, layout, streams, ++seed);
            check_messages(report, layout, streams);
        }
    }
    check_left(report);
    check_failed(report);
    check_timeout(report);
    check_mismatch(report);
    check_asking_other_hosts(report);
    check_asking_on_one_host(report);
    return report.finish();
}

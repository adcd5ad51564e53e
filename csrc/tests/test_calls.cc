// Tests that calls succeed: synchronous or asynchronous, in any order, by one or several threads of
// a rank.
#include <algorithm>
#include <atomic>
#include <random>

#include "tests/calls.h"
#include "tests/kernel_features.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

Step random_step(std::mt19937_64& random, uint32_t ranks, uint32_t kinds) {
    constexpr uint64_t counts[] = {0, 1, 7, 64, 500, 3000};
    Step step{};
    step.kind = static_cast<Kind>(random() % kinds);
    step.count = counts[random() % std::size(counts)];
    step.root = static_cast<uint32_t>(random() % ranks);
    step.block_bytes = 64ULL << random() % 5;
    step.seed = random() % 1000;
    step.in_place = random() % 2 != 0;
    return step;
}

// All ranks make the same random calls, and every result must be right. Some calls are synchronous.
// The ranks wait for the asynchronous calls later, in any order.
void check_sequences(Report& report, Mapping mapping, uint32_t ranks, uint32_t kinds,
                     uint64_t seed) {
    std::mt19937_64 choose(seed);
    World world(shape_of(ranks, 1 + seed % 3), mapping, choose() % 2 ? ranks : 1);
    std::atomic<int> wrong{0};
    world.run([&](Rank& rank) {
        std::mt19937_64 script(seed), own(seed * 100 + rank.rank);
        std::vector<std::pair<std::unique_ptr<Call>, std::shared_ptr<Job>>> under_way;
        const auto finish = [&](size_t at) {
            auto [call, job] = std::move(under_way[at]);
            under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(at));
            if (own() % 2) {
                while (!rank.dispatcher->wait(*job, 0.001, {})) {
                }
            } else {
                rank.dispatcher->wait(*job, -1, {});
            }
            if (!call->right()) ++wrong;
        };
        const Outcome outcome = outcome_of([&] {
            for (int i = 0; i < 60; ++i) {
                auto call =
                    std::make_unique<Call>(random_step(script, ranks, kinds), rank.rank, ranks);
                auto execution = call->execution();
                if (own() % 2) {
                    rank.dispatcher->run(std::move(execution), kLong_s, {});
                    if (!call->right()) ++wrong;
                } else {
                    constexpr double inlines_s[] = {0, 20e-6, 200e-6};
                    auto job = rank.dispatcher->submit(std::move(execution), kLong_s,
                                                       inlines_s[own() % 3]);
                    under_way.emplace_back(std::move(call), std::move(job));
                }
                while (under_way.size() > 4 || (!under_way.empty() && own() % 3 == 0))
                    finish(own() % under_way.size());
            }
            while (!under_way.empty()) finish(0);
        });
        report.check(outcome.fault == Fault::none,
                     "sequence of " + std::to_string(ranks) + ": " + outcome.text);
    });
    report.check(wrong == 0, "results of a sequence of " + std::to_string(ranks));
}

// Threads of one rank make equal calls, so their order does not matter. No call may be lost, and no
// call may run in the middle of another call.
void check_threads(Report& report, Mapping mapping, uint32_t ranks) {
    World world(shape_of(ranks, 2), mapping, 1);
    std::atomic<int> wrong{0};
    world.run([&](Rank& rank) {
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 3; ++t) {
            threads.emplace_back([&, t] {
                const auto outcome = outcome_of([&] {
                    for (unsigned i = 0; i < 30; ++i) {
                        Call call(simple(Kind::direct, 300), rank.rank, ranks);
                        if ((i + t) % 2) {
                            auto execution = call.execution();
                            rank.dispatcher->run(std::move(execution), kLong_s, {});
                        } else {
                            rank.dispatcher->wait(
                                *rank.dispatcher->submit(call.execution(), kLong_s, t * 30e-6), -1,
                                {});
                        }
                        if (!call.right()) ++wrong;
                    }
                });
                report.check(outcome.fault == Fault::none, "threads: " + outcome.text);
            });
        }
        for (auto& thread : threads) thread.join();
    });
    report.check(wrong == 0, "results of threads");
}

// Ranks use single copy only where the kernel permits reads of a peer's memory.
void check_single_copy(Report& report) {
    const Descriptor fd(create_segment(shape_of(2, 2), World::nonce));
    Group first(Descriptor(::dup(fd.get())), 0, World::nonce, 2);
    Group second(Descriptor(::dup(fd.get())), 1, World::nonce, 2);
    for (const Group* group : {&first, &second})
        report.check(group->can_read_peers() == kernel_reads_peers(), "can_borrow() is wrong");
}

}  // namespace

int main() {
    Report report;
    check_single_copy(report);
    const uint32_t kinds =
        can_run_single_copy(report, "single-copy calls") ? kKinds : kKindsWithoutSingleCopy;
    for (const Mapping mapping : {Mapping::own, Mapping::one}) {
        for (const uint32_t ranks : {2U, 3U, 4U, 8U}) {
            for (uint64_t seed = 1; seed <= 4; ++seed)
                check_sequences(report, mapping, ranks, kinds, seed);
        }
        check_threads(report, mapping, 3);
    }
    return report.finish();
}

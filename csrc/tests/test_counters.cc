// Tests of the counters: each completed call and message counts once, independent of the thread
// that runs it.
#include <atomic>

#include "tests/calls.h"
#include "tests/host_groups.h"
#include "tests/message_ranks.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr auto kAllReduceRow = static_cast<uint32_t>(OpKind::all_reduce);
constexpr auto kInternalRow = static_cast<uint32_t>(OpKind::split);

struct Counted {
    uint64_t calls, bytes_sent, bytes_received;
    bool operator==(const Counted&) const = default;
};

Counted counted(const OperationCounters& counters, uint32_t row) {
    const auto& r = counters.row(row);
    return {r.calls.load(), r.bytes_sent.load(), r.bytes_received.load()};
}

void expect(Report& report, const OperationCounters& counters, uint32_t row,
            const Counted& expected, const std::string& what) {
    const Counted found = counted(counters, row);
    report.check(found == expected, what + ": row " + std::to_string(row) + " has " +
                                        std::to_string(found.calls) + " calls, " +
                                        std::to_string(found.bytes_sent) + " bytes sent and " +
                                        std::to_string(found.bytes_received) + " received");
}

// Makes a call that is counted in row `row` of the counters, with 100 bytes sent and 10 bytes
// received.
Execution execution_of(Call& call, uint32_t row) {
    Execution execution = call.execution();
    execution.volume = {row, 1, 100, 10};
    return execution;
}

// Each call is counted exactly once, whether it runs in the calling thread or in the progress
// thread.
void check_calls(Report& report, Mapping mapping) {
    constexpr uint32_t kRanks = 3, kThreads = 3, kCalls = 20;
    World world(shape_of(kRanks, 2), mapping, 1);
    world.run([&](Rank& rank) {
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < kThreads; ++t) {
            threads.emplace_back([&, t] {
                for (unsigned i = 0; i < kCalls; ++i) {
                    Call call(simple(Kind::direct, 300), rank.rank, kRanks);
                    auto execution = execution_of(call, kAllReduceRow);
                    if ((i + t) % 2) {
                        rank.dispatcher->run(std::move(execution), kLong_s, {});
                    } else {
                        const auto job = rank.dispatcher->submit(std::move(execution), kLong_s, 0);
                        rank.dispatcher->wait(*job, -1, {});
                    }
                }
            });
        }
        for (auto& thread : threads) thread.join();
        constexpr uint64_t calls = uint64_t{kThreads} * kCalls;
        expect(report, *rank.counters, kAllReduceRow, {calls, 100 * calls, 10 * calls}, "calls");
        expect(report, *rank.counters, kSendRow, {0, 0, 0}, "calls");
    });
}

// A call that follows another call counts only if it runs, and counts in its own row.
void check_continuations(Report& report) {
    constexpr uint32_t kRanks = 2;
    World world(shape_of(kRanks, 2), Mapping::own, 1);
    world.run([&](Rank& rank) {
        for (const bool follows : {true, false, true}) {
            Call vote(simple(Kind::one_shot, 1), rank.rank, kRanks);
            Call next(simple(Kind::direct, 100), rank.rank, kRanks);
            rank.dispatcher->run(execution_of(vote, kInternalRow), kLong_s, {},
                                 [&]() -> std::optional<Execution> {
                                     if (!follows) return std::nullopt;
                                     return execution_of(next, kAllReduceRow);
                                 });
        }
        expect(report, *rank.counters, kInternalRow, {3, 300, 30}, "votes");
        expect(report, *rank.counters, kAllReduceRow, {2, 200, 20}, "calls after votes");
    });
}

// A refused call and a failed call do not count.
void check_failures(Report& report) {
    constexpr uint32_t kRanks = 2;
    World world(shape_of(kRanks, 2), Mapping::own, 1);
    world.run([&](Rank& rank) {
        rank.dispatcher->refuse("wrong arguments");
        Call good(simple(Kind::direct, 100), rank.rank, kRanks);
        rank.dispatcher->run(execution_of(good, kAllReduceRow), kLong_s, {});
        Call bad(simple(Kind::direct, 100 + rank.rank), rank.rank, kRanks);
        const Outcome outcome = outcome_of(
            [&] { rank.dispatcher->run(execution_of(bad, kAllReduceRow), kLong_s, {}); });
        report.check(outcome.fault != Fault::none, "a wrong call was accepted");
        expect(report, *rank.counters, kAllReduceRow, {1, 100, 10}, "calls with failures");
    });
}

template <class Ranks>
void check_messages(Report& report, Ranks& world, const std::string& where) {
    world.run([&](Rank& rank) {
        const auto other = static_cast<int32_t>(1 - rank.rank);
        uint64_t messages = 0, bytes = 0;
        for (const size_t length : {0, 5, 3000, 40'000}) {  // together they take all paths
            Data out(length, 1), in(length);
            for (const bool in_background : {false, true}) {
                Requests requests;
                begin(requests, rank, message(in, p2p::kAnySource, p2p::kAnyTag), false);
                begin(requests, rank, message(out, other, 1), true, in_background);
                for (auto& request : requests) rank.p2p->wait(request, kLong_s, -1, {});
                ++messages;
                bytes += length;
            }
        }
        expect(report, *rank.counters, kSendRow, {messages, bytes, 0}, where + " sends");
        expect(report, *rank.counters, kReceiveRow, {messages, 0, bytes}, where + " receives");
    });
}

// A message of a rank to itself moves no bytes. A cancelled message does not count.
void check_own_messages(Report& report) {
    World world(shape_of(2, 2), Mapping::own, 1);
    Rank& rank = world[0];
    for (const size_t length : {10, 20'000}) {
        Data out(length, 1), in(length);
        Requests requests;
        begin(requests, rank, message(in, 0, 1), false);
        begin(requests, rank, message(out, 0, 1), true);
        for (auto& request : requests) rank.p2p->wait(request, kLong_s, -1, {});
    }
    Data never(8);
    p2p::Request request(message(never, 1, 2), false);
    rank.p2p->begin(request, false);
    report.check(rank.p2p->cancel(request), "a receive could not be cancelled");
    expect(report, *rank.counters, kSendRow, {2, 0, 0}, "own sends");
    expect(report, *rank.counters, kReceiveRow, {2, 0, 0}, "own receives");
}

// Waits that are given up and waits that fail count their time. Waits of messages have their own
// rows.
void check_waits(Report& report) {
    World world(shape_of(2, 2), Mapping::own, 1);
    Rank& rank = world[0];
    const auto waited = [&](uint32_t row) { return rank.counters->row(row).waited_ns.load(); };
    Data data(8);
    p2p::Request request(message(data, 1, 2), false);
    rank.p2p->begin(request, false);
    report.check(!rank.p2p->wait(request, kLong_s, 0.002, {}), "a message came from nowhere");
    report.check(waited(kReceiveRow) > 0, "the wait for a message took no time");
    report.check(waited(kSendRow) == 0, "a send has waited");
    report.check(rank.p2p->cancel(request), "a receive could not be cancelled");
    Call call(simple(Kind::direct, 100), 0, 2);
    const Outcome outcome =
        outcome_of([&] { rank.dispatcher->run(execution_of(call, kAllReduceRow), 0.002, {}); });
    report.check(outcome.fault == Fault::timeout, "a call without peers gave " + outcome.text);
    report.check(waited(kAllReduceRow) > 0, "the wait for a peer took no time");
    expect(report, *rank.counters, kAllReduceRow, {0, 0, 0}, "a call that timed out");
}

}  // namespace

int main() {
    Report report;
    for (const Mapping mapping : {Mapping::own, Mapping::one}) check_calls(report, mapping);
    check_continuations(report);
    check_failures(report);
    {
        World world(shape_of(2, 2), Mapping::own, 1);
        check_messages(report, world, "shared memory");
    }
    {
        Hosts world(Layout{{0}, {1}}, 1);
        check_messages(report, world, "TCP");
    }
    check_own_messages(report);
    check_waits(report);
    return report.finish();
}

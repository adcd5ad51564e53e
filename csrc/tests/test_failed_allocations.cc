// Tests with failed allocations at every point of a call or message. No rank waits without end, and
// the counters of the ranks stay consistent.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "tests/calls.h"
#include "tests/host_groups.h"
#include "tests/kernel_features.h"
#include "tests/message_ranks.h"
#include "tests/read_only_memory.h"
#include "tests/report.h"

namespace {

// Number of allocations that still succeed in this thread; negative: no limit.
thread_local int64_t t_left = -1;
thread_local bool t_refused = false;
thread_local void (*t_on_refusal)() = nullptr;

void* get(std::size_t bytes) {
    if (t_left == 0) {
        t_refused = true;
        if (t_on_refusal) t_on_refusal();
        return nullptr;
    }
    if (t_left > 0) --t_left;
    return std::malloc(bytes == 0 ? 1 : bytes);
}

// Runs `work` while this thread's allocations fail after the first `from`. Returns true if an
// allocation failed.
template <class Work>
bool starve(int64_t from, Work&& work) {
    t_left = from;
    t_refused = false;
    work();
    t_left = -1;
    return t_refused;
}

}  // namespace

void* operator new(std::size_t bytes) {
    if (void* const memory = get(bytes)) return memory;
    throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
    return get(bytes);
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr uint32_t kRanks = 3;
constexpr double kSoon_s = 5;

enum class Mode : uint8_t { run, begin, queue };

// Returns the outcome of a rank whose allocations fail: success, an error of the core, or
// std::bad_alloc.
template <class Work>
Outcome outcome_or_no_memory(Work&& work) {
    try {
        return outcome_of(work);
    } catch (const std::bad_alloc&) {
        return {Fault::system, "std::bad_alloc"};
    }
}

void make(Rank& rank, Execution call, Mode mode) {
    if (mode == Mode::run) return rank.dispatcher->run(std::move(call), kSoon_s, {});
    const double inline_s = mode == Mode::begin ? kSoon_s : 0;
    rank.dispatcher->wait(*rank.dispatcher->submit(std::move(call), kSoon_s, inline_s), -1, {});
}

// Fails rank 1's allocations after the first `from` of a call. Returns true if an allocation
// failed. If `reports` is set, the other ranks learn of the failure at once. Otherwise they learn
// of it when a rank closes, because no connection manager runs in this test.
template <class SomeWorld>
bool check_call(Report& report, SomeWorld& world, Kind kind, Mode mode, int64_t from,
                bool reports) {
    bool starved = false;
    const std::string what = "call " + std::to_string(static_cast<int>(kind)) + ", mode " +
                             std::to_string(static_cast<int>(mode)) + ", starved from " +
                             std::to_string(from);
    std::array<Outcome, kRanks> first, second;
    world.run([&](Rank& rank) {
        Call call(simple(kind, 1000), rank.rank, kRanks),
            next(simple(Kind::direct, 100), rank.rank, kRanks);
        Outcome& outcome = first[rank.rank];
        Execution execution = call.execution();
        const auto run = [&] {
            outcome = outcome_or_no_memory([&] { make(rank, std::move(execution), mode); });
        };
        if (rank.rank == 1) {
            starved = starve(from, run);
        } else {
            run();
        }
        if (outcome.fault == Fault::none) report.check(call.right(), what + ": wrong");
        if (outcome.fault != Fault::none && !reports) rank.close();
        second[rank.rank] = outcome_or_no_memory([&] { make(rank, next.execution(), Mode::run); });
    });
    for (const auto* outcomes : {&first, &second}) {
        for (const Outcome& outcome : *outcomes)
            report.check(outcome.fault != Fault::timeout, what + " ended late: " + outcome.text);
    }
    const bool lives = second[0].fault == Fault::none;
    for (const Outcome& outcome : second)
        report.check((outcome.fault == Fault::none) == lives, what + ", then " + outcome.text);
    if (!starved)
        report.check(lives, what + ": failed without a failed allocation: " + second[0].text);
    return starved;
}

void check_messages(Report& report, size_t bytes) {
    bool starved = true;
    for (int64_t from = 0; starved; ++from) {
        World world(shape_of(2, 2), Mapping::own, 1);
        const std::string what =
            std::to_string(bytes) + " bytes, starved from " + std::to_string(from);
        world.run([&](Rank& rank) {
            std::vector<uint8_t> sent(bytes, static_cast<uint8_t>(rank.rank)), received(bytes);
            const int32_t peer = rank.rank == 0 ? 1 : 0;
            p2p::Request out(message(sent, peer, 0), true), in(message(received, peer, 0), false);
            bool begun = false;
            const auto exchange = [&] {
                rank.p2p->begin(out, true);
                begun = true;
                rank.p2p->begin(in, true);
                rank.p2p->wait(in, kSoon_s, -1, {});
                rank.p2p->wait(out, kSoon_s, -1, {});
            };
            Outcome outcome;
            if (rank.rank == 0) {
                outcome = outcome_or_no_memory(exchange);
                report.check(outcome.fault != Fault::timeout, what + " late: " + outcome.text);
            } else {
                starved = starve(from, [&] { outcome = outcome_or_no_memory(exchange); });
            }
            // Ends the requests that are still pending if another request could not begin.
            if (outcome.fault != Fault::none) rank.close();
            if (outcome.fault == Fault::none)
                report.check(received == std::vector<uint8_t>(bytes, static_cast<uint8_t>(peer)),
                             what + ": wrong");
            report.check(!begun || out.done(), what + ": a send is still pending");
        });
    }
}

// Does the connection manager's work: reports a rank's failure to the ranks of other hosts.
void report_to_others(World&, uint32_t) {}
void report_to_others(Hosts& hosts, uint32_t rank) {
    Group& group = hosts.group(rank);
    if (!(group.members().events().take() & static_cast<uint32_t>(Event::failed))) return;
    const Error failure = *group.members().failure();
    for (uint32_t other = 0; other < 2; ++other)
        if (other != rank) hosts.group(other).fail(failure.fault(), failure.what());
}

// Rank 1's allocations fail after the first `from` of a large message, and rank 1 stays in the
// group. The other rank learns the cause. Returns true if an allocation failed.
template <class SomeWorld>
bool check_failure_reported(Report& report, SomeWorld& world, bool sends, int64_t from,
                            int& reported) {
    constexpr size_t bytes = 100'000;
    bool starved = false;
    const std::string what =
        std::string(sends ? "a send" : "a receive") + ", starved from " + std::to_string(from);
    std::array<Outcome, 2> outcomes;
    std::array<std::vector<uint8_t>, 2> data{std::vector<uint8_t>(bytes, 1),
                                             std::vector<uint8_t>(bytes, 1)};
    data[sends ? 0 : 1].assign(bytes, 0);
    std::vector<std::unique_ptr<p2p::Request>> requests;
    for (uint32_t r = 0; r < 2; ++r)
        requests.push_back(std::make_unique<p2p::Request>(
            message(data[r], 1 - static_cast<int32_t>(r), 0), (r == 1) == sends));
    world.run([](Rank& rank) {  // so that all connections are established
        Data little(1);
        rank.rank == 1 ? send(rank, little, 0, 1) : static_cast<void>(receive(rank, little, 1, 1));
    });
    world.run([&](Rank& rank) {
        p2p::Request& request = *requests[rank.rank];
        const auto move = [&] {
            rank.p2p->begin(request, true);
            rank.p2p->wait(request, kSoon_s, -1, {});
        };
        if (rank.rank == 0) {
            outcomes[0] = outcome_or_no_memory(move);
        } else {
            starved = starve(from, [&] { outcomes[1] = outcome_or_no_memory(move); });
            report_to_others(world, 1);
        }
    });
    for (const auto& request : requests)
        report.check(request->done(), what + ": a message is still pending");
    const bool reported_here = outcomes[0].fault == Fault::system &&
                               outcomes[0].text.find("rank 1 ") != std::string::npos &&
                               outcomes[0].text.find("memory") != std::string::npos;
    report.check(reported_here || (outcomes[0].fault == Fault::none && data[0] == data[1]),
                 what + " gave the other rank " + outcomes[0].text);
    reported += reported_here;
    return starved;
}

template <class Make>
void check_failures_reported(Report& report, const char* where, Make&& make) {
    for (const bool sends : {true, false}) {
        int reported = 0;
        bool starved = true;
        for (int64_t from = 0; starved; ++from) {
            auto world = make();
            starved = check_failure_reported(report, *world, sends, from, reported);
        }
        report.check(reported > 0,
                     std::string("no starved rank has reported its failure, ") + where);
    }
}

std::atomic<bool> g_received{false};

// Rank 0 cannot write to the read-only part of rank 1's memory, and cannot allocate the text of
// this error. Rank 1 copies the other chunks, and polls whenever an allocation of rank 0 fails. The
// message lacks a chunk, so it must not count as received.
void check_failed_write(Report& report) {
    constexpr size_t bytes = 64 << 20;
    const PartlyReadOnly memory(bytes);
    World world(shape_of(2, 2), Mapping::own, 1);
    std::vector<uint8_t> sent(bytes, 1);
    p2p::Request out(message(sent, 1, 0), true);
    p2p::Request in({memory.data(), bytes, DType::uint8, 0, 0}, false);
    const auto poll = [](Rank& rank, p2p::Request& request) {
        for (Deadline soon(kSoon_s); !request.done() && !soon.passed();) rank.p2p->test(request);
    };
    g_received = false;
    world.run([&](Rank& rank) {
        p2p::Request& request = rank.rank == 0 ? out : in;
        rank.p2p->begin(request, false);
        if (rank.rank == 1) {
            poll(rank, in);
            g_received = true;
            return;
        }
        t_on_refusal = [] {
            for (Deadline soon(0.2); !g_received && !soon.passed();) pause(0.001);
        };
        report.check(starve(0, [&] { poll(rank, out); }), "a failed write allocates memory");
        t_on_refusal = nullptr;
    });
    report.check(in.done() && in.error() && out.done() && out.error(),
                 "a message with a chunk that could not be written");
}

// A rank without free memory can still leave and report its group's failure.
void check_end(Report& report) {
    World world(shape_of(2, 2), Mapping::own, 1);
    Call calls[] = {{simple(Kind::direct, 100), 0, 2}, {simple(Kind::barrier, 0), 0, 2}};
    std::vector<std::shared_ptr<Job>> jobs;
    for (Call& call : calls)
        jobs.push_back(world[0].dispatcher->submit(call.execution(), kSoon_s, 1e-4));
    std::optional<Error> failure;
    starve(0, [&] {
        world[0].members->leave();
        world[0].dispatcher->stop();
        failure = world[0].members->failure();
    });
    for (const auto& job : jobs)
        report.check(job->done() && job->error().has_value(), "close without free memory");
    report.check(failure && failure->fault() == Fault::aborted, "a failure without free memory");
}

}  // namespace

int main() {
    Report report;
    for (const Kind kind : {Kind::direct, Kind::chain, Kind::all_gather}) {
        for (const Mode mode : {Mode::run, Mode::begin, Mode::queue}) {
            bool starved = true;
            for (int64_t from = 0; starved; ++from) {
                World world(shape_of(kRanks, 2), Mapping::own, 1);
                starved = check_call(report, world, kind, mode, from, true);
            }
            starved = true;
            for (int64_t from = 0; starved; ++from) {
                Hosts hosts({{0}, {1, 2}}, 2);
                starved = check_call(report, hosts, kind, mode, from, false);
            }
        }
    }
    for (const size_t bytes : {50UL, 5000UL, 100'000UL}) check_messages(report, bytes);
    check_failures_reported(report, "on one host", [] {
        return std::make_unique<World>(shape_of(2, 2), Mapping::own, 1);
    });
    check_failures_reported(report, "across hosts",
                            [] { return std::make_unique<Hosts>(Layout{{0}, {1}}, 1U); });
    if (can_run_single_copy(report, "a failed write without free memory"))
        check_failed_write(report);
    check_end(report);
    return report.finish();
}

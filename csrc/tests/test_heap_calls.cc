// Tests of calls on arrays in shared heaps, and of their failures. Ranks are threads and, except
// under a thread sanitizer, processes.
#include <sys/wait.h>

#include <cstring>
#include <random>
#include <thread>

#include "tests/heap_calls.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

HeapStep random_step(std::mt19937& random) {
    constexpr MakePlan plans[] = {hand::write_back, hand::star, hand::single_copy};
    constexpr uint64_t counts[] = {1, 15, 1000, 4097, 20'011, 70'000};
    return {plans[random() % 3], counts[random() % std::size(counts)],
            uint64_t{4096} << random() % 8, random(), random() % 2 == 0};
}

bool run_steps(Member& member, uint32_t seed, int calls) {
    std::mt19937 random(seed);
    for (int i = 0; i < calls; ++i) {
        const HeapStep step = random_step(random);
        const HeapCall call(member, step);
        if (call.run().fault != Fault::none || !call.right()) return false;
        if (!step.in_place && !call.untouched()) return false;
    }
    return true;
}

void check_threads(Report& report, uint32_t ranks, uint32_t seed) {
    const Descriptor fd = segment_of(ranks);
    std::vector<std::unique_ptr<Member>> members;
    for (uint32_t r = 0; r < ranks; ++r) members.push_back(std::make_unique<Member>(fd, r));
    std::vector<std::thread> threads;
    for (const auto& member : members) {
        threads.emplace_back(
            [&] { report.check(run_steps(*member, seed, 25), "calls of ranks that are threads"); });
    }
    for (std::thread& thread : threads) thread.join();
}

// Both ranks of a group in this thread, of which one never makes its call in time.
void check_late_peer(Report& report, MakePlan plan, uint32_t rank, bool closes) {
    const Descriptor fd = segment_of(2);
    Member first(fd, 0), second(fd, 1);
    Member &early = rank == 0 ? first : second, &late = rank == 0 ? second : first;
    const HeapStep step{plan, 50'000, 1 << 20, 3, true};
    const HeapCall call(early, step);
    const uint64_t offset = call.offset(), bytes = step.count * 4;
    if (closes) {
        const auto work = early.rank_.dispatcher->submit(call.execution(), kLong_s, 0.01, {});
        early.rank_.close();
        report.check(work->done(), "closing ends the call");
    } else {
        report.check(call.run(0.05).fault == Fault::timeout, "the late peer is not awaited");
    }
    std::memset(late.group->heap().at(rank, offset, bytes), 0xee, bytes);
    report.check(call.untouched(),
                 "a late peer does not reach the array of a call that was given up");
    const HeapCall theirs(late, step);
    report.check(theirs.run(1).fault != Fault::none, "the late peer's call fails");
    report.check(outcome_of([&] { static_cast<void>(early.group->heap().allocate(1)); }).fault ==
                     Fault::aborted,
                 "a failed group makes no more shared arrays");
}

// A plan of rank 1, which puts addresses into its slots and then only waits.
std::shared_ptr<const Plan> hostile(uint32_t rank, uint32_t ranks) {
    if (rank == 0) return hand::single_copy(rank, ranks);
    hand::Writer w;
    for (uint32_t part = 0; part < ranks; ++part)
        w.share(hand::slot(rank, part), hand::in(0, part));
    return w.post(1).wait(0, 2).post(3).plan(rank, ranks, 1, 1, ranks, 3, hand::Slots(ranks, ranks),
                                             0, true);
}

void check_hostile_offset(Report& report) {
    const Descriptor fd = segment_of(2);
    Member member(fd, 0), other(fd, 1);
    std::thread peer([&] {
        const HeapCall call(other, {hostile, 50'000, 1 << 20, 3, false});
        // The hash is that of the call in heaps, but the slots hold addresses.
        static_cast<void>(call.run(5, false));
    });
    const HeapCall call(member, {hand::single_copy, 50'000, 1 << 20, 3, false});
    expect(report, call.run(), Fault::mismatch, "outside of its heap", "a hostile offset");
    peer.join();
    const auto at = [&](uint64_t offset, uint64_t bytes) {
        return outcome_of([&] { static_cast<void>(member.group->heap().at(1, offset, bytes)); });
    };
    for (const uint64_t offset : {kHeap, kHeap - 3, ~uint64_t{0}, ~uint64_t{0} - 7})
        expect(report, at(offset, 4), Fault::mismatch, "outside of its heap", "a hostile offset");
    expect(report, at(8, ~uint64_t{0}), Fault::mismatch, "outside of its heap", "a hostile length");
    report.check(at(kHeap - 4, 4).fault == Fault::none, "the last bytes of a heap");
}

// Rank 2 only receives results. Rank 0 has made them from the memory of rank 1 after rank 1 gave up
// the call, so rank 2 must not take them for right.
void check_derived_result(Report& report) {
    const Descriptor fd = segment_of(3);
    Member reducer(fd, 0), early(fd, 1), held(fd, 2);
    const HeapStep step{hand::star, 20'000, 1 << 20, 3, true};
    const HeapCall theirs(early, step), call(held, step);
    Execution execution = call.execution();
    const uint64_t header = header_of(1, execution.hash);
    const auto meanwhile = [&] {
        report.check(theirs.run(0.01).fault == Fault::timeout, "rank 1 gives up");
        RankControl& control = reducer.rank_.segment->rank(0);
        control.header.store(header);
        control.progress.store(2);
        return false;
    };
    const Outcome outcome =
        outcome_of([&] { held.rank_.dispatcher->run(std::move(execution), kLong_s, meanwhile); });
    report.check(outcome.fault == Fault::timeout, "a result made from detached memory is refused");
}

#if !defined(__SANITIZE_THREAD__)
void check_processes(Report& report, uint32_t ranks, uint32_t seed) {
    const Descriptor fd = segment_of(ranks);
    std::vector<pid_t> children;
    for (uint32_t r = 1; r < ranks; ++r) {
        children.push_back(::fork());
        if (children.back() != 0) continue;
        bool right = false;
        {
            Member member(fd, r);
            right = run_steps(member, seed, 40);
        }
        ::_exit(right ? 0 : 1);
    }
    Member member(fd, 0);
    report.check(run_steps(member, seed, 40), "calls of ranks that are processes");
    for (const pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        report.check(status == 0, "calls of a child");
    }
}

#endif

}  // namespace

int main() {
    Report report;
#if !defined(__SANITIZE_THREAD__)
    for (const uint32_t ranks : {2U, 3U}) check_processes(report, ranks, ranks);
#endif
    for (const uint32_t ranks : {1U, 2U, 3U, 5U}) check_threads(report, ranks, ranks);
    for (const bool closes : {false, true}) {
        check_late_peer(report, hand::write_back, 0, closes);
        check_late_peer(report, hand::write_back, 1, closes);
        check_late_peer(report, hand::star, 1, closes);
    }
    check_hostile_offset(report);
    check_derived_result(report);
    return report.finish();
}

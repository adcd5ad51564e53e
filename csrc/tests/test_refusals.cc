// Tests refused calls, and the errors that the other ranks then get.
#include <sys/mman.h>

#include <thread>
#include <utility>

#include "tests/calls.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr uint32_t kRanks = 3;

// A call by a signal handler in the middle of another call of the same thread must raise an error.
// It cannot wait for the interrupted call, which continues only after the handler.
void check_called_by_a_signal(Report& report, Mapping mapping) {
    World world(shape_of(kRanks, 2), mapping, 1);
    Outcome within;
    const auto handler = [&] {
        within = run_step(world[0], simple(Kind::barrier, 0));
        return true;
    };
    expect(report, run_step(world[0], simple(Kind::direct, 100), kLong_s, handler),
           Fault::interrupted, "", "a call whose signal handler makes a call");
    expect(report, within, Fault::invalid, "signal handler", "a call by a signal handler");
}

// A rank that refuses many calls does not wait for the other ranks. A rank that makes the first of
// these calls must still report a mismatch.
void check_refused_far_ahead(Report& report, Mapping mapping) {
    World world(shape_of(2, 2), mapping, 1);
    for (size_t i = 0; i < 2 * kCallHistory; ++i) {
        Execution refused{};
        refused.refusal = std::make_shared<const std::string>("no data left");
        world[1].dispatcher->submit(std::move(refused), kLong_s, kLong_s);
    }
    expect(report, run_step(world[0], simple(Kind::direct, 100), 0.5), Fault::mismatch,
           "rank 1 called a call that is no longer in the history", "a refusal far ahead");
}

// Only one rank finds an error in its call before the call begins. The others learn the reason at
// once. If all ranks find the same error, the group stays healthy.
void check_refused_by_the_executor(Report& report, Mapping mapping) {
    Step large = simple(Kind::direct, 1000000);
    large.block_bytes = 1 << 20;
    {
        World world(shape_of(kRanks, 2), mapping, 1);
        world.run([&](Rank& rank) {
            expect(report, run_step(rank, simple(Kind::direct, 100)), Fault::none, "", "before");
            for (int i = 0; i < 3; ++i)
                expect(report, run_step(rank, large), Fault::invalid, "bytes of staging", "alike");
            expect(report, run_step(rank, simple(Kind::direct, 100)), Fault::none, "", "after");
        });
    }
    for (const double inline_s : {-1.0, 0.0, 1.0}) {
        World world(shape_of(kRanks, 2), mapping, 1);
        world.run([&](Rank& rank) {
            if (rank.rank != 1) {
                expect(report, run_step(rank, simple(Kind::direct, 100)), Fault::mismatch,
                       "rank 1 refused all_reduce: the plan needs", "a refusal by another rank");
                return;
            }
            Call call(large, rank.rank, kRanks);
            const auto outcome = outcome_of([&] {
                if (inline_s < 0) return rank.dispatcher->run(call.execution(), kLong_s, {});
                const auto job = rank.dispatcher->submit(call.execution(), kLong_s, inline_s);
                rank.dispatcher->wait(*job, -1, {});
            });
            expect(report, outcome, Fault::invalid, "all_reduce: the plan needs",
                   "a refusal by this rank");
        });
    }
}

// A signal handler makes a call and ignores the error. The handler's call keeps its number in the
// sequence of calls.
void check_numbers_after_a_signal(Report& report, Mapping mapping) {
    World world(shape_of(2, 2), mapping, 1);
    Outcome within;
    bool asked = false;
    const auto handler = [&] {
        if (!std::exchange(asked, true)) within = run_step(world[0], simple(Kind::barrier, 0));
        return false;
    };
    std::thread late([&] {
        pause(0.3);
        expect(report, run_step(world[1], simple(Kind::direct, 100)), Fault::none, "", "the first");
        expect(report, run_step(world[1], simple(Kind::barrier, 0)), Fault::mismatch,
               "rank 0 refused barrier: a signal handler", "the signal handler's call");
    });
    expect(report, run_step(world[0], simple(Kind::direct, 100), kLong_s, handler), Fault::none, "",
           "the interrupted call");
    expect(report, within, Fault::invalid, "signal handler", "a call by a signal handler");
    late.join();
}

// A segment from another process is accepted only with this version's layout, in a file of the
// right length. Some of these forged layouts have the right length only after a wrap at 64 bits.
void check_foreign_segments(Report& report) {
    const SegmentShape shape{2, 2, 4096, 2, 64};
    const auto made = [&] {  // a segment that can still be changed and truncated
        Descriptor fd(::memfd_create("foreign", MFD_CLOEXEC));
        lay_out_segment(fd.get(), shape, World::nonce);
        return fd;
    };
    const auto open = [](const Descriptor& fd) {
        return outcome_of([&] { Segment(Descriptor(::dup(fd.get()))); });
    };
    const auto refused = [&](const std::string& what, auto&& forge) {
        const Descriptor fd = made();
        void* const base =
            ::mmap(nullptr, sizeof(GroupControl), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
        forge(*static_cast<GroupControl*>(base));
        ::munmap(base, sizeof(GroupControl));
        expect(report, open(fd), Fault::invalid, "not made by this version", what);
    };
    expect(report, open(made()), Fault::none, "", "a segment of this version");
    constexpr uint64_t top = 1ULL << 63;
    refused("another magic", [](GroupControl& g) { g.magic ^= 1; });
    refused("no ranks", [](GroupControl& g) { g.ranks = 0; });
    refused("one rank more", [](GroupControl& g) { ++g.ranks; });
    refused("2^32 - 1 ranks", [](GroupControl& g) { g.ranks = ~0U; });
    refused("2^31 ranks, whose pairs wrap around", [](GroupControl& g) { g.ranks = 1U << 31; });
    refused("no blocks", [](GroupControl& g) { g.depth = 0; });
    refused("2^32 - 1 blocks", [](GroupControl& g) { g.depth = ~0U; });
    refused("buffers that wrap around", [](GroupControl& g) { g.buffer_bytes += top; });
    refused("buffers of 2^64 - 1 bytes", [](GroupControl& g) { g.buffer_bytes = ~0ULL; });
    refused("buffers that wrap around with the blocks", [](GroupControl& g) {
        g.depth = 64;
        g.buffer_bytes = (1ULL << 57) + 2 * 4096 / 64;
    });
    refused("buffers of less than a page", [](GroupControl& g) {
        g.depth = 4;
        g.buffer_bytes = 2048;
    });
    refused("a number of slots that is not a power of two",
            [](GroupControl& g) { g.pair_slots = 3; });
    refused("a ring length that is not a power of two", [](GroupControl& g) { g.pair_bytes = 96; });
    refused("rings of less than a cache line", [](GroupControl& g) { g.pair_bytes = 32; });
    refused("no slots", [](GroupControl& g) { g.pair_slots = 0; });
    refused("slots that wrap around", [](GroupControl& g) { g.pair_slots = 1ULL << 58; });
    refused("no ring", [](GroupControl& g) { g.pair_bytes = 0; });
    refused("rings that wrap around", [](GroupControl& g) { g.pair_bytes = top; });
    refused("rings that wrap around with the number of pairs",
            [](GroupControl& g) { g.pair_bytes = 1ULL << 62; });
    const auto ends = [&](off_t bytes, const char* part, const std::string& what) {
        const Descriptor fd = made();
        report.check(::ftruncate(fd.get(), bytes) == 0, "the length of a file");
        expect(report, open(fd), Fault::invalid, part, what);
    };
    const off_t all = ::lseek(made().get(), 0, SEEK_END);
    ends(all - 1, "not made by this version", "a file that ends early");
    ends(all + 4096, "not made by this version", "a file with extra bytes");
    ends(sizeof(GroupControl), "not made by this version", "a header alone");
    ends(sizeof(GroupControl) - 1, "expected at least", "an incomplete header");
    ends(0, "expected at least", "an empty file");
}

void check_refusals(Report& report) {
    const auto refused = [&](const char* what, auto&& make) {
        report.check(outcome_of(make).fault == Fault::invalid,
                     std::string(what) + " is not refused");
    };
    refused("a group without ranks", [] { static_cast<void>(shape_for(0, 1, 1 << 20)); });
    refused("staging buffers above the limit",
            [] { create_segment({2, 2, 1ULL << 40, 2, 256}, World::nonce); });
    refused("a segment of 2^56 bytes",
            [] { create_segment({4096, 1, 4096, 1024, 1ULL << 30}, World::nonce); });
    refused("a slot of an unknown rank", [] {
        hand::Writer()
            .copy(hand::slot(2, 0), hand::in(0), hand::in(0))
            .post(1)
            .plan(0, 2, 1, 1, 1, 1, {1, 1});
    });
    refused("writing a peer's slot", [] {
        hand::Writer()
            .copy(hand::slot(1, 0), hand::in(0), hand::in(0))
            .post(1)
            .plan(0, 2, 1, 1, 1, 1, {1, 1});
    });
    refused("a block without its end",
            [] { hand::Writer().post(1).plan(0, 2, 1, 1, 1, 2, {1, 1}); });
    refused("decreasing progress",
            [] { hand::Writer().post(2).post(1).plan(0, 2, 1, 1, 1, 1, {1, 1}); });
    refused("missing operands", [] {
        hand::Writer()
            .reduce(hand::out(0), {}, hand::in(0), 0)
            .post(1)
            .plan(0, 2, 1, 1, 1, 1, {1, 1});
    });
    World world(shape_of(2, 1), Mapping::own, 2);
    refused("the same rank twice", [&] {
        View view(*world[0].segment, 0, HostRanks::one_host(2));
        Membership(view, World::nonce);
    });
    refused("a place with two ranks", [&] { View(*world[0].segment, 0, HostRanks{3, {0, 0}}); });
    refused("a rank of another host", [&] { View(*world[0].segment, 2, HostRanks{3, {0, 1}}); });
    Step large = simple(Kind::direct, 1000000);
    large.block_bytes = 1 << 20;
    report.check(run_step(world[0], large).fault == Fault::invalid,
                 "blocks larger than the staging buffers are not refused");
    for (const uint64_t seq : {1ULL, 0xffffffULL, 0x1000000ULL, 0x1000001ULL, 0xffffffffffULL}) {
        report.check(ahead_of(header_of(seq, 5), seq) == 0 &&
                         ahead_of(header_of(seq + 1, 5), seq) == 1 &&
                         ahead_of(header_of(seq - 1, kHashMask), seq) == -1,
                     "the wrap of 24 bits");
    }
}

}  // namespace

int main() {
    Report report;
    check_refusals(report);
    check_foreign_segments(report);
    for (const Mapping mapping : {Mapping::own, Mapping::one}) {
        check_called_by_a_signal(report, mapping);
        check_numbers_after_a_signal(report, mapping);
        check_refused_far_ahead(report, mapping);
        check_refused_by_the_executor(report, mapping);
    }
    return report.finish();
}

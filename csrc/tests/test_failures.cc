// Tests of failures: every rank soon reports the same cause.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <latch>
#include <thread>
#include <utility>

#include "core/call_fingerprint.h"
#include "tests/calls.h"
#include "tests/kernel_features.h"
#include "tests/message_ranks.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr uint32_t kRanks = 3;

void check_mismatch(Report& report, Mapping mapping, const Step& some, const Step& other) {
    World world(shape_of(kRanks, 2), mapping, 1);
    world.run([&](Rank& rank) {
        expect(report, run_step(rank, simple(Kind::direct, 50)), Fault::none, "",
               "before a mismatch");
        const Step& step = rank.rank == 1 ? other : some;
        expect(report, run_step(rank, step), Fault::mismatch, "rank 1 called", "mismatch");
        expect(report, run_step(rank, simple(Kind::barrier, 0)), Fault::mismatch, "rank 1 called",
               "after a mismatch");
    });
}

void check_timeout(Report& report, Mapping mapping) {
    World world(shape_of(kRanks, 2), mapping, 1);
    std::latch timed_out(kRanks - 1);
    world.run([&](Rank& rank) {
        if (rank.rank == 1) timed_out.wait();
        expect(report, run_step(rank, simple(Kind::direct, 100), 0.1), Fault::timeout,
               "rank 1 has not arrived, it has made no call yet", "timeout");
        if (rank.rank != 1) timed_out.count_down();
    });
}

void check_left_before(Report& report, Mapping mapping) {
    World world(shape_of(kRanks, 2), mapping, 1);
    world.run([&](Rank& rank) {
        expect(report, run_step(rank, simple(Kind::direct, 100)), Fault::none, "",
               "the last call of all ranks");
        if (rank.rank == 2) return rank.close();
        expect(report, run_step(rank, simple(Kind::direct, 100)), Fault::peer_lost, "rank 2 left",
               "rank 2 left before the call");
    });
}

void check_left_within(Report& report, Mapping mapping) {
    for (const double inline_s : {0.0, 1e-5}) {
        World world(shape_of(kRanks, 2), mapping, 1);
        Call call(simple(Kind::direct, 1000), 2, kRanks);
        const auto job = world[2].dispatcher->submit(call.execution(), kLong_s, inline_s);
        pause(0.05);
        world[2].close();
        report.check(job->done() && job->error() && job->error()->fault() == Fault::aborted,
                     "close with a pending call");
        world.run([&](Rank& rank) {
            if (rank.rank == 2) return;
            expect(report, run_step(rank, simple(Kind::direct, 1000)), Fault::aborted,
                   "rank 2 gave up", "rank 2 left during the call");
        });
    }
}

void check_aborted(Report& report, Mapping mapping) {
    World world(shape_of(kRanks, 2), mapping, 1);
    world.run([&](Rank& rank) {
        if (rank.rank == 0) {
            pause(0.05);
            return rank.members->record(Fault::aborted, "enough of this");
        }
        expect(report, run_step(rank, simple(Kind::one_shot, 100)), Fault::aborted,
               "enough of this", "abort");
    });
}

void check_closed_during_a_call(Report& report, Mapping mapping) {
    World world(shape_of(kRanks, 2), mapping, 1);
    std::vector<uint8_t> data(10);
    Call queued(simple(Kind::barrier, 0), 0, kRanks);
    std::thread caller([&] {
        expect(report, run_step(world[0], simple(Kind::direct, 100)), Fault::aborted, "closed",
               "close during a call");
    });
    std::thread receiver([&] {
        const auto outcome = outcome_of([&] { receive(world[0], data, 1, 0); });
        expect(report, outcome, Fault::aborted, "closed", "close during a receive");
    });
    pause(0.05);
    const auto job = world[0].dispatcher->submit(queued.execution(), kLong_s, 1e-4);
    world[0].close();
    report.check(world[1].members->failed(),
                 "the other ranks know of the failure before close returns");
    caller.join();
    receiver.join();
    report.check(job->done() && job->error().has_value(), "close with a queued call");
    expect(report, outcome_of([&] { world[0].dispatcher->wait(*job, -1, {}); }), Fault::aborted,
           "closed", "a wait after close");
    expect(report, run_step(world[0], simple(Kind::barrier, 0)), Fault::aborted, "closed",
           "a call after close");
}

// A call may still drive after close() has given up the wait for it. The group's memory is given
// back once that call has ended.
void check_idle_after_a_late_end(Report& report) {
    World world(shape_of(kRanks, 2), Mapping::own, 1);
    std::latch driving(1);
    const auto late = [&, first = true]() mutable {
        if (std::exchange(first, false)) {
            driving.count_down();
            pause(1.3);  // longer than the second for which close() waits
        }
        return false;
    };
    std::thread caller([&] {
        expect(report, run_step(world[0], simple(Kind::direct, 100), kLong_s, late), Fault::aborted,
               "closed", "a call that ends late");
    });
    driving.wait();
    world[0].close();
    report.check(!world[0].dispatcher->quiet(), "close gave up its wait for the call");
    report.check(world[0].dispatcher->await_idle(), "the late call ends");
    caller.join();
}

// A signal handler may close the group while it interrupts a waiting thread that holds locks. The
// wait must end with an error, not in a deadlock.
void check_closed_by_a_signal(Report& report, Mapping mapping) {
    World world(shape_of(kRanks, 2), mapping, 1);
    Call first(simple(Kind::direct, 100), 0, kRanks);
    const auto job = world[0].dispatcher->submit(first.execution(), kLong_s, 0);
    const auto handler = [&] {
        world[0].close();
        return false;
    };
    expect(report, run_step(world[0], simple(Kind::barrier, 0), kLong_s, handler), Fault::aborted,
           "closed", "close by a signal handler");
    World other(shape_of(kRanks, 2), mapping, 1);
    Call second(simple(Kind::direct, 100), 0, kRanks);
    const auto timed = other[0].dispatcher->submit(second.execution(), kLong_s, 0);
    const auto handler_of_other = [&] {
        other[0].close();
        return false;
    };
    expect(report, outcome_of([&] { other[0].dispatcher->wait(*timed, 10, handler_of_other); }),
           Fault::aborted, "closed", "close by a signal handler during a wait");
}

// After a failed call, a rank unmaps its memory while another rank still reads it. The call of the
// other rank must then end with the group's failure or succeed. No other error may occur.
void check_lent_memory_unmapped(Report& report) {
    constexpr uint64_t bytes = 256 << 20;
    World world(shape_of(2, 2), Mapping::own, 1);
    const auto map = [] {  // untouched pages, so that reading takes long
        return static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    };
    std::byte *const shared = map(), *const read = map();
    *shared = std::byte{1};
    const std::atomic_ref<std::byte> arriving(*read);
    const CallArgs args{OpKind::all_gather, DType::int32, ReduceOp::sum, -1, bytes / 4, 0};
    std::atomic<int> ended{0};
    std::thread breaker([&] {
        while (arriving.load() == std::byte{0} && ended.load() == 0) ::sched_yield();
        world[1].members->record(Fault::aborted, "enough of this");
    });
    world.run([&](Rank& rank) {
        const auto plan = hand::with_readers(
            rank.rank, 2, [](uint32_t r) { return hand::single_copy_gather(r, 2); });
        const Prepared call{plan,  args,  fingerprint(args),    bytes,
                            bytes, bytes, StorePolicy::adaptive};
        Pieces in, out;
        in.push_back({shared, rank.rank == 0 ? bytes : 0});
        out.push_back({rank.rank == 0 ? shared : read, bytes});
        out.push_back({read, 0});
        const auto outcome = outcome_of(
            [&] { rank.dispatcher->run(call.bind(std::move(in), std::move(out)), kLong_s, {}); });
        if (rank.rank == 0) ::munmap(shared, bytes);
        ++ended;
        report.check(outcome.fault == Fault::aborted || outcome.fault == Fault::none,
                     "unmapping memory during a single copy gave " + outcome.text);
    });
    breaker.join();
    ::munmap(read, bytes);
}

// Checks that seconds are printed without an exponent.
void check_seconds(Report& report) {
    for (const auto& [seconds, text] : std::initializer_list<std::pair<double, const char*>>{
             {5, "5 s"}, {0.25, "0.25 s"}, {1800, "1800 s"}, {1e8, "100000000 s"}}) {
        report.check(
            timeout_text(1, seconds) == "timeout after " + std::string(text) + " on rank 1",
            timeout_text(1, seconds));
    }
}

// A timeout must be on time even if other threads occupy all cores, so that a rank that yields
// waits long until it runs again.
void check_timeout_on_busy_cores(Report& report, Mapping mapping) {
    std::atomic<bool> over{false};
    std::vector<std::thread> others;
    for (unsigned i = 0; i < 4 * std::thread::hardware_concurrency(); ++i) {
        others.emplace_back([&] {
            while (!over.load(std::memory_order_relaxed)) {
            }
        });
    }
    // The shortest of several timeouts. The machine itself may pause, so one short timeout is
    // sufficient proof.
    std::chrono::duration<double> shortest(kLong_s);
    for (int attempt = 0; attempt < 5 && shortest.count() >= 1.5; ++attempt) {
        World world(shape_of(2, 2), mapping, 1);
        const auto start = std::chrono::steady_clock::now();
        expect(report, run_step(world[0], simple(Kind::direct, 100), 0.1), Fault::timeout,
               "rank 1 has not arrived", "timeout on busy cores");
        shortest = std::min<std::chrono::duration<double>>(
            shortest, std::chrono::steady_clock::now() - start);
    }
    over = true;
    for (std::thread& other : others) other.join();
    report.check(shortest.count() < 1.5,
                 "timeout on busy cores, after " + std::to_string(shortest.count()));
}

void check_interrupted_after_another(Report& report, Mapping mapping) {
    World world(shape_of(kRanks, 2), mapping, 1);
    Call first(simple(Kind::direct, 100), 0, kRanks);
    const auto job = world[0].dispatcher->submit(first.execution(), kLong_s, 1e-5);
    const auto outcome = run_step(world[0], simple(Kind::barrier, 0), kLong_s, [] { return true; });
    expect(report, outcome, Fault::interrupted, "", "interrupted");
    expect(report, outcome_of([&] { world[0].dispatcher->wait(*job, -1, {}); }), Fault::aborted,
           "signal", "the interrupted rank's earlier call");
    expect(report, run_step(world[1], simple(Kind::barrier, 0)), Fault::aborted,
           "rank 0 was interrupted", "the other ranks' calls");
}

// During the object's lifetime, no thread can be created: its stack would need more memory than
// there is.
class NoMoreThreads {
  public:
    NoMoreThreads() {
        ::pthread_getattr_default_np(&before_);
        pthread_attr_t huge = before_;
        ::pthread_attr_setstacksize(&huge, size_t{1} << 60);
        ::pthread_setattr_default_np(&huge);
    }
    NoMoreThreads(const NoMoreThreads&) = delete;
    NoMoreThreads& operator=(const NoMoreThreads&) = delete;
    ~NoMoreThreads() { ::pthread_setattr_default_np(&before_); }

  private:
    pthread_attr_t before_{};
};

// If no thread can be started, a waiting thread executes the call itself, within its timeout.
void check_waiting_without_threads(Report& report, Mapping mapping) {
    World world(shape_of(2, 2), mapping, 1);
    std::atomic<bool> come{false};
    std::thread other([&] {
        while (!come) pause(0.001);
        run_step(world[1], simple(Kind::direct, 100));
    });
    {
        const NoMoreThreads none;
        Call call(simple(Kind::direct, 100), 0, 2);
        Dispatcher& dispatcher = *world[0].dispatcher;
        const auto job = dispatcher.submit(call.execution(), kLong_s, 0);
        report.check(!dispatcher.wait(*job, 0.02, {}), "a wait ends at its limit");
        come = true;
        report.check(dispatcher.wait(*job, 10, {}), "a limited wait executes the call");
        report.check(call.right(), "the result of a call executed by the waiting thread");
    }
    other.join();
}

}  // namespace

int main() {
    Report report;
    check_seconds(report);
    check_idle_after_a_late_end(report);
#if !defined(__SANITIZE_THREAD__)
    if (can_run_single_copy(report, "unmapping memory during a single copy"))
        check_lent_memory_unmapped(report);
#endif
    for (const Mapping mapping : {Mapping::own, Mapping::one}) {
        const Step direct = simple(Kind::direct, 100);
        check_mismatch(report, mapping, direct, simple(Kind::direct, 101));
        check_mismatch(report, mapping, direct, simple(Kind::one_shot, 9000));
        check_mismatch(report, mapping, simple(Kind::barrier, 0), simple(Kind::all_gather, 5000));
        check_mismatch(report, mapping, simple(Kind::broadcast, 3000), simple(Kind::chain, 3000));
        check_timeout(report, mapping);
        check_left_before(report, mapping);
        check_left_within(report, mapping);
        check_aborted(report, mapping);
        check_closed_during_a_call(report, mapping);
        check_closed_by_a_signal(report, mapping);
        check_interrupted_after_another(report, mapping);
        check_timeout_on_busy_cores(report, mapping);
        check_waiting_without_threads(report, mapping);
    }
    return report.finish();
}

// Tests of receives that fail while the sender writes to their memory. A receive must not end
// before the write, unless the sender cannot write any more. A write without an end is not awaited
// without end.
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <optional>
#include <string>
#include <thread>

#include "tests/kernel_features.h"
#include "tests/report.h"
#include "tests/stepped_ranks.h"

namespace {

using namespace unisono;
using namespace unisono::test;

// Makes the process unable to open files during the object's lifetime.
class NoDescriptors {
  public:
    NoDescriptors() {
        ::getrlimit(RLIMIT_NOFILE, &before_);
        const rlimit none{0, before_.rlim_max};
        ::setrlimit(RLIMIT_NOFILE, &none);
    }
    NoDescriptors(const NoDescriptors&) = delete;
    NoDescriptors& operator=(const NoDescriptors&) = delete;
    ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

  private:
    rlimit before_{};
};

// Rank 1 receives a message from rank 0, a process that seems to be another one. The test writes
// the words of rank 0.
class Receiving : public SteppedRanks {
  public:
    Receiving() {
        send(data_of(1, 40 * kLarge), 1);
        in_ = &receive(40 * kLarge, 1);
        RankControl& sender = world()[1].segment->rank(0);
        sender.process.store(sender.process.load() + 1);
        // The sender has claimed a chunk, and its write has begun.
        transfer().claims.fetch_add(1ULL << 32);
    }
    p2p::Transfer& transfer() { return pair().transfers[0]; }
    p2p::Request& in() { return *in_; }
    void name_sender(pid_t pid) { world()[1].segment->rank(0).pid.store(pid); }
    bool may_run() { return world()[1].members->may_run(0); }
    // Fails the group, and returns after rank 1 has ended its receive.
    void fail() {
        world()[1].members->record(Fault::aborted, "enough of this");
        poll(1);
    }

  private:
    p2p::Request* in_ = nullptr;
};

pid_t sleeping_child() {
    const pid_t child = ::fork();
    if (child == 0) {
        for (;;) ::pause();
    }
    return child;
}

void check_which_process_may_run(Report& report) {
    Receiving ranks;
    report.check(ranks.may_run(), "a process that runs");
    {
        const NoDescriptors none;
        report.check(ranks.may_run(), "a process that runs, without a free descriptor");
    }
    const pid_t child = sleeping_child();
    ranks.name_sender(child);
    report.check(ranks.may_run(), "a process that sleeps in a system call");
    ::kill(child, SIGSTOP);
    ::waitpid(child, nullptr, WUNTRACED);
    report.check(!ranks.may_run(), "a process that is stopped");
    {
        const NoDescriptors none;
        report.check(ranks.may_run(), "a process that may be stopped, without a free descriptor");
    }
    ::kill(child, SIGKILL);
    siginfo_t gone;
    ::waitid(P_PID, static_cast<id_t>(child), &gone, WEXITED | WNOWAIT);
    report.check(!ranks.may_run(), "a process that has ended");
    ::waitpid(child, nullptr, 0);
    report.check(!ranks.may_run(), "a process that does not exist");
    const NoDescriptors none;
    report.check(!ranks.may_run(), "a process that does not exist, without a free descriptor");
}

// The receive waits for the end of the write, even if /proc cannot be read.
void check_write_that_ends(Report& report, bool reads_proc) {
    const std::string what = reads_proc ? "a write that ends" : "a write that ends, without /proc";
    Receiving ranks;
    std::atomic<bool> early{false};
    std::thread writer([&] {
        while (ranks.transfer().phase != static_cast<uint64_t>(p2p::Phase::revoked)) pause(0.001);
        pause(0.05);
        early = ranks.in().done();
        ranks.transfer().written.fetch_add(1);
    });
    {
        std::optional<NoDescriptors> none;
        if (!reads_proc) none.emplace();
        ranks.fail();
    }
    writer.join();
    report.check(!early, what + ": the receive has ended before the write");
    report.check(ranks.in().done() && !ranks.in().needs_memory(), what + ": the memory is free");
}

// The wait for a write has a limit. The memory is then kept, and another receive does not wait
// again.
void check_write_without_end(Report& report) {
    Receiving ranks;
    ranks.fail();
    report.check(ranks.in().done() && ranks.in().error(), "the receive has failed");
    report.check(ranks.in().needs_memory(), "a write without an end keeps the memory");
}

// A peer that claims two writes at once breaks the protocol, so nothing is known about its writes.
void check_two_writes(Report& report) {
    Receiving ranks;
    ranks.transfer().claims.fetch_add(1ULL << 32);
    ranks.fail();
    report.check(ranks.in().done() && ranks.in().needs_memory(), "two writes keep the memory");
}

// A sender that is stopped or gone before its write has begun writes nothing later.
void check_sender_that_is_gone(Report& report) {
    Receiving ranks;
    const pid_t child = sleeping_child();
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ranks.name_sender(child);
    ranks.fail();
    report.check(ranks.in().done() && !ranks.in().needs_memory(), "a sender that is gone");
}

// The receiver's pid names another process by now: the receiver has died, and the kernel has used
// its pid again. The other process does not have the token of the receiver.
void check_pid_of_another_process(Report& report, bool sends) {
    const std::string what = sends ? "a write" : "a read";
    SteppedRanks stepped;
    const uint64_t other[2] = {1, 2};
    stepped.settle();
    p2p::Request& out = stepped.send(data_of(1, 40 * kLarge), 1);
    p2p::Request& in = stepped.receive(40 * kLarge, 1);
    stepped.poll(sends ? 0 : 1);
    pause(0.1);
    stepped.world()[0]
        .segment->rank(sends ? 1 : 0)
        .token.store(reinterpret_cast<uintptr_t>(&other));
    const uint64_t before = stepped.pair().transfers[0].written;
    stepped.poll(sends ? 0 : 1);
    expect(report, outcome_of([&] { stepped.world()[0].members->require_healthy(); }),
           Fault::aborted, "No such process", what + " by the pid of another process");
    if (sends) report.check(stepped.pair().transfers[0].written <= before + 1, what);
    stepped.settle();
    report.check(in.done() && in.error() && out.done() && out.error(), what + ": both have failed");
}

// A wait may throw although the group has not failed. Its caller then ends the request.
void check_end_after_wait_has_thrown(Report& report) {
    SteppedRanks stepped;
    p2p::Request& request = stepped.receive(10, 1);
    struct Unexpected : std::exception {};
    bool thrown = false;
    try {
        stepped[1].wait(request, kLong_s, -1, []() -> bool { throw Unexpected(); });
    } catch (const Unexpected&) {
        thrown = true;
    }
    report.check(thrown && !request.done(), "the wait has thrown, and the request is pending");
    stepped[1].end(request);
    report.check(request.done() && request.error(), "the request has ended");
    expect(report, outcome_of([&] { stepped.world()[0].members->require_healthy(); }),
           Fault::aborted, "rank 1 gave up its recv from rank 0", "the group has failed");
}

}  // namespace

int main() {
    Report report;
    check_end_after_wait_has_thrown(report);
    if (!can_run_single_copy(report, "writes to memory of failed receives")) return report.finish();
    check_which_process_may_run(report);
    for (const bool reads_proc : {true, false}) check_write_that_ends(report, reads_proc);
    check_write_without_end(report);
    check_two_writes(report);
    check_sender_that_is_gone(report);
    for (const bool sends : {true, false}) check_pid_of_another_process(report, sends);
    return report.finish();
}

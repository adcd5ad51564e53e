// Tests of failures of processes: killed, forked, or gone from a group that they joined. Under a
// thread sanitizer, which does not support processes, this test does nothing.
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

#include "tests/calls.h"
#include "tests/kernel_features.h"
#include "tests/message_ranks.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

#if !defined(__SANITIZE_THREAD__)
using Asked = std::function<Outcome(Rank&)>;

// A rank is killed in a call. `asked`, run by another rank, soon reports the killed rank.
void check_killed(Report& report, const std::string& what, const Asked& asked) {
    const Descriptor fd(create_segment(shape_of(2, 2), World::nonce));
    const pid_t child = ::fork();
    if (child == 0) {
        Rank rank =
            rank_of(std::make_shared<Group>(Descriptor(::dup(fd.get())), 1, World::nonce, 1), 1);
        run_step(rank, simple(Kind::direct, 100));
        Call call(simple(Kind::direct, 1000), 1, 2);
        auto execution = call.execution();
        rank.dispatcher->run(std::move(execution), kLong_s,
                             [] { return ::kill(::getpid(), SIGKILL) == 0; });
        ::_exit(1);
    }
    Rank rank =
        rank_of(std::make_shared<Group>(Descriptor(::dup(fd.get())), 0, World::nonce, 1), 0);
    report.check(run_step(rank, simple(Kind::direct, 100)).fault == Fault::none,
                 "a call between processes");
    int status = 0;
    ::waitpid(child, &status, 0);
    const auto start = std::chrono::steady_clock::now();
    const Outcome outcome = asked(rank);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    // The other rank detects either the loss or the mismatch of its own call with the killed rank's
    // call.
    report.check(outcome.fault == Fault::peer_lost || outcome.fault == Fault::mismatch,
                 what + " after a rank was killed: " + outcome.text);
    report.check(took.count() < 5, what + " detects the killed rank late");
}

// A killed rank must be detected by a rank that makes a call, one that polls a message, and one
// that probes.
void check_killed(Report& report) {
    std::vector<uint8_t> data(10);
    check_killed(report, "a call",
                 [](Rank& rank) { return run_step(rank, simple(Kind::direct, 50)); });
    check_killed(report, "polling a message", [&](Rank& rank) {
        p2p::Request request(message(data, 1, 0), false);
        rank.p2p->begin(request, false);
        Deadline soon(10);
        while (!rank.p2p->test(request) && !soon.passed()) std::this_thread::yield();
        return outcome_of([&] {
            if (request.error()) throw *request.error();
        });
    });
    check_killed(report, "probing", [](Rank& rank) {
        return outcome_of([&] {
            for (Deadline soon(10); !soon.passed(); std::this_thread::yield())
                static_cast<void>(rank.p2p->probe(1, 0));
        });
    });
}

void await_joined(const Rank& rank, uint32_t peer) {
    const auto& presence = rank.segment->rank(peer).presence;
    while (presence.load() != static_cast<uint32_t>(Presence::joined)) pause(0.001);
}

// Returns the number of open descriptors of a file in this process.
int count_open(const Descriptor& fd) {
    struct stat file{}, other{};
    ::fstat(fd.get(), &file);
    int count = 0;
    for (int n = 0; n < 1024; ++n) {
        count +=
            ::fstat(n, &other) == 0 && other.st_dev == file.st_dev && other.st_ino == file.st_ino;
    }
    return count;
}

// After a failed attempt to join a group, a second attempt can succeed.
void check_joining_again(Report& report) {
    const Descriptor fd(create_segment(shape_of(2, 2), World::nonce));
    int ready[2];
    report.check(::pipe(ready) == 0, "a pipe");
    const pid_t child = ::fork();
    if (child == 0) {  // the child holds the lock of rank 1
        struct flock lock{};
        lock.l_type = F_WRLCK;
        lock.l_start = 1;
        lock.l_len = 1;
        const char taken = ::fcntl(fd.get(), F_SETLK, &lock) == 0;
        static_cast<void>(!::write(ready[1], &taken, 1));
        pause(60);
    }
    char taken = 0;
    report.check(::read(ready[0], &taken, 1) == 1 && taken, "another process holds the lock");
    const auto join = [&] { Group(Descriptor(::dup(fd.get())), 1, World::nonce, 1); };
    expect(report, outcome_of(join), Fault::system, "locking this rank's byte", "joining");
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    expect(report, outcome_of(join), Fault::none, "", "joining again");
    for (const int end : ready) ::close(end);
}

// Two ranks are in one process and a third rank is in another process. When one of the two leaves,
// the third must not report the other as lost. This is difficult because the kernel keeps locks per
// process, and drops all locks of a process when any descriptor of the file is closed.
void check_other_rank_of_the_process_closed(Report& report) {
    const Descriptor fd(create_segment(shape_of(3, 2), World::nonce));
    const auto join = [&](uint32_t rank) {
        return rank_of(std::make_shared<Group>(Descriptor(::dup(fd.get())), rank, World::nonce, 1),
                       rank);
    };
    const pid_t child = ::fork();
    if (child == 0) {
        Rank rank = join(2);
        const auto& first = rank.segment->rank(0).presence;
        while (first.load() != static_cast<uint32_t>(Presence::left)) pause(0.001);
        pause(0.05);
        ::_exit(outcome_of([&] { rank.members->require_peers_alive(); }).fault == Fault::none ? 0
                                                                                              : 1);
    }
    {
        Rank second = join(1);
        Rank first = join(0);
        await_joined(second, 2);
        first.close();
        first.members->give_back();
        report.check(count_open(fd) == 3,
                     "a descriptor was closed whose lock another rank of the process needs");
        int status = 0;
        ::waitpid(child, &status, 0);
        report.check(status == 0,
                     "a rank was reported lost after another rank of its process left");
        second.close();
        second.members->give_back();
        report.check(count_open(fd) == 1,
                     "descriptors stay open after all ranks of a process left");
    }
    report.check(count_open(fd) == 1, "a descriptor was closed twice");
}

// The group has failed and one rank is lost. The other ranks can still read the group and exchange
// the successor.
void check_reads_of_a_failed_group(Report& report) {
    const Descriptor fd(create_segment(shape_of(3, 2), World::nonce));
    const auto join = [&](uint32_t rank) {
        return rank_of(std::make_shared<Group>(Descriptor(::dup(fd.get())), rank, World::nonce, 1),
                       rank);
    };
    const pid_t child = ::fork();
    if (child == 0) {
        Rank rank = join(2);
        pause(60);
    }
    Rank second = join(1);
    Rank first = join(0);
    await_joined(first, 2);
    report.check(first.members->present(2), "a living rank is present");
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    first.members->record(Fault::timeout, "late");
    report.check(!first.members->present(2), "a killed rank is not present");
    report.check(first.members->present(1) && second.members->present(0),
                 "the other ranks are present");
    report.check(first.members->exchange_successor(0, 6) == 0, "the first rank sets the successor");
    report.check(second.members->exchange_successor(0, 10) == 6,
                 "the second rank gets the first rank's value");
    report.check(second.members->exchange_successor(6, 7) == 6,
                 "the second rank can replace that value");
    report.check(first.members->exchange_successor(0, 0) == 7, "all ranks can read the new value");
    second.close();
    report.check(!first.members->present(1), "a rank that left is not present");
    report.check(second.members->exchange_successor(7, 9) == 7,
                 "a rank that left can still set the successor");
    expect(report, outcome_of([&] { static_cast<void>(second.members->present(0)); }),
           Fault::aborted, "closed", "a presence check in a closed group");
    second.members->give_back();
    report.check(second.members->exchange_successor(0, 0) == 9,
                 "a rank that left can read the successor");
    expect(report, outcome_of([&] { second.members->exchange_successor(9, 11); }), Fault::aborted,
           "closed", "setting the successor in released memory");
    report.check(first.members->exchange_successor(9, 13) == 9,
                 "the other ranks can still set the successor");
}

// A forked child cannot use its parent's group. Operations raise errors and do not hang or crash.
void check_forked(Report& report) {
    Call call(simple(Kind::direct, 100), 0, 2);
    std::vector<uint8_t> data(10);
    p2p::Request received(message(data, 1, 0), false), sent(message(data, 1, 0), true);
    // Destroyed before the requests' memory, because this ends the pending requests.
    auto world = std::make_unique<World>(shape_of(2, 2), Mapping::own, 1);
    const auto job = (*world)[0].dispatcher->submit(call.execution(), kLong_s, 0);
    (*world)[0].p2p->begin(received, true);
    pause(0.05);
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(10);
        Rank& rank = (*world)[0];
        const auto refused = [](const Outcome& outcome) {
            return outcome.text.find("forked child") != std::string::npos;
        };
        bool ok = refused(run_step(rank, simple(Kind::barrier, 0)));
        ok &= refused(outcome_of([&] { rank.dispatcher->submit(call.execution(), 1, 0); }));
        ok &= refused(outcome_of([&] { rank.dispatcher->wait(*job, -1, {}); }));
        ok &= refused(outcome_of([&] { rank.p2p->begin(sent, false); }));
        ok &= refused(outcome_of([&] { rank.p2p->wait(received, 1, -1, {}); }));
        rank.members->record(Fault::aborted, "by a child");
        world.reset();
        ::_exit(ok ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    report.check(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                 "forked child: status " + std::to_string(status));
    const auto outcome = outcome_of([&] { (*world)[0].members->require_healthy(); });
    report.check(outcome.fault == Fault::none, "a forked child changed its parent's group");
}
#endif

}  // namespace

int main() {
    Report report;
#if !defined(__SANITIZE_THREAD__)
    check_killed(report);  // runs first, while this process has only one thread
    check_joining_again(report);
    check_other_rank_of_the_process_closed(report);
    check_reads_of_a_failed_group(report);
    if (can_wipe_on_fork(report, "a forked child")) check_forked(report);
#endif
    return report.finish();
}

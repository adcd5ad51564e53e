// Tests of the liveness checks, in which the ranks of a host ask the kernel if other ranks are
// alive. The number of checks must be sufficient, but not large.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdarg>
#include <string>
#include <vector>

#include "memory/peer_checks.h"
#include "tests/calls.h"
#include "tests/report.h"

namespace {

// Returns the counter of the checks by all processes of this test.
std::atomic<uint64_t>* asked() {
    static void* const page =
        ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return static_cast<std::atomic<uint64_t>*>(page);
}

int counted_fcntl(int fd, int command, void* argument) {
    if (command == F_GETLK) asked()->fetch_add(1);
    return static_cast<int>(::syscall(SYS_fcntl, fd, command, argument));
}

}  // namespace

extern "C" int fcntl(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void* const argument = va_arg(rest, void*);
    va_end(rest);
    return counted_fcntl(fd, command, argument);
}

namespace {

using namespace unisono;
using namespace unisono::test;

// Simulates ten seconds in which `sleepers` ranks check every 50 ms, one after the other. Every
// rank must be checked in time, with few checks.
void check_simulated_intervals(Report& report, uint32_t ranks, uint32_t sleepers,
                               uint32_t from_us) {
    constexpr uint32_t slice_ms = 50, all_ms = 10'000;
    const std::string what =
        std::to_string(sleepers) + " sleepers of " + std::to_string(ranks) + " ranks: ";
    const uint32_t round_ms = std::clamp(ranks, kLeastRound_ms, kMostRound_ms);
    std::atomic<uint64_t> turn{0};
    std::vector<uint32_t> last(ranks, 0);
    uint64_t taken = 0;
    uint32_t longest_ms = 0;
    for (uint32_t ms = 0; ms < all_ms; ++ms) {
        for (uint32_t s = ms % slice_ms; s < sleepers; s += slice_ms) {
            const PeersDue due = take_due(turn, ranks, from_us + ms * 1000);
            taken += due.count;
            for (uint32_t i = 0; i < due.count; ++i) {
                uint32_t& at = last[(due.first + i) % ranks];
                longest_ms = std::max(longest_ms, ms - at);
                at = ms;
            }
        }
    }
    for (const uint32_t at : last) longest_ms = std::max(longest_ms, all_ms - at);
    report.check(longest_ms <= round_ms + slice_ms + 2,
                 what + "a rank was not checked for " + std::to_string(longest_ms) + " ms");
    const uint64_t most = uint64_t{ranks} * (all_ms / round_ms + 2);
    report.check(taken <= most,
                 what + std::to_string(taken) + " checks, at most " + std::to_string(most));
}

// If the clocks of ranks differ much, as in containers with their own time namespaces, every rank
// must still find that all checks are due.
void check_clocks_that_disagree(Report& report) {
    std::atomic<uint64_t> turn{0};
    for (uint32_t us = 50'000; us < 1'000'000; us += 50'000) {
        for (const uint32_t ahead_us : {0U, 1'000'000'000U, 4'000'000'000U}) {
            report.check(take_due(turn, 7, us + ahead_us).count == 7, "clocks that disagree");
        }
    }
}

// Starts a rank in a process of its own.
template <class Body>
pid_t start(const Descriptor& fd, uint32_t rank, Body&& body) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    Rank joined =
        rank_of(std::make_shared<Group>(Descriptor(::dup(fd.get())), rank, World::nonce, 1), rank);
    body(joined);
    joined.close();
    ::_exit(0);
}

void await_joined(const Segment& segment, uint32_t first) {
    for (uint32_t r = first; r < segment.shape().ranks; ++r) {
        const auto& presence = segment.rank(r).presence;
        while (presence.load() != static_cast<uint32_t>(Presence::joined)) pause(0.001);
    }
}

// One rank is late, and all others sleep. When the late rank is killed, all others must report its
// loss.
void check_many_sleepers(Report& report) {
    constexpr uint32_t ranks = 16;
    constexpr double sleep_s = 0.6;
    const Descriptor fd(create_segment(shape_of(ranks, 2), World::nonce));
    const auto sleep = [](Rank& rank) {
        const Outcome outcome = run_step(rank, simple(Kind::direct, 100));
        const bool named =
            outcome.fault == Fault::peer_lost && outcome.text.find("rank 3 ") != std::string::npos;
        if (!named) ::_exit(1);
    };
    const auto start_s = std::chrono::steady_clock::now();
    std::vector<pid_t> children;
    for (uint32_t r = 0; r < ranks; ++r) {
        children.push_back(r == 3 ? start(fd, r, [](Rank&) { pause(kLong_s); })
                                  : start(fd, r, sleep));
    }
    await_joined(Segment(Descriptor(::dup(fd.get()))), 0);
    pause(sleep_s);
    while (asked()->load() < ranks) pause(0.001);
    const uint64_t questions = asked()->load();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start_s;
    const double most = ranks * (took.count() / 0.05 + 2);
    report.check(questions <= most, std::to_string(questions) + " checks in " +
                                        std::to_string(took.count()) + " s, at most " +
                                        std::to_string(most));
    ::kill(children[3], SIGKILL);
    for (uint32_t r = 0; r < ranks; ++r) {
        int status = 0;
        ::waitpid(children[r], &status, 0);
        report.check(r == 3 || status == 0,
                     "rank " + std::to_string(r) + " did not report the lost rank");
    }
}

// One rank sleeps in a call while all other ranks compute, and so check nothing. The sleeping rank
// must detect the loss of a rank alone.
void check_one_sleeper(Report& report) {
    constexpr uint32_t ranks = 6;
    const Descriptor fd(create_segment(shape_of(ranks, 2), World::nonce));
    std::vector<pid_t> children;
    for (uint32_t r = 1; r < ranks; ++r)
        children.push_back(start(fd, r, [](Rank&) { pause(kLong_s); }));
    Rank rank =
        rank_of(std::make_shared<Group>(Descriptor(::dup(fd.get())), 0, World::nonce, 1), 0);
    await_joined(*rank.segment, 1);
    ::kill(children[3], SIGKILL);
    expect(report, run_step(rank, simple(Kind::direct, 100)), Fault::peer_lost, "rank 4 (pid",
           "the only sleeping rank");
    for (const pid_t child : children) ::kill(child, SIGKILL);
    for (const pid_t child : children) ::waitpid(child, nullptr, 0);
}

}  // namespace

int main() {
    Report report;
    static_cast<void>(asked());  // must be called before the first fork
    for (const uint32_t ranks : {1U, 2U, 7U, 50U, 51U, 300U, 1000U}) {
        for (const uint32_t sleepers : {1U, 2U, 49U, 1000U}) {
            for (const uint32_t from_us : {0U, ~0U - 5'000'000U}) {
                if (sleepers <= ranks) check_simulated_intervals(report, ranks, sleepers, from_us);
            }
        }
    }
    check_clocks_that_disagree(report);
#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not support forked processes
    check_many_sleepers(report);
    check_one_sleeper(report);
#endif
    return report.finish();
}

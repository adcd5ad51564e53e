// Tests that kill a rank in the middle of a large message. The other rank must soon report the
// killed rank, and may then reuse its own memory.
#include <sys/uio.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <string>

#include "tests/message_ranks.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

#if !defined(__SANITIZE_THREAD__)
// This test needs processes, which a thread sanitizer does not support.

constexpr size_t kBytes = 24 << 20;
constexpr uint64_t kBlock = 64 << 10;
constexpr double kSoon_s = 10;

// Returns true if a child can read its parent's memory. The receiver reads the sender's memory, and
// either process may be the receiver.
bool processes_read_peers() {
    const pid_t parent = ::getpid(), child = ::fork();
    if (child == 0) {
        int from = 0, to = 0;
        const iovec source{&from, sizeof(from)}, sink{&to, sizeof(to)};
        ::_exit(::process_vm_readv(parent, &sink, 1, &source, 1, 0) == sizeof(to) ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return status == 0;
}

// One of two ranks, with its send or receive of a message from rank 0 to rank 1.
class End {
  public:
    End(const Descriptor& fd, bool sends, bool single_copy)
        : rank_(rank_of(
              std::make_shared<Group>(Descriptor(::dup(fd.get())), sends ? 0 : 1, World::nonce, 2),
              sends ? 0 : 1)),
          data_(kBytes, sends ? 7 : 0),
          request_(message(data_, sends ? 1 : 0, 0), sends) {
        rank_.p2p->use_single_copy(single_copy);
        rank_.p2p->begin(request_, false);
    }
    void fill(uint8_t value) { std::fill(data_.begin(), data_.end(), value); }
    bool holds(uint8_t value) const {
        return std::all_of(data_.begin(), data_.end(), [=](uint8_t b) { return b == value; });
    }
    const p2p::Request& request() const { return request_; }
    // Returns the progress of both ranks, in chunks or blocks.
    uint64_t moved() {
        p2p::Pair& pair = *rank_.segment->pair(0, 1).shared;
        const uint64_t claims = pair.transfers[0].claims;
        return (claims & 0xffffffff) + (claims >> 32) + pair.blocks;
    }
    bool is_staged() {
        const p2p::Pair& pair = *rank_.segment->pair(0, 1).shared;
        return pair.transfers[0].phase == static_cast<uint64_t>(p2p::Phase::staging);
    }
    void poll() { rank_.p2p->test(request_); }
    void wait() { rank_.p2p->wait(request_, kSoon_s, -1, {}); }

  private:
    Rank rank_;
    Data data_;
    p2p::Request request_;
};

struct Case {
    bool sender_dies;
    bool single_copy;
    // True: the killed rank stops in the middle and is dead before the other rank continues. False:
    // both ranks are active when the rank is killed.
    bool stops;
    uint64_t moved;  // minimum progress before the kill
};

// Runs until this process is killed, or until the message is complete.
[[noreturn]] void live(const Descriptor& fd, const Case& c) {
    ::alarm(60);
    End end(fd, c.sender_dies, c.single_copy);
    if (!c.stops) {
        static_cast<void>(outcome_of([&] { end.wait(); }));
        ::_exit(0);
    }
    while (end.moved() < c.moved) end.poll();
    for (;;) ::pause();
}

void check_killed(Report& report, const Case& c) {
    const std::string what = std::string(c.sender_dies ? "a sender" : "a receiver") +
                             (c.single_copy ? ", one copy" : ", staged") +
                             (c.stops ? ", stopped" : ", at work") + " after " +
                             std::to_string(c.moved);
    const Descriptor fd(create_segment(shape_of(2, 2, 16, kBlock), World::nonce));
    const pid_t child = ::fork();
    if (child == 0) live(fd, c);
    End end(fd, !c.sender_dies, c.single_copy);
    while (end.moved() < c.moved && !end.request().done()) end.poll();
    if (c.stops) report.check(end.is_staged() != c.single_copy, what + ": unexpected path");
    ::kill(child, SIGKILL);
    if (c.stops) ::waitpid(child, nullptr, 0);
    const auto begun = std::chrono::steady_clock::now();
    const Outcome outcome = outcome_of([&] { end.wait(); });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    report.check(took.count() < kSoon_s, what + ": reported late");
    if (outcome.fault == Fault::none) {  // the rank was killed after the message was complete
        report.check(!c.stops && end.holds(7),
                     what + ": an incomplete message was reported as received");
    } else {
        expect(report, outcome, Fault::peer_lost,
               std::string(c.sender_dies ? "rank 0" : "rank 1") + " (pid " + std::to_string(child) +
                   ") is gone",
               what);
    }
    report.check(end.request().done(), what + ": the request is still pending");
    end.fill(0xee);
    if (!c.stops) ::waitpid(child, nullptr, 0);
    end.poll();
    report.check(end.holds(0xee), what + ": its memory is used after the end");
}

void check_all(Report& report, bool single_copy) {
    for (const bool sender_dies : {true, false}) {
        check_killed(report, {sender_dies, single_copy, true, 1});
        for (const uint64_t moved : {1, 8, 30})
            check_killed(report, {sender_dies, single_copy, false, moved});
    }
}
#endif

}  // namespace

int main() {
    Report report;
#if !defined(__SANITIZE_THREAD__)
    if (report.can_run("killed in the middle of a single copy", processes_read_peers(),
                       "processes cannot read each other's memory here"))
        check_all(report, true);
    check_all(report, false);
#endif
    return report.finish();
}

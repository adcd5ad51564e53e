// Tests invalid frames from an authenticated peer, and unexpected ends of its connections. Each
// case must lead to a specific error or to no error, but never to an endless wait or an access
// outside the buffers.
#include <sys/wait.h>

#include <atomic>
#include <chrono>

#include "tests/calls.h"
#include "tests/kernel_features.h"
#include "tests/message_ranks.h"
#include "tests/peer.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr std::array kKindsOfMessages{FrameKind::message, FrameKind::data, FrameKind::grant,
                                      FrameKind::credit,  FrameKind::held, FrameKind::question,
                                      FrameKind::denied};

Outcome call(FakePeer& fake, double timeout_s = kLong_s) {
    return run_step(fake.rank(), simple(Kind::direct, 100), timeout_s);
}

Outcome receive(FakePeer& fake, Data& data, uint64_t tag = 0, double timeout_s = kLong_s) {
    return outcome_of([&] { receive(fake.rank(), data, 1, tag, timeout_s); });
}

// ---- invalid frames

void check_invalid_posts(Report& report) {
    const auto refused = [&](const char* what, const Frame& first, const Frame& second) {
        FakePeer fake;
        fake.send(kCalls, first);
        fake.send(kCalls, second);
        expect(report, call(fake), Fault::system, "rank 1 sent", what);
    };
    const auto strange = [](auto&& change) {
        Frame frame = post_of(1, 0);
        frame.bytes = 8;
        change(frame);
        return frame;
    };
    const Frame none = post_of(1, 0), next = post_of(2, 0);
    refused("a kind of 0", strange([](Frame& f) { f.kind = FrameKind(0); }), next);
    refused("an unknown kind", strange([](Frame& f) {
                f.kind = FrameKind(77);
                f.bytes = 0;
            }),
            next);
    for (const FrameKind kind : kKindsOfMessages)
        refused("a kind for messages only", frame_of(kind, 1), next);
    refused("an unknown size class", strange([](Frame& f) { f.size_class = 3; }), next);
    refused("a place after the staging buffers", strange([](Frame& f) { f.place = 128 * 256; }),
            next);
    refused("a place that wraps around", strange([](Frame& f) { f.place = ~0ULL - 3; }), next);
    refused("a payload of 2^64 - 1 bytes", strange([](Frame& f) { f.bytes = ~0ULL; }), next);
    refused("post number 0", post_of(0, 0), next);
    refused("a post number far ahead", post_of(1 << 20, 0), next);
    refused("the same post number twice", post_of(2, 0, 1), post_of(2, 0, 1));
    refused("an earlier post number", none, post_of(1, 5));
    refused("decreasing progress", post_of(1, 100), post_of(2, 99));
    refused("more loads than announced", post_of(2, 0, 0), frame_of(FrameKind::load, 2));
    refused("a load before a post without loads", frame_of(FrameKind::load, 1), none);
    refused("a failure with too long a text", frame_of(FrameKind::failed, 0, kFaultText + 1), next);
}

void check_invalid_messages(Report& report) {
    const auto refused = [&](const char* what, const std::vector<Frame>& frames,
                             Fault fault = Fault::system) {
        FakePeer fake;
        Data data(100);
        for (const Frame& frame : frames)
            fake.send(kMessages, frame, std::string(std::min<uint64_t>(frame.bytes, 100), ' '));
        expect(report, receive(fake, data), fault, "rank 1 sent", what);
        expect(report, outcome_of([&] { fake.group().members().require_healthy(); }), fault, "",
               what);
    };
    Frame untyped = message_of(1, 0, 100), aside = message_of(1, 5, 0, 100);
    untyped.called.kind = num_dtypes;
    aside.loads = 1;
    const Frame other = message_of(1, 5, 100), part = message_of(1, 5, 10, 100);
    refused("a message of an unknown type", {untyped});
    refused("a message of 2^64 - 1 bytes", {message_of(1, 1, ~0ULL)});
    refused("too many eager bytes", {message_of(1, 1, (64 << 10) + 1, 1 << 20)});
    refused("more eager bytes than the message has", {[] {
                Frame frame = message_of(1, 1, 100);
                frame.progress = 99;
                return frame;
            }()});
    refused("a message shorter than the receive", {message_of(1, 0, 99)}, Fault::mismatch);
    refused("a message longer than the receive", {message_of(1, 0, 100, 1 << 20)}, Fault::mismatch);
    refused("the same message twice", {other, other});
    refused("an answer without a question", {aside});
    refused("the rest of an unknown message", {frame_of(FrameKind::data, 1, 10)});
    refused("an empty rest of an unknown message", {frame_of(FrameKind::data, 1)});
    refused("the rest of a complete message", {other, frame_of(FrameKind::data, 1)});
    refused("a rest without a grant", {part, frame_of(FrameKind::data, 1, 90)});
    refused("an empty rest without a grant", {part, frame_of(FrameKind::data, 1)});
    refused("a grant for an unknown message", {frame_of(FrameKind::grant, 1)});
    refused("a post among messages", {post_of(1, 0)});
    refused("a post with payload among messages", {frame_of(FrameKind::post, 1, 8)});
    refused("an unknown kind among messages", {frame_of(FrameKind(12), 1)});
    refused("kind 0 among messages", {frame_of(FrameKind(0), 1)});
    refused("a post far ahead among messages", {post_of(1 << 30, 0)});
}

// Each message uses 256 bytes of credit plus its eager bytes, until it is received.
void check_credit(Report& report) {
    for (const uint64_t bytes : {0ULL, 1000ULL}) {
        const uint64_t most = (256 << 10) / (256 + bytes);
        FakePeer fake;
        Data data(bytes), last(1);
        const auto send = [&](uint64_t number) {
            fake.send(kMessages, message_of(number, 7, bytes), std::string(bytes, '\1'));
        };
        for (uint64_t k = 1; k <= most; ++k) send(k);
        expect(report, receive(fake, last, 0, 0.1), Fault::timeout, "",
               "as many messages as the credit allows");
        FakePeer other;
        for (uint64_t k = 1; k <= most + 1; ++k)
            other.send(kMessages, message_of(k, 7, bytes), std::string(bytes, '\1'));
        expect(report, receive(other, last), Fault::system, "no credit", "one message too many");
    }
}

// The receiver grants the rest of a message only after a receive matches the message.
void check_grant(Report& report) {
    FakePeer fake;
    Data data(1000), other(10);
    fake.send(kMessages, message_of(1, 0, 100, 1000), std::string(100, '\2'));
    fake.send(kMessages, message_of(2, 1, 10), std::string(10, '\3'));
    expect(report, receive(fake, other, 1), Fault::none, "", "a message behind a long one");
    report.check(!fake.receives(kMessages, FrameKind::grant, 0.05), "a grant without a receive");
    p2p::Request request(message(data, 1, 0), false);
    fake.rank().p2p->begin(request, false);
    report.check(fake.receives(kMessages, FrameKind::grant, kLong_s), "a grant");
    report.check(!fake.rank().p2p->wait(request, kLong_s, 0.02, {}),
                 "an incomplete message was reported as received");
    fake.send(kMessages, frame_of(FrameKind::data, 1, 900), std::string(900, '\2'));
    fake.rank().p2p->wait(request, kLong_s, -1, {});
    report.check(data == Data(1000, 2) && other == Data(10, 3),
                 "a message that arrived in two parts");
}

// An invalid frame arrives in the middle of a message. The message must not count as complete.
void check_post_within_a_message(Report& report) {
    FakePeer fake(2);
    Data data(1000, 1);
    p2p::Request request(message(data, 1, 0), false);
    fake.rank().p2p->begin(request, false);
    fake.send(kMessages, message_of(1, 0, 1000), std::string(500, '\2'));
    pause(0.02);
    report.check(!fake.rank().p2p->wait(request, kLong_s, 0.02, {}),
                 "half a message was reported as received");
    fake.send(kMessages, post_of(1, 0), {}, 1);
    expect(report, outcome_of([&] { fake.rank().p2p->wait(request, kLong_s, -1, {}); }),
           Fault::system, "rank 1 sent", "a post within a message");
    FakePeer other(2);
    other.send(kMessages, message_of(1, 0, 1000), std::string(500, '\2'), 1);
    expect(report, receive(other, data), Fault::system, "wrong connection",
           "a message on another connection");
}

void check_reported_failures(Report& report) {
    const auto reported = [&](uint32_t fault, const std::string& text, Fault expected) {
        FakePeer fake;
        Frame frame = frame_of(FrameKind::failed, 0, text.size());
        frame.called.kind = fault;
        fake.send(kCalls, frame, text);
        expect(report, call(fake), expected, text, "a peer's reported failure");
        FakePeer waiting;
        waiting.send(kMessages, frame, text);
        Data data(8);
        expect(report, receive(waiting, data), expected, text,
               "a peer's reported failure during a receive");
    };
    reported(static_cast<uint32_t>(Fault::timeout), "somebody was late", Fault::timeout);
    reported(static_cast<uint32_t>(Fault::peer_lost), "", Fault::peer_lost);
    reported(0, "no fault", Fault::system);
    reported(static_cast<uint32_t>(Fault::interrupted), "no Python here", Fault::system);
    reported(1000, "an unknown fault", Fault::system);
}

// ---- connections

void check_inconsistent_streams(Report& report) {
    FakePeer fake;
    expect(report, outcome_of([&] { fake.attach(kCalls, 3, 3); }), Fault::invalid, "",
           "a stream index beyond the number of streams");
    expect(report, outcome_of([&] { fake.attach(kCalls, 0, 1 << 20); }), Fault::invalid, "",
           "a million streams");
    fake.attach(kCalls, 1, 3);
    expect(report, call(fake), Fault::system, "different numbers of streams",
           "inconsistent numbers of streams");
    FakePeer again;
    again.attach(kCalls, 0, 1);  // closes the second connection; the first remains
    again.send(kCalls, post_of(1, 0));
    expect(report, call(again, 0.1), Fault::timeout, "", "the same connection twice");
}

void check_ends(Report& report) {
    for (const bool reset : {false, true}) {
        for (const uint32_t streams : {1U, 3U}) {
            for (const size_t reported :
                 {size_t{0}, size_t{30}, sizeof(Frame), sizeof(Frame) + 4}) {
                FakePeer fake(streams);
                Frame frame = post_of(1, 0);
                frame.bytes = 8;
                std::string bytes(reinterpret_cast<const char*>(&frame), sizeof(frame));
                fake.send_bytes(kCalls, (bytes + std::string(8, ' ')).substr(0, reported),
                                streams - 1);
                pause(0.005);
                for (size_t s = 0; s < streams; ++s) fake.hang_up(kCalls, s, reset);
                expect(report, call(fake), Fault::peer_lost, "rank 1 is gone",
                       "an end after " + std::to_string(reported) + " bytes");
            }
        }
    }
    FakePeer fake(3);  // half a frame, then the end of this connection only
    fake.send_bytes(kCalls, std::string(30, '\1'), 1);
    fake.hang_up(kCalls, 1, false);
    expect(report, call(fake), Fault::peer_lost, "rank 1 is gone", "one torn connection of three");
    for (const uint64_t part : {uint64_t{0}, uint64_t{50}}) {
        FakePeer messages;
        Data data(100);
        messages.send(kMessages, message_of(1, 0, 100), std::string(part, ' '));
        messages.hang_up(kMessages, 0, false);
        expect(report, receive(messages, data), Fault::peer_lost, "rank 1 is gone",
               "half a message");
    }
}

void check_order(Report& report) {
    FakePeer fake(2);
    const auto& progress = fake.group().view().control(1).progress;
    // The call has so many blocks that it must wait.
    std::thread caller([&] { run_step(fake.rank(), simple(Kind::direct, 100'000), 2); });
    const auto comes = [&](uint64_t expected) {
        for (int i = 0; i < 1000 && progress.load() != expected; ++i) pause(0.001);
        report.check(progress.load() == expected, "progress of all posts that have arrived");
    };
    fake.send(kCalls, post_of(2, 20), {}, 1);
    Frame load = frame_of(FrameKind::load, 3, 4);
    fake.send(kCalls, load, "1234", 0);
    pause(0.1);
    report.check(progress.load() == 0, "progress of the second post before the first has arrived");
    fake.send(kCalls, post_of(1, 10), {}, 0);
    comes(20);
    fake.send(kCalls, post_of(3, 30, 2), {}, 1);
    pause(0.1);
    report.check(progress.load() == 20, "progress of a post before all its loads have arrived");
    fake.send(kCalls, load, "1234", 1);
    comes(30);
    caller.join();
}

// An unmatched message whose sender is lost must not keep the receiver awake. A later receive
// reports the loss.
void check_message_of_a_lost_rank(Report& report) {
    FakePeer fake;
    p2p::Engine& engine = *fake.rank().p2p;
    Data sent(10), data(10, 0);
    send(fake.rank(), sent, 1, 0);
    fake.send(kMessages, message_of(1, 3, 10), std::string(10, '\7'));
    report.check(engine.wait_probe(1, 3, kLong_s, -1, {}).has_value(), "an unexpected message");
    fake.hang_up(kMessages, 0, true);
    pause(0.01);
    int woken = 0;
    for (int i = 0; i < 5; ++i) {
        static_cast<void>(outcome_of([&] { engine.transport()->poll(); }));
        woken += engine.transport()->sleep(0.01, [] { return false; }) == Woken::rung;
    }
    report.check(woken <= 1, "a lost rank's message keeps its receiver awake");
    expect(report, receive(fake, data, 3), Fault::peer_lost, "rank 1 is gone",
           "a receive from a lost rank");
}

// A polling thread may take the event that should wake all threads. Every sleeping thread must wake
// nevertheless.
void check_doorbell(Report& report) {
    FakePeer fake;
    Transport& transport = *fake.rank().p2p->transport();
    for (int i = 0; i < 20; ++i) {
        std::atomic<bool> done{false};
        std::vector<std::thread> sleepers;
        for (int t = 0; t < 2; ++t) {
            sleepers.emplace_back([&] {
                while (!done) transport.sleep(20, [&] { return done.load(); });
            });
        }
        pause(0.01);
        const auto begun = std::chrono::steady_clock::now();
        done = true;
        transport.wake();
        for (int k = 0; k < 100; ++k) transport.poll();
        for (std::thread& sleeper : sleepers) sleeper.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
        report.check(took.count() < 10, "not all threads woke");
        if (took.count() >= 10) return;
    }
}

#if !defined(__SANITIZE_THREAD__)
// A forked child must neither keep its parent's connections open nor close them.
void check_forked(Report& report) {
    auto fake = std::make_unique<FakePeer>(2);
    int pipe[2];
    static_cast<void>(!::pipe(pipe));
    expect(report, run_step(fake->rank(), simple(Kind::broadcast, 10)), Fault::none, "",
           "before a fork");
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(60);
        ::close(pipe[1]);
        fake->group().abandon();
        for (const TransportKind kind : kTransports) {
            for (size_t s = 0; s < 2; ++s) fake->end(kind, s) = Descriptor();
        }
        char byte = 0;
        static_cast<void>(!::read(pipe[0], &byte, 1));
        fake.reset();  // must not close a connection twice
        ::_exit(0);
    }
    ::close(pipe[0]);
    pause(0.05);
    fake->send(kCalls, post_of(1, 0), {}, 1);
    expect(report, run_step(fake->rank(), simple(Kind::broadcast, 10)), Fault::none, "",
           "after a forked child has closed its connections");
    std::vector<Descriptor> ends;
    for (const TransportKind kind : kTransports) {
        for (size_t s = 0; s < 2; ++s) ends.push_back(std::move(fake->end(kind, s)));
    }
    fake->rank().members->record(Fault::aborted, "over");  // so that closing waits only briefly
    fake.reset();
    for (const Descriptor& end : ends) {
        const timeval most{10, 0};
        ::setsockopt(end.get(), SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
        std::array<char, 4096> bytes;
        ssize_t got = 0;
        while ((got = ::recv(end.get(), bytes.data(), bytes.size(), 0)) > 0) {
        }
        report.check(got == 0 || errno == ECONNRESET, "a forked child holds a connection open");
    }
    ::close(pipe[1]);
    int status = 0;
    ::waitpid(child, &status, 0);
    report.check(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                 "the forked child: status " + std::to_string(status));
}
#endif

}  // namespace

int main() {
    Report report;
#if !defined(__SANITIZE_THREAD__)
    if (can_wipe_on_fork(report, "a forked child that keeps running")) check_forked(report);
#endif
    check_invalid_posts(report);
    check_invalid_messages(report);
    check_credit(report);
    check_grant(report);
    check_post_within_a_message(report);
    check_reported_failures(report);
    check_inconsistent_streams(report);
    check_ends(report);
    check_order(report);
    check_message_of_a_lost_rank(report);
    check_doorbell(report);
    return report.finish();
}

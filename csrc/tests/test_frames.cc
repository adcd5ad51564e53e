// Invalid frames from an authenticated peer, and unexpected ends of its connections. Each leads to
// a named error or to none, never to an endless wait or an access outside the buffers.
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

Outcome call(Faced& faced, double timeout_s = kLong_s) {
    return run_step(faced.rank(), simple(Kind::direct, 100), timeout_s);
}

Outcome receive(Faced& faced, Data& data, uint64_t tag = 0, double timeout_s = kLong_s) {
    return outcome_of([&] { receive(faced.rank(), data, 1, tag, timeout_s); });
}

// ---- invalid frames

void check_strange_posts(Report& report) {
    const auto refused = [&](const char* what, const Frame& first, const Frame& second) {
        Faced faced;
        faced.say(kCalls, first);
        faced.say(kCalls, second);
        expect(report, call(faced), Fault::system, "rank 1 sent", what);
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
        refused("what only messages have", frame_of(kind, 1), next);
    refused("a strip of 3", strange([](Frame& f) { f.strip = 3; }), next);
    refused("a place behind the areas", strange([](Frame& f) { f.place = 128 * 256; }), next);
    refused("a place that wraps", strange([](Frame& f) { f.place = ~0ULL - 3; }), next);
    refused("a payload of all", strange([](Frame& f) { f.bytes = ~0ULL; }), next);
    refused("a number of 0", post_of(0, 0), next);
    refused("a number far ahead", post_of(1 << 20, 0), next);
    refused("a number twice", post_of(2, 0, 1), post_of(2, 0, 1));
    refused("a number again", none, post_of(1, 5));
    refused("progress that falls", post_of(1, 100), post_of(2, 99));
    refused("more loads than announced", post_of(2, 0, 0), frame_of(FrameKind::load, 2));
    refused("loads before a post of none", frame_of(FrameKind::load, 1), none);
    refused("a fault with a long text", frame_of(FrameKind::failed, 0, kFaultText + 1), next);
}

void check_strange_messages(Report& report) {
    const auto refused = [&](const char* what, const std::vector<Frame>& frames,
                             Fault fault = Fault::system) {
        Faced faced;
        Data data(100);
        for (const Frame& frame : frames)
            faced.say(kMessages, frame, std::string(std::min<uint64_t>(frame.bytes, 100), ' '));
        expect(report, receive(faced, data), fault, "rank 1 sent", what);
        expect(report, outcome_of([&] { faced.group().members().require_healthy(); }), fault, "",
               what);
    };
    Frame untyped = message_of(1, 0, 100), aside = message_of(1, 5, 0, 100);
    untyped.called.kind = num_dtypes;
    aside.loads = 1;
    const Frame other = message_of(1, 5, 100), part = message_of(1, 5, 10, 100);
    refused("a message of no type", {untyped});
    refused("a message of all memory", {message_of(1, 1, ~0ULL)});
    refused("more of a message than comes first", {message_of(1, 1, (64 << 10) + 1, 1 << 20)});
    refused("a message that is longer than itself", {[] {
                Frame frame = message_of(1, 1, 100);
                frame.progress = 99;
                return frame;
            }()});
    refused("a message of a length that is not asked for", {message_of(1, 0, 99)}, Fault::mismatch);
    refused("a message of more than is asked for", {message_of(1, 0, 100, 1 << 20)},
            Fault::mismatch);
    refused("a message twice", {other, other});
    refused("a message for which nobody has asked", {aside});
    refused("the rest of no message", {frame_of(FrameKind::data, 1, 10)});
    refused("no rest of no message", {frame_of(FrameKind::data, 1)});
    refused("the rest of a message that is all there", {other, frame_of(FrameKind::data, 1)});
    refused("a rest that was not granted", {part, frame_of(FrameKind::data, 1, 90)});
    refused("no rest that was not granted", {part, frame_of(FrameKind::data, 1)});
    refused("a grant of nothing", {frame_of(FrameKind::grant, 1)});
    refused("a post among messages", {post_of(1, 0)});
    refused("a post with payload among messages", {frame_of(FrameKind::post, 1, 8)});
    refused("an unknown kind among messages", {frame_of(FrameKind(12), 1)});
    refused("no kind among messages", {frame_of(FrameKind(0), 1)});
    refused("a post far ahead among messages", {post_of(1 << 30, 0)});
}

// Each message uses 256 bytes of credit plus its eager bytes, until it is received.
void check_credit(Report& report) {
    for (const uint64_t bytes : {0ULL, 1000ULL}) {
        const uint64_t most = (256 << 10) / (256 + bytes);
        Faced faced;
        Data data(bytes), last(1);
        const auto say = [&](uint64_t number) {
            faced.say(kMessages, message_of(number, 7, bytes), std::string(bytes, '\1'));
        };
        for (uint64_t k = 1; k <= most; ++k) say(k);
        expect(report, receive(faced, last, 0, 0.1), Fault::timeout, "",
               "what there is credit for");
        Faced other;
        for (uint64_t k = 1; k <= most + 1; ++k)
            other.say(kMessages, message_of(k, 7, bytes), std::string(bytes, '\1'));
        expect(report, receive(other, last), Fault::system, "no credit", "one message too many");
    }
}

// The receiver grants the rest of a message only after a receive matches.
void check_grant(Report& report) {
    Faced faced;
    Data data(1000), other(10);
    faced.say(kMessages, message_of(1, 0, 100, 1000), std::string(100, '\2'));
    faced.say(kMessages, message_of(2, 1, 10), std::string(10, '\3'));
    expect(report, receive(faced, other, 1), Fault::none, "", "a message behind a long one");
    report.check(!faced.hears(kMessages, FrameKind::grant, 0.05), "a grant without a receive");
    p2p::Request request(message(data, 1, 0), false);
    faced.rank().p2p->begin(request, false);
    report.check(faced.hears(kMessages, FrameKind::grant, kLong_s), "a grant");
    report.check(!faced.rank().p2p->wait(request, kLong_s, 0.02, {}), "a message in part is none");
    faced.say(kMessages, frame_of(FrameKind::data, 1, 900), std::string(900, '\2'));
    faced.rank().p2p->wait(request, kLong_s, -1, {});
    report.check(data == Data(1000, 2) && other == Data(10, 3), "what came in two parts");
}

// An invalid frame arrives in the middle of a message. The message must not count as complete.
void check_post_within_a_message(Report& report) {
    Faced faced(2);
    Data data(1000, 1);
    p2p::Request request(message(data, 1, 0), false);
    faced.rank().p2p->begin(request, false);
    faced.say(kMessages, message_of(1, 0, 1000), std::string(500, '\2'));
    pause(0.02);
    report.check(!faced.rank().p2p->wait(request, kLong_s, 0.02, {}), "half a message is none");
    faced.say(kMessages, post_of(1, 0), {}, 1);
    expect(report, outcome_of([&] { faced.rank().p2p->wait(request, kLong_s, -1, {}); }),
           Fault::system, "rank 1 sent", "a post within a message");
    Faced other(2);
    other.say(kMessages, message_of(1, 0, 1000), std::string(500, '\2'), 1);
    expect(report, receive(other, data), Fault::system, "wrong connection",
           "messages side by side");
}

void check_last_words(Report& report) {
    const auto said = [&](uint32_t fault, const std::string& text, Fault expected) {
        Faced faced;
        Frame frame = frame_of(FrameKind::failed, 0, text.size());
        frame.called.kind = fault;
        faced.say(kCalls, frame, text);
        expect(report, call(faced), expected, text, "the last words of a peer");
        Faced waiting;
        waiting.say(kMessages, frame, text);
        Data data(8);
        expect(report, receive(waiting, data), expected, text,
               "the last words of a peer to who waits for a message");
    };
    said(static_cast<uint32_t>(Fault::timeout), "somebody was late", Fault::timeout);
    said(static_cast<uint32_t>(Fault::peer_lost), "", Fault::peer_lost);
    said(0, "no fault", Fault::system);
    said(static_cast<uint32_t>(Fault::interrupted), "no Python here", Fault::system);
    said(1000, "an unknown fault", Fault::system);
}

// ---- connections

void check_streams_that_disagree(Report& report) {
    Faced faced;
    expect(report, outcome_of([&] { faced.attach(kCalls, 3, 3); }), Fault::invalid, "",
           "a stream beyond their number");
    expect(report, outcome_of([&] { faced.attach(kCalls, 0, 1 << 20); }), Fault::invalid, "",
           "a million streams");
    faced.attach(kCalls, 1, 3);
    expect(report, call(faced), Fault::system, "different numbers of streams",
           "streams that disagree");
    Faced again;
    again.attach(kCalls, 0, 1);  // closes the second connection; the first remains
    again.say(kCalls, post_of(1, 0));
    expect(report, call(again, 0.1), Fault::timeout, "", "a connection twice");
}

void check_ends(Report& report) {
    for (const bool reset : {false, true}) {
        for (const uint32_t streams : {1U, 3U}) {
            for (const size_t said : {size_t{0}, size_t{30}, sizeof(Frame), sizeof(Frame) + 4}) {
                Faced faced(streams);
                Frame frame = post_of(1, 0);
                frame.bytes = 8;
                std::string bytes(reinterpret_cast<const char*>(&frame), sizeof(frame));
                faced.say_bytes(kCalls, (bytes + std::string(8, ' ')).substr(0, said), streams - 1);
                pause(0.005);
                for (size_t s = 0; s < streams; ++s) faced.hang_up(kCalls, s, reset);
                expect(report, call(faced), Fault::peer_lost, "rank 1 is gone",
                       "an end after " + std::to_string(said) + " bytes");
            }
        }
    }
    Faced faced(3);  // half a frame, then the end of only this connection
    faced.say_bytes(kCalls, std::string(30, '\1'), 1);
    faced.hang_up(kCalls, 1, false);
    expect(report, call(faced), Fault::peer_lost, "rank 1 is gone", "one torn connection of three");
    for (const uint64_t part : {uint64_t{0}, uint64_t{50}}) {
        Faced messages;
        Data data(100);
        messages.say(kMessages, message_of(1, 0, 100), std::string(part, ' '));
        messages.hang_up(kMessages, 0, false);
        expect(report, receive(messages, data), Fault::peer_lost, "rank 1 is gone",
               "half a message");
    }
}

void check_order(Report& report) {
    Faced faced(2);
    const auto& progress = faced.group().view().control(1).progress;
    // Many blocks, so that the call waits in any case.
    std::thread caller([&] { run_step(faced.rank(), simple(Kind::direct, 100'000), 2); });
    const auto comes = [&](uint64_t expected) {
        for (int i = 0; i < 1000 && progress.load() != expected; ++i) pause(0.001);
        report.check(progress.load() == expected, "progress of all that has come");
    };
    faced.say(kCalls, post_of(2, 20), {}, 1);
    Frame load = frame_of(FrameKind::load, 3, 4);
    faced.say(kCalls, load, "1234", 0);
    pause(0.1);
    report.check(progress.load() == 0, "the second before the first");
    faced.say(kCalls, post_of(1, 10), {}, 0);
    comes(20);
    faced.say(kCalls, post_of(3, 30, 2), {}, 1);
    pause(0.1);
    report.check(progress.load() == 20, "progress before all it shows");
    faced.say(kCalls, load, "1234", 1);
    comes(30);
    caller.join();
}

// An unmatched message whose sender is lost must not keep the receiver awake. A later receive
// reports the loss.
void check_message_of_who_is_gone(Report& report) {
    Faced faced;
    p2p::Engine& engine = *faced.rank().p2p;
    Data sent(10), data(10, 0);
    send(faced.rank(), sent, 1, 0);
    faced.say(kMessages, message_of(1, 3, 10), std::string(10, '\7'));
    report.check(engine.wait_probe(1, 3, kLong_s, -1, {}).has_value(), "a message nobody asks for");
    faced.hang_up(kMessages, 0, true);
    pause(0.01);
    int woken = 0;
    for (int i = 0; i < 5; ++i) {
        static_cast<void>(outcome_of([&] { engine.wire()->poll(); }));
        woken += engine.wire()->sleep(0.01, [] { return false; }) == Woken::rung;
    }
    report.check(woken <= 1, "a message of who is gone keeps its receiver awake");
    expect(report, receive(faced, data, 3), Fault::peer_lost, "rank 1 is gone",
           "a message of who is gone");
}

// A polling thread may take the event that should wake all threads. Every sleeping thread must wake
// nevertheless.
void check_bell(Report& report) {
    Faced faced;
    Wire& wire = *faced.rank().p2p->wire();
    for (int i = 0; i < 20; ++i) {
        std::atomic<bool> done{false};
        std::vector<std::thread> sleepers;
        for (int t = 0; t < 2; ++t) {
            sleepers.emplace_back([&] {
                while (!done) wire.sleep(20, [&] { return done.load(); });
            });
        }
        pause(0.01);
        const auto begun = std::chrono::steady_clock::now();
        done = true;
        wire.wake();
        for (int k = 0; k < 100; ++k) wire.poll();
        for (std::thread& sleeper : sleepers) sleeper.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
        report.check(took.count() < 10, "a bell that not all have heard");
        if (took.count() >= 10) return;
    }
}

#if !defined(__SANITIZE_THREAD__)
// A forked child must neither keep its parent's connections open nor close them.
void check_forked(Report& report) {
    auto faced = std::make_unique<Faced>(2);
    int pipe[2];
    static_cast<void>(!::pipe(pipe));
    expect(report, run_step(faced->rank(), simple(Kind::broadcast, 10)), Fault::none, "",
           "before a fork");
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(60);
        ::close(pipe[1]);
        faced->group().abandon();
        for (const WireKind kind : kWires) {
            for (size_t s = 0; s < 2; ++s) faced->end(kind, s) = Descriptor();
        }
        char byte = 0;
        static_cast<void>(!::read(pipe[0], &byte, 1));
        faced.reset();  // closes no connection twice
        ::_exit(0);
    }
    ::close(pipe[0]);
    pause(0.05);
    faced->say(kCalls, post_of(1, 0), {}, 1);
    expect(report, run_step(faced->rank(), simple(Kind::broadcast, 10)), Fault::none, "",
           "a child has let go of connections");
    std::vector<Descriptor> ends;
    for (const WireKind kind : kWires) {
        for (size_t s = 0; s < 2; ++s) ends.push_back(std::move(faced->end(kind, s)));
    }
    faced->rank().members->record(Fault::aborted, "over");  // so that closing waits only briefly
    faced.reset();
    for (const Descriptor& end : ends) {
        const timeval most{10, 0};
        ::setsockopt(end.get(), SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
        std::array<char, 4096> bytes;
        ssize_t got = 0;
        while ((got = ::recv(end.get(), bytes.data(), bytes.size(), 0)) > 0) {
        }
        report.check(got == 0 || errno == ECONNRESET, "a child holds a connection open");
    }
    ::close(pipe[1]);
    int status = 0;
    ::waitpid(child, &status, 0);
    report.check(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                 "the child: status " + std::to_string(status));
}
#endif

}  // namespace

int main() {
    Report report;
#if !defined(__SANITIZE_THREAD__)
    if (can_wipe_on_fork(report, "a child that lives on")) check_forked(report);
#endif
    check_strange_posts(report);
    check_strange_messages(report);
    check_credit(report);
    check_grant(report);
    check_post_within_a_message(report);
    check_last_words(report);
    check_streams_that_disagree(report);
    check_ends(report);
    check_order(report);
    check_message_of_who_is_gone(report);
    check_bell(report);
    return report.finish();
}

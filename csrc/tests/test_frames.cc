// What a proved peer may say that no peer should, and the ends that its connections may have: each
// leads to the named error or to none, never to a wait without end, nor past anybody's memory.
#include <sys/wait.h>

#include <atomic>
#include <chrono>

#include "calls.h"
#include "kernel.h"
#include "peer.h"
#include "report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr WireKind kCalls = WireKind::collectives, kMail = WireKind::mail;

Outcome call(Faced& faced, double timeout_s = kLong_s) {
    return run_step(faced.rank(), simple(Kind::direct, 100), timeout_s);
}

Outcome receive(Faced& faced, std::vector<uint8_t>& data, uint64_t tag = 0,
                double timeout_s = kLong_s) {
    PostOffice& mail = *faced.rank().mail;
    return outcome_of([&] { mail.wait(*mail.receive(message(data, 1, tag)), timeout_s, -1, {}); });
}

// ---- strange frames

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
    refused("what only messages have", frame_of(FrameKind::taken, 1), next);
    refused("a letter", letter_of(0, 0), next);
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

void check_strange_letters(Report& report) {
    const auto refused = [&](const char* what, const Frame& frame, Fault fault = Fault::system) {
        Faced faced;
        std::vector<uint8_t> data(100);
        faced.say(kMail, frame);
        expect(report, receive(faced, data), fault, "", what);
        expect(report, outcome_of([&] { faced.group().members().require_healthy(); }), fault, "",
               what);
    };
    Frame untyped = letter_of(0, 100);
    untyped.called.kind = num_dtypes;
    refused("a letter of no type", untyped);
    refused("a letter of all memory", letter_of(1, ~0ULL));
    refused("a letter of a length that is not asked for", letter_of(0, 99), Fault::mismatch);
    refused("a post among letters", post_of(1, 0));
    refused("a post with payload among letters", frame_of(FrameKind::post, 1, 8));
    refused("an unknown kind among letters", frame_of(FrameKind(9), 1));
    refused("a post far ahead among letters", post_of(1 << 30, 0));
}

// A letter is under way when a frame comes that is none: the letter's memory must not be taken for
// complete.
void check_post_within_a_letter(Report& report) {
    Faced faced(2);
    std::vector<uint8_t> data(1000, 1);
    const auto parcel = faced.rank().mail->receive(message(data, 1, 0));
    faced.say(kMail, letter_of(0, 1000), std::string(500, '\2'));
    pause(0.02);
    report.check(!faced.rank().mail->wait(*parcel, kLong_s, 0.02, {}), "half a letter is none");
    faced.say(kMail, post_of(1, 0), {}, 1);
    expect(report, outcome_of([&] { faced.rank().mail->wait(*parcel, kLong_s, -1, {}); }),
           Fault::system, "rank 1 sent", "a post within a letter");
    Faced other(2);
    faced.say(kMail, letter_of(0, 1000), std::string(500, '\2'));
    other.say(kMail, letter_of(0, 1000), std::string(500, '\2'), 1);
    expect(report, receive(other, data), Fault::system, "wrong connection", "letters side by side");
}

void check_last_words(Report& report) {
    const auto said = [&](uint32_t fault, const std::string& text, Fault expected) {
        Faced faced;
        Frame frame = frame_of(FrameKind::failed, 0, text.size());
        frame.called.kind = fault;
        faced.say(kCalls, frame, text);
        expect(report, call(faced), expected, text, "the last words of a peer");
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
    again.attach(kCalls, 0, 1);  // a second one is closed, and the first stays
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
    Faced faced(3);  // half a frame, and the end of this one connection only
    faced.say_bytes(kCalls, std::string(30, '\1'), 1);
    faced.hang_up(kCalls, 1, false);
    expect(report, call(faced), Fault::peer_lost, "rank 1 is gone", "one torn connection of three");
    Faced letters;
    std::vector<uint8_t> data(100);
    letters.say(kMail, letter_of(0, 100), std::string(50, ' '));
    letters.hang_up(kMail, 0, false);
    expect(report, receive(letters, data), Fault::peer_lost, "rank 1 is gone", "half a letter");
}

// The peer has left and some of its connections have ended: what it is still told goes nowhere, and
// nobody waits for that.
void check_left_in_steps(Report& report) {
    Faced faced(3);
    const auto tell = [&] { return run_step(faced.rank(), simple(Kind::broadcast, 100), 1); };
    expect(report, tell(), Fault::none, "", "before anything has ended");
    faced.say(kCalls, frame_of(FrameKind::left, 1), {}, 2);
    for (size_t s = 0; s < 3; ++s) {
        faced.hang_up(kCalls, s, false);
        pause(0.01);
        for (int i = 0; i < 4; ++i)
            expect(report, tell(), Fault::none, "", "telling who is leaving");
    }
}

// Who never connected and has left will not read.
void check_left_unconnected(Report& report) {
    Faced faced(1, false);
    std::thread later([&] {
        pause(0.05);
        faced.group().peer_left(1);
    });
    expect(report, run_step(faced.rank(), simple(Kind::broadcast, 100), 20), Fault::peer_lost,
           "rank 1 left the group", "telling who has left");
    later.join();
}

void check_order(Report& report) {
    Faced faced(2);
    const auto& progress = faced.group().view().control(1).progress;
    // Many blocks, so that it waits whatever is said here.
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

// Nobody asks for a letter, and its sender is gone: that keeps nobody awake. Who asks then is told.
void check_letter_of_who_is_gone(Report& report) {
    Faced faced;
    Wire& wire = *faced.rank().mail->wire();
    std::vector<uint8_t> sent(10), data(10, 0);
    faced.rank().mail->carry_on();
    const auto parcel = faced.rank().mail->send(message(sent, 1, 0));
    report.check(faced.rank().mail->wait(*parcel, kLong_s, -1, {}), "a letter is sent");
    faced.say(kMail, letter_of(3, 10), std::string(10, '\7'));
    pause(0.01);
    faced.rank().mail->send(message(sent, 1, 0));  // finds that nobody asks for it
    faced.hang_up(kMail, 0, true);
    pause(0.01);
    int woken = 0;
    for (int i = 0; i < 5; ++i) {
        wire.poll();
        woken += wire.sleep(0.01, [] { return false; }) == Woken::rung;
    }
    report.check(woken <= 1, "a letter of who is gone keeps its reader awake");
    expect(report, receive(faced, data, 3), Fault::peer_lost, "rank 1 is gone",
           "a letter of who is gone");
    report.check(data == std::vector<uint8_t>(10, 7), "what had come of it is there");
}

// After a failure a letter's memory is its sender's: what still leaves is what the letter was.
void check_letter_given_up(Report& report) {
    Faced faced;
    std::vector<uint8_t> data(16 << 20, 7);
    expect(report, outcome_of([&] {
               faced.rank().mail->wait(*faced.rank().mail->send(message(data, 1, 0)), 0.1, -1, {});
           }),
           Fault::timeout, "it was not received", "a letter that nobody takes");
    std::fill(data.begin(), data.end(), uint8_t{0xee});
    std::thread closing([&] { faced.rank().close(); });
    std::vector<uint8_t> got(1 << 20), all;
    for (;;) {
        const ssize_t bytes = ::recv(faced.end(kMail).get(), got.data(), got.size(), 0);
        if (bytes <= 0) break;
        all.insert(all.end(), got.begin(), got.begin() + bytes);
    }
    closing.join();
    const size_t content = std::min(all.size(), sizeof(Frame) + data.size());
    report.check(content > sizeof(Frame), "some of the letter has come");
    report.check(
        std::all_of(all.begin() + sizeof(Frame), all.begin() + static_cast<std::ptrdiff_t>(content),
                    [](uint8_t byte) { return byte == 7; }),
        "a letter that was given up has other content");
}

void check_attached_too_late(Report& report) {
    Faced faced;
    faced.rank().close();
    faced.attach(kCalls, 0, 1);
    faced.group().peer_left(1);
    faced.group().fail(Fault::aborted, "too late");
    char byte = 0;
    report.check(::recv(faced.end(kCalls, 1).get(), &byte, 1, 0) == 0,
                 "a connection for a group that was closed is closed");
}

// Who polls takes what rings for all; whoever sleeps must hear it none the less.
void check_bell(Report& report) {
    Faced faced;
    Wire& wire = *faced.rank().mail->wire();
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
// A child that lives on must not keep its parent's connections open, nor end them.
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
        faced.reset();  // closes nothing a second time
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
    faced->rank().members->record(Fault::aborted, "over");  // it lingers for a moment only
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
    check_strange_letters(report);
    check_post_within_a_letter(report);
    check_last_words(report);
    check_streams_that_disagree(report);
    check_ends(report);
    check_left_in_steps(report);
    check_left_unconnected(report);
    check_order(report);
    check_letter_of_who_is_gone(report);
    check_letter_given_up(report);
    check_attached_too_late(report);
    check_bell(report);
    return report.finish();
}

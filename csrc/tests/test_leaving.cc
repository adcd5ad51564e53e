// Leaving a group with other hosts: the last frames, their order, and the time until they are
// acknowledged.
#include <chrono>
#include <deque>

#include "tests/calls.h"
#include "tests/message_ranks.h"
#include "tests/peer.h"
#include "tests/play.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

// A rank's messages come before its `left` frame, because both use one connection.
void check_order_of_leaving(Report& report) {
    Faced faced(3);
    Data data(10);
    send(faced.rank(), data, 1, 0);
    std::thread closing([&] { faced.rank().close(); });
    const auto heard = faced.hear_all(kMessages, 0);
    for (size_t s = 1; s < 3; ++s)
        report.check(faced.hear_all(kMessages, s).empty(), "words by another connection");
    closing.join();
    report.check(heard == std::vector{FrameKind::message, FrameKind::left},
                 "a message, then that its rank leaves");
}

// The peer has left and some of its connections have ended. Later frames to it are dropped, and no
// call waits for them.
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

// A rank that left the group before a peer connected says so on each connection.
void check_left_by_each_connection(Report& report) {
    Faced faced(2);
    for (size_t s = 0; s < 2; ++s) {
        faced.say(kMessages, frame_of(FrameKind::left, 1), {}, s);
        faced.hang_up(kMessages, s, false);
    }
    Data data(8);
    expect(report, outcome_of([&] { receive(faced.rank(), data, 1, 0, 10); }), Fault::peer_lost,
           "rank 1 left the group while rank 0 was receiving from it",
           "who has left says so twice");
}

// A rank that has left without ever connecting reads nothing.
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

// The control channels may report a rank's end before its last data have arrived.
void check_left_before_its_last(Report& report) {
    Faced faced;
    std::thread later([&] {
        faced.group().peer_left(1);
        pause(0.3);
        faced.say(kCalls, post_of(1, 2));
        faced.say(kCalls, frame_of(FrameKind::left, 2));
    });
    const auto take = [&] { return run_step(faced.rank(), simple(Kind::direct, 100), 20); };
    expect(report, take(), Fault::none, "", "the last of who has left");
    later.join();
    expect(report, take(), Fault::peer_lost, "rank 1 left the group", "after the last");
}

// A connection ends within a message after its peer has left. The message never completes.
void check_torn_after_leaving(Report& report) {
    Faced faced;
    faced.say_bytes(kMessages, std::string(sizeof(Frame) / 2, 'x'));
    faced.group().peer_left(1);
    faced.hang_up(kMessages, 0, false);
    Data data(8);
    expect(report, outcome_of([&] { receive(faced.rank(), data, 1, 0, 10); }), Fault::peer_lost,
           "rank 1 left the group while rank 0 was receiving from it", "the rest of a message");
}

// Polling a message of a rank that has left ends that message. Messages of other ranks continue.
void check_looks_after_leaving(Report& report) {
    World world(shape_of(3, 2), Mapping::one, 1);
    world[1].close();
    Data data(8), other(8);
    p2p::Request first(message(other, 2, 0), false), second(message(data, 1, 0), false);
    for (p2p::Request* const request : {&first, &second}) world[0].p2p->begin(*request, false);
    report.check(!world[0].p2p->test(second, false), "one of several is not ended alone");
    Deadline soon(10);
    while (!second.done() && !soon.passed()) {
        world[0].p2p->test(first);
        world[0].p2p->test(second);
    }
    report.check(second.done() && second.error() && second.error()->fault() == Fault::peer_lost,
                 "looks at a message of a rank that has left");
    Data sent(8, 3);
    std::thread sending([&] { send(world[2], sent, 0, 0); });
    report.check(world[0].p2p->wait(first, kLong_s, -1, {}) && other == sent,
                 "what another rank sends comes all the same");
    sending.join();
}

// The same for a large message that the rank has seen but not received.
template <class Some>
void check_untaken_after_leaving(Report& report, const std::string& what) {
    Some play(3);
    p2p::Request& sent = play.send(data_of(1, kLarge), 1);
    Deadline soon(10);
    while (!play[1].probe(0, 1) && !soon.passed()) play.look(0);
    report.check(!play[0].cancel(sent), what + ", which may still receive it");
    play.world()[1].close();
    while (!sent.done() && !soon.passed()) play[0].test(sent);
    report.check(sent.done() && sent.error() && sent.error()->fault() == Fault::peer_lost,
                 what + ", which has left");
    const Data data = data_of(2, 10);
    bool came = false;
    const auto meet = [&] {
        play.send(data, 2, 0, 2);
        came = play.brings(play.receive(data.size(), 2, 0, 2), data);
    };
    expect(report, outcome_of(meet), Fault::none, "", what + ", then one to another");
    report.check(came, what + ": one to another has not come");
}

// The last rank may still send to itself. A receive from any rank does not wait for that, but a
// receive from the rank itself does.
void check_alone(Report& report) {
    World world(shape_of(2, 2), Mapping::one, 1);
    world[1].close();
    Data data(8), other(8), sent(8, 3);
    p2p::Request any(message(other, p2p::kAnySource, 0), false), own(message(data, 0, 0), false);
    for (p2p::Request* const request : {&any, &own}) world[0].p2p->begin(*request, false);
    Deadline soon(10);
    while (!any.done() && !soon.passed()) {
        world[0].p2p->test(own);
        world[0].p2p->test(any);
    }
    report.check(any.done() && any.error() && any.error()->fault() == Fault::peer_lost,
                 "a receive of any rank, when all others have left");
    send(world[0], sent, 0, 0);
    report.check(world[0].p2p->wait(own, kLong_s, -1, {}) && data == sent,
                 "what a rank that is left sends to itself comes");
}

// Sends of all sizes to a rank that has left end one by one when polled: unsent ones, partly sent
// ones, and ones begun later.
void check_sends_to_who_has_left(Report& report) {
    enum class There : uint8_t { never, slowly, no_more };
    for (const There there : {There::never, There::slowly, There::no_more}) {
        Faced faced(1, false);
        const std::string what = "case " + std::to_string(static_cast<int>(there));
        if (there != There::never) faced.attach(kMessages, 0, 1, 4096);
        p2p::Engine& engine = *faced.rank().p2p;
        Data little(8), some(kLarge), much(8 << 20);
        std::deque<p2p::Request> sends;
        const auto begin = [&] {
            for (Data* const data : {&some, &little, &much, &little}) {
                sends.emplace_back(message(*data, 1, 0), true);
                engine.begin(sends.back(), true);
            }
        };
        if (there != There::no_more) begin();
        const auto look = [&] {
            Deadline soon(10);
            for (auto& request : sends) {
                while (!request.done() && !soon.passed()) engine.test(request);
            }
        };
        if (there == There::never) {
            faced.group().peer_left(1);
        } else {
            faced.say(kMessages, frame_of(FrameKind::left, 1));
            if (there == There::no_more) faced.hang_up(kMessages, 0, false);
        }
        if (there == There::no_more) {
            Data data(1);
            p2p::Request first(message(data, 1, 5), false);
            engine.begin(first, false);
            for (Deadline soon(10); !first.done() && !soon.passed();) engine.test(first);
            begin();
        }
        look();
        for (const auto& request : sends) {
            report.check(request.done(), what + ": a send that nobody takes");
            report.check(!request.error() || request.error()->fault() == Fault::peer_lost,
                         what + ": how it ends");
        }
        report.check(sends[0].error().has_value() && sends[2].error().has_value(),
                     what + ": large sends have not arrived");
        report.check(!sends[1].error() && !sends[3].error(),
                     what + ": small sends leave at once, as on one host");
        report.check(!faced.rank().members->failed(), what + ": the group goes on");
    }
}

// Sends a message that is done for its sender, while the peer has not read most of it.
void send_untaken(Report& report, Faced& faced, const Data& data) {
    const int little = 64 << 10;
    ::setsockopt(faced.end(kMessages).get(), SOL_SOCKET, SO_RCVBUF, &little, sizeof(little));
    Data sent = data;
    p2p::Request request(message(sent, 1, 0), true);
    faced.rank().p2p->begin(request, false);
    faced.say(kMessages, frame_of(FrameKind::grant, 1));
    report.check(faced.rank().p2p->wait(request, kLong_s, -1, {}), "the kernel has taken it");
}

// Sent bytes wait in the kernel for a peer that computes.
void check_patient_leaving(Report& report) {
    Faced faced;
    const Data data(1 << 20, 7);
    send_untaken(report, faced, data);
    std::thread closing([&] { faced.group().close(20, {}); });
    report.check(faced.hears(kCalls, FrameKind::left, 1), "calls need not wait for messages");
    pause(2.5);
    faced.say(kMessages,
              frame_of(FrameKind::grant, 2));  // the kernel would answer this with a reset
    pause(0.05);
    report.check(faced.rest(kMessages).size() == data.size() + 3 * sizeof(Frame),
                 "what a peer takes late has come, and that its sender has left");
    closing.join();
}

// Unsent grants do not count as a message that was given up.
void check_grants_under_way(Report& report) {
    Faced faced(1, false);
    faced.attach(kMessages, 0, 1, 4 << 10);
    Data data(8);
    std::deque<p2p::Request> receives;
    for (uint64_t i = 1; i <= 1000; ++i) {
        faced.say(kMessages, message_of(i, 0, 0, data.size()));
        receives.emplace_back(message(data, 1, 0), false);
    }
    p2p::Engine& engine = *faced.rank().p2p;
    for (auto& receive : receives) engine.begin(receive, false);
    report.check(!engine.wire()->idle(), "grants wait for the peer");
    std::thread closing([&] { faced.group().close(20, {}); });
    const auto heard = faced.hear_all(kMessages);
    closing.join();
    report.check(!heard.empty() && heard.back() == FrameKind::left,
                 "who has only grants to send leaves in order");
}

// After a failure, closing does not wait for the peer to read.
void check_failure_while_leaving(Report& report) {
    Faced faced;
    const Data data(1 << 20, 7);
    send_untaken(report, faced, data);
    const auto began = std::chrono::steady_clock::now();
    std::thread closing([&] { faced.group().close(20, {}); });
    pause(0.1);
    faced.group().fail(Fault::aborted, "by another rank");
    closing.join();
    report.check(std::chrono::steady_clock::now() - began < std::chrono::seconds(10),
                 "a failure ends the wait of who leaves");
}

// A peer that has connected learns that the rank leaves, even if the rank has never polled the
// connection.
void check_left_before_looking(Report& report) {
    Faced faced, partly(1, false);
    faced.rank().close();
    for (const WireKind kind : kWires)
        report.check(faced.hear_all(kind) == std::vector{FrameKind::left}, "who was not looked at");
    partly.attach(kMessages, 0, 2);
    partly.rank().close();
    report.check(partly.hear_all(kMessages) == std::vector{FrameKind::left},
                 "one of whom not all connections are there");
}

void check_attached_too_late(Report& report) {
    Faced faced;
    faced.rank().close();
    faced.attach(kCalls, 0, 1);
    faced.group().peer_left(1);
    faced.group().fail(Fault::aborted, "too late");
    report.check(faced.hear_all(kCalls, 1) == std::vector{FrameKind::left},
                 "who dials a rank that has left hears so");
}

}  // namespace

int main() {
    Report report;
    check_order_of_leaving(report);
    check_left_in_steps(report);
    check_left_by_each_connection(report);
    check_left_unconnected(report);
    check_left_before_its_last(report);
    check_torn_after_leaving(report);
    check_looks_after_leaving(report);
    check_alone(report);
    check_untaken_after_leaving<Play>(report, "a send to a rank of this host");
    check_untaken_after_leaving<PlayOverHosts>(report, "a send to a rank of another host");
    check_sends_to_who_has_left(report);
    check_patient_leaving(report);
    check_grants_under_way(report);
    check_failure_while_leaving(report);
    check_left_before_looking(report);
    check_attached_too_late(report);
    return report.finish();
}

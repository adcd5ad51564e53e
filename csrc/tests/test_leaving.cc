// Tests of leaving a group on several hosts: the last frames, their order, and the time until they
// are acknowledged.
#include <chrono>
#include <deque>

#include "tests/calls.h"
#include "tests/message_ranks.h"
#include "tests/peer.h"
#include "tests/report.h"
#include "tests/stepped_ranks.h"

namespace {

using namespace unisono;
using namespace unisono::test;

// A rank's messages come before its `left` frame, because both use one connection.
void check_order_of_leaving(Report& report) {
    FakePeer fake(3);
    Data data(10);
    send(fake.rank(), data, 1, 0);
    std::thread closing([&] { fake.rank().close(); });
    const auto received = fake.read_kinds(kMessages, 0);
    for (size_t s = 1; s < 3; ++s)
        report.check(fake.read_kinds(kMessages, s).empty(), "a frame on another connection");
    closing.join();
    report.check(received == std::vector{FrameKind::message, FrameKind::left},
                 "expected the message, then the left frame");
}

// The peer has left and some of its connections have ended. Later frames to it are dropped, and no
// call waits for them.
void check_left_in_steps(Report& report) {
    FakePeer fake(3);
    const auto broadcast = [&] { return run_step(fake.rank(), simple(Kind::broadcast, 100), 1); };
    expect(report, broadcast(), Fault::none, "", "before a connection has ended");
    fake.send(kCalls, frame_of(FrameKind::left, 1), {}, 2);
    for (size_t s = 0; s < 3; ++s) {
        fake.hang_up(kCalls, s, false);
        pause(0.01);
        for (int i = 0; i < 4; ++i)
            expect(report, broadcast(), Fault::none, "", "a call to a rank that is leaving");
    }
}

// A rank that left the group before a peer connected reports this on each connection.
void check_left_by_each_connection(Report& report) {
    FakePeer fake(2);
    for (size_t s = 0; s < 2; ++s) {
        fake.send(kMessages, frame_of(FrameKind::left, 1), {}, s);
        fake.hang_up(kMessages, s, false);
    }
    Data data(8);
    expect(report, outcome_of([&] { receive(fake.rank(), data, 1, 0, 10); }), Fault::peer_lost,
           "rank 1 left the group while rank 0 was receiving from it",
           "a second left frame is ignored");
}

// A call that sends to a rank which has left without ever connecting must end with an error,
// because that rank will never read the data.
void check_left_unconnected(Report& report) {
    FakePeer fake(1, false);
    std::thread later([&] {
        pause(0.05);
        fake.group().peer_left(1);
    });
    expect(report, run_step(fake.rank(), simple(Kind::broadcast, 100), 20), Fault::peer_lost,
           "rank 1 left the group", "a call to a rank that has left");
    later.join();
}

// The control channels may report that a rank has left before its last data arrives. A call must
// still receive these data.
void check_left_before_its_last(Report& report) {
    FakePeer fake;
    std::thread later([&] {
        fake.group().peer_left(1);
        pause(0.3);
        fake.send(kCalls, post_of(1, 2));
        fake.send(kCalls, frame_of(FrameKind::left, 2));
    });
    const auto take = [&] { return run_step(fake.rank(), simple(Kind::direct, 100), 20); };
    expect(report, take(), Fault::none, "", "the last data of a rank that has left");
    later.join();
    expect(report, take(), Fault::peer_lost, "rank 1 left the group", "after the last data");
}

// A connection ends within a message after its peer has left. The message never completes.
void check_torn_after_leaving(Report& report) {
    FakePeer fake;
    fake.send_bytes(kMessages, std::string(sizeof(Frame) / 2, 'x'));
    fake.group().peer_left(1);
    fake.hang_up(kMessages, 0, false);
    Data data(8);
    expect(report, outcome_of([&] { receive(fake.rank(), data, 1, 0, 10); }), Fault::peer_lost,
           "rank 1 left the group while rank 0 was receiving from it",
           "the rest of a message after its sender has left");
}

// A receive from a rank that has left ends with an error when it is polled. A receive from another
// rank goes on and still succeeds.
void check_polling_after_leaving(Report& report) {
    World world(shape_of(3, 2), Mapping::one, 1);
    world[1].close();
    Data data(8), other(8);
    p2p::Request first(message(other, 2, 0), false), second(message(data, 1, 0), false);
    for (p2p::Request* const request : {&first, &second}) world[0].p2p->begin(*request, false);
    report.check(!world[0].p2p->test(second, false),
                 "without ends_without_peers, test does not end a request");
    Deadline soon(10);
    while (!second.done() && !soon.passed()) {
        world[0].p2p->test(first);
        world[0].p2p->test(second);
    }
    report.check(second.done() && second.error() && second.error()->fault() == Fault::peer_lost,
                 "polling a message of a rank that has left");
    Data sent(8, 3);
    std::thread sending([&] { send(world[2], sent, 0, 0); });
    report.check(world[0].p2p->wait(first, kLong_s, -1, {}) && other == sent,
                 "another rank's message still arrives");
    sending.join();
}

// A poll also ends a large message that the rank has seen but not received.
template <class Some>
void check_untaken_after_leaving(Report& report, const std::string& what) {
    Some stepped(3);
    p2p::Request& sent = stepped.send(data_of(1, kLarge), 1);
    Deadline soon(10);
    while (!stepped[1].probe(0, 1) && !soon.passed()) stepped.poll(0);
    report.check(!stepped[0].cancel(sent), what + " that may still receive it");
    stepped.world()[1].close();
    while (!sent.done() && !soon.passed()) stepped[0].test(sent);
    report.check(sent.done() && sent.error() && sent.error()->fault() == Fault::peer_lost,
                 what + " that has left");
    const Data data = data_of(2, 10);
    bool came = false;
    const auto meet = [&] {
        stepped.send(data, 2, 0, 2);
        came = stepped.brings(stepped.receive(data.size(), 2, 0, 2), data);
    };
    expect(report, outcome_of(meet), Fault::none, "", what + ", then a message to another rank");
    report.check(came, what + ": the message to another rank has not arrived");
}

// The last rank may still send to itself. A receive from any rank does not wait for such a message,
// but a receive from the rank itself does.
void check_last_rank(Report& report) {
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
                 "a receive from any rank after all others have left");
    send(world[0], sent, 0, 0);
    report.check(world[0].p2p->wait(own, kLong_s, -1, {}) && data == sent,
                 "the last rank's message to itself arrives");
}

// Each send to a rank that has left must end when the send is polled. Tests all sizes: messages not
// sent yet, messages partly sent, and messages sent after the rank has left.
void check_sends_to_a_rank_that_left(Report& report) {
    enum class There : uint8_t { never, slowly, no_more };
    for (const There there : {There::never, There::slowly, There::no_more}) {
        FakePeer fake(1, false);
        const std::string what = "case " + std::to_string(static_cast<int>(there));
        if (there != There::never) fake.attach(kMessages, 0, 1, 4096);
        p2p::Engine& engine = *fake.rank().p2p;
        Data little(8), some(kLarge), much(8 << 20);
        std::deque<p2p::Request> sends;
        const auto begin = [&] {
            for (Data* const data : {&some, &little, &much, &little}) {
                sends.emplace_back(message(*data, 1, 0), true);
                engine.begin(sends.back(), true);
            }
        };
        if (there != There::no_more) begin();
        const auto poll = [&] {
            Deadline soon(10);
            for (auto& request : sends) {
                while (!request.done() && !soon.passed()) engine.test(request);
            }
        };
        if (there == There::never) {
            fake.group().peer_left(1);
        } else {
            fake.send(kMessages, frame_of(FrameKind::left, 1));
            if (there == There::no_more) fake.hang_up(kMessages, 0, false);
        }
        if (there == There::no_more) {
            Data data(1);
            p2p::Request first(message(data, 1, 5), false);
            engine.begin(first, false);
            for (Deadline soon(10); !first.done() && !soon.passed();) engine.test(first);
            begin();
        }
        poll();
        for (const auto& request : sends) {
            report.check(request.done(), what + ": a send without a receiver ends");
            report.check(!request.error() || request.error()->fault() == Fault::peer_lost,
                         what + ": error of a send");
        }
        report.check(sends[0].error().has_value() && sends[2].error().has_value(),
                     what + ": large sends have not arrived");
        report.check(!sends[1].error() && !sends[3].error(),
                     what + ": small sends complete at once, as on one host");
        report.check(!fake.rank().members->failed(), what + ": the group stays healthy");
    }
}

// Sends a message and waits until the send has completed. The peer has not read most of the message
// then.
void send_untaken(Report& report, FakePeer& fake, const Data& data) {
    const int little = 64 << 10;
    ::setsockopt(fake.end(kMessages).get(), SOL_SOCKET, SO_RCVBUF, &little, sizeof(little));
    Data sent = data;
    p2p::Request request(message(sent, 1, 0), true);
    fake.rank().p2p->begin(request, false);
    fake.send(kMessages, frame_of(FrameKind::grant, 1));
    report.check(fake.rank().p2p->wait(request, kLong_s, -1, {}),
                 "the kernel has accepted the message");
}

// A rank that leaves waits until the kernel has sent all bytes to a peer that computes.
void check_leaving_waits(Report& report) {
    FakePeer fake;
    const Data data(1 << 20, 7);
    send_untaken(report, fake, data);
    std::thread closing([&] { fake.group().close(20, {}); });
    report.check(fake.receives(kCalls, FrameKind::left, 1), "collectives do not wait for messages");
    pause(2.5);
    // If the rank had not waited, its socket would be closed, and the kernel would answer this
    // frame with a reset.
    fake.send(kMessages, frame_of(FrameKind::grant, 2));
    pause(0.05);
    report.check(fake.rest(kMessages).size() == data.size() + 3 * sizeof(Frame),
                 "a late reader gets the whole message and the left frame");
    closing.join();
}

// A rank that leaves while some of its grants are unsent must still leave in good order: unsent
// grants are not messages that it has given up.
void check_unsent_grants(Report& report) {
    FakePeer fake(1, false);
    fake.attach(kMessages, 0, 1, 4 << 10);
    Data data(8);
    std::deque<p2p::Request> receives;
    for (uint64_t i = 1; i <= 1000; ++i) {
        fake.send(kMessages, message_of(i, 0, 0, data.size()));
        receives.emplace_back(message(data, 1, 0), false);
    }
    p2p::Engine& engine = *fake.rank().p2p;
    for (auto& receive : receives) engine.begin(receive, false);
    report.check(!engine.transport()->idle(), "unsent grants wait for the peer");
    std::thread closing([&] { fake.group().close(20, {}); });
    const auto received = fake.read_kinds(kMessages);
    closing.join();
    report.check(!received.empty() && received.back() == FrameKind::left,
                 "a rank with only unsent grants leaves in good order");
}

// After a failure, closing does not wait for the peer to read.
void check_failure_while_leaving(Report& report) {
    FakePeer fake;
    const Data data(1 << 20, 7);
    send_untaken(report, fake, data);
    const auto began = std::chrono::steady_clock::now();
    std::thread closing([&] { fake.group().close(20, {}); });
    pause(0.1);
    fake.group().fail(Fault::aborted, "by another rank");
    closing.join();
    report.check(std::chrono::steady_clock::now() - began < std::chrono::seconds(10),
                 "a failure ends the wait of a leaving rank");
}

// A peer that has connected learns that the rank leaves, even if the rank has never polled the
// connection.
void check_left_before_polling(Report& report) {
    FakePeer fake, partly(1, false);
    fake.rank().close();
    for (const TransportKind kind : kTransports)
        report.check(fake.read_kinds(kind) == std::vector{FrameKind::left},
                     "a connection that was never polled gets a left frame");
    partly.attach(kMessages, 0, 2);
    partly.rank().close();
    report.check(partly.read_kinds(kMessages) == std::vector{FrameKind::left},
                 "a peer whose connections are not complete gets a left frame");
}

void check_connected_too_late(Report& report) {
    FakePeer fake;
    fake.rank().close();
    fake.attach(kCalls, 0, 1);
    fake.group().peer_left(1);
    fake.group().fail(Fault::aborted, "too late");
    report.check(fake.read_kinds(kCalls, 1) == std::vector{FrameKind::left},
                 "a peer that connects to a rank that has left gets a left frame");
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
    check_polling_after_leaving(report);
    check_last_rank(report);
    check_untaken_after_leaving<SteppedRanks>(report, "a send to a rank of this host");
    check_untaken_after_leaving<SteppedHosts>(report, "a send to a rank of another host");
    check_sends_to_a_rank_that_left(report);
    check_leaving_waits(report);
    check_unsent_grants(report);
    check_failure_while_leaving(report);
    check_left_before_polling(report);
    check_connected_too_late(report);
    return report.finish();
}

// Tests of the end of a group over a message library: the last frames, and the memory that the
// library still uses.
#include "tests/library_peer.h"
#include "tests/message_ranks.h"
#include "tests/report.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr size_t kBytes = 100'000;
constexpr uint64_t kPiece = 64 << 10;  // the first bytes of a message, sent at once

// A rank leaves while the library receives into a caller's array, and into memory for a message
// that no receive matches. The library must end before this memory is free again.
void check_receives_under_way(Report& report, bool releases) {
    const std::string what = releases ? "a library that ends" : "a library that goes on";
    Data data(kBytes);
    LibraryPeer fake;
    ScriptedLibrary& library = fake.library();
    library.releases = releases;
    const p2p::Request& request = fake.receive_most(data, 1);
    library.deliver(1, message_of(2, 2, kPiece, kBytes), kPiece);
    static_cast<void>(fake.engine().probe(1, 9));
    report.check(library.receives.size() == 2, what + ": two receives have begun");
    bool early = false;
    library.on_close = [&] { early = request.done(); };
    fake.group().close();
    report.check(library.closed && !early, what + ": the library ends before the request");
    report.check(request.done() && request.error(), what + ": the request has failed");
    report.check(request.needs_memory() != releases, what + ": the array is kept if necessary");
    report.check(library.sent_of(FrameKind::left) == 1, what + ": the peer gets a left frame");
    report.check(!fake.group().members().failed(), what + ": the group has not failed");
    // The library may write until the process ends; a sanitizer reports memory that was freed.
    if (!releases) std::memset(library.receives[1].data, 1, library.receives[1].bytes);
}

// A thread polls after the rank has left the group and before the engine stops.
void check_poll_while_leaving(Report& report, bool sends) {
    const std::string what = sends ? "an unfinished send" : "a receive";
    Data data(kBytes);
    LibraryPeer fake;
    p2p::Request& request = fake.begin(data, 1, sends);
    fake.group().members().leave();
    report.check(fake.engine().test(request), what + ": a poll ends the request");
    fake.group().close();
    for (const TransportKind kind : kTransports)
        report.check(fake.library(kind).sent_of(FrameKind::left) == 1,
                     what + ": the peer gets a left frame");
    report.check(!request.needs_memory(), what + ": the library has ended");
}

// A rank leaves while the library sends from a caller's array. The frame tells the peer that the
// content of the message may change.
void check_sends_under_way(Report& report) {
    Data data(kBytes);
    LibraryPeer fake(3);
    fake.library().releases = false;
    const p2p::Request& request = fake.begin(data, 1, true);
    fake.group().close();
    for (const uint32_t peer : {1U, 2U})
        report.check(fake.library().sent_of(FrameKind::left, peer) == 1,
                     "the peers of an unfinished send get left frames");
    for (const auto& [peer, frame] : fake.library().sent) {
        if (frame.kind == FrameKind::left)
            report.check(frame.loads == (peer == 1), "only the receiver learns of the message");
    }
    report.check(request.needs_memory(), "the array of an unfinished send is kept");
}

// The peer leaves while it sends a message. The message never counts as received, even if the
// library brings its last bytes together with the left frame.
void check_given_up_by_peer(Report& report, bool comes) {
    Data data(kBytes);
    LibraryPeer fake;
    p2p::Request& request = fake.receive_most(data, 1);
    Frame left = frame_of(FrameKind::left);
    left.loads = 1;
    fake.library().deliver(1, left);
    if (comes) fake.library().ended.push_back({fake.library().receives.back().ticket, ""});
    expect(report, outcome_of([&] { fake.engine().wait(request, 20, -1, {}); }), Fault::peer_lost,
           "rank 1 left the group while rank 0 was receiving from it",
           "a message that its sender gave up");
    fake.group().close();
}

// The same after the control channels have reported that the peer has left.
void check_given_up_after_report(Report& report) {
    Data data(kBytes);
    LibraryPeer fake;
    p2p::Request& request = fake.receive_most(data, 1);
    fake.group().peer_left(1);
    Frame left = frame_of(FrameKind::left);
    left.loads = 1;
    fake.library().deliver(1, left);
    static_cast<void>(fake.engine().test(request, false));
    fake.library().ended.push_back({fake.library().receives.back().ticket, ""});
    expect(report, outcome_of([&] { fake.engine().wait(request, 20, -1, {}); }), Fault::peer_lost,
           "rank 1 left the group while rank 0 was receiving from it",
           "a message that a rank gave up when it left");
    fake.group().close();
}

// A message that no receive matches fails no other request.
void check_unmatched_given_up(Report& report) {
    Data data(10);
    LibraryPeer fake;
    fake.library().deliver(1, message_of(1, 1, kPiece), kPiece);
    Frame left = frame_of(FrameKind::left);
    left.loads = 1;
    fake.library().deliver(1, left);
    static_cast<void>(fake.engine().probe(1, 9));
    report.check(!fake.group().members().failed(), "an unmatched message fails nothing");
    expect(report, outcome_of([&] { fake.engine().wait(fake.begin(data, 2, false), 20, -1, {}); }),
           Fault::peer_lost, "rank 1 left the group", "a later receive");
    fake.group().close();
}

// A failure while the peer sends a message. The message never counts as received.
void check_failure_of_peer(Report& report) {
    Data data(kBytes);
    LibraryPeer fake;
    p2p::Request& request = fake.receive_most(data, 1);
    fake.library().deliver_failure(1, Fault::aborted, "enough of this");
    fake.library().ended.push_back({fake.library().receives.back().ticket, ""});
    expect(report, outcome_of([&] { fake.engine().wait(request, 20, -1, {}); }), Fault::aborted,
           "enough of this", "a message of a rank that fails");
    fake.group().close();
}

// A rank fails while it sends. The receiver learns of the failure before the content changes.
void check_failure_while_sending(Report& report) {
    Data data(kBytes);
    LibraryPeer fake(3);
    fake.library().releases = false;
    p2p::Request& request = fake.begin(data, 1, true);
    size_t told = 0;
    fake.library().on_close = [&] { told = fake.library().sent_of(FrameKind::failed); };
    fake.group().abort("enough of this");
    static_cast<void>(fake.engine().test(request));
    report.check(request.done() && told == 1, "the receiver of an unfinished send is told");
    p2p::Request never(message(data, 1, 2), false);
    static_cast<void>(fake.engine().test(never));
    report.check(fake.library().sent_of(FrameKind::failed) == 1, "the receiver is told once");
    report.check(fake.library().sent_of(FrameKind::failed, 2) == 0,
                 "other ranks learn of the failure through the control channels");
    fake.group().close();
}

// Frames, failed transfers and lost peers do not fail the group of a rank that has left.
void check_input_after_leaving(Report& report) {
    Data data(10);
    LibraryPeer fake(3);
    ScriptedLibrary& library = fake.library();
    library.lost_peer = 1;
    library.holds_heads = true;
    library.on_poll = [&] {
        library.deliver(2, frame_of(FrameKind::grant, 7));
        library.deliver(2, frame_of(FrameKind::data, 7, kBytes), kBytes);
        for (const uint64_t head : library.heads) library.ended.push_back({head, "it has gone"});
        library.on_poll = [&] { library.deliver(2, frame_of(FrameKind::grant, 8)); };
    };
    fake.group().close();
    report.check(library.sent_of(FrameKind::left, 2) == 1,
                 "a peer gets a left frame although another peer is lost");
    report.check(library.receives.empty(), "a rank that has left receives nothing");
    report.check(!fake.group().members().failed(), "late input does not fail the group");
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__)
// Memory that a library may still use is never freed, on purpose.
extern "C" [[gnu::visibility("default")]] const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
    return "detect_leaks=0";
}
#endif

int main() {
    Report report;
    for (const bool releases : {true, false}) check_receives_under_way(report, releases);
    for (const bool sends : {true, false}) check_poll_while_leaving(report, sends);
    check_sends_under_way(report);
    for (const bool comes : {false, true}) check_given_up_by_peer(report, comes);
    check_given_up_after_report(report);
    check_unmatched_given_up(report);
    check_failure_of_peer(report);
    check_failure_while_sending(report);
    check_input_after_leaving(report);
    return report.finish();
}

// Tests failures in the middle of messages. Each request must end with the cause of the failure,
// and no thread may use the request's memory afterwards.
#include <atomic>
#include <fstream>
#include <functional>
#include <string>

#include "tests/kernel_features.h"
#include "tests/peer.h"
#include "tests/read_only_memory.h"
#include "tests/report.h"
#include "tests/stepped_ranks.h"

namespace {

using namespace unisono;
using namespace unisono::test;

// A sender that helps to copy a message fails, because the receiver's memory is read-only. The
// receive must end with an error, not count as complete.
void check_write_that_fails(Report& report) {
    constexpr size_t kBytes = 64 << 20;
    const PartlyReadOnly memory(kBytes);
    World world(shape_of(2, 2), Mapping::own, 1);
    world.run([&](Rank& rank) {
        Data data(rank.rank == 0 ? kBytes : 0, 1);
        const auto transfer = [&] {
            if (rank.rank == 0) return send(rank, data, 1, 0);
            p2p::Request request({memory.data(), kBytes, DType::uint8, 0, 0}, false);
            rank.p2p->begin(request, false);
            rank.p2p->wait(request, kLong_s, -1, {});
        };
        expect(report, outcome_of(transfer), Fault::aborted, "Bad address", "read-only memory");
    });
}

template <class Some>
struct State {
    const char* what;
    std::function<void(Some&)> reach;
};

// Returns all states in which a message may be when its group fails.
template <class Some>
std::vector<State<Some>> states() {
    return {
        {"posted", [](Some& stepped) { stepped.receive(10, 1); }},
        {"offered", [](Some& stepped) { stepped.send(data_of(1, kLarge), 1); }},
        {"stored",
         [](Some& stepped) {
             stepped.send(data_of(1, kLarge), 1);
             stepped.receive(10, 2);
             stepped.settle();
         }},
        {"waiting for room",
         [](Some& stepped) {
             stepped.receive(10, 1);
             stepped.fill();
             stepped.send(data_of(1, kLarge), 2);
         }},
        {"asked for",
         [](Some& stepped) {
             stepped.receive(kLarge, 1);
             stepped.fill();
             stepped.send(data_of(1, kLarge), 1);
             stepped.poll(1);
         }},
        {"found",
         [](Some& stepped) {
             stepped.receive(kLarge, 1);
             stepped.fill();
             stepped.send(data_of(1, kLarge), 1);
             stepped.poll(1);
             stepped.poll(0);
         }},
        {"begun",
         [](Some& stepped) {
             stepped.send(data_of(1, 40 * kLarge), 1);
             stepped.receive(40 * kLarge, 1);
         }},
        {"half moved",
         [](Some& stepped) {
             stepped.send(data_of(1, 40 * kLarge), 1);
             stepped.receive(40 * kLarge, 1);
             stepped.poll(0);
             stepped.poll(1);
         }},
        {"to oneself", [](Some& stepped) { stepped.send(data_of(1, kLarge), 1, 0, 0); }},
    };
}

template <class Some>
void check_failures(Report& report) {
    for (const bool single_copy : {true, false}) {
        for (const State<Some>& state : states<Some>()) {
            for (const bool closes : {false, true}) {
                const std::string what = std::string(state.what) + (closes ? ", closed" : "");
                Some stepped(2, single_copy);
                state.reach(stepped);
                report.check(stepped.under_way() > 0, what + ": no request is pending");
                if (closes) {
                    stepped.world()[0].close();
                    stepped.world()[1].close();
                } else {
                    // Rank 0 may already know of the failure that rank 1 records. In this case rank
                    // 0's own record has no effect.
                    for (const uint32_t rank : {1, 0})
                        stepped.world()[rank].members->record(Fault::aborted, "enough of this");
                }
                stepped.settle();
                report.check(stepped.under_way() == 0, what + ": a request is still pending");
                stepped.check_errors(report, Fault::aborted, closes ? "closed" : "enough of this",
                                     what);
                stepped.scribble();
                stepped.settle();
                report.check(stepped.is_scribbled(), what + ": memory is used after the end");
            }
        }
    }
}

// A sender leaves and reuses its memory. The receiver must not get the new content.
void check_sender_left(Report& report) {
    for (const bool single_copy : {true, false}) {
        // -1: the receive begins after the sender has left. 0: it begins before the sender leaves.
        // 1: it begins before the sender leaves, and is then polled once.
        for (const int polls : {-1, 0, 1}) {
            SteppedRanks stepped(2, single_copy);
            stepped.send(data_of(1, 40 * kLarge), 1);
            p2p::Request* in = polls < 0 ? nullptr : &stepped.receive(40 * kLarge, 1);
            for (int i = 0; i < polls; ++i) stepped.poll(1);
            stepped.world()[0].close();
            stepped.scribble();
            if (!in) in = &stepped.receive(40 * kLarge, 1);
            expect(report, outcome_of([&] { stepped[1].wait(*in, kLong_s, -1, {}); }),
                   Fault::peer_lost, "rank 0", "a sender that left");
            report.check(in->done() && in->error(), "the message does not count as received");
        }
    }
}

void check_receiver_left(Report& report) {
    for (const bool single_copy : {true, false}) {
        SteppedRanks stepped(2, single_copy);
        p2p::Request& out = stepped.send(data_of(1, 40 * kLarge), 1);
        stepped.receive(40 * kLarge, 1);
        stepped.poll(0);
        stepped.world()[1].close();
        stepped.scribble();
        expect(report, outcome_of([&] { stepped[0].wait(out, kLong_s, -1, {}); }), Fault::peer_lost,
               "rank 1 left the group while rank 0 was sending to it", "a receiver that left");
        report.check(stepped.is_scribbled(), "memory of a receiver that left");
    }
}

// Returns the value `name` of /proc/self/status in bytes, or 0 if it is missing.
uint64_t own_bytes(const std::string& name) {
    std::ifstream status("/proc/self/status");
    uint64_t kib = 0;
    for (std::string word; status >> word;) {
        if (word == name + ":") status >> kib;
    }
    return kib << 10;
}

// The peer does not read a large send when the group fails. The send is dropped without a copy: it
// takes no extra memory, no more of it is sent, and the caller may reuse the memory at once.
void check_stalled_send(Report& report, bool times_out) {
    constexpr int room = 64 << 10;  // the kernel's buffer at each end
    const std::string what = times_out ? "a send that timed out" : "a send that was aborted";
    FakePeer fake(1, false);
    fake.attach(kMessages, 0, 1, room);
    Data data(64 << 20, 7);
    p2p::Request request(message(data, 1, 0), true);
    p2p::Engine& engine = *fake.rank().p2p;
    engine.begin(request, false);
    fake.send(kMessages, frame_of(FrameKind::grant, 1));
    report.check(!engine.wait(request, kLong_s, 0.05, {}), what + ": the send has not stalled");
    const uint64_t before = own_bytes("VmRSS");
    if (!times_out) fake.group().abort("enough of this");
    expect(report, outcome_of([&] { engine.wait(request, times_out ? 0.05 : kLong_s, -1, {}); }),
           times_out ? Fault::timeout : Fault::aborted,
           times_out ? "it was not received" : "enough of this", what);
    report.check(request.done(), what + ": the send is still pending");
    std::fill(data.begin(), data.end(), uint8_t{0xee});
    std::thread closing([&] { fake.rank().close(); });
    size_t came = 0, overwritten = 0;
    fake.read(kMessages, 0, [&](auto piece) {
        came += piece.size();
        overwritten += static_cast<size_t>(std::count(piece.begin(), piece.end(), 0xee));
    });
    closing.join();
    report.check(came > kEager && came < 16 * room,
                 what + ": " + std::to_string(came) + " bytes were sent");
    report.check(overwritten == 0, what + ": bytes that the caller wrote afterwards were sent");
    if (report.can_run("memory of a send that is dropped", before > 0, "no VmRSS here"))
        report.check(own_bytes("VmHWM") < before + (8 << 20), what + ": it was copied");
}

// Each rank waits for a message from the next rank, in a cycle. The text of the timeout must name
// all ranks of the cycle.
void check_cycle(Report& report, Mapping mapping) {
    World world(shape_of(3, 2), mapping, 3);
    std::atomic<int> waiting{0};
    world.run([&](Rank& rank) {
        Data data(10);
        const auto next = static_cast<int32_t>((rank.rank + 1) % 3);
        if (rank.rank == 0) {
            while (waiting < 2) pause(0.001);
            pause(0.02);
        } else {
            ++waiting;
        }
        expect(report, outcome_of([&] { receive(rank, data, next, 4, rank.rank == 0 ? 0.2 : 60); }),
               Fault::timeout,
               "recv from rank 1 (10 bytes, tag 4): timeout after 0.2 s on rank 0: "
               "nothing was sent; rank 1: it has made no call yet, and it waits in recv from rank "
               "2; these ranks wait for each other: rank 0 in recv from rank 1, rank 1 in recv "
               "from rank 2, rank 2 in recv from rank 0",
               "a cycle");
    });
    World other(shape_of(2, 2), mapping, 2);
    Data data(10);
    const auto outcome = outcome_of([&] { receive(other[0], data, 1, 4, 0.05); });
    expect(report, outcome, Fault::timeout, "nothing was sent; rank 1: it has made no call yet",
           "no cycle");
    report.check(outcome.text.find("each other") == std::string::npos, "no cycle: " + outcome.text);
}

}  // namespace

int main() {
    Report report;
    // This test runs first, because it reads the process's peak memory.
    for (const bool times_out : {false, true}) check_stalled_send(report, times_out);
    check_failures<SteppedRanks>(report);
    check_failures<SteppedHosts>(report);
    check_sender_left(report);
    check_receiver_left(report);
    if (can_run_single_copy(report, "writes that fail")) check_write_that_fails(report);
    for (const Mapping mapping : {Mapping::own, Mapping::one}) check_cycle(report, mapping);
    return report.finish();
}

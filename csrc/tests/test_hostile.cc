// Tests of a peer on this host that writes arbitrary values to the shared memory. The damage is
// limited to an error or a message that never ends.
#include <algorithm>
#include <atomic>
#include <random>
#include <string>

#include "tests/kernel_features.h"
#include "tests/report.h"
#include "tests/stepped_ranks.h"

namespace {

using namespace unisono;
using namespace unisono::test;
using p2p::Phase;

// Rank 0 is a real rank. The test plays rank 1 and writes to the memory that they share.
class Hostile {
  public:
    explicit Hostile(bool single_copy = true) : stepped_(2, single_copy) {
        auto& segment = *stepped_.world()[1].segment;
        in_ = segment.pair(1, 0);
        out_ = segment.pair(0, 1);
    }
    SteppedRanks& stepped() { return stepped_; }
    p2p::Pair& in() { return *in_.shared; }
    p2p::Pair& out() { return *out_.shared; }
    p2p::Slot& slot(uint64_t number) { return in_.slots[number - 1]; }
    p2p::Slot& put(uint64_t number, uint64_t tag, uint64_t bytes,
                   uint32_t transfer = p2p::kNoTransfer, uint64_t place = 0) {
        p2p::Slot& s = slot(number);
        s.tag = tag;
        s.bytes = bytes;
        s.place = place;
        s.kind = static_cast<uint32_t>(DType::uint8);
        s.transfer = transfer;
        s.number = number;
        return s;
    }
    p2p::Transfer& offer(uint32_t transfer, const Data& data, uint64_t tag) {
        p2p::Transfer& t = in().transfers[transfer];
        t.source = reinterpret_cast<uintptr_t>(data.data());
        t.bytes = data.size();
        t.tag = tag;
        t.kind = static_cast<uint64_t>(DType::uint8);
        t.phase = static_cast<uint64_t>(Phase::offered);
        return t;
    }
    Outcome receive(size_t bytes, uint64_t tag, double timeout_s = 0.05) {
        p2p::Request* request = nullptr;
        return outcome_of([&] {
            request = &stepped_.receive(bytes, tag, 1, 0);
            stepped_[0].wait(*request, timeout_s, -1, {});
        });
    }

  private:
    SteppedRanks stepped_;
    PairMemory in_, out_;
};

void check_hostile_slots(Report& report) {
    const auto refused = [&](const char* what, const std::function<void(Hostile&)>& write) {
        Hostile hostile;
        write(hostile);
        expect(report, hostile.receive(100, 1), Fault::system, "rank 1 sent a message", what);
    };
    constexpr uint64_t ring = 1 << 16;
    refused("2^64 - 1 bytes", [](Hostile& h) { h.put(1, 1, ~0ULL); });
    refused("more than an eager message", [](Hostile& h) { h.put(1, 1, kMostEager + 1); });
    refused("beyond the end of the ring",
            [](Hostile& h) { h.put(1, 1, 100, p2p::kNoTransfer, ring - 99); });
    refused("a place that wraps around",
            [](Hostile& h) { h.put(1, 1, 100, p2p::kNoTransfer, ~0ULL - 50); });
    refused("an unknown type", [](Hostile& h) { h.put(1, 1, 100).kind = num_dtypes; });
    refused("an unknown type with another tag", [](Hostile& h) { h.put(1, 2, 100).kind = 77; });
    for (const uint32_t transfer : {p2p::kTransfers, p2p::kTransfers + 1, 0x7fffffffU})
        refused("an unknown transfer", [&](Hostile& h) { h.put(1, 1, 100, transfer); });
    for (const uint64_t phase : {0, 3, 4, 5, 6, 77}) {
        refused("a transfer that was not offered", [&](Hostile& h) {
            h.put(1, 1, 100, 3);
            h.in().transfers[3].phase = phase;
        });
    }
}

// If a hostile peer changes a slot after the receiver has read it, the receiver must use the values
// of its first read.
void check_slots_that_change(Report& report) {
    for (const size_t bytes : {10UL, 100UL, kEager}) {
        for (const bool aside : {false, true}) {
            Hostile h;
            h.put(1, 1, bytes);
            p2p::Request& never = h.stepped().receive(10, 2, 1, 0);
            h.stepped().poll(0);  // no receive matches this message
            const auto change = [&] {
                h.slot(1).bytes = 1 << 30;
                h.slot(1).place = ~0ULL - 50;
                h.slot(1).kind = 77;
                h.slot(1).transfer = 70;
            };
            if (!aside) change();
            for (uint64_t k = 2; k < 400; ++k) {
                h.put(k, 3, 1);
                if (k == 300) change();
            }
            h.stepped().poll(0);
            p2p::Request& in = h.stepped().receive(bytes, 1, 1, 0);
            report.check(in.done() && !in.error() && !never.done(),
                         "a slot that changes after it was read");
        }
    }
}

void check_hostile_transfers(Report& report) {
    Data data = data_of(1, kLarge);
    for (const bool single_copy : {true, false}) {
        Hostile twice(single_copy);
        const Data larger(40 * kLarge);
        twice.offer(3, larger, 1);
        twice.put(1, 1, larger.size(), 3);
        p2p::Request& first = twice.stepped().receive(larger.size(), 1, 1, 0);
        twice.put(2, 1, larger.size(), 3);
        twice.in().transfers[3].phase = static_cast<uint64_t>(Phase::offered);
        expect(report, twice.receive(larger.size(), 1), Fault::system, "two messages by transfer 3",
               "the same transfer twice");
        report.check(first.done() && first.error(), "both receives have ended");
        for (const uint64_t phase : {0, 1, 2, 3, 4, 5, 6, 77}) {
            for (const uint64_t claims :
                 {0ULL, 0xffffffffULL, 1ULL << 32, ~0ULL, 0xfffffffeULL << 32}) {
                for (const uint64_t blocks : {0ULL, 3ULL, ~0ULL}) {
                    Hostile h(single_copy);
                    p2p::Transfer& t = h.offer(3, data, 1);
                    h.put(1, 1, kLarge, 3);
                    p2p::Request& in = h.stepped().receive(kLarge, 1, 1, 0);
                    t.phase = phase;
                    t.claims = claims;
                    t.written = claims == 1ULL << 32 ? 1 : blocks;
                    t.turn = 0;
                    h.in().blocks = blocks;
                    h.in().blocks_taken = blocks + (blocks & 1);
                    h.stepped().settle();
                    h.stepped().world()[0].members->record(Fault::aborted, "enough of this");
                    h.stepped().settle();
                    report.check(in.done(), "a receive by an invalid transfer is still pending");
                    h.stepped().scribble();
                    h.stepped().settle();
                    report.check(h.stepped().is_scribbled(),
                                 "memory of an invalid transfer is used after the end");
                }
            }
        }
    }
}

void check_invalid_source(Report& report) {
    Data data = data_of(1, kLarge);
    Hostile h;
    h.offer(3, data, 1).source = 4096;
    h.put(1, 1, kLarge, 3);
    expect(report, h.receive(kLarge, 1, 20), Fault::aborted, "cannot read the memory that rank 1",
           "memory that cannot be read");
}

void check_invalid_target(Report& report) {
    Data data = data_of(1, kLarge);
    Hostile h;
    p2p::Request& out = h.stepped().send(data, 1, 0, 1);
    p2p::Transfer& t = h.out().transfers[0];
    t.target = 4096;
    t.phase = static_cast<uint64_t>(Phase::reading);
    ++h.out().steps;
    expect(report, outcome_of([&] { h.stepped()[0].wait(out, 20, -1, {}); }), Fault::aborted,
           "cannot write the memory that rank 1", "memory that cannot be written");
}

void check_hostile_answers(Report& report) {
    const auto stepped = [](Hostile& h) {
        h.put(1, 9, 10);
        h.in().held = 5;
        p2p::Request& in = h.stepped().receive(10, 1, 1, 0);
        h.stepped().poll(0);
        return &in;
    };
    for (const uint64_t answer : {67ULL, 255ULL}) {
        Hostile h;
        stepped(h);
        h.in().answered = 1 << 8 | answer;
        expect(report, h.receive(10, 2), Fault::system, "rank 1 sent an answer",
               "an unknown transfer");
    }
    for (const uint64_t answer : {3ULL, 2ULL << 8, 1ULL << 8, ~0ULL}) {
        Hostile h;
        const p2p::Request* const in = stepped(h);
        report.check(h.in().asked == 1 && h.out().asked == 0, "the receiver has asked");
        h.in().answered = answer;
        expect(report, h.receive(10, 2), Fault::timeout, "", "an answer to another question");
        report.check(in->done() && in->error(), "the receive ends with an error");
    }
    Hostile h;  // an answer that refers to a message that was not offered
    stepped(h);
    h.in().transfers[7].bytes = 10;
    h.in().transfers[7].tag = 1;
    h.in().transfers[7].kind = static_cast<uint64_t>(DType::uint8);
    h.in().answered = 1 << 8 | 8;
    expect(report, h.receive(10, 2), Fault::system, "in phase 0", "an answer without a message");
}

// The receiver writes wrong values to the counters that the sender reads. All sends must still end
// once the group fails.
void check_hostile_receiver(Report& report) {
    Data data = data_of(1, kLarge);
    for (const bool single_copy : {true, false}) {
        for (const uint64_t counter : {0ULL, 1ULL, 1ULL << 32, ~0ULL}) {
            Hostile h(single_copy);
            SteppedRanks& stepped = h.stepped();
            for (uint64_t k = 0; k < 20; ++k) {
                stepped.send(data_of(k, k * 500), 1, 0, 1);
                h.out().slots_taken = h.out().bytes_taken = h.out().blocks_taken = counter + k;
                h.out().asked = counter;
                h.out().asked_tag = counter;
                for (p2p::Transfer& t : h.out().transfers) {
                    t.claims = counter;
                    t.turn = counter;
                    t.target = reinterpret_cast<uintptr_t>(data.data());
                    if (t.phase == static_cast<uint64_t>(Phase::offered))
                        t.phase = static_cast<uint64_t>(k % 2 ? Phase::staging : Phase::complete);
                }
                ++h.out().steps;
                stepped.poll(0);
            }
            stepped.world()[0].members->record(Fault::aborted, "enough of this");
            stepped.settle();
            report.check(stepped.under_way() == 0, "sends to an invalid receiver have ended");
        }
    }
}

// The peer writes random values to random addresses of the shared memory. All requests must still
// end once the group fails, and their memory must not be used afterwards.
void check_random_hostility(Report& report) {
    for (uint64_t seed = 0; seed < 60; ++seed) {
        Hostile h(seed % 2);
        std::mt19937_64 random(seed);
        Data data = data_of(seed, kLarge);
        SteppedRanks& stepped = h.stepped();
        uint64_t number = 0;
        const auto some = [&]() -> uint64_t {
            const uint64_t values[] = {0,       1, 2, 3, 4, 5, 6, random() % 70, random() % kLarge,
                                       random()};
            return values[random() % std::size(values)];
        };
        const size_t sizes[] = {0, 10, 100, kEager, kLarge};
        const auto outcome = outcome_of([&] {
            for (int step = 0; step < 200; ++step) {
                const size_t bytes = sizes[random() % std::size(sizes)];
                const auto transfer = static_cast<uint32_t>(random() % 4);
                auto* const words =
                    reinterpret_cast<std::atomic<uint64_t>*>(random() % 2 ? &h.in() : &h.out());
                switch (random() % 8) {
                    case 0:
                        stepped.receive(bytes, random() % 3, 1, 0);
                        break;
                    case 1:
                        stepped.send(data_of(1, bytes), random() % 3, 0, 1);
                        break;
                    case 2:
                        h.put(++number, random() % 3, bytes,
                              bytes > kEager ? transfer : p2p::kNoTransfer);
                        break;
                    case 3:
                        h.offer(transfer, data, random() % 3);
                        break;
                    case 4:
                        words[random() % 64] = some();
                        break;
                    case 5:
                        reinterpret_cast<std::atomic<uint64_t>*>(
                            &h.in().transfers[transfer])[random() % 2 ? 0 : 8 + random() % 2] =
                            some();
                        break;
                    default:
                        stepped.poll(0);
                }
            }
        });
        stepped.world()[0].members->record(Fault::aborted, "enough of this");
        stepped.settle();
        report.check(stepped.under_way() == 0,
                     "seed " + std::to_string(seed) + " after " + outcome.text);
        stepped.scribble();
        stepped.settle();
        report.check(stepped.is_scribbled(),
                     "memory is used after the end, seed " + std::to_string(seed));
    }
}

}  // namespace

int main() {
    Report report;
    check_hostile_slots(report);
    check_slots_that_change(report);
    check_hostile_transfers(report);
    check_hostile_answers(report);
    check_hostile_receiver(report);
    if (can_run_single_copy(report, "unmapped memory")) {
        check_invalid_source(report);
        check_invalid_target(report);
    }
    check_random_hostility(report);
    return report.finish();
}

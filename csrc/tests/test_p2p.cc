// Messages between two ranks: all arrive, in order; those that cannot fail, soon.
#include <algorithm>
#include <atomic>
#include <random>

#include "letters.h"
#include "report.h"
#include "world.h"

namespace {

using namespace unisono;
using namespace unisono::test;

size_t bytes_of(uint64_t seed) {
    return seed % 5 == 0 ? 0 : seed * 7919 % 2000;
}

// Every thread of every rank writes to its like on all ranks; receives are posted before and after
// the messages come, in other orders than they were sent.
void check_mail(Report& report, Mapping mapping, uint32_t ranks) {
    constexpr uint64_t kTags = 2, kLetters = 6;
    World world(shape_of(ranks, 1), mapping, ranks);
    std::atomic<int> wrong{0};
    world.run([&](Rank& rank) {
        std::vector<std::thread> threads;
        for (uint64_t tag = 0; tag < kTags; ++tag) {
            threads.emplace_back([&, tag] {
                const auto outcome =
                    outcome_of([&] { exchange(rank, ranks, tag, kLetters, bytes_of, wrong); });
                report.check(outcome.fault == Fault::none, "mail: " + outcome.text);
            });
        }
        for (auto& thread : threads) thread.join();
        // From anybody: each of the others once.
        const auto outcome = outcome_of([&] {
            std::vector<uint8_t> data(300, static_cast<uint8_t>(rank.rank));
            if (rank.rank != 0) {
                rank.mail->wait(*rank.mail->send(message(data, 0, 9)), kLong_s, -1, {});
                return;
            }
            std::vector<bool> seen(ranks);
            for (uint32_t i = 1; i < ranks; ++i) {
                const auto parcel = rank.mail->receive(message(data, kAnySource, 9));
                rank.mail->wait(*parcel, kLong_s, -1, {});
                const auto from = static_cast<size_t>(parcel->source());
                wrong +=
                    seen[from] || data != std::vector<uint8_t>(300, static_cast<uint8_t>(from));
                seen[from] = true;
            }
        });
        report.check(outcome.fault == Fault::none, "mail from anybody: " + outcome.text);
    });
    report.check(wrong == 0, "letters of " + std::to_string(ranks));
}

constexpr uint32_t kRanks = 3;  // of what follows

void check_letters_that_differ(Report& report, Mapping mapping) {
    World world(shape_of(kRanks, 2), mapping, 1);
    world.run([&](Rank& rank) {
        std::vector<uint8_t> data(rank.rank == 0 ? 1000 : 999);
        if (rank.rank == 2) return;
        const auto outcome = outcome_of([&] {
            const auto parcel = rank.rank == 0 ? rank.mail->send(message(data, 1, 3))
                                               : rank.mail->receive(message(data, 0, 3));
            rank.mail->wait(*parcel, kLong_s, -1, {});
        });
        expect(report, outcome, Fault::mismatch, "rank 0 sent 1000 bytes", "letters that differ");
    });
}

void check_letters_nobody_sends(Report& report, Mapping mapping) {
    for (const int32_t from : {1, kAnySource}) {
        World world(shape_of(kRanks, 2), mapping, 1);
        std::vector<uint8_t> data(1000), sent(100);
        const auto kept = world[1].mail->send(message(sent, 0, 7));  // another tag
        const auto parcel = world[0].mail->receive(message(data, from, 3));
        report.check(!world[0].mail->wait(*parcel, kLong_s, 0.02, {}), "nothing came yet");
        if (from == 1) world[0].mail->carry_on();
        world[1].close();
        if (from == kAnySource) world[2].close();
        expect(report, outcome_of([&] { world[0].mail->wait(*parcel, kLong_s, -1, {}); }),
               Fault::peer_lost, "left the group", "letters of who left");
    }
    World world(shape_of(kRanks, 2), mapping, 1);
    std::vector<uint8_t> data(1000);
    expect(report, outcome_of([&] {
               world[0].mail->wait(*world[0].mail->receive(message(data, 1, 3)), 0.05, -1, {});
           }),
           Fault::timeout, "nothing was sent", "letters that are late");
    expect(report, outcome_of([&] { world[0].mail->send(message(data, 0, 3)); }), Fault::timeout,
           "nothing was sent", "letters after a failure");
}

// A peer's garbage must do no more harm than an error.
void check_letter_of_garbage(Report& report, Mapping mapping) {
    World world(shape_of(kRanks, 2), mapping, 1);
    Segment& segment = *world[1].segment;
    MailSlot* slot = segment.mail_slot(1, 0, 0);
    slot->bytes = ~0ULL;
    slot->tag = 5;
    slot->kind = 77;
    segment.mailbox(1, 0).head.store(1);
    std::vector<uint8_t> data(1000);
    expect(report, outcome_of([&] { world[0].mail->receive(message(data, 1, 3)); }), Fault::system,
           "cannot store", "huge letter");
    expect(report, outcome_of([&] { world[1].members->require_healthy(); }), Fault::system,
           "rank 0 cannot store", "after a huge letter");
}

}  // namespace

int main() {
    Report report;
    for (const Mapping mapping : {Mapping::own, Mapping::one}) {
        for (const uint32_t ranks : {2U, 3U, 4U, 8U}) check_mail(report, mapping, ranks);
        check_letters_that_differ(report, mapping);
        check_letters_nobody_sends(report, mapping);
        check_letter_of_garbage(report, mapping);
    }
    return report.finish();
}

// Messages between two ranks: all arrive, in order; those that cannot fail, soon.
#include <algorithm>
#include <atomic>
#include <random>

#include "report.h"
#include "world.h"

namespace {

using namespace unisono;
using namespace unisono::test;

std::vector<uint8_t> letter(uint32_t from, uint32_t to, uint64_t tag, uint64_t number) {
    const uint64_t seed = ((from * 8ULL + to) * 8 + tag) * 64 + number;
    std::vector<uint8_t> data(seed % 5 == 0 ? 0 : seed * 7919 % 2000);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(seed * 13 + i);
    return data;
}

// Every thread of every rank writes to its like on all ranks; receives are posted before and after
// the messages come, in other orders than they were sent.
void check_mail(Report& report, Mapping mapping, uint32_t ranks) {
    constexpr uint64_t kTags = 2, kLetters = 6;
    World world(shape_of(ranks, 1), mapping, ranks);
    std::atomic<int> wrong{0};
    const auto exchange = [&](Rank& rank, uint64_t tag) {
        PostOffice& mail = *rank.mail;
        std::mt19937_64 random(rank.rank * 10 + tag);
        std::vector<std::shared_ptr<Parcel>> parcels;
        std::vector<std::pair<std::vector<uint8_t>, std::vector<uint8_t>>>
            arriving;  // what, and what it should be
        arriving.reserve(ranks * kLetters);
        std::vector<std::vector<uint8_t>> leaving;
        leaving.reserve(ranks * kLetters);
        for (uint64_t k = 0; k < kLetters; ++k) {
            for (uint32_t i = 1; i < ranks; ++i) {
                const uint32_t to = (rank.rank + i) % ranks, from = (rank.rank + ranks - i) % ranks;
                leaving.push_back(letter(rank.rank, to, tag, k));
                parcels.push_back(
                    mail.send(message(leaving.back(), static_cast<int32_t>(to), tag)));
                auto expected = letter(from, rank.rank, tag, k);
                arriving.emplace_back(std::vector<uint8_t>(expected.size()), expected);
                parcels.push_back(
                    mail.receive(message(arriving.back().first, static_cast<int32_t>(from), tag)));
            }
            if (random() % 2) mail.carry_on();
        }
        std::shuffle(parcels.begin(), parcels.end(), random);
        for (const auto& parcel : parcels) {
            while (!mail.wait(*parcel, kLong_s, random() % 2 ? -1 : 0.001, {})) {
            }
        }
        for (const auto& [got, expected] : arriving) wrong += got != expected;
        for (const auto& parcel : parcels) wrong += !parcel->done() || parcel->error();
    };
    world.run([&](Rank& rank) {
        std::vector<std::thread> threads;
        for (uint64_t tag = 0; tag < kTags; ++tag) {
            threads.emplace_back([&, tag] {
                const auto outcome = outcome_of([&] { exchange(rank, tag); });
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

// The core without Python: executor, dispatcher, mail, membership, and how they fail.
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <random>

#include "../prepared.h"
#include "hand_plans.h"
#include "world.h"

namespace {

using namespace unisono;
using namespace unisono::test;

constexpr double kLong_s = 60;  // of what must not happen

// ---- calls

enum class Kind : uint8_t { one_shot, direct, chain, broadcast, all_gather, barrier };
constexpr uint32_t kKinds = 6;

struct Step {
    Kind kind;
    uint64_t count;  // elements; of the longest piece where pieces differ
    uint32_t root;
    uint64_t block_bytes;
    uint64_t seed;
    bool in_place;
};

int32_t value_of(uint64_t seed, uint32_t rank, uint64_t i) {
    uint64_t h = (seed * 31 + rank + 1) * 0x9e3779b97f4a7c15ULL + i * 0xbf58476d1ce4e5b9ULL;
    return static_cast<int32_t>((h ^ h >> 29) & 0xffffff);
}

std::shared_ptr<const Plan> plan_of(const Step& step, uint32_t rank, uint32_t ranks) {
    switch (step.kind) {
        case Kind::one_shot:
            return hand::one_shot(rank, ranks);
        case Kind::direct:
            return hand::direct(rank, ranks);
        case Kind::chain:
            return hand::chain(rank, ranks);
        case Kind::broadcast:
            return hand::broadcast(rank, ranks, step.root);
        case Kind::all_gather:
            return hand::all_gather(rank, ranks);
        case Kind::barrier:
            break;
    }
    return hand::barrier(rank, ranks);
}

// One call of one rank with its memory.
class Call {
  public:
    Call(const Step& step, uint32_t rank, uint32_t ranks)
        : step_(step), rank_(rank), ranks_(ranks) {
        if (step.kind != Kind::barrier) {
            in_.resize(length(rank));
            for (uint64_t i = 0; i < in_.size(); ++i) in_[i] = value_of(step.seed, rank, i);
        }
        const bool gathers = step.kind == Kind::all_gather;
        if (gathers) {
            for (uint32_t q = 0; q < ranks; ++q) outs_.emplace_back(length(q), -1);
        } else if (step.kind != Kind::barrier && !step.in_place) {
            outs_.emplace_back(in_.size(), -1);
        }
    }

    Execution execution() {
        constexpr OpKind ops[] = {OpKind::all_reduce, OpKind::all_reduce, OpKind::all_reduce,
                                  OpKind::broadcast,  OpKind::all_gather, OpKind::barrier};
        const auto kind = static_cast<size_t>(step_.kind);
        const CallArgs args{ops[kind],     DType::int32,
                            ReduceOp::sum, static_cast<int32_t>(step_.root),
                            step_.count,   kind << 32 | step_.block_bytes};
        const Prepared prepared{plan_of(step_, rank_, ranks_),
                                args,
                                fingerprint(args),
                                step_.block_bytes,
                                0,
                                step_.count * 4,
                                StorePolicy::adaptive};
        if (step_.kind == Kind::barrier) return prepared.bind(Pieces{}, Pieces{});
        Pieces out;
        for (auto& o : outs_) out.push_back(piece(o));
        if (outs_.empty()) out.push_back(piece(in_));
        Pieces in;
        in.push_back(piece(in_));
        return prepared.bind(std::move(in), std::move(out));
    }

    bool right() const {
        if (step_.kind == Kind::barrier) return true;
        if (step_.kind == Kind::all_gather) {
            for (uint32_t q = 0; q < ranks_; ++q) {
                for (uint64_t i = 0; i < outs_[q].size(); ++i) {
                    if (outs_[q][i] != value_of(step_.seed, q, i)) return false;
                }
            }
            return true;
        }
        const auto& result = outs_.empty() ? in_ : outs_[0];
        for (uint64_t i = 0; i < result.size(); ++i) {
            int32_t expected = 0;
            for (uint32_t q = 0; q < ranks_; ++q) expected += value_of(step_.seed, q, i);
            if (step_.kind == Kind::broadcast) expected = value_of(step_.seed, step_.root, i);
            if (result[i] != expected) return false;
        }
        return true;
    }

  private:
    uint64_t length(uint32_t rank) const {
        return step_.kind == Kind::all_gather
                   ? step_.count * ((rank + step_.seed) % ranks_) / ranks_
                   : step_.count;
    }
    static Piece piece(std::vector<int32_t>& v) {
        return {reinterpret_cast<std::byte*>(v.data()), v.size() * 4};
    }

    Step step_;
    uint32_t rank_, ranks_;
    std::vector<int32_t> in_;
    std::vector<std::vector<int32_t>> outs_;
};

Step random_step(std::mt19937_64& random, uint32_t ranks) {
    constexpr uint64_t counts[] = {0, 1, 7, 64, 500, 3000};
    Step step{};
    step.kind = static_cast<Kind>(random() % kKinds);
    step.count = counts[random() % std::size(counts)];
    step.root = static_cast<uint32_t>(random() % ranks);
    step.block_bytes = 64ULL << random() % 5;
    step.seed = random() % 1000;
    step.in_place = random() % 2 != 0;
    return step;
}

SegmentShape shape_of(uint32_t ranks, uint32_t depth) {
    return {ranks, depth, 4096 * ((ranks + 3) / 4), 2, 256};
}

// Barriers and all-reduces without surprises, for tests of what goes wrong.
Step simple(Kind kind, uint64_t count) {
    return {kind, count, 0, 256, 5, false};
}

Outcome run_step(Rank& rank, const Step& step, double timeout_s = kLong_s,
                 const Interrupted& interrupted = {}) {
    Call call(step, rank.rank, rank.members->ranks());
    auto execution = call.execution();
    return outcome_of([&] { rank.dispatcher->run(execution, timeout_s, interrupted); });
}

void pause(double s) {
    std::this_thread::sleep_for(std::chrono::duration<double>(s));
}

// ---- what works

// The same random calls on all ranks; some wait, some are waited for later, in any order.
void check_sequences(Report& report, Mapping mapping, uint32_t ranks, uint64_t seed) {
    std::mt19937_64 choose(seed);
    World world(shape_of(ranks, 1 + seed % 3), mapping, choose() % 2 ? ranks : 1);
    std::atomic<int> wrong{0};
    world.run([&](Rank& rank) {
        std::mt19937_64 script(seed), own(seed * 100 + rank.rank);
        std::vector<std::pair<std::unique_ptr<Call>, std::shared_ptr<Job>>> under_way;
        const auto finish = [&](size_t at) {
            auto [call, job] = std::move(under_way[at]);
            under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(at));
            if (own() % 2) {
                while (!rank.dispatcher->wait(*job, 0.001, {})) {
                }
            } else {
                rank.dispatcher->wait(*job, -1, {});
            }
            if (!call->right()) ++wrong;
        };
        const Outcome outcome = outcome_of([&] {
            for (int i = 0; i < 60; ++i) {
                auto call = std::make_unique<Call>(random_step(script, ranks), rank.rank, ranks);
                auto execution = call->execution();
                if (own() % 2) {
                    rank.dispatcher->run(execution, kLong_s, {});
                    if (!call->right()) ++wrong;
                } else {
                    constexpr double inlines_s[] = {0, 20e-6, 200e-6};
                    auto job = rank.dispatcher->submit(std::move(execution), kLong_s,
                                                       inlines_s[own() % 3]);
                    under_way.emplace_back(std::move(call), std::move(job));
                }
                while (under_way.size() > 4 || (!under_way.empty() && own() % 3 == 0))
                    finish(own() % under_way.size());
            }
            while (!under_way.empty()) finish(0);
        });
        report.check(outcome.fault == Fault::none,
                     "sequence of " + std::to_string(ranks) + ": " + outcome.text);
    });
    report.check(wrong == 0, "results of a sequence of " + std::to_string(ranks));
}

// Threads of one rank make equal calls, so their order does not matter: none may overtake another
// half-way, or be lost.
void check_threads(Report& report, Mapping mapping, uint32_t ranks) {
    World world(shape_of(ranks, 2), mapping, 1);
    std::atomic<int> wrong{0};
    world.run([&](Rank& rank) {
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 3; ++t) {
            threads.emplace_back([&, t] {
                const auto outcome = outcome_of([&] {
                    for (unsigned i = 0; i < 30; ++i) {
                        Call call(simple(Kind::direct, 300), rank.rank, ranks);
                        if ((i + t) % 2) {
                            auto execution = call.execution();
                            rank.dispatcher->run(execution, kLong_s, {});
                        } else {
                            rank.dispatcher->wait(
                                *rank.dispatcher->submit(call.execution(), kLong_s, t * 30e-6), -1,
                                {});
                        }
                        if (!call.right()) ++wrong;
                    }
                });
                report.check(outcome.fault == Fault::none, "threads: " + outcome.text);
            });
        }
        for (auto& thread : threads) thread.join();
    });
    report.check(wrong == 0, "results of threads");
}

Message message(std::vector<uint8_t>& data, int32_t peer, uint64_t tag) {
    return {reinterpret_cast<std::byte*>(data.data()), data.size(), DType::uint8, peer, tag};
}

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

// ---- what fails

class Failures {
  public:
    Failures(Report& report, Mapping mapping) : report_(report), mapping_(mapping) {}

    void run() {
        mismatch(simple(Kind::direct, 100), simple(Kind::direct, 101));
        mismatch(simple(Kind::direct, 100), simple(Kind::one_shot, 9000));
        mismatch(simple(Kind::barrier, 0), simple(Kind::all_gather, 5000));
        mismatch(simple(Kind::broadcast, 3000), simple(Kind::chain, 3000));
        timeout();
        left_before();
        left_within();
        aborted();
        closed_under_a_caller();
        closed_by_a_signal();
        interrupted_behind_another();
        letters_that_differ();
        letters_nobody_sends();
        letter_of_garbage();
    }

  private:
    static constexpr uint32_t kRanks = 3;

    void expect(const Outcome& outcome, Fault fault, const std::string& part,
                const std::string& what) {
        report_.check(outcome.fault == fault && outcome.text.find(part) != std::string::npos,
                      what + " gave " + std::to_string(static_cast<int>(outcome.fault)) + ": " +
                          outcome.text);
    }

    void mismatch(const Step& some, const Step& other) {
        World world(shape_of(kRanks, 2), mapping_, 1);
        world.run([&](Rank& rank) {
            expect(run_step(rank, simple(Kind::direct, 50)), Fault::none, "", "before a mismatch");
            const Step& step = rank.rank == 1 ? other : some;
            expect(run_step(rank, step), Fault::mismatch, "rank 1 called", "mismatch");
            expect(run_step(rank, simple(Kind::barrier, 0)), Fault::mismatch, "rank 1 called",
                   "after a mismatch");
        });
    }

    void timeout() {
        World world(shape_of(kRanks, 2), mapping_, 1);
        world.run([&](Rank& rank) {
            if (rank.rank == 1) pause(0.3);
            expect(run_step(rank, simple(Kind::direct, 100), 0.1), Fault::timeout,
                   "rank 1 has not arrived", "timeout");
        });
    }

    void left_before() {
        World world(shape_of(kRanks, 2), mapping_, 1);
        world.run([&](Rank& rank) {
            expect(run_step(rank, simple(Kind::direct, 100)), Fault::none, "",
                   "the last call of all");
            if (rank.rank == 2) return rank.close();
            expect(run_step(rank, simple(Kind::direct, 100)), Fault::peer_lost, "rank 2 left",
                   "left before");
        });
    }

    void left_within() {
        for (const double inline_s : {0.0, 1e-5}) {
            World world(shape_of(kRanks, 2), mapping_, 1);
            Call call(simple(Kind::direct, 1000), 2, kRanks);
            const auto job = world[2].dispatcher->submit(call.execution(), kLong_s, inline_s);
            pause(0.05);
            world[2].close();
            report_.check(job->done() && job->error() && job->error()->fault() == Fault::aborted,
                          "closed with a call under way");
            world.run([&](Rank& rank) {
                if (rank.rank == 2) return;
                expect(run_step(rank, simple(Kind::direct, 1000)), Fault::aborted, "rank 2 gave up",
                       "left within");
            });
        }
    }

    void aborted() {
        World world(shape_of(kRanks, 2), mapping_, 1);
        world.run([&](Rank& rank) {
            if (rank.rank == 0) {
                pause(0.05);
                return rank.members->record(Fault::aborted, "enough of this");
            }
            expect(run_step(rank, simple(Kind::one_shot, 100)), Fault::aborted, "enough of this",
                   "abort");
        });
    }

    void closed_under_a_caller() {
        World world(shape_of(kRanks, 2), mapping_, 1);
        std::vector<uint8_t> data(10);
        Call queued(simple(Kind::barrier, 0), 0, kRanks);
        std::thread caller([&] {
            expect(run_step(world[0], simple(Kind::direct, 100)), Fault::aborted, "closed",
                   "closed under a caller");
        });
        std::thread reader([&] {
            const auto outcome = outcome_of([&] {
                world[0].mail->wait(*world[0].mail->receive(message(data, 1, 0)), kLong_s, -1, {});
            });
            expect(outcome, Fault::aborted, "closed", "closed under a reader");
        });
        pause(0.05);
        const auto job = world[0].dispatcher->submit(queued.execution(), kLong_s, 1e-4);
        world[0].close();
        caller.join();
        reader.join();
        report_.check(job->done() && job->error().has_value(), "closed over a queued call");
        expect(outcome_of([&] { world[0].dispatcher->wait(*job, -1, {}); }), Fault::aborted,
               "closed", "waiting after the end");
        expect(run_step(world[0], simple(Kind::barrier, 0)), Fault::aborted, "closed",
               "calling after the end");
    }

    // A handler runs in the thread that waits, above its locks.
    void closed_by_a_signal() {
        World world(shape_of(kRanks, 2), mapping_, 1);
        Call first(simple(Kind::direct, 100), 0, kRanks);
        const auto job = world[0].dispatcher->submit(first.execution(), kLong_s, 0);
        const auto handler = [&] {
            world[0].close();
            return false;
        };
        expect(run_step(world[0], simple(Kind::barrier, 0), kLong_s, handler), Fault::aborted,
               "closed", "closed by a handler");
        World other(shape_of(kRanks, 2), mapping_, 1);
        Call second(simple(Kind::direct, 100), 0, kRanks);
        const auto timed = other[0].dispatcher->submit(second.execution(), kLong_s, 0);
        const auto handler_of_other = [&] {
            other[0].close();
            return false;
        };
        expect(outcome_of([&] { other[0].dispatcher->wait(*timed, 10, handler_of_other); }),
               Fault::aborted, "closed", "closed by a handler while waiting");
    }

    void interrupted_behind_another() {
        World world(shape_of(kRanks, 2), mapping_, 1);
        Call first(simple(Kind::direct, 100), 0, kRanks);
        const auto job = world[0].dispatcher->submit(first.execution(), kLong_s, 1e-5);
        const auto outcome =
            run_step(world[0], simple(Kind::barrier, 0), kLong_s, [] { return true; });
        expect(outcome, Fault::interrupted, "", "interrupted");
        expect(outcome_of([&] { world[0].dispatcher->wait(*job, -1, {}); }), Fault::aborted,
               "signal", "what was before it");
        expect(run_step(world[1], simple(Kind::barrier, 0)), Fault::aborted,
               "rank 0 was interrupted", "the others");
    }

    void letters_that_differ() {
        World world(shape_of(kRanks, 2), mapping_, 1);
        world.run([&](Rank& rank) {
            std::vector<uint8_t> data(rank.rank == 0 ? 1000 : 999);
            if (rank.rank == 2) return;
            const auto outcome = outcome_of([&] {
                const auto parcel = rank.rank == 0 ? rank.mail->send(message(data, 1, 3))
                                                   : rank.mail->receive(message(data, 0, 3));
                rank.mail->wait(*parcel, kLong_s, -1, {});
            });
            expect(outcome, Fault::mismatch, "rank 0 sent 1000 bytes", "letters that differ");
        });
    }

    void letters_nobody_sends() {
        for (const int32_t from : {1, kAnySource}) {
            World world(shape_of(kRanks, 2), mapping_, 1);
            std::vector<uint8_t> data(1000), sent(100);
            const auto kept = world[1].mail->send(message(sent, 0, 7));  // another tag
            const auto parcel = world[0].mail->receive(message(data, from, 3));
            report_.check(!world[0].mail->wait(*parcel, kLong_s, 0.02, {}), "nothing came yet");
            if (from == 1) world[0].mail->carry_on();
            world[1].close();
            if (from == kAnySource) world[2].close();
            expect(outcome_of([&] { world[0].mail->wait(*parcel, kLong_s, -1, {}); }),
                   Fault::peer_lost, "left the group", "letters of who left");
        }
        World world(shape_of(kRanks, 2), mapping_, 1);
        std::vector<uint8_t> data(1000);
        expect(outcome_of([&] {
                   world[0].mail->wait(*world[0].mail->receive(message(data, 1, 3)), 0.05, -1, {});
               }),
               Fault::timeout, "nothing was sent", "letters that are late");
        expect(outcome_of([&] { world[0].mail->send(message(data, 0, 3)); }), Fault::timeout,
               "nothing was sent", "letters after a failure");
    }

    // A peer's garbage must do no more harm than an error.
    void letter_of_garbage() {
        World world(shape_of(kRanks, 2), mapping_, 1);
        Segment& segment = *world[1].segment;
        MailSlot* slot = segment.mail_slot(1, 0, 0);
        slot->bytes = ~0ULL;
        slot->tag = 5;
        slot->kind = 77;
        segment.mailbox(1, 0).head.store(1);
        std::vector<uint8_t> data(1000);
        expect(outcome_of([&] { world[0].mail->receive(message(data, 1, 3)); }), Fault::system,
               "cannot store", "huge letter");
        expect(run_step(world[1], simple(Kind::barrier, 0)), Fault::system, "rank 0 cannot store",
               "after a huge letter");
    }

    Report& report_;
    Mapping mapping_;
};

// ---- shapes and plans that are refused

void check_refusals(Report& report) {
    const auto refused = [&](const char* what, auto&& make) {
        report.check(outcome_of(make).fault == Fault::invalid,
                     std::string(what) + " is not refused");
    };
    refused("a group of nobody", [] { static_cast<void>(shape_for(0, 1, 1 << 20)); });
    refused("staging beyond all bounds",
            [] { create_segment({2, 2, 1ULL << 40, 2, 256}, World::nonce); });
    refused("a slot of nobody", [] {
        hand::Writer()
            .copy(hand::slot(2, 0), hand::in(0), hand::in(0))
            .post(1)
            .plan(0, 2, 1, 1, 1, 1, {1, 1});
    });
    refused("writing a peer's slot", [] {
        hand::Writer()
            .copy(hand::slot(1, 0), hand::in(0), hand::in(0))
            .post(1)
            .plan(0, 2, 1, 1, 1, 1, {1, 1});
    });
    refused("a block without its end",
            [] { hand::Writer().post(1).plan(0, 2, 1, 1, 1, 2, {1, 1}); });
    refused("falling progress",
            [] { hand::Writer().post(2).post(1).plan(0, 2, 1, 1, 1, 1, {1, 1}); });
    refused("missing operands", [] {
        hand::Writer()
            .reduce(hand::out(0), {}, hand::in(0), 0)
            .post(1)
            .plan(0, 2, 1, 1, 1, 1, {1, 1});
    });
    World world(shape_of(2, 1), Mapping::own, 2);
    refused("a rank twice", [&] { Membership(*world[0].segment, 0, World::nonce); });
    Step large = simple(Kind::direct, 1000000);
    large.block_bytes = 1 << 20;
    report.check(run_step(world[0], large).fault == Fault::invalid,
                 "blocks larger than the staging are not refused");
    for (const uint64_t seq : {1ULL, 0xffffffULL, 0x1000000ULL, 0x1000001ULL, 0xffffffffffULL}) {
        report.check(ahead_of(header_of(seq, 5), seq) == 0 &&
                         ahead_of(header_of(seq + 1, 5), seq) == 1 &&
                         ahead_of(header_of(seq - 1, kHashMask), seq) == -1,
                     "the wrap of 24 bits");
    }
}

#if !defined(__SANITIZE_THREAD__)
// ---- processes; not under a thread sanitizer, which does not follow them

// A rank that is killed in a call is named, soon.
void check_killed(Report& report) {
    const Descriptor fd(create_segment(shape_of(2, 2), World::nonce));
    const pid_t child = ::fork();
    if (child == 0) {
        Rank rank =
            rank_of(std::make_shared<Group>(Descriptor(::dup(fd.get())), 1, World::nonce, 1), 1);
        run_step(rank, simple(Kind::direct, 100));
        Call call(simple(Kind::direct, 1000), 1, 2);
        auto execution = call.execution();
        rank.dispatcher->run(execution, kLong_s, [] { return ::kill(::getpid(), SIGKILL) == 0; });
        ::_exit(1);
    }
    Rank rank =
        rank_of(std::make_shared<Group>(Descriptor(::dup(fd.get())), 0, World::nonce, 1), 0);
    report.check(run_step(rank, simple(Kind::direct, 100)).fault == Fault::none,
                 "a call between processes");
    int status = 0;
    ::waitpid(child, &status, 0);
    const auto start = std::chrono::steady_clock::now();
    const Outcome outcome = run_step(rank, simple(Kind::direct, 50));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    // Either the loss is seen first, or that what it began is another call.
    report.check(outcome.fault == Fault::peer_lost || outcome.fault == Fault::mismatch,
                 "killed: " + outcome.text);
    report.check(took.count() < 1, "killed, seen late");
}

// Some emulators of the kernel accept this advice and ignore it.
bool forks_wipe_memory() {
    void* page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ::madvise(page, 4096, MADV_WIPEONFORK);
    *static_cast<char*>(page) = 1;
    const pid_t child = ::fork();
    if (child == 0) ::_exit(*static_cast<char*>(page));
    int status = 0;
    ::waitpid(child, &status, 0);
    ::munmap(page, 4096);
    return status == 0;
}

// A forked child finds out that the group is not its own; nothing in it hangs or crashes.
void check_forked(Report& report) {
    auto world = std::make_unique<World>(shape_of(2, 2), Mapping::own, 1);
    Call call(simple(Kind::direct, 100), 0, 2);
    std::vector<uint8_t> data(10);
    const auto job = (*world)[0].dispatcher->submit(call.execution(), kLong_s, 0);
    const auto parcel = (*world)[0].mail->receive(message(data, 1, 0));
    (*world)[0].mail->carry_on();
    pause(0.05);
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(10);
        Rank& rank = (*world)[0];
        const auto refused = [](const Outcome& outcome) {
            return outcome.text.find("forked child") != std::string::npos;
        };
        bool ok = refused(run_step(rank, simple(Kind::barrier, 0)));
        ok &= refused(outcome_of([&] { rank.dispatcher->submit(call.execution(), 1, 0); }));
        ok &= refused(outcome_of([&] { rank.dispatcher->wait(*job, -1, {}); }));
        ok &= refused(outcome_of([&] { rank.mail->send(message(data, 1, 0)); }));
        ok &= refused(outcome_of([&] { rank.mail->wait(*parcel, 1, -1, {}); }));
        rank.members->record(Fault::aborted, "by a child");
        world.reset();
        ::_exit(ok ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    report.check(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                 "forked child: status " + std::to_string(status));
    const auto outcome = outcome_of([&] { (*world)[0].members->require_healthy(); });
    report.check(outcome.fault == Fault::none, "a child reached its parent's group");
}
#endif

}  // namespace

int main() {
    Report report;
#if !defined(__SANITIZE_THREAD__)
    check_killed(report);  // first, while this process has one thread
    if (forks_wipe_memory()) check_forked(report);
#endif
    check_refusals(report);
    for (const Mapping mapping : {Mapping::own, Mapping::one}) {
        for (const uint32_t ranks : {2U, 3U, 4U, 8U}) {
            for (uint64_t seed = 1; seed <= 4; ++seed)
                check_sequences(report, mapping, ranks, seed);
            check_mail(report, mapping, ranks);
        }
        check_threads(report, mapping, 3);
        Failures(report, mapping).run();
    }
    return report.finish();
}

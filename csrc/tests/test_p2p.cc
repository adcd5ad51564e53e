// Tests messages between ranks of one host. All messages must arrive in order, on every path.
#include <algorithm>
#include <atomic>
#include <random>

#include "tests/message_ranks.h"
#include "tests/report.h"
#include "tests/world.h"

namespace {

using namespace unisono;
using namespace unisono::test;
using p2p::kAnySource;
using p2p::kAnyTag;

// How large messages move: by one copy between the ranks' memories, or by two copies through shared
// memory.
enum class Path : bool { copied_once = true, staged = false };

void use(World& world, uint32_t ranks, Path path) {
    for (uint32_t r = 0; r < ranks; ++r) world[r].p2p->use_single_copy(path == Path::copied_once);
}

void run(Report& report, World& world, const std::string& what,
         const std::function<void(Rank&)>& body) {
    world.run([&](Rank& rank) {
        const auto outcome = outcome_of([&] { body(rank); });
        report.check(outcome.fault == Fault::none, what + ": " + outcome.text);
    });
}

// Returns lengths for each path (slot, byte ring, transfer), just below and above each limit.
size_t bytes_of(uint64_t seed) {
    constexpr size_t lengths[] = {0,    1,    24,     25,     64,     65,    500,
                                  8192, 8193, 16'384, 16'385, 20'000, 70'000};
    return lengths[seed * 7919 % std::size(lengths)];
}

// Each thread of each rank sends to the corresponding threads of all other ranks. All messages must
// arrive unchanged, although the receives are posted before or after the arrivals, and in a
// different order than the sends.
void check_exchange(Report& report, Mapping mapping, const SegmentShape& shape, Path path) {
    constexpr uint64_t kTags = 2, kMessages = 8;
    World world(shape, mapping, shape.ranks);
    use(world, shape.ranks, path);
    std::atomic<int> wrong{0};
    run(report, world, "an exchange", [&](Rank& rank) {
        std::vector<std::thread> threads;
        for (uint64_t tag = 0; tag < kTags; ++tag) {
            threads.emplace_back([&, tag] {
                const auto outcome = outcome_of(
                    [&] { exchange(rank, shape.ranks, tag, kMessages, bytes_of, wrong); });
                report.check(outcome.fault == Fault::none, "an exchange: " + outcome.text);
            });
        }
        for (auto& thread : threads) thread.join();
    });
    report.check(wrong == 0, "messages of " + std::to_string(shape.ranks) + " ranks");
}

// Receives messages from any rank with any tag. One message arrives from each other rank,
// unchanged.
void check_any(Report& report, Mapping mapping, Path path) {
    constexpr uint32_t kRanks = 4;
    World world(shape_of(kRanks, 1), mapping, kRanks);
    use(world, kRanks, path);
    run(report, world, "a receive from any rank", [&](Rank& rank) {
        for (const size_t bytes : {3UL, 60UL, 300UL, 40'000UL}) {
            Data data = data_of(rank.rank + 1, bytes);
            Data none;
            if (rank.rank != 0) {
                receive(rank, none, 0, 1);
                send(rank, data, 0, 100 + rank.rank);
                continue;
            }
            for (uint32_t i = 1; i < kRanks; ++i) send(rank, none, static_cast<int32_t>(i), 1);
            std::vector<bool> seen(kRanks);
            for (uint32_t i = 1; i < kRanks; ++i) {
                p2p::Request request(message(data, kAnySource, kAnyTag), false);
                rank.p2p->begin(request, false);
                rank.p2p->wait(request, kLong_s, -1, {});
                const auto from = static_cast<size_t>(request.source());
                report.check(
                    request.tag() == 100 + from && !seen[from] && data == data_of(from + 1, bytes),
                    "a receive from any rank with any tag");
                seen[from] = true;
            }
        }
    });
}

// Messages of one tag and their receives keep their order, for all lengths.
void check_order(Report& report, Mapping mapping, const SegmentShape& shape, Path path) {
    constexpr uint64_t kMessages = 40;
    World world(shape, mapping, 2);
    use(world, 2, path);
    run(report, world, "in order", [&](Rank& rank) {
        std::vector<Data> datas;
        Requests requests;
        for (uint64_t k = 0; k < kMessages; ++k)
            datas.push_back(rank.rank == 0 ? data_of(k, bytes_of(k)) : Data(bytes_of(k)));
        std::mt19937_64 random(1);
        for (uint64_t k = 0; k < kMessages; ++k) {
            const uint64_t tag = rank.rank == 0 || random() % 2 ? 5 : kAnyTag;
            begin(requests, rank, message(datas[k], rank.rank == 0 ? 1 : 0, tag), rank.rank == 0);
        }
        for (p2p::Request& request : requests) rank.p2p->wait(request, kLong_s, -1, {});
        for (uint64_t k = 0; k < kMessages; ++k)
            report.check(datas[k] == data_of(k, bytes_of(k)), "message " + std::to_string(k));
    });
}

// Sends enough messages to wrap around the slots and the byte ring many times, and to make the
// sender wait for room.
void check_wraps(Report& report, Mapping mapping, const SegmentShape& shape) {
    constexpr uint64_t kMessages = 3000;
    World world(shape, mapping, 2);
    const auto length = [&](uint64_t k) { return k * 7919 % (shape.pair_bytes / 4 + 1); };
    std::atomic<int> wrong{0};
    run(report, world, "messages that wrap around", [&](Rank& rank) {
        Data data;
        for (uint64_t k = 0; k < kMessages; ++k) {
            data = rank.rank == 0 ? data_of(k, length(k)) : Data(length(k));
            if (rank.rank == 0) {
                send(rank, data, 1, k % 3);
            } else {
                receive(rank, data, 0, k % 3);
                wrong += data != data_of(k, length(k));
            }
        }
    });
    report.check(wrong == 0, "content of messages that wrap around");
}

// Large messages arrive unchanged, whichever rank comes first. This includes messages that the
// sender helps to copy, and lengths that are not a multiple of the chunk.
void check_large(Report& report, Mapping mapping, const SegmentShape& shape, Path path) {
    World world(shape, mapping, 2);
    use(world, 2, path);
    run(report, world, "large messages", [&](Rank& rank) {
        for (const size_t bytes :
             {8193UL, 16'384UL, 16'385UL, 100'001UL, 3'000'000UL, 9'000'001UL}) {
            for (const bool receiver_first : {false, true}) {
                Data data = rank.rank == 0 ? data_of(bytes, bytes) : Data(bytes);
                if ((rank.rank == 1) != receiver_first) pause(0.002);
                if (rank.rank == 0) {
                    send(rank, data, 1, 1);
                } else {
                    receive(rank, data, 0, 1);
                    report.check(data == data_of(bytes, bytes),
                                 std::to_string(bytes) + " bytes arrive wrong");
                }
            }
        }
    });
}

void check_to_oneself(Report& report, Mapping mapping) {
    World world(shape_of(1, 2), mapping, 1);
    Rank& rank = world[0];
    std::vector<Data> datas;
    Requests requests;
    uint64_t seed = 0;
    for (const size_t bytes : {0UL, 24UL, 8192UL, 8193UL, 16384UL, 16385UL, 300'000UL}) {
        for (const bool receive_first : {false, true}) {
            Data sent = data_of(++seed, bytes), got(bytes);
            p2p::Request out(message(sent, 0, 1), true), in(message(got, kAnySource, 1), false);
            rank.p2p->begin(receive_first ? in : out, false);
            rank.p2p->begin(receive_first ? out : in, false);
            report.check(out.done() && in.done() && in.source() == 0 && sent == got,
                         std::to_string(bytes) + " bytes from a rank to itself");
        }
    }
    // Sends so many messages that only some are copied and complete at once. Then receives all
    // messages of one tag, and then those of the other, each in order.
    for (uint64_t k = 0; k < 60; ++k) {
        datas.push_back(data_of(k, 8000));
        begin(requests, rank, message(datas.back(), 0, k % 2), true);
    }
    const auto copied = std::count_if(requests.begin(), requests.end(),
                                      [](const p2p::Request& r) { return r.done(); });
    report.check(copied == 32, std::to_string(copied) + " messages of a rank to itself are copied");
    for (const uint64_t tag : {1, 0}) {
        for (uint64_t k = tag; k < 60; k += 2) {
            Data data(8000);
            receive(rank, data, 0, tag);
            report.check(data == data_of(k, 8000), "messages of a rank to itself keep their order");
        }
    }
    report.check(std::all_of(requests.begin(), requests.end(),
                             [](const p2p::Request& r) { return r.done() && !r.error(); }),
                 "all sends are done");
    Data data(10);
    Requests late;
    p2p::Request& in = begin(late, rank, message(data, 0, 9), false);
    report.check(rank.p2p->cancel(in) && in.done() && in.error(),
                 "a cancelled receive from the rank itself ends");
    Data large(10'000);
    p2p::Request& out = begin(late, rank, message(large, 0, 9), true);
    report.check(rank.p2p->cancel(out) && !rank.p2p->probe(0, 9),
                 "a cancelled send to the rank itself ends");
    p2p::Request& again = begin(late, rank, message(large, 0, 9), false);
    report.check(!again.done(), "a cancelled message is not received");
    begin(late, rank, message(large, 0, 9), true);
    report.check(again.done() && !again.error(), "the next message is received");
}

void check_sizes_that_differ(Report& report, Mapping mapping, Path path) {
    for (const auto& [sent, received] : std::initializer_list<std::pair<size_t, size_t>>{
             {1, 0}, {0, 1}, {10, 20}, {100, 60}, {1000, 999}, {999, 1000}, {5000, 50'000}}) {
        for (const bool receiver_first : {false, true}) {
            World world(shape_of(2, 2), mapping, 1);
            use(world, 2, path);
            Data datas[] = {Data(sent), Data(received, 7)};
            world.run([&](Rank& rank) {
                Data& data = datas[rank.rank];
                if ((rank.rank == 1) != receiver_first) pause(0.002);
                const auto outcome = outcome_of([&] {
                    rank.rank == 0 ? send(rank, data, 1, 3)
                                   : static_cast<void>(receive(rank, data, 0, 3));
                });
                if (rank.rank == 0 && outcome.fault == Fault::none) return;  // the send was eager
                expect(report, outcome, Fault::mismatch,
                       "rank 0 sent " + std::to_string(sent) + " bytes (" + std::to_string(sent) +
                           " elements of type uint8) with tag 3, but rank 1 receives " +
                           std::to_string(received) + " bytes",
                       "sizes that differ");
            });
            report.check(datas[1] == Data(received, 7), "a mismatched message changes no memory");
        }
    }
    World world(shape_of(2, 2), mapping, 1);
    Data data(8);
    p2p::Message floats = message(data, 1, 3);
    floats.dtype = DType::float32;
    Requests requests;
    begin(requests, world[0], floats, true);
    expect(report, outcome_of([&] { receive(world[1], data, 0, 3); }), Fault::mismatch,
           "8 bytes (2 elements of type float32)", "types that differ");
}

}  // namespace

int main() {
    Report report;
    for (const Mapping mapping : {Mapping::own, Mapping::one}) {
        for (const Path path : {Path::copied_once, Path::staged}) {
            for (const uint32_t ranks : {2U, 3U, 8U}) {
                check_exchange(report, mapping, shape_of(ranks, 1), path);
                check_exchange(report, mapping, shape_of(ranks, 1, 512, 1 << 16), path);
            }
            check_any(report, mapping, path);
            for (const uint64_t slots : {1U, 4U, 512U}) {
                for (const uint64_t bytes : {64UL, 1UL << 16})
                    check_order(report, mapping, shape_of(2, 1, slots, bytes), path);
            }
            check_large(report, mapping, shape_of(2, 1, 4, 1 << 16), path);
            check_sizes_that_differ(report, mapping, path);
        }
        for (const uint64_t slots : {1U, 2U, 8U, 512U}) {
            for (const uint64_t bytes : {64UL, 256UL, 4096UL})
                check_wraps(report, mapping, shape_of(2, 1, slots, bytes));
        }
        check_to_oneself(report, mapping);
    }
    return report.finish();
}

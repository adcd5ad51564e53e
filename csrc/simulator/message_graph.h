// Turns the transfers of a schedule into messages and their dependencies.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace unisono::simulator {

// The columns of a schedule, ordered by round.
struct Transfers {
    std::span<const int32_t> round, src, src_chunk, dst, dst_chunk, count, channel;
    std::span<const uint8_t> reduce;
};

// The order in which a rank's messages leave, in addition to the dependencies of their values.
enum class Order : uint32_t {
    none = 0,     // Each message leaves as soon as the rank has its values.
    program = 1,  // In each channel, the messages leave in the order of the schedule.
    // The messages of a round leave once all earlier messages of the rank have been sent and have
    // arrived.
    rounds = 2,
};

struct MessageOptions {
    uint32_t ranks = 0;
    uint32_t locations = 0;   // Locations of each rank.
    bool reductions = false;  // True: reductions are separate tasks.
    bool gates = false;       // True: a message or reduction waits for its rank; see `needs`.
    Order order = Order::none;
    // For each transfer, the number of its message, counted from 0 in the order of first use. If
    // empty, all transfers between two ranks in a round and a channel are one message.
    std::span<const int32_t> groups;
};

enum class Kind : uint8_t { message = 0, reduction = 1, join = 2 };

// Tasks in columns. A join takes no time; it represents all tasks that it waits for.
struct Messages {
    std::vector<uint8_t> kind;
    std::vector<int32_t> round, src, dst, channel;
    std::vector<double> chunks;  // Chunks that are sent or reduced.
    std::vector<int32_t> needs;  // Tasks, or rank r as -1 - r.
    std::vector<int64_t> needs_starts;
    std::vector<int32_t> after;  // with Order::program, see Tasks::after; else empty
};

// Makes the messages. A message waits for the last writes to its values before its round. It waits
// for values, not for locations: a write over a value that is still to be sent does not wait,
// because executors stage values. Throws Error if there are more than 2^31 tasks.
[[nodiscard]] Messages messages_of(const Transfers& transfers, const MessageOptions& options);

}  // namespace unisono::simulator

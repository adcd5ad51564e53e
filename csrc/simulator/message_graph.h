// From the transfers of a schedule to messages, and what each has to wait for.
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

// In which order the messages of a rank leave, beyond what their values ask for.
enum class Order : uint32_t {
    none = 0,     // as soon as the values are there
    program = 1,  // in each channel, one after the other as the schedule lists them
    rounds = 2,   // those of a round when all that the rank sends and receives before has arrived
};

struct MessageOptions {
    uint32_t ranks = 0;
    uint32_t locations = 0;   // of each rank
    bool reductions = false;  // reductions are tasks of their own
    bool gates = false;       // what a rank sends waits for the rank: see `needs`
    Order order = Order::none;
    // Messages as the caller wants them: of each transfer, from 0 in the order of first use. Empty:
    // what a rank sends another in a round and a channel is one message.
    std::span<const int32_t> groups;
};

enum class Kind : uint8_t { message = 0, reduction = 1, join = 2 };

// Tasks in columns. A join takes no time: it stands for all that it waits for.
struct Messages {
    std::vector<uint8_t> kind;
    std::vector<int32_t> round, src, dst, channel;
    std::vector<double> chunks;  // sent, or reduced
    std::vector<int32_t> needs;  // tasks; rank r itself is -1 - r
    std::vector<int64_t> needs_starts;
    std::vector<int32_t> after;  // with Order::program; else empty
};

// Messages wait for the last writes before their round of what they send: for values, not for
// places. Whoever overwrites a value that is still to be sent does not wait, as executors stage.
// Throws Error if there are more than 2^31 tasks.
[[nodiscard]] Messages messages_of(const Transfers& transfers, const MessageOptions& options);

}  // namespace unisono::simulator

// Layout of the memory that two ranks of a host share for the messages in one direction.
//
// Each message takes one slot of a ring. A few bytes travel inside the slot; more bytes travel in a
// byte ring beside the slots. For a large message the slot holds the number of a transfer, which
// holds the address of the sender's memory. All bytes of an empty pair are zero, as in fresh pages
// of the segment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/control_words.h"

namespace unisono::p2p {

inline constexpr uint64_t kInline = 24;  // Longest message that travels inside its slot, in bytes.
inline constexpr uint32_t kTransfers = 64;  // Large messages that can be in flight per direction.
// Number of the extra transfer for a message that the receiver asked for.
inline constexpr uint32_t kAside = kTransfers;
inline constexpr uint32_t kNoTransfer = 0xffffffff;  // value of Slot::transfer for an eager message

struct alignas(kLine) Slot {
    // Number of the message, counted from 1. Written last, with release order.
    std::atomic<uint64_t> number;
    // Atomic, because a faulty sender may change these words while the receiver checks and uses
    // them. The receiver loads each word only once.
    std::atomic<uint64_t> tag, bytes;
    std::atomic<uint64_t> place;  // Position in the byte ring, counted on without wrapping around.
    std::atomic<uint32_t> kind;   // Element type.
    std::atomic<uint32_t> transfer;
    std::byte data[kInline];
};
static_assert(sizeof(Slot) == kLine);

enum class Phase : uint64_t {
    idle = 0,  // The sender may use the transfer for a new message.
    // The sender has filled the transfer. The receiver has not begun to receive it.
    offered = 1,
    // The sender has cancelled the message. If the receiver finds this before it has begun to
    // receive, it sets the phase to `complete`, so that the sender can use the transfer again.
    withdrawn = 2,
    // The receiver copies from the sender's memory. A sender that waits helps: it writes into the
    // receiver's memory.
    reading = 3,
    staging = 4,   // The sender copies into the staging ring, the receiver copies out of it.
    complete = 5,  // The receiver has all bytes.
    // The receiver has given up: the sender may no longer write to the receiver's memory.
    revoked = 6,
    // Like `offered`, but the sender cannot cancel the message until the receiver has left the
    // group.
    claimed = 7,
};

struct alignas(2 * kLine) Transfer {
    std::atomic<uint64_t> phase;
    std::atomic<uint64_t> source;  // the sender's memory; see CrossMemory::location_of
    std::atomic<uint64_t> bytes, tag, kind;
    // In phase `staging`: the number of this transfer in the order in which transfers are staged.
    std::atomic<uint64_t> turn;
    // For a message that the receiver asked for: number of messages that were sent in slots before
    // it, and that must be received before it.
    std::atomic<uint64_t> after;
    // Number of claimed chunks in phase `reading`. The receiver claims chunks from the start of the
    // message (counted in the low half), the sender from the end (counted in the high half).
    // `written` counts the chunks that the sender has finished writing.
    alignas(kLine) std::atomic<uint64_t> claims;
    std::atomic<uint64_t> written;
    // Nonzero if the receiver has other messages at the same time. Chunks then have the largest
    // size, so that sender and receiver tend to work on different messages. Two ranks that copy
    // from or to the same pages slow each other down.
    std::atomic<uint64_t> whole;
    std::atomic<uint64_t> target;  // The receiver's memory.
    // Destination of the sender's write, in the form that process_vm_writev reads. The kernel reads
    // the two words at the time of the call. So a receiver that sets the length to zero revokes a
    // write that has not begun.
    std::atomic<uint64_t> write_to, write_bytes;
};
static_assert(sizeof(Transfer) == 2 * kLine);

struct alignas(2 * kLine) Pair {
    // Written by the receiver with every message. Read by a sender that lacks free slots or bytes.
    std::atomic<uint64_t> slots_taken, bytes_taken, blocks_taken;
    // Written by the receiver with every step of a transfer. Read whenever the sender polls.
    alignas(2 * kLine) std::atomic<uint64_t> steps;
    // Number of the receiver's latest question for a held-back message (one for which there was no
    // room), and the tag that it asks for.
    std::atomic<uint64_t> asked, asked_tag;
    // Written by the sender. 0 if no send has to wait for room, otherwise a number that changes
    // with every send that has to wait.
    alignas(2 * kLine) std::atomic<uint64_t> held;
    // The sender's answer: number of the question << 8 | low byte. The low byte is 1 + the number
    // of the transfer that carries the found message, or 0 if no held-back message has the tag.
    std::atomic<uint64_t> answered;
    std::atomic<uint64_t> blocks;  // number of blocks that the sender has staged
    alignas(2 * kLine) Transfer transfers[kTransfers + 1];
    // The slots, the byte ring and the staging ring follow.
};

}  // namespace unisono::p2p

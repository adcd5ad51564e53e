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

inline constexpr uint64_t kInline = 24;     // bytes inside a slot
inline constexpr uint32_t kTransfers = 64;  // large messages in flight in one direction
inline constexpr uint32_t kAside =
    kTransfers;  // an extra transfer for a message that the receiver asked for
inline constexpr uint32_t kNoTransfer = 0xffffffff;  // value of Slot::transfer for an eager message

struct alignas(kLine) Slot {
    // Number of the message, counted from 1. Written last, with release order.
    std::atomic<uint64_t> number;
    // Atomic, because the sender may change these words while the receiver decides. The receiver
    // loads each word only once.
    std::atomic<uint64_t> tag, bytes;
    std::atomic<uint64_t> place;  // position in the byte ring, not wrapped
    std::atomic<uint32_t> kind;   // element type
    std::atomic<uint32_t> transfer;
    std::byte data[kInline];
};
static_assert(sizeof(Slot) == kLine);

enum class Phase : uint64_t {
    idle = 0,     // free for the sender
    offered = 1,  // the sender has filled the transfer; the receiver has not asked for it yet
    // The sender has cancelled the message; if it was only offered, the receiver completes it.
    withdrawn = 2,
    reading = 3,   // the receiver copies from the sender's memory, and the sender helps by writing
    staging = 4,   // the sender copies into the staging ring, the receiver copies out of it
    complete = 5,  // the receiver has all bytes
    // The receiver has given up: the sender may no longer write to the receiver's memory.
    revoked = 6,
    claimed = 7,  // offered, but the sender cannot cancel the message while the receiver is alive
};

struct alignas(2 * kLine) Transfer {
    std::atomic<uint64_t> phase;
    std::atomic<uint64_t> source;  // the sender's memory
    std::atomic<uint64_t> bytes, tag, kind;
    // Staging: position of this transfer in the order of staged transfers.
    std::atomic<uint64_t> turn;
    std::atomic<uint64_t>
        after;  // for a message that the receiver asked for: number of earlier messages in slots
    // Number of claimed chunks in phase `reading`. The receiver claims from the front (low half),
    // the sender from the back (high half). `written` counts the sender's chunks that are complete.
    alignas(kLine) std::atomic<uint64_t> claims;
    std::atomic<uint64_t> written;
    // Nonzero if the receiver has other messages at the same time. Chunks then have the largest
    // size, so that sender and receiver move different messages. Two copies on the same pages slow
    // each other.
    std::atomic<uint64_t> whole;
    std::atomic<uint64_t> target;  // the receiver's memory
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
    std::atomic<uint64_t> asked,
        asked_tag;  // number of the receiver's last question, and the tag that it asks for
    // Written by the sender.
    // 0, or a number that changes with every send that has to wait.
    alignas(2 * kLine) std::atomic<uint64_t> held;
    // The answer: number of the question << 8 | number of the found transfer + 1, or 0 if none was
    // found.
    std::atomic<uint64_t> answered;
    std::atomic<uint64_t> blocks;  // blocks that the sender has staged
    alignas(2 * kLine) Transfer transfers[kTransfers + 1];
    // The slots, the byte ring and the staging ring follow.
};

}  // namespace unisono::p2p

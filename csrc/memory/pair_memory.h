// What two ranks of a host share for the messages from the one to the other: layout only.
//
// A message takes one slot of a ring. Few bytes travel inside the slot, some more in a ring of
// bytes beside it; of a large message the slot names a transfer, which tells where its memory is.
// Fresh pages of the segment are zero, which is what an empty pair is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/control_words.h"

namespace unisono::p2p {

inline constexpr uint64_t kInline = 24;         // bytes inside a slot
inline constexpr uint32_t kTransfers = 64;      // large messages under way from one rank to another
inline constexpr uint32_t kAside = kTransfers;  // one more, for a message that was asked for
inline constexpr uint32_t kNoTransfer = 0xffffffff;  // of a slot

struct alignas(kLine) Slot {
    // Of the message, counted from 1: written last, with release.
    std::atomic<uint64_t> number;
    // Atomic, so that a receiver decides by one look whatever the sender does to them meanwhile.
    std::atomic<uint64_t> tag, bytes;
    std::atomic<uint64_t> place;  // absolute, in the ring of bytes
    std::atomic<uint32_t> kind;   // element type
    std::atomic<uint32_t> transfer;
    std::byte data[kInline];
};
static_assert(sizeof(Slot) == kLine);

enum class Phase : uint64_t {
    idle = 0,       // the sender's to use
    offered = 1,    // the sender has written it; nobody has asked for it yet
    withdrawn = 2,  // the sender has taken it back; if it was offered, the receiver gives it back
    reading = 3,    // the receiver copies, and the sender helps by writing
    staging = 4,    // the sender copies into the staging ring, the receiver out of it
    complete = 5,   // the receiver has all of it
    revoked = 6,    // the receiver has given it up: nobody writes to its memory any more
    claimed = 7,    // offered, and the sender cannot take it back while the receiver is there
};

struct alignas(2 * kLine) Transfer {
    std::atomic<uint64_t> phase;
    std::atomic<uint64_t> source;  // the sender's memory
    std::atomic<uint64_t> bytes, tag, kind;
    std::atomic<uint64_t> turn;   // staging: its place in the order of those that are staged
    std::atomic<uint64_t> after;  // of one that was asked for: messages put in slots before it
    // Reading: chunks claimed, by the receiver from the front (low half), and by the sender from
    // the back (high half); and how many of the latter are written.
    alignas(kLine) std::atomic<uint64_t> claims;
    std::atomic<uint64_t> written;
    // Not 0: chunks as large as can be. The ends move other messages meanwhile, each another, for
    // two at work on the same pages disturb each other.
    std::atomic<uint64_t> whole;
    std::atomic<uint64_t> target;  // the receiver's memory
    // Where the sender's write goes, as process_vm_writev reads it: the kernel looks at the moment
    // of the call, so a receiver that sets the length to zero revokes a write that has not begun.
    std::atomic<uint64_t> write_to, write_bytes;
};
static_assert(sizeof(Transfer) == 2 * kLine);

struct alignas(2 * kLine) Pair {
    // Written by the receiver with every message, and read by a sender who lacks room.
    std::atomic<uint64_t> slots_taken, bytes_taken, blocks_taken;
    // Written by the receiver now and then, and read with every look of the sender.
    alignas(2 * kLine) std::atomic<uint64_t> steps;  // changes with every step of a transfer
    std::atomic<uint64_t> asked, asked_tag;          // a number, and the tag that it asks for
    // Written by the sender.
    alignas(2 *
            kLine) std::atomic<uint64_t> held;  // 0, or changes with every send that has to wait
    // Number of the question << 8 | the transfer of what was found + 1, or 0.
    std::atomic<uint64_t> answered;
    std::atomic<uint64_t> blocks;  // staged
    alignas(2 * kLine) Transfer transfers[kTransfers + 1];
    // Slots, the ring of bytes and the staging ring follow.
};

}  // namespace unisono::p2p

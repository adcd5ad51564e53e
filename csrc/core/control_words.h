// Layout of the shared words through which the ranks of a group observe each other.
//
// Every word that two ranks access is a lock-free std::atomic. So the same code is correct between
// processes, which share a memfd, and between threads, which each map the memfd once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace unisono {

inline constexpr size_t kLine = 64;  // A cache line; the CPU prefetches lines in pairs.
inline constexpr uint64_t kMagic = 0x554e49534f4e4f31;  // "UNISONO1".
// Number of calls in a rank's history. Unless it refuses calls, a rank is never this many calls
// ahead of another rank, because it would first run out of free staging buffers.
inline constexpr size_t kCallHistory = 256;
inline constexpr size_t kFaultText = 1536;
inline constexpr size_t kRefusalWords = 48;  // each word holds 8 characters

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// A call of a rank, kept for errors. `seq` is the call's number in its group. It is 0 while the
// other fields are being written, because other ranks may read at that time.
struct CallRecord {
    std::atomic<uint64_t> seq{0};
    std::atomic<uint64_t> count{0};
    std::atomic<uint64_t> hash{0};
    std::atomic<uint32_t> kind{
        0};  // op | reduction << 8 | type << 16 | LengthsFrom << 24 | in_heaps << 31
    std::atomic<int32_t> root{-1};
};

// The reason of the latest refused call. The text is stored in atomic words because a peer may read
// it while the next reason is written. The peer checks `seq` before and after it reads.
struct Refusal {
    std::atomic<uint64_t> seq{0};
    std::atomic<uint64_t> words[kRefusalWords]{};
};

// A futex that is woken only if a thread sleeps on it.
struct Doorbell {
    std::atomic<uint32_t> sleepers{0};
    std::atomic<uint32_t> rings{0};
};

// State of a rank in its group. A `joining` rank has no lock yet. Only a rank that has joined can
// be lost.
enum class Presence : uint32_t { absent = 0, joined = 1, left = 2, joining = 3 };

struct alignas(2 * kLine) RankControl {
    // The polled cache line. header = call number (24 bits) | fingerprint (40 bits). With one load,
    // a peer learns if the rank has entered the call, and if both ranks make the same call.
    std::atomic<uint64_t> header{0};
    std::atomic<uint64_t> progress{0};
    std::atomic<int32_t> core{-1};  // on which this rank was lately; see core_sharing.h

    alignas(2 * kLine) Doorbell doorbell;  // Rung when header or progress changes.
    Doorbell p2p;  // Rung when a message to or from this rank makes progress.
    std::atomic<uint32_t> presence{0};
    std::atomic<int32_t> pid{0};
    std::atomic<uint64_t> process{
        0};  // Identifies the process: equal for ranks that are threads of one process.
    // 1 + the descriptor of the segment that this rank leaves open because other ranks of its
    // process still need their locks, or 0; see membership.cc.
    std::atomic<int32_t> kept_fd{0};
    std::atomic<uint64_t> token{
        0};  // address of the rank's token in its process; see single_copy.h

    // The message that the rank waits for; see call.h. Every wait writes this word. It has its own
    // cache line because peers read the words above with every message.
    alignas(2 * kLine) std::atomic<uint64_t> awaited_message{0};

    // The beacon: the CPU core on which this rank last published its progress, and the published
    // value; see store_policy.h. In calls that measure the distance, each rank writes its beacon
    // with every post, and reads one peer's beacon in every block.
    alignas(2 * kLine) std::atomic<uint64_t> beacon{0};

    alignas(2 * kLine) CallRecord calls[kCallHistory];
    Refusal refusal;
};

// The first failure of the group, which all ranks raise.
struct FaultRecord {
    std::atomic<uint32_t> state{0};  // 0: none; 1: being written; 2: readable
    std::atomic<uint32_t> fault{0};
    char text[kFaultText]{};
};

struct alignas(2 * kLine) GroupControl {
    uint64_t magic;
    uint32_t ranks;
    uint32_t depth;                   // Blocks that a rank may have in flight.
    uint64_t buffer_bytes;            // A rank's staging buffer for one block.
    uint64_t pair_slots, pair_bytes;  // Slots and bytes for the messages from one rank to another.
    uint64_t heap_bytes;              // Bytes of each rank's shared heap; 0: the ranks have none.
    uint8_t nonce[16];                // Sent back to the owner as proof that the memory is shared.
    std::atomic<uint32_t> fences_needed;  // Not 0 if a rank could not register for heavy barriers.
    // The group that replaces this group after a failure, as agreed by the ranks. It is changed
    // only by compare-and-exchange: if two ranks set it at the same time, the second one receives
    // the value of the first.
    std::atomic<uint64_t> successor;
    std::atomic<uint64_t> turn;  // the rank whose liveness is checked next; see peer_checks.h
    alignas(2 * kLine) FaultRecord failure;
};

}  // namespace unisono

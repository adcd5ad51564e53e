// The shared words through which the ranks of a group see each other: layout only, no behaviour.
//
// Every word that two ranks touch is a lock-free std::atomic, so the same code is right between
// processes (over a memfd) and between threads (over the same memfd, mapped once a rank).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace unisono {

inline constexpr size_t kLine = 64;  // a cache line; two of them are prefetched together
inline constexpr uint64_t kMagic = 0x554e49534f4e4f31;  // "UNISONO1"
// Calls a rank remembers: more than ranks can be apart, which the staging areas bound.
inline constexpr size_t kCallHistory = 256;
inline constexpr size_t kFaultText = 1536;
inline constexpr size_t kRefusalWords = 48;  // of 8 characters

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// What a rank called, kept so that an error can say it. `seq` is the number of the call in its
// group; 0 while the rest is being written, which others may read meanwhile.
struct CallRecord {
    std::atomic<uint64_t> seq{0};
    std::atomic<uint64_t> count{0};
    std::atomic<uint64_t> hash{0};
    std::atomic<uint32_t> kind{0};  // op | reduction << 8 | type << 16 | LengthsFrom << 24
    std::atomic<int32_t> root{-1};
};

// Why a rank refused its arguments, of the latest such call. Words, since a peer may read while the
// next reason is written; it looks at `seq` before and after.
struct Refusal {
    std::atomic<uint64_t> seq{0};
    std::atomic<uint64_t> words[kRefusalWords]{};
};

// A futex that is rung only when somebody sleeps on it.
struct Bell {
    std::atomic<uint32_t> sleepers{0};
    std::atomic<uint32_t> rings{0};
};

// `joining`: has no lock yet. Only who has joined can be lost.
enum class Presence : uint32_t { absent = 0, joined = 1, left = 2, joining = 3 };

struct alignas(2 * kLine) RankControl {
    // The polled line. header = call number (24 bits) | fingerprint (40 bits): one load tells both
    // whether the peer has entered the call and whether it means the same call.
    std::atomic<uint64_t> header{0};
    std::atomic<uint64_t> progress{0};

    alignas(2 * kLine) Bell bell;  // rung when header or progress moves
    Bell p2p;                      // rung when a message moves to this rank or from it
    std::atomic<uint32_t> presence{0};
    std::atomic<int32_t> pid{0};
    std::atomic<uint64_t> process{0};  // tells ranks that are threads of one process
    std::atomic<int32_t> kept_fd{0};   // 1 + what it has left open for those; see membership.cc
    std::atomic<uint64_t> token{0};    // where it is in that process; see loans.h

    // A message that it waits for; see call.h. Written with each wait: the others look at what is
    // above with each message.
    alignas(2 * kLine) std::atomic<uint64_t> errand{0};

    // Written with every post of a large message, looked at once a block; see stores.h.
    alignas(2 * kLine) std::atomic<uint64_t> beacon{0};

    alignas(2 * kLine) CallRecord calls[kCallHistory];
    Refusal refusal;
};

// The first failure of the group; everybody who looks raises the same cause.
struct FaultRecord {
    std::atomic<uint32_t> state{0};  // 0 none, 1 being written, 2 readable
    std::atomic<uint32_t> fault{0};
    char text[kFaultText]{};
};

struct alignas(2 * kLine) GroupControl {
    uint64_t magic;
    uint32_t ranks;
    uint32_t depth;                       // blocks of staging a rank may have in flight
    uint64_t area_bytes;                  // staging of one rank for one block
    uint64_t pair_slots, pair_bytes;      // of messages from one rank to another
    uint8_t nonce[16];                    // read back to the owner: proof that the memory is shared
    std::atomic<uint32_t> fences_needed;  // a rank could not register for heavy barriers
    // What the ranks have agreed on about the group that succeeds this one. It is moved by compare
    // and exchange alone, so that of two ranks that decide at once one learns that it was second.
    std::atomic<uint64_t> successor;
    std::atomic<uint64_t> turn;  // whose lock is asked about next; see peer_checks.h
    alignas(2 * kLine) FaultRecord failure;
};

}  // namespace unisono

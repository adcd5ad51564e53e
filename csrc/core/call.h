// A call of a rank: operation, arguments, the history of calls, and their text in errors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/control_words.h"
#include "core/types.h"

namespace unisono {

// The operations of unisono.types.Op, in the same order, then operations that only the library
// itself calls.
enum class OpKind : uint8_t {
    all_reduce,
    reduce_scatter,
    all_gather,
    all_to_all,
    broadcast,
    reduce,
    gather,
    scatter,
    barrier,
    scan,
    exscan,
    split,
    window,
};
inline constexpr uint32_t kOpKinds = 13;

// The argument that gives the lengths of the pieces of a call. The values equal those of
// unisono.types.LengthsFrom.
enum class LengthsFrom : uint8_t { none, counts, send_counts };
inline constexpr uint32_t kLengthsFrom = 3;

// Kind and fingerprint, in the call history, of a call whose arguments the rank refused. All
// refused calls have this fingerprint. So ranks that all refuse a call agree, and a rank that
// refuses alone disagrees with its peers.
inline constexpr uint32_t kRefusedKind = 0xff;
inline constexpr uint64_t kRefusedHash = 0x5e'f0'5e'd0'00ULL;

// The value of CallArgs::count in a call that only tells all ranks the lengths of each rank's
// pieces. The total is not known yet.
inline constexpr uint64_t kUnknownCount = ~0ULL;

struct CallArgs {
    OpKind op;
    DType dtype;
    ReduceOp reduction;
    int32_t root;    // -1: no root.
    uint64_t count;  // Number of the caller's elements, or kUnknownCount.
    // Hash of all other values that must be equal on all ranks: algorithm, lengths of the pieces.
    uint64_t extra;
    // The type of the caller's elements if the call reduces a wider copy of them.
    std::optional<DType> caller_dtype = std::nullopt;
    // Used only in error messages; may differ between ranks.
    LengthsFrom lengths_from = LengthsFrom::none;
    // The arrays of all ranks lie in the ranks' shared heaps.
    bool in_heaps = false;
};

// Returns the kind of a call, as in CallRecord.
[[nodiscard]] uint32_t kind_of(const CallArgs& args) noexcept;

// Returns the header of a call: seq (24 bits) | fingerprint (40 bits).
[[nodiscard]] inline uint64_t header_of(uint64_t seq, uint64_t hash) noexcept {
    return seq << 40 | hash;
}
// Returns the number of calls by which the owner of `header` is ahead of `seq`. The result is
// correct when the 24-bit number wraps around.
[[nodiscard]] inline int32_t ahead_of(uint64_t header, uint64_t seq) noexcept {
    const auto difference = static_cast<uint32_t>((header >> 40) - seq) & 0xffffffU;
    return static_cast<int32_t>(difference << 8) >> 8;
}

// The last call of a rank, in the form that is sent to another host.
struct LastCall {
    uint64_t header, seq, count, hash;
    uint32_t kind;  // as in CallRecord
    int32_t root;
};
static_assert(sizeof(LastCall) == 40);

// The last call of a rank, and the message that the rank waits for.
struct Activity {
    LastCall called;
    uint64_t awaited_message;  // 0: none; see awaited_message_of
};
static_assert(sizeof(Activity) == 48);

[[nodiscard]] const char* name_of(DType type) noexcept;
[[nodiscard]] const char* name_of(OpKind op) noexcept;

// Returns "send to rank 1", or "recv from any rank" if `peer` is negative.
[[nodiscard]] std::string message_text(bool sends, int32_t peer);
// Encodes the message that a sleeping rank waits for as one word, for other ranks to read.
[[nodiscard]] inline uint64_t awaited_message_of(bool sends, int32_t peer) noexcept {
    return 1ULL << 63 | uint64_t{sends} << 62 | static_cast<uint32_t>(peer);
}

void record_call(RankControl& control, uint64_t seq, const CallArgs& args, uint64_t hash) noexcept;
void record_refusal(RankControl& control, uint64_t seq, std::string_view reason) noexcept;
[[nodiscard]] LastCall last_call_of(const RankControl& control) noexcept;
// Stores the last call of a rank on another host in the mirror, which is this rank's copy of that
// rank's control words. Does nothing if the mirror already has a later call. Only one thread may
// call this at a time.
void update_last_call(RankControl& mirror, const LastCall& called) noexcept;
// Returns true if both ranks have a record of call `seq` and the fingerprints differ. For a rank on
// another host, there are records only of the calls that it has reported to this rank.
[[nodiscard]] bool differ(const RankControl& one, const RankControl& other, uint64_t seq) noexcept;
// Returns a text such as "all_reduce(sum, float32[1000])".
[[nodiscard]] std::string call_text(const RankControl& control, uint64_t seq);
// Returns "its last call was all_reduce(sum, float32[1000])", or "it has made no call yet".
[[nodiscard]] std::string last_call_text(const RankControl& control);
// Returns last_call_text(), and the message that the rank waits for, if any.
[[nodiscard]] std::string activity_text(const RankControl& control);
// Returns "called all_reduce(sum, float32[1000])", or "refused " and the reason.
[[nodiscard]] std::string outcome_text(const RankControl& control, uint64_t seq);
// Returns the source of the lengths in this call: "counts", "send_counts" or "the lengths of the
// pieces".
[[nodiscard]] std::string lengths_of(const RankControl& control, uint64_t seq);
// Returns true if the arrays of this call lie in the ranks' shared heaps.
[[nodiscard]] bool is_in_heaps(const RankControl& control, uint64_t seq);

}  // namespace unisono

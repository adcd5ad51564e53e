// What a rank calls: the operation with its arguments, its fingerprint, and its words for errors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/control_words.h"
#include "core/types.h"

namespace unisono {

// The values are the order of unisono.types.Op; then what the library does by itself.
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
};
inline constexpr uint32_t kOpKinds = 12;

// Which argument says how long the pieces are. The values are those of unisono.types.LengthsFrom.
enum class LengthsFrom : uint8_t { none, counts, send_counts };
inline constexpr uint32_t kLengthsFrom = 3;

// What stands in the history for a call whose arguments a rank refused. It has a fingerprint of its
// own: ranks that refuse alike agree, and one that refuses alone disagrees with the others.
inline constexpr uint32_t kRefusedKind = 0xff;
inline constexpr uint64_t kRefusedHash = 0x5e'f0'5e'd0'00ULL;

// The count of a call in which the ranks tell each other how much they have.
inline constexpr uint64_t kUntold = ~0ULL;

struct CallArgs {
    OpKind op;
    DType dtype;
    ReduceOp reduction;
    int32_t root;    // -1 where there is none
    uint64_t count;  // elements, as the caller counts them, or kUntold
    uint64_t extra;  // hash of all else that must agree: algorithm, lengths of the pieces
    // What the caller's elements are, where a wider copy of them is reduced.
    std::optional<DType> caller_dtype = std::nullopt;
    LengthsFrom lengths_from = LengthsFrom::none;  // for errors: need not agree
};

inline constexpr uint64_t kHashMask = (1ULL << 40) - 1;

[[nodiscard]] uint64_t fingerprint(const CallArgs& args) noexcept;  // 40 bits

// header = seq (24 bits) | fingerprint (40 bits)
[[nodiscard]] inline uint64_t header_of(uint64_t seq, uint64_t hash) noexcept {
    return seq << 40 | hash;
}
// How many calls the owner of `header` is ahead of `seq`, right across the wrap of 24 bits.
[[nodiscard]] inline int32_t ahead_of(uint64_t header, uint64_t seq) noexcept {
    const auto difference = static_cast<uint32_t>((header >> 40) - seq) & 0xffffffU;
    return static_cast<int32_t>(difference << 8) >> 8;
}

// What a rank called last, for the way to another host.
struct Called {
    uint64_t header, seq, count, hash;
    uint32_t kind;  // as in CallRecord
    int32_t root;
};
static_assert(sizeof(Called) == 40);

// The same with the message that it waits for: what it is doing, as far as others can tell.
struct Doing {
    Called called;
    uint64_t errand;  // see errand_of; 0: none
};
static_assert(sizeof(Doing) == 48);

[[nodiscard]] const char* name_of(DType type) noexcept;
[[nodiscard]] const char* name_of(OpKind op) noexcept;

// "send to rank 1", or "recv from any rank" of a peer that is negative.
[[nodiscard]] std::string errand_text(bool sends, int32_t peer);
// The same in a word: a message for which a rank sleeps, as others see it.
[[nodiscard]] inline uint64_t errand_of(bool sends, int32_t peer) noexcept {
    return 1ULL << 63 | uint64_t{sends} << 62 | static_cast<uint32_t>(peer);
}

void remember(RankControl& control, uint64_t seq, const CallArgs& args, uint64_t hash) noexcept;
void remember_refusal(RankControl& control, uint64_t seq, std::string_view reason) noexcept;
[[nodiscard]] Called called_by(const RankControl& control) noexcept;
// Writes it down in a mirror, unless that has heard of a later call. By one thread at a time.
void hear(RankControl& mirror, const Called& called) noexcept;
// Whether the fingerprints differ that two ranks had for a call which both remember. Of ranks
// elsewhere one knows those calls of which one heard.
[[nodiscard]] bool differ(const RankControl& one, const RankControl& other, uint64_t seq) noexcept;
// "all_reduce(sum, float32[1000])".
[[nodiscard]] std::string recall(const RankControl& control, uint64_t seq);
// "its last call was all_reduce(sum, float32[1000])", or "it has made no call yet".
[[nodiscard]] std::string last_call(const RankControl& control);
// The same, and for which message the rank waits, if it does.
[[nodiscard]] std::string whereabouts(const RankControl& control);
// "called all_reduce(sum, float32[1000])", or "refused all_reduce: " with the reason.
[[nodiscard]] std::string deed(const RankControl& control, uint64_t seq);
// "counts": what says how long the pieces of the call are, or "the lengths of the pieces".
[[nodiscard]] std::string lengths_of(const RankControl& control, uint64_t seq);

}  // namespace unisono

// A plan: the records that one rank runs for one block of a collective. Plans of all algorithms
// have the same form.
//
// A record has the binary format of unisono.schedule.record (48 bytes, little endian).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace unisono {

enum class Space : uint8_t {
    in = 0,      // The caller's input; index = piece, part = part of the piece.
    out = 1,     // The caller's output; the same indices.
    slot = 2,    // A staging slot of `rank`; index = slot.
    tmp = 3,     // Private scratch; index = scratch block.
    shared = 4,  // The memory whose address is in slot `index` of `rank`.
};

struct Ref {
    Space space;
    uint8_t pad;
    uint16_t rank;
    uint16_t index;
    uint16_t part;
};

enum class Action : uint16_t { copy = 0, reduce = 1, arg = 2, wait = 3, post = 4, share = 5 };

inline constexpr size_t kMostSources = 4096;  // operands of one reduction

inline constexpr uint16_t kHasSecond = 1;  // The result is also written to dst2.
inline constexpr uint16_t kFinal = 2;      // The result has the contributions of all ranks.
inline constexpr uint16_t kShares = 4;     // The address of dst is stored in the slot dst2.
inline constexpr uint16_t kWritesBack =
    8;  // REDUCE: the result is also written to each shared operand. SHARE: a peer does so.

struct Record {
    Action action;
    uint16_t sources;  // Reduce: number of arg records that follow.
    uint16_t peer;     // Wait: the rank to wait for.
    uint16_t flags;
    // Wait, post: value of the progress counter, counted from the start of the block.
    uint32_t value;
    uint16_t round;   // Round of the schedule to which the record belongs.
    uint16_t posted;  // Wait: the round in which the peer posts the value.
    Ref dst, dst2, src;
    Ref length;  // the moved data are as long as this part of `in` or `out`
};
static_assert(sizeof(Ref) == 8 && sizeof(Record) == 48);

// A slot of this rank that a peer reads after the given post. The binary format is that of
// Plan.pack_readers in unisono.schedule.execution_plan.
struct Reader {
    uint32_t post;
    uint16_t slot;
    uint16_t rank;
};
static_assert(sizeof(Reader) == 8);

class Plan {
  public:
    // Checks every index against the group's size and the given counts. Throws Error(invalid).
    Plan(std::span<const std::byte> packed, std::span<const std::byte> packed_readers,
         uint32_t rank, uint32_t ranks, uint32_t pieces_in, uint32_t pieces_out, uint32_t parts,
         uint32_t stages, uint32_t rounds, std::vector<uint32_t> slots, uint32_t scratch,
         bool addresses_only = false);

    // Returns the readers of the slots that post `value` publishes, ordered by rank, then by slot.
    [[nodiscard]] std::span<const Reader> readers_of(uint32_t value) const noexcept;

    std::vector<Record> records;
    std::vector<Reader> readers;           // Ordered by post, then by rank, then by slot.
    std::vector<uint32_t> readers_of_any;  // Ranks that read any slot of this rank.
    std::vector<uint32_t> sources;         // Ranks whose slots this rank reads.
    // For each slot of this rank: a part of the input or output that has the slot's length.
    std::vector<Ref> slot_lengths;
    uint32_t rank, ranks;
    uint32_t pieces_in, pieces_out;
    uint32_t parts;               // Number of parts of each piece.
    uint32_t stages;              // Increase of the progress counter per block; equal on all ranks.
    uint32_t rounds;              // Rounds of the schedule.
    std::vector<uint32_t> slots;  // Staging slots per block, by rank.
    uint32_t scratch;
    bool addresses_only;         // The slots of all ranks hold only addresses (single copy).
    bool shares_memory = false;  // Peers read this rank's own memory.
    bool reads_in_place = false;
    bool writes_back = false;  // Peers write to this rank's memory, or this rank to theirs.
    bool copies_only;          // this rank reduces nothing

  private:
    void check(const Ref& ref, size_t at) const;
    void check_record(size_t at) const;
    void note_slots();
    void take_readers(std::span<const std::byte> packed);
};

}  // namespace unisono

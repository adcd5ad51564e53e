// A plan: what one rank does for one block of a collective, as flat records. No algorithm here.
//
// The record is the wire format of unisono.schedule.record (48 bytes, little endian).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace unisono {

enum class Space : uint8_t {
    in = 0,    // the caller's input; index = piece, part = part of the piece
    out = 1,   // the caller's output; the same
    slot = 2,  // staging in shared memory of `rank`; index = slot
    tmp = 3,   // private scratch; index = scratch block
    lent = 4,  // what slot `index` of `rank` shows the place of
};

struct Ref {
    Space space;
    uint8_t pad;
    uint16_t rank;
    uint16_t index;
    uint16_t part;
};

enum class Action : uint16_t { copy = 0, reduce = 1, arg = 2, wait = 3, post = 4, lend = 5 };

inline constexpr size_t kMostSources = 4096;  // operands of one reduction

inline constexpr uint16_t kHasSecond = 1;  // also write dst2
inline constexpr uint16_t kFinal = 2;      // the result holds every rank's contribution
inline constexpr uint16_t kLends = 4;      // dst2 shows where dst is

struct Record {
    Action action;
    uint16_t sources;  // reduce: that many arg records follow
    uint16_t peer;     // wait: on whom
    uint16_t flags;
    uint32_t value;   // wait, post: progress within the block
    uint16_t round;   // of the schedule
    uint16_t posted;  // wait: the round in which the peer posts that
    Ref dst, dst2, src;
    Ref length;  // an in or out part that is as long as what this record moves
};
static_assert(sizeof(Ref) == 8 && sizeof(Record) == 48);

// An own slot, visible from an own post on, that another rank reads. The wire format of
// Plan.pack_readers of unisono.schedule.execution_plan.
struct Reader {
    uint32_t post;
    uint16_t slot;
    uint16_t rank;
};
static_assert(sizeof(Reader) == 8);

class Plan {
  public:
    // Checks every index against the group's size and the counts given; throws Error(invalid).
    Plan(std::span<const std::byte> packed, std::span<const std::byte> packed_readers,
         uint32_t rank, uint32_t ranks, uint32_t pieces_in, uint32_t pieces_out, uint32_t parts,
         uint32_t stages, uint32_t rounds, std::vector<uint32_t> slots, uint32_t scratch,
         bool loans_only = false);

    // Who reads what the own post `value` shows: by rank, then by slot.
    [[nodiscard]] std::span<const Reader> readers_of(uint32_t value) const noexcept;

    std::vector<Record> records;
    std::vector<Reader> readers;           // by post, then by rank, then by slot
    std::vector<uint32_t> readers_of_any;  // ranks
    std::vector<uint32_t> sources;         // ranks whose slots are read
    std::vector<Ref> slot_lengths;         // by own slot: a part that is as long
    uint32_t rank, ranks;
    uint32_t pieces_in, pieces_out;
    uint32_t parts;               // how finely each piece is cut
    uint32_t stages;              // progress per block, equal on all ranks
    uint32_t rounds;              // of the schedule
    std::vector<uint32_t> slots;  // staging slots per block, by rank
    uint32_t scratch;
    bool loans_only;     // of all ranks: no slot holds data
    bool lends = false;  // this rank
    bool borrows = false;
    bool copies_only;  // this rank reduces nothing

  private:
    void check(const Ref& ref, size_t at) const;
    void check_record(size_t at) const;
    void note_slots();
    void take_readers(std::span<const std::byte> packed);
};

}  // namespace unisono

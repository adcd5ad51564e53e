#include "execution/plan.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace unisono {
namespace {

[[noreturn]] void refuse(size_t at, const char* why) {
    throw Error(Fault::invalid, "plan record " + std::to_string(at) + ": " + why);
}

}  // namespace

Plan::Plan(std::span<const std::byte> packed, std::span<const std::byte> packed_readers,
           uint32_t rank_, uint32_t ranks_, uint32_t pieces_in_, uint32_t pieces_out_,
           uint32_t parts_, uint32_t stages_, uint32_t rounds_, std::vector<uint32_t> slots_,
           uint32_t scratch_, bool addresses_only_)
    : records(packed.size() / sizeof(Record)),
      rank(rank_),
      ranks(ranks_),
      pieces_in(pieces_in_),
      pieces_out(pieces_out_),
      parts(parts_),
      stages(stages_),
      rounds(rounds_),
      slots(std::move(slots_)),
      scratch(scratch_),
      addresses_only(addresses_only_) {
    if (packed.size() % sizeof(Record) != 0)
        throw Error(Fault::invalid, "plan: expected records of " + std::to_string(sizeof(Record)) +
                                        " bytes each, got " + std::to_string(packed.size()) +
                                        " bytes in all");
    if (rank >= ranks || slots.size() != ranks || parts == 0 || rounds == 0) {
        throw Error(Fault::invalid,
                    "plan: expected a rank below the ranks, slots for each, and at least one part "
                    "and round; got rank " +
                        std::to_string(rank) + " of " + std::to_string(ranks) + ", slots of " +
                        std::to_string(slots.size()) + ", " + std::to_string(parts) + " parts, " +
                        std::to_string(rounds) + " rounds");
    }
    if (!packed.empty()) std::memcpy(records.data(), packed.data(), packed.size());
    uint32_t posted = 0, round = 0;
    for (size_t i = 0; i < records.size(); ++i) {
        check_record(i);
        if (records[i].round < round || records[i].round >= rounds)
            refuse(i, "expected rounds in ascending order");
        round = records[i].round;
        if (records[i].action != Action::post) continue;
        if (records[i].value <= posted) refuse(i, "expected posts in ascending order");
        posted = records[i].value;
    }
    if (posted != stages)
        throw Error(Fault::invalid, "plan: a block ends with post " + std::to_string(posted) +
                                        ", but all ranks expect " + std::to_string(stages));
    copies_only = std::none_of(records.begin(), records.end(),
                               [](const Record& r) { return r.action == Action::reduce; });
    note_slots();
    take_readers(packed_readers);
}

// Finds the peers whose slots are read, and the lengths of this rank's slots.
void Plan::note_slots() {
    std::vector<bool> read(ranks, false);
    slot_lengths.assign(slots[rank], Ref{Space::slot, 0, 0, 0, 0});
    const auto written = [this](const Ref& ref, const Ref& length) {
        if (ref.space == Space::slot) slot_lengths[ref.index] = length;
    };
    for (const Record& r : records) {
        if (r.action == Action::wait) read[r.peer] = true;
        reads_in_place |= r.src.space == Space::shared;
        if (r.action == Action::wait || r.action == Action::post || r.action == Action::arg)
            continue;
        shares_memory |= r.action == Action::share || r.flags & kShares;
        writes_back |= (r.flags & kWritesBack) != 0;
        written(r.dst, r.length);
        if (r.flags & (kHasSecond | kShares)) written(r.dst2, r.length);
    }
    for (uint32_t peer = 0; peer < ranks; ++peer) {
        if (read[peer]) sources.push_back(peer);
    }
}

void Plan::take_readers(std::span<const std::byte> packed) {
    if (packed.size() % sizeof(Reader) != 0)
        throw Error(Fault::invalid, "plan: expected readers of " + std::to_string(sizeof(Reader)) +
                                        " bytes each, got " + std::to_string(packed.size()) +
                                        " bytes in all");
    readers.resize(packed.size() / sizeof(Reader));
    if (!packed.empty()) std::memcpy(readers.data(), packed.data(), packed.size());
    std::sort(readers.begin(), readers.end(), [](const Reader& a, const Reader& b) {
        return std::tie(a.post, a.rank, a.slot) < std::tie(b.post, b.rank, b.slot);
    });
    for (const Reader& reader : readers) {
        if (reader.rank >= ranks || reader.rank == rank || reader.slot >= slots[rank] ||
            reader.post > stages || slot_lengths[reader.slot].space == Space::slot) {
            throw Error(Fault::invalid, "plan: rank " + std::to_string(reader.rank) +
                                            " reads slot " + std::to_string(reader.slot) +
                                            " after post " + std::to_string(reader.post) +
                                            ", which rank " + std::to_string(rank) +
                                            " does not publish to it");
        }
        readers_of_any.push_back(reader.rank);
    }
    std::sort(readers_of_any.begin(), readers_of_any.end());
    const auto rest = std::unique(readers_of_any.begin(), readers_of_any.end());
    readers_of_any.erase(rest, readers_of_any.end());
}

std::span<const Reader> Plan::readers_of(uint32_t value) const noexcept {
    const auto [first, last] =
        std::equal_range(readers.begin(), readers.end(), Reader{value, 0, 0},
                         [](const Reader& a, const Reader& b) { return a.post < b.post; });
    return {first, last};
}

void Plan::check(const Ref& ref, size_t at) const {
    switch (ref.space) {
        case Space::in:
            if (ref.index >= pieces_in || ref.part >= parts) refuse(at, "input part out of range");
            return;
        case Space::out:
            if (ref.index >= pieces_out || ref.part >= parts)
                refuse(at, "output part out of range");
            return;
        case Space::shared:
            if (ref.rank == rank) refuse(at, "reads shared memory of its own rank");
            [[fallthrough]];
        case Space::slot:
            if (ref.rank >= ranks || ref.index >= slots[ref.rank]) refuse(at, "slot out of range");
            return;
        case Space::tmp:
            if (ref.index >= scratch) refuse(at, "scratch block out of range");
            return;
    }
    refuse(at, "unknown space");
}

void Plan::check_record(size_t at) const {
    const Record& r = records[at];
    const auto writable = [&](const Ref& ref) {
        check(ref, at);
        if (ref.space == Space::in || ref.space == Space::shared ||
            (ref.space == Space::slot && ref.rank != rank))
            refuse(at, "writes to the input, to shared memory or to a slot of another rank");
    };
    const auto shareable = [&](const Ref& slot, const Ref& memory) {
        if (slot.space != Space::slot || (memory.space != Space::in && memory.space != Space::out))
            refuse(at, "shares memory that is not input or output, or without a slot");
        check(memory, at);
    };
    switch (r.action) {
        case Action::copy:
        case Action::reduce:
        case Action::share:
            writable(r.dst);
            if (r.flags & (kHasSecond | kShares)) writable(r.dst2);
            if (r.flags & kShares) shareable(r.dst2, r.dst);
            if (r.length.space != Space::in && r.length.space != Space::out)
                refuse(at, "its length is not that of an input or output part");
            check(r.length, at);
            if (r.action == Action::share) return shareable(r.dst, r.src);
            if (r.action == Action::copy) return check(r.src, at);
            if (r.sources == 0 || r.sources > kMostSources)
                refuse(at, "expected 1 to 4096 operands");
            if (at + r.sources >= records.size())
                refuse(at, "fewer operands follow than its count");
            for (size_t k = 1; k <= r.sources; ++k) {
                if (records[at + k].action != Action::arg)
                    refuse(at, "fewer operands follow than its count");
            }
            return;
        case Action::arg:
            return check(r.src, at);
        case Action::wait:
            if (r.peer >= ranks || r.peer == rank || r.value > stages || r.posted > r.round)
                refuse(at,
                       "waits for its own rank, for an unknown rank, or for a post that does not "
                       "exist");
            return;
        case Action::post:
            if (r.value > stages) refuse(at, "posts a value above the stages of a block");
            return;
    }
    refuse(at, "unknown action");
}

}  // namespace unisono

#include "plan.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "error.h"

namespace unisono {
namespace {

[[noreturn]] void refuse(size_t at, const char* why) {
    throw Error(Fault::invalid, "plan record " + std::to_string(at) + ": " + why);
}

}  // namespace

Plan::Plan(std::span<const std::byte> packed, uint32_t rank_, uint32_t ranks_, uint32_t pieces_in_,
           uint32_t pieces_out_, uint32_t parts_, uint32_t stages_, std::vector<uint32_t> slots_,
           uint32_t scratch_)
    : records(packed.size() / sizeof(Record)),
      rank(rank_),
      ranks(ranks_),
      pieces_in(pieces_in_),
      pieces_out(pieces_out_),
      parts(parts_),
      stages(stages_),
      slots(std::move(slots_)),
      scratch(scratch_) {
    if (packed.size() % sizeof(Record) != 0)
        throw Error(Fault::invalid, "plan: not a whole number of records");
    if (rank >= ranks || slots.size() != ranks || parts == 0)
        throw Error(Fault::invalid, "plan: bad shape");
    if (!packed.empty()) std::memcpy(records.data(), packed.data(), packed.size());
    uint32_t posted = 0;
    for (size_t i = 0; i < records.size(); ++i) {
        check_record(i);
        if (records[i].action != Action::post) continue;
        if (records[i].value <= posted) refuse(i, "progress does not rise");
        posted = records[i].value;
    }
    if (posted != stages)
        throw Error(Fault::invalid, "plan: a block does not end where all ranks expect it");
    copies_only = std::none_of(records.begin(), records.end(),
                               [](const Record& r) { return r.action == Action::reduce; });
    one_writer = std::count_if(slots.begin(), slots.end(), [](uint32_t s) { return s > 0; }) == 1;
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
        if (ref.space == Space::in || (ref.space == Space::slot && ref.rank != rank))
            refuse(at, "writes what it may not");
    };
    switch (r.action) {
        case Action::copy:
        case Action::reduce:
            writable(r.dst);
            if (r.flags & kHasSecond) writable(r.dst2);
            if (r.length.space != Space::in && r.length.space != Space::out)
                refuse(at, "length of no part");
            check(r.length, at);
            if (r.action == Action::copy) return check(r.src, at);
            if (r.sources == 0 || r.sources > kMostSources)
                refuse(at, "too few or too many operands");
            if (at + r.sources >= records.size()) refuse(at, "operands missing");
            for (size_t k = 1; k <= r.sources; ++k) {
                if (records[at + k].action != Action::arg) refuse(at, "operands missing");
            }
            return;
        case Action::arg:
            return check(r.src, at);
        case Action::wait:
            if (r.peer >= ranks || r.peer == rank || r.value > stages)
                refuse(at, "waits for what never comes");
            return;
        case Action::post:
            if (r.value > stages) refuse(at, "posts more than a block has");
            return;
    }
    refuse(at, "unknown action");
}

}  // namespace unisono

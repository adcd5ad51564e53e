// Calls on arrays in shared heaps, for tests of the core.
#pragma once

#include "tests/calls.h"

namespace unisono::test {

inline constexpr uint64_t kMiB = 1 << 20, kHeap = 96 * kMiB;

using MakePlan = std::shared_ptr<const Plan> (*)(uint32_t, uint32_t);

struct HeapStep {
    MakePlan plan;
    uint64_t count, block_bytes, seed;
    bool in_place;
};

// One rank of a group with heaps.
struct Member {
    Member(const Descriptor& fd, uint32_t rank)
        : group(std::make_shared<Group>(Descriptor(::dup(fd.get())), rank, World::nonce, 2)),
          rank_(rank_of(group, rank)) {}
    ~Member() { rank_.close(); }
    std::shared_ptr<Group> group;
    Rank rank_;
};

inline Descriptor segment_of(uint32_t ranks) {
    SegmentShape shape = shape_of(ranks, 2);
    shape.heap_bytes = kHeap;
    return create_segment(shape, World::nonce);
}

// An all_reduce of one rank, with memory in its heap.
class HeapCall {
  public:
    HeapCall(Member& member, const HeapStep& step) : member_(member), step_(step) {
        const uint64_t bytes = step.count * 4;
        in_ = member.group->heap().allocate(bytes);
        out_ = step.in_place ? in_ : member.group->heap().allocate(bytes);
        for (uint64_t i = 0; i < step.count; ++i) data(in_)[i] = value_of(step.seed, rank(), i);
    }
    // `in_heaps`: false if the call puts addresses into its slots instead of offsets.
    Execution execution(bool in_heaps = true) const {
        const auto plan =
            hand::with_readers(rank(), ranks(), [&](uint32_t r) { return step_.plan(r, ranks()); });
        const CallArgs args{OpKind::all_reduce, DType::int32,         ReduceOp::sum, -1,
                            step_.count,        step_.block_bytes + 7};
        Prepared prepared{plan,
                          args,
                          fingerprint(args),
                          step_.block_bytes,
                          0,
                          step_.count * 4,
                          StorePolicy::adaptive};
        if (in_heaps) {
            prepared.heap_form = std::make_shared<HeapForm>(
                HeapForm{plan, prepared.hash, step_.block_bytes, true, true});
        }
        Pieces in, out;
        in.push_back({in_.get(), step_.count * 4});
        out.push_back({out_.get(), step_.count * 4});
        return prepared.bind(std::move(in), std::move(out));
    }
    Outcome run(double timeout_s = kLong_s, bool in_heaps = true) const {
        return outcome_of(
            [&] { member_.rank_.dispatcher->run(execution(in_heaps), timeout_s, {}); });
    }
    bool right() const {
        for (uint64_t i = 0; i < step_.count; ++i) {
            int32_t sum = 0;
            for (uint32_t q = 0; q < ranks(); ++q) sum += value_of(step_.seed, q, i);
            if (data(out_)[i] != sum) return false;
        }
        return true;
    }
    bool untouched() const {
        for (uint64_t i = 0; i < step_.count; ++i) {
            if (data(in_)[i] != value_of(step_.seed, rank(), i)) return false;
        }
        return true;
    }
    uint64_t offset() const { return member_.group->heap().offset_of(in_.get()); }

  private:
    static int32_t* data(const std::shared_ptr<std::byte>& memory) {
        return reinterpret_cast<int32_t*>(memory.get());
    }
    uint32_t rank() const { return member_.rank_.rank; }
    uint32_t ranks() const { return member_.rank_.members->ranks(); }
    Member& member_;
    HeapStep step_;
    std::shared_ptr<std::byte> in_, out_;
};

}  // namespace unisono::test

// Groups of unisono.h for tests, with plans written by hand for all types and reductions.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "capi/handed_group.h"
#include "tests/calls.h"
#include "tests/world.h"

namespace unisono::test {

// Prepares all-reduces and all-gathers, and refuses to divide the group.
class PlanOwner final : public capi::Owner {
  public:
    static constexpr const char* kNoSplit = "this group stays whole";

    PlanOwner(uint32_t rank, uint32_t ranks) : rank_(rank), ranks_(ranks) {}

    std::shared_ptr<const Prepared> prepare(const unisono_collective& made) override {
        const bool gathers = made.op == UNISONO_ALL_GATHER;
        if (!gathers && made.op != UNISONO_ALL_REDUCE)
            throw Error(Fault::unsupported, "expected an all-reduce or an all-gather");
        const auto dtype = static_cast<DType>(made.dtype);
        const Step step{gathers ? Kind::all_gather : Kind::direct, made.count, 0, 256, 0, false};
        const CallArgs args{static_cast<OpKind>(made.op),
                            dtype,
                            static_cast<ReduceOp>(made.reduction),
                            -1,
                            made.count,
                            7};
        const uint64_t bytes = made.count * size_of(dtype);
        return std::make_shared<Prepared>(Prepared{plan_of(step, rank_, ranks_), args,
                                                   fingerprint(args), 256, bytes, bytes,
                                                   StorePolicy::adaptive});
    }
    unisono_group* split(int32_t, int32_t) override { throw Error(Fault::timeout, kNoSplit); }
    void reach(int32_t) override {}

  private:
    uint32_t rank_, ranks_;
};

// Returns a rank's group, which the caller owns.
inline unisono_group* handed_group(const Rank& rank) {
    const uint32_t ranks = rank.members->ranks();
    return capi::hand_over(std::static_pointer_cast<Group>(rank.keep),
                           std::make_unique<PlanOwner>(rank.rank, ranks));
}

}  // namespace unisono::test

// Calls of the core with hand-written plans, their memory and their expected results.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/call_fingerprint.h"
#include "execution/prepared_call.h"
#include "tests/hand_plans.h"
#include "tests/world.h"

namespace unisono::test {

enum class Kind : uint8_t {
    one_shot,
    direct,
    chain,
    broadcast,
    all_gather,
    barrier,
    single_copy,
    single_copy_gather
};
inline constexpr uint32_t kKinds = 8, kKindsWithoutSingleCopy = 6;

inline bool gathers(Kind kind) {
    return kind == Kind::all_gather || kind == Kind::single_copy_gather;
}

struct Step {
    Kind kind;
    uint64_t count;  // number of elements; of the longest piece if pieces differ
    uint32_t root;
    uint64_t block_bytes;
    uint64_t seed;
    bool in_place;
};

inline int32_t value_of(uint64_t seed, uint32_t rank, uint64_t i) {
    uint64_t h = (seed * 31 + rank + 1) * 0x9e3779b97f4a7c15ULL + i * 0xbf58476d1ce4e5b9ULL;
    return static_cast<int32_t>((h ^ h >> 29) & 0xffffff);
}

inline std::shared_ptr<const Plan> bare_plan_of(const Step& step, uint32_t rank, uint32_t ranks) {
    switch (step.kind) {
        case Kind::one_shot:
            return hand::one_shot(rank, ranks);
        case Kind::direct:
            return hand::direct(rank, ranks);
        case Kind::chain:
            return hand::chain(rank, ranks);
        case Kind::broadcast:
            return hand::broadcast(rank, ranks, step.root);
        case Kind::all_gather:
            return hand::all_gather(rank, ranks);
        case Kind::single_copy:
            return hand::single_copy(rank, ranks);
        case Kind::single_copy_gather:
            return hand::single_copy_gather(rank, ranks);
        case Kind::barrier:
            break;
    }
    return hand::barrier(rank, ranks);
}

inline std::shared_ptr<const Plan> plan_of(const Step& step, uint32_t rank, uint32_t ranks) {
    return hand::with_readers(rank, ranks,
                              [&](uint32_t r) { return bare_plan_of(step, r, ranks); });
}

// One rank's call with its memory.
class Call {
  public:
    Call(const Step& step, uint32_t rank, uint32_t ranks)
        : step_(step), rank_(rank), ranks_(ranks) {
        if (step.kind != Kind::barrier) {
            in_.resize(length(rank));
            for (uint64_t i = 0; i < in_.size(); ++i) in_[i] = value_of(step.seed, rank, i);
        }
        if (gathers(step.kind)) {
            for (uint32_t q = 0; q < ranks; ++q) outs_.emplace_back(length(q), -1);
        } else if (step.kind != Kind::barrier && !step.in_place) {
            outs_.emplace_back(in_.size(), -1);
        }
    }

    Execution execution() {
        constexpr OpKind ops[] = {OpKind::all_reduce, OpKind::all_reduce, OpKind::all_reduce,
                                  OpKind::broadcast,  OpKind::all_gather, OpKind::barrier,
                                  OpKind::all_reduce, OpKind::all_gather};
        const auto kind = static_cast<size_t>(step_.kind);
        const CallArgs args{ops[kind],     DType::int32,
                            ReduceOp::sum, static_cast<int32_t>(step_.root),
                            step_.count,   kind << 32 | step_.block_bytes};
        const Prepared prepared{plan_of(step_, rank_, ranks_),
                                args,
                                fingerprint(args),
                                step_.block_bytes,
                                0,
                                step_.count * 4,
                                StorePolicy::adaptive};
        if (step_.kind == Kind::barrier) return prepared.bind(Pieces{}, Pieces{});
        Pieces out;
        for (auto& o : outs_) out.push_back(piece(o));
        if (outs_.empty()) out.push_back(piece(in_));
        Pieces in;
        in.push_back(piece(in_));
        return prepared.bind(std::move(in), std::move(out));
    }

    bool right() const {
        if (step_.kind == Kind::barrier) return true;
        if (gathers(step_.kind)) {
            for (uint32_t q = 0; q < ranks_; ++q) {
                for (uint64_t i = 0; i < outs_[q].size(); ++i) {
                    if (outs_[q][i] != value_of(step_.seed, q, i)) return false;
                }
            }
            return true;
        }
        const auto& result = outs_.empty() ? in_ : outs_[0];
        for (uint64_t i = 0; i < result.size(); ++i) {
            int32_t expected = 0;
            for (uint32_t q = 0; q < ranks_; ++q) expected += value_of(step_.seed, q, i);
            if (step_.kind == Kind::broadcast) expected = value_of(step_.seed, step_.root, i);
            if (result[i] != expected) return false;
        }
        return true;
    }

  private:
    uint64_t length(uint32_t rank) const {
        return gathers(step_.kind) ? step_.count * ((rank + step_.seed) % ranks_) / ranks_
                                   : step_.count;
    }
    static Piece piece(std::vector<int32_t>& v) {
        return {reinterpret_cast<std::byte*>(v.data()), v.size() * 4};
    }

    Step step_;
    uint32_t rank_, ranks_;
    std::vector<int32_t> in_;
    std::vector<std::vector<int32_t>> outs_;
};

// A simple barrier or all-reduce for tests of failures.
inline Step simple(Kind kind, uint64_t count) {
    return {kind, count, 0, 256, 5, false};
}

inline Outcome run_step(Rank& rank, const Step& step, double timeout_s = kLong_s,
                        const Interrupted& interrupted = {}) {
    Call call(step, rank.rank, rank.members->ranks());
    auto execution = call.execution();
    return outcome_of([&] { rank.dispatcher->run(std::move(execution), timeout_s, interrupted); });
}

}  // namespace unisono::test

// The check that calls of one batch do not write memory that other calls of it access.
#pragma once

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/pack.h"

namespace unisono::bind {

// Memory that a call accesses: start, end, true if the call writes, number of the call.
using Span = std::tuple<Address, Address, bool, int64_t>;

// Finds the largest end address of the memory that other calls access. `of_others(call)` ignores
// the memory of `call` itself, so this class stores the largest end addresses of two different
// calls.
class Reach {
  public:
    void add(Address end, int64_t call) noexcept {
        if (call == first_.call) {
            first_.end = std::max(first_.end, end);
        } else if (end > first_.end) {
            second_ = std::exchange(first_, {end, call});
        } else if (end > second_.end) {
            second_ = {end, call};
        }
    }
    [[nodiscard]] Address of_others(int64_t call) const noexcept {
        return call == first_.call ? second_.end : first_.end;
    }

  private:
    struct End {
        Address end = 0;
        int64_t call = 0;
    };
    End first_, second_;  // of two different calls; the larger end is first
};

// Returns true if one call writes memory that another call accesses. Each array of a pack counts as
// a separate call.
[[nodiscard]] inline bool share_memory(const std::vector<const Pack*>& packs,
                                       std::vector<Span> spans) {
    int64_t own = -1;
    for (const Pack* pack : packs) {
        for (const auto& [address, bytes] : pack->memory()) {
            spans.emplace_back(address, address + bytes, true, own--);
        }
    }
    std::sort(spans.begin(), spans.end());
    Reach all, writers;
    for (const auto& [start, end, written, call] : spans) {
        if (start < end && start < (written ? all : writers).of_others(call)) return true;
        all.add(end, call);
        if (written) writers.add(end, call);
    }
    return false;
}

}  // namespace unisono::bind

// Small arrays that travel as one.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "buffer.h"

namespace unisono::bind {

class Pack {
  public:
    // `keep` holds the memory.
    void add(Address address, uint64_t bytes, nanobind::object keep) {
        memory_.emplace_back(address, bytes);
        keep_.push_back(std::move(keep));
    }
    [[nodiscard]] const Memory& memory() const noexcept { return memory_; }
    [[nodiscard]] nanobind::tuple lengths() const {
        nanobind::list found;
        for (const auto& piece : memory_) found.append(piece.second);
        return nanobind::tuple(found);
    }
    void gather(Address to) const {
        for (const auto& [address, bytes] : memory_) {
            if (bytes) std::memcpy(at(to), at(address), bytes);
            to += bytes;
        }
    }
    void scatter(Address from) const {
        for (const auto& [address, bytes] : memory_) {
            if (bytes) std::memcpy(at(address), at(from), bytes);
            from += bytes;
        }
    }

  private:
    Memory memory_;
    std::vector<nanobind::object> keep_;
};

// Memory that a call touches: start, end, whether written, which call.
using Span = std::tuple<Address, Address, bool, int64_t>;

// Whether one call writes what another one touches. The arrays of packs are calls of their own.
[[nodiscard]] inline bool share_memory(const std::vector<const Pack*>& packs,
                                       std::vector<Span> spans) {
    int64_t own = -1;
    for (const Pack* pack : packs) {
        for (const auto& [address, bytes] : pack->memory()) {
            spans.emplace_back(address, address + bytes, true, own--);
        }
    }
    std::sort(spans.begin(), spans.end());
    Span furthest{0, 0, false, 0};  // what extends furthest so far
    for (const Span& span : spans) {
        const auto [start, end, written, call] = span;
        const auto [_, reach, reach_written, reach_call] = furthest;
        if (start < std::min(end, reach) && (written || reach_written) && call != reach_call)
            return true;
        if (end > reach) furthest = span;
    }
    return false;
}

}  // namespace unisono::bind

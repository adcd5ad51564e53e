// Small arrays that are communicated as one message.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <utility>
#include <vector>

#include "bind/arrays.h"

namespace unisono::bind {

// Adds a pending work to the set that keeps the work and its arrays alive.
inline void keep_in(const nanobind::set& held, const nanobind::object& work) noexcept {
    if (PySet_Add(held.ptr(), work.ptr()) == 0) return;
    // The set has no memory for the work, so the work is never freed.
    PyErr_Clear();
    work.inc_ref();
}

class Pack {
  public:
    // Adds an array. The object `keep` owns the array's memory.
    void add(Address address, uint64_t bytes, nanobind::object keep) {
        memory_.emplace_back(address, bytes);
        keep_.push_back(std::move(keep));
    }
    // Keeps the storages of the arrays, too; see `Arrays::storage_of`.
    void keep_storages(Arrays& arrays) {
        for (size_t i = 0; i < memory_.size(); ++i) keep_.push_back(arrays.storage_of(keep_[i]));
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

}  // namespace unisono::bind

// Single copy: a rank reads another rank's memory in place, through the kernel (process_vm_readv).
// So data is copied once, without a staging buffer. Threads of one process also copy through the
// kernel, because the owner may unmap its memory after the call has failed. The kernel then returns
// an error, but a plain load would fault.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "memory/membership.h"
#include "memory/shared_heap.h"

namespace unisono {

// Stores in a slot, for its readers, where the owner's memory is: its address, or its offset in the
// owner's shared heap.
inline void write_location(std::byte* slot, uint64_t location) noexcept {
    std::memcpy(slot, &location, sizeof location);
}
[[nodiscard]] inline uint64_t read_location(const std::byte* slot) noexcept {
    uint64_t location;
    std::memcpy(&location, slot, sizeof location);
    return location;
}

class CrossMemory {
  public:
    CrossMemory(View& view, Membership& members, SharedHeap& heap);
    CrossMemory(const CrossMemory&) = delete;
    CrossMemory& operator=(const CrossMemory&) = delete;

    // Returns true if this rank can read the memory of every other rank of its host. Requires that
    // all ranks have joined.
    [[nodiscard]] bool reach_all() const noexcept;
    // Returns true if this rank can read the memory of `rank`.
    [[nodiscard]] bool reach(uint32_t rank) const noexcept;
    // Copies from memory of `rank`. Throws Error if the memory or its rank is gone.
    void read(uint32_t rank, std::byte* dst, const std::byte* theirs, uint64_t bytes);

    // Returns a number by which other ranks find memory of this rank: its address, or its offset in
    // this rank's shared heap, which they read without the kernel.
    [[nodiscard]] uint64_t location_of(const std::byte* memory, uint64_t bytes) const noexcept;
    [[nodiscard]] static bool is_in_heap(uint64_t location) noexcept {
        return (location & kInHeap) != 0;
    }
    // Copies from a location of `rank`, `at` bytes after its start.
    void read_at(uint32_t rank, std::byte* dst, uint64_t location, uint64_t at, uint64_t bytes);

    // Returns true if the kernel permits writes to the memory of ranks that this rank can read.
    [[nodiscard]] static bool may_write() noexcept;
    // Copies into memory of `rank`. `to` points to two words that both ranks share: an address and
    // a length. The kernel reads them at the time of the call, so `rank` may change them until
    // then. Returns 0, or the error number of an incomplete copy.
    [[nodiscard]] int write(uint32_t rank, const std::atomic<uint64_t>* to, const std::byte* data,
                            uint64_t bytes) noexcept;
    // Throws the Error of an incomplete write.
    [[noreturn]] void fail_write(uint32_t rank, int error) { explain(rank, error, "write"); }

  private:
    static constexpr uint64_t kInHeap = 1ULL << 63;  // no address of a program has this bit
    // Identifies the process that a pid names. A pid may name a different process in another
    // container; only the right process has this token at the address that it published.
    struct Token {
        uint64_t process, rank;
    };
    [[nodiscard]] int64_t fetch(uint32_t rank, void* dst, const void* theirs,
                                uint64_t bytes) const noexcept;
    [[nodiscard]] bool is_still(uint32_t rank) noexcept;
    [[noreturn]] void explain(uint32_t rank, int error, const char* verb);

    View& view_;
    Membership& members_;
    SharedHeap& heap_;
    Token token_;
    std::vector<std::atomic<int64_t>> checked_ms_;  // by rank: time of the last check by `is_still`
};

}  // namespace unisono

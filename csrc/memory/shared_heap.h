// The shared heap of each rank: memory for arrays of the program, which all ranks of the host map.
// So a rank reads a peer's array in place, without a staging buffer and without a system call.
//
// Only the owner allocates and frees its heap. Peers read and write it inside a call, whose end the
// owner waits for, and exposed arrays at any time. If the group fails, a peer may still be writing,
// so the owner detaches these arrays: they keep their address and contents, but no peer can change
// them any more.
//
// A peer finds an array by its offset in the owner's heap, which the owner publishes in a slot. So
// the ranks need not allocate in the same order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/group_memory.h"

namespace unisono {

struct HeapRange {
    uint64_t offset, bytes;
    bool operator==(const HeapRange&) const = default;
};

// One rank's own heap. Arrays keep it alive, also after the end of the group.
class OwnHeap : public std::enable_shared_from_this<OwnHeap> {
  public:
    // `keeps_pages`: detached pages stay in the file, because the transport may still send them.
    OwnHeap(int fd, uint64_t offset, uint64_t bytes, bool keeps_pages);
    OwnHeap(const OwnHeap&) = delete;
    OwnHeap& operator=(const OwnHeap&) = delete;
    ~OwnHeap();

    // Returns uninitialised memory, which its last owner frees. Returns null if there is no room.
    [[nodiscard]] std::shared_ptr<std::byte> allocate(uint64_t bytes);
    // Replaces the pages of an array by private memory with the same contents, unless that was done
    // before. Only one thread may call this at a time.
    void detach(uint64_t offset, uint64_t bytes) noexcept;
    [[nodiscard]] std::byte* base() const noexcept { return base_; }
    [[nodiscard]] uint64_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] uint64_t used_bytes() const noexcept {
        return used_bytes_.load(std::memory_order_relaxed);
    }

  private:
    void free(uint64_t offset, uint64_t bytes) noexcept;
    void drop_pages(uint64_t offset, uint64_t bytes) noexcept;
    [[nodiscard]] bool is_detached(uint64_t page) const noexcept;
    void make_private(uint64_t offset, uint64_t bytes) noexcept;

    std::byte* base_ = nullptr;
    int fd_;  // of the segment, while the heap is attached
    uint64_t offset_, bytes_;
    bool keeps_pages_;
    int owner_pid_;
    std::mutex mutex_;                   // guards `gaps_`
    std::map<uint64_t, uint64_t> gaps_;  // offset and bytes of each free range
    std::vector<HeapRange> detached_;    // whole pages
    std::atomic<uint64_t> used_bytes_{0};
};

class SharedHeap {
  public:
    explicit SharedHeap(const View& view) : view_(view) {}
    SharedHeap(const SharedHeap&) = delete;
    SharedHeap& operator=(const SharedHeap&) = delete;
    ~SharedHeap();

    // Returns memory in this rank's heap, or null if there is no room. Any thread may call this.
    // Throws Error(system) if the heap cannot be mapped, and Error(unsupported) if the group has no
    // shared heaps.
    [[nodiscard]] std::shared_ptr<std::byte> allocate(uint64_t bytes);
    [[nodiscard]] uint64_t used_bytes() const noexcept;
    // Returns true if the memory lies in this rank's heap.
    [[nodiscard]] bool contains(const std::byte* memory, uint64_t bytes) const noexcept {
        const std::byte* const base = own_base_.load(std::memory_order_acquire);
        if (base == nullptr) return false;
        const uint64_t offset = offset_of(memory), all = view_.segment().shape().heap_bytes;
        return offset <= all && bytes <= all - offset;
    }
    // Returns the offset of memory in this rank's heap.
    [[nodiscard]] uint64_t offset_of(const std::byte* memory) const noexcept {
        const auto address = [](const std::byte* at) { return reinterpret_cast<uintptr_t>(at); };
        return address(memory) - address(own_base_.load(std::memory_order_relaxed));
    }
    // Records a range of this rank's heap that peers may access outside of calls, until conceal().
    void expose(const HeapRange& range);
    void conceal(const HeapRange& range) noexcept;
    // Detaches the memory of a call that failed. The group is then of no more use, so new arrays
    // are refused.
    void detach(const std::byte* memory, uint64_t bytes) noexcept;
    // Detaches all exposed ranges of a failed group; a second call finds none.
    void detach_exposed() noexcept;
    // Returns memory of a rank of this host. Throws Error if the range is not inside the heap, or
    // cannot be mapped.
    [[nodiscard]] std::byte* at(uint32_t rank, uint64_t offset, uint64_t bytes);

  private:
    void detach_locked(const HeapRange& range) noexcept;  // requires `own_`
    std::byte* map_all();

    const View& view_;
    std::mutex mutex_;  // guards `detached_`, `exposed_` and the creation of `own_` and `heaps_`
    std::shared_ptr<OwnHeap> own_;
    std::vector<HeapRange> exposed_;
    std::atomic<bool> made_{false};              // `own_` exists
    std::atomic<std::byte*> own_base_{nullptr};  // while `own_` exists and is attached
    bool detached_ = false;
    std::atomic<std::byte*> heaps_{nullptr};  // the heaps of all ranks of this host
    int mapper_pid_ = 0;
};

}  // namespace unisono

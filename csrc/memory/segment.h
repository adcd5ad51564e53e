// The memory segment of a group on one host. The host's first rank creates the segment as a memfd.
// All ranks of the host map it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/control_words.h"
#include "memory/pair_memory.h"

namespace unisono {

// An owned file descriptor.
class Descriptor {
  public:
    explicit Descriptor(int fd = -1) noexcept : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
    Descriptor& operator=(Descriptor&& other) noexcept;
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor();
    [[nodiscard]] int get() const noexcept { return fd_.load(std::memory_order_relaxed); }
    int release() noexcept;

  private:
    std::atomic<int>
        fd_;  // atomic: a group's segment may be released while other threads read this
};

struct SegmentShape {
    uint32_t ranks;
    uint32_t depth;
    uint64_t buffer_bytes;
    // Both are powers of two; see pair_memory.h.
    uint64_t pair_slots;  // Number of messages that may wait in one direction.
    uint64_t pair_bytes;  // Length of the byte ring in bytes.
    // Address space of each rank's shared heap; see shared_heap.h. Pages take memory once they are
    // used. 0: the ranks have no shared heap.
    uint64_t heap_bytes = 0;

    // Bytes of the byte ring that may be in use at once. A long ring is used in part only: the
    // memory that the sender writes next has then left the receiver's cache; see staging_ring.h.
    [[nodiscard]] uint64_t pair_room() const noexcept {
        return std::max(pair_bytes / 4, staged_block_bytes());
    }
    // Bytes of each block of `PairMemory::staging`.
    [[nodiscard]] uint64_t staged_block_bytes() const noexcept {
        return std::min<uint64_t>(pair_bytes, 128 << 10);
    }
};

// Returns a segment shape that suits `ranks` ranks on `cores` cores. `staging_bytes` is the total
// of the group.
SegmentShape shape_for(uint32_t ranks, uint32_t cores, uint64_t staging_bytes);

// Creates the segment of a group. The memfd has no name in a file system, so a crash leaves nothing
// behind.
Descriptor create_segment(const SegmentShape& shape, const std::array<uint8_t, 16>& nonce);
// Creates the segment in a memfd or an empty file that the caller has opened.
void lay_out_segment(int fd, SegmentShape shape, const std::array<uint8_t, 16>& nonce);

// The memory that two ranks share for the messages in one direction; see pair_memory.h.
struct PairMemory {
    p2p::Pair* shared;
    p2p::Slot* slots;
    std::byte* bytes;    // The byte ring.
    std::byte* staging;  // `kStagedBlocks` blocks of SegmentShape::staged_block_bytes().
};
inline constexpr uint64_t kStagedBlocks = 4;

// The staging buffers of all ranks for messages of one size class. Each rank uses its buffers as a
// ring. Smaller messages have more buffers, so that a rank can run far ahead of ranks that share
// its core.
struct SizeClass {
    std::byte* base = nullptr;
    uint64_t depth = 0;         // Buffers of each rank.
    uint64_t buffer_bytes = 0;  // Bytes of one buffer; a multiple of the cache line.
    [[nodiscard]] uint64_t bytes(uint32_t ranks) const noexcept {
        return ranks * depth * buffer_bytes;
    }
    [[nodiscard]] std::byte* buffer(uint32_t rank, uint64_t position) const noexcept {
        return base + (rank * depth + position) * buffer_bytes;
    }
};
inline constexpr size_t kSizeClasses = 3;  // in ascending order of buffer size

class Segment {
  public:
    explicit Segment(Descriptor fd);  // validates all values that it reads
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();

    [[nodiscard]] int fd() const noexcept { return fd_.get(); }
    // Keeps all memory mapped until the process ends.
    void keep() noexcept { kept_ = true; }
    // Releases the memory while pointers into it may still exist. These pointers then read the last
    // values of GroupControl and RankControl, and zeros elsewhere.
    void give_back() noexcept;
    // Passes the descriptor to the caller.
    int release_descriptor() noexcept { return fd_.release(); }
    [[nodiscard]] const SegmentShape& shape() const noexcept { return shape_; }
    [[nodiscard]] GroupControl& group() const noexcept;
    [[nodiscard]] RankControl& rank(uint32_t r) const noexcept { return ranks_[r]; }
    [[nodiscard]] const SizeClass& size_class(size_t index) const noexcept {
        return size_classes_[index];
    }
    // Returns the offset of the first shared heap in the segment's file. The segment itself does
    // not map the heaps.
    [[nodiscard]] uint64_t heaps_offset() const noexcept { return heaps_offset_; }
    // Returns the memory for messages from one place of the segment to another.
    [[nodiscard]] PairMemory pair(uint32_t from, uint32_t to) const noexcept;

  private:
    Descriptor fd_;
    SegmentShape shape_{};
    std::byte* base_ = nullptr;
    size_t bytes_ = 0;
    bool kept_ = false;
    int owner_pid_ = 0;
    RankControl* ranks_ = nullptr;
    std::array<SizeClass, kSizeClasses> size_classes_;
    std::byte* pairs_ = nullptr;
    uint64_t each_pair_ = 0;
    uint64_t heaps_offset_ = 0;
};

}  // namespace unisono

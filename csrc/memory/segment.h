// One memory segment a group: created by its first rank as a memfd, mapped by all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/control_words.h"
#include "memory/pair_memory.h"

namespace unisono {

// An open descriptor that is closed with its owner.
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
    std::atomic<int> fd_;  // of a group's segment it goes while threads may still look at it
};

struct SegmentShape {
    uint32_t ranks;
    uint32_t depth;
    uint64_t area_bytes;
    // Both powers of two; see p2p/pair.h.
    uint64_t pair_slots;  // messages from one rank to another that may wait
    uint64_t pair_bytes;  // of small ones' content
};

// Staging that suits `ranks` ranks on `cores` cores; `staging_bytes` is the total of the group.
SegmentShape shape_for(uint32_t ranks, uint32_t cores, uint64_t staging_bytes);

// Creates the segment of a group; nothing of it has a name, so nothing is left behind.
Descriptor create_segment(const SegmentShape& shape, const std::array<uint8_t, 16>& nonce);
// The same in a memfd or an empty file that the caller has opened.
void lay_out_segment(int fd, const SegmentShape& shape, const std::array<uint8_t, 16>& nonce);

// What two ranks share for the messages from the one to the other; see p2p/pair.h.
struct PairMemory {
    p2p::Pair* shared;
    p2p::Slot* slots;
    std::byte* bytes;    // the ring of bytes
    std::byte* staging;  // `kStagedBlocks` blocks, each as long as the ring of bytes
};
inline constexpr uint64_t kStagedBlocks = 4;

// The staging areas of all ranks that messages of one size class go round through. The smaller the
// messages the more areas, so that a rank can run far ahead of those that share its core.
struct Strip {
    std::byte* base = nullptr;
    uint64_t depth = 0;       // areas of each rank
    uint64_t area_bytes = 0;  // a multiple of the line
    [[nodiscard]] uint64_t bytes(uint32_t ranks) const noexcept {
        return ranks * depth * area_bytes;
    }
    [[nodiscard]] std::byte* area(uint32_t rank, uint64_t position) const noexcept {
        return base + (rank * depth + position) * area_bytes;
    }
};
inline constexpr size_t kStrips = 3;  // in the order of their areas' sizes

class Segment {
  public:
    explicit Segment(Descriptor fd);  // validates everything that it reads
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();

    [[nodiscard]] int fd() const noexcept { return fd_.get(); }
    // All of it stays mapped until the process ends.
    void keep() noexcept { kept_ = true; }
    // Gives back the memory while pointers into it are still about: they lead to what GroupControl
    // and RankControl said last, and to zeros.
    void give_back() noexcept;
    // The descriptor is the caller's from here on.
    int release_descriptor() noexcept { return fd_.release(); }
    [[nodiscard]] const SegmentShape& shape() const noexcept { return shape_; }
    [[nodiscard]] GroupControl& group() const noexcept;
    [[nodiscard]] RankControl& rank(uint32_t r) const noexcept { return ranks_[r]; }
    [[nodiscard]] const Strip& strip(size_t index) const noexcept { return strips_[index]; }
    // `from` and `to` are places in the segment.
    [[nodiscard]] PairMemory pair(uint32_t from, uint32_t to) const noexcept;

  private:
    Descriptor fd_;
    SegmentShape shape_{};
    std::byte* base_ = nullptr;
    size_t bytes_ = 0;
    bool kept_ = false;
    int owner_pid_ = 0;
    RankControl* ranks_ = nullptr;
    std::array<Strip, kStrips> strips_;
    std::byte* pairs_ = nullptr;
    uint64_t each_pair_ = 0;
};

}  // namespace unisono

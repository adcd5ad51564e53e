// The staging memory of one size class, used as a ring. All ranks are at the same position of the
// ring.
//
// The length of the ring in bytes decides how soon the same memory is written again. To write a
// line that is still in the reader's second-level cache takes 5 times as long as to write a line
// that this cache has dropped. (Measured with near cores; the writer has to wait until the other
// core has dropped its copy.) So the ring is longer than that cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "execution/cpu_cores.h"
#include "execution/remote_slots.h"
#include "memory/group_memory.h"

namespace unisono {

class StagingRing {
  public:
    // Returns a ring in which every block takes a whole buffer, as remote_slots.h requires. Each
    // buffer of the size class is divided into `parts` buffers.
    static StagingRing with_buffers(const View& view, size_t size_class, uint64_t parts = 1) {
        const SizeClass& all = view.segment().size_class(size_class);
        const uint64_t depth = all.depth * parts, bytes = all.buffer_bytes / parts;
        return {view, size_class, true, depth, bytes, depth * bytes, depth};
    }
    // Returns a ring in which a block takes the bytes that it needs.
    static StagingRing of_any_length(const View& view, size_t size_class) {
        const SizeClass& all = view.segment().size_class(size_class);
        const uint64_t bytes = all.depth * all.buffer_bytes;
        return {view, size_class, false, all.depth, all.buffer_bytes, bytes, kMostEnded / 2};
    }
    // Returns the length of the ring for calls of one block.
    [[nodiscard]] static uint64_t usual_bytes() noexcept {
        return 2 * std::max<uint64_t>(1 << 20, private_cache_bytes());
    }

    [[nodiscard]] uint64_t buffer_bytes() const noexcept { return buffer_bytes_; }
    // Returns the least number of blocks that the memory holds at once.
    [[nodiscard]] uint64_t depth() const noexcept { return depth_; }

    // Begins a call of `blocks` blocks that need `bytes` each, of which `lead` + 1 are in the ring
    // at once. The blocks of a longer call use a shorter ring: its data drop the lines from the
    // reader's cache, and need the room in the shared cache.
    void begin(uint64_t bytes, uint64_t lead, uint64_t blocks) noexcept {
        block_bytes_ = whole_ ? buffer_bytes_ : (bytes + kUnit - 1) / kUnit * kUnit;
        const uint64_t least = std::max(depth_, lead + 2) * block_bytes_;
        ring_bytes_ =
            whole_ ? all_bytes_
                   : std::min(all_bytes_, blocks > 1 ? least : std::max(least, usual_bytes()));
        // From any other place, the last of the `lead` + 1 blocks could need the memory of the
        // first.
        const bool anywhere = (lead + 2) * block_bytes_ <= ring_bytes_;
        const bool fits = first_.offset + block_bytes_ <= ring_bytes_;
        if (!whole_ && !(anywhere && fits)) first_ = {0, first_.lap + 1};
    }
    // Returns the address of a rank's slot 0 for the block that is `ahead` blocks after the first
    // unfinished block.
    [[nodiscard]] std::byte* buffer(uint32_t rank, uint64_t ahead) const noexcept {
        return view_.buffers(rank, size_class_) + at(ahead).offset;
    }
    [[nodiscard]] Place place(uint64_t ahead) const noexcept {
        return {size_class_, at(ahead).offset / buffer_bytes_, blocks_ + ahead};
    }
    // Returns the progress that a rank must reach before this memory can be used again: the rank
    // has then finished the blocks that used it before.
    [[nodiscard]] uint64_t reusable_at(uint64_t ahead) noexcept {
        const Position start = at(ahead);
        while (ended_count_ > 0 && is_in_the_way(oldest().start, start)) drop_oldest();
        return reusable_at_;
    }
    // Ends the first unfinished block.
    void end(uint64_t progress) noexcept {
        if (ended_count_ == most_ended_) drop_oldest();
        ended_[(oldest_ + ended_count_++) % kMostEnded] = {first_, progress};
        first_ = at(1);
        ++blocks_;
    }

  private:
    // A place in the ring, and the number of times that the ring was used up to its end before.
    struct Position {
        uint64_t offset, lap;
    };
    struct Ended {
        Position start;
        uint64_t progress;
    };
    static constexpr uint64_t kUnit = 2 * kLine;
    // Limits the calls by which a rank is ahead of another; see kCallHistory.
    static constexpr uint64_t kMostEnded = 128;

    StagingRing(const View& view, size_t size_class, bool whole, uint64_t depth,
                uint64_t buffer_bytes, uint64_t all_bytes, uint64_t most_ended)
        : view_(view),
          size_class_(size_class),
          whole_(whole),
          depth_(depth),
          buffer_bytes_(buffer_bytes),
          all_bytes_(all_bytes),
          most_ended_(std::min(most_ended, kMostEnded)),
          ring_bytes_(all_bytes) {}

    [[nodiscard]] Position at(uint64_t ahead) const noexcept {
        Position found = first_;
        for (; ahead > 0; --ahead) {
            found.offset += block_bytes_;
            if (found.offset + block_bytes_ > ring_bytes_) found = {0, found.lap + 1};
        }
        return found;
    }
    // Returns true if a block that has ended is one lap behind, and begins before the end of a
    // block at `start`.
    [[nodiscard]] bool is_in_the_way(const Position& ended, const Position& start) const noexcept {
        return ended.lap + 1 < start.lap ||
               (ended.lap + 1 == start.lap && ended.offset < start.offset + block_bytes_);
    }
    [[nodiscard]] const Ended& oldest() const noexcept { return ended_[oldest_]; }
    void drop_oldest() noexcept {
        reusable_at_ = oldest().progress;
        oldest_ = (oldest_ + 1) % kMostEnded;
        --ended_count_;
    }

    const View& view_;
    size_t size_class_;
    bool whole_;
    uint64_t depth_, buffer_bytes_, all_bytes_, most_ended_;
    uint64_t ring_bytes_, block_bytes_ = 0;  // of the current call
    Position first_{0, 0};                   // of the first unfinished block
    uint64_t blocks_ = 0;                    // finished blocks
    uint64_t reusable_at_ = 0;               // progress at the end of the block dropped last
    uint64_t oldest_ = 0, ended_count_ = 0;  // in `ended_`
    std::array<Ended, kMostEnded> ended_{};
};

}  // namespace unisono

// A rank's view of the memory of all ranks of its group. The memory of ranks on the same host is in
// the host's segment. For each rank of another host there is a mirror: private memory that has the
// same layout and is filled by a transport.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/call.h"
#include "core/futex.h"
#include "memory/segment.h"

namespace unisono {

// The ranks of a group that are on this host.
struct HostRanks {
    uint32_t ranks;              // Number of ranks of the whole group.
    std::vector<uint32_t> here;  // Ranks on this host, by their place in the segment.
    // Returns the ranks of a group on one host. The place of each rank in the segment equals its
    // number.
    static HostRanks one_host(uint32_t ranks);
};

class View {
  public:
    View(Segment& segment, uint32_t rank, HostRanks host_ranks);
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View();
    // Stores the last call of a rank on another host. Any thread may call this.
    void update_last_call(uint32_t r, const LastCall& called) noexcept {
        const std::lock_guard lock(mirror_mutex_);
        unisono::update_last_call(control(r), called);
    }
    // Releases the memory of the segment and of the mirrors; see Segment::give_back(). Only the
    // RankControl of each mirror is kept, because update_last_call() may still write it.
    void give_back() noexcept;
    // Keeps all memory mapped until the process ends.
    void keep() noexcept {
        kept_ = true;
        segment_.keep();
    }
    [[nodiscard]] bool kept() const noexcept { return kept_; }

    [[nodiscard]] uint32_t rank() const noexcept { return rank_; }
    [[nodiscard]] uint32_t ranks() const noexcept { return static_cast<uint32_t>(seen_.size()); }
    [[nodiscard]] Segment& segment() const noexcept { return segment_; }
    [[nodiscard]] RankControl& control(uint32_t r) const noexcept { return *seen_[r].control; }
    [[nodiscard]] RankControl& own() const noexcept { return control(rank_); }
    [[nodiscard]] bool local(uint32_t r) const noexcept { return seen_[r].place != kAway; }
    // Returns the place of a local rank in the segment.
    [[nodiscard]] uint32_t place(uint32_t r) const noexcept { return seen_[r].place; }
    [[nodiscard]] const std::vector<uint32_t>& here() const noexcept { return here_; }
    [[nodiscard]] const std::vector<uint32_t>& away() const noexcept { return away_; }
    // Returns true if the rank has left without a failure.
    [[nodiscard]] bool has_left(uint32_t r) const noexcept {
        return control(r).presence.load(std::memory_order_acquire) ==
               static_cast<uint32_t>(Presence::left);
    }
    // Returns the fence that doorbells of this host need.
    [[nodiscard]] Fence fence() const noexcept {
        const bool full = segment_.group().fences_needed.load(std::memory_order_relaxed) != 0;
        return full ? Fence::full : Fence::light;
    }
    // Returns the first staging buffer of a rank in one size class. The rank's other buffers of the
    // class follow it.
    [[nodiscard]] std::byte* buffers(uint32_t r, size_t size_class) const noexcept {
        return seen_[r].buffers[size_class];
    }

  private:
    static constexpr uint32_t kAway = ~0U;
    struct Seen {
        RankControl* control = nullptr;
        std::array<std::byte*, kSizeClasses> buffers{};
        uint32_t place = kAway;
    };
    void mirror_away();

    Segment& segment_;
    uint32_t rank_;
    std::vector<Seen> seen_;  // by rank of the group
    std::vector<uint32_t> here_, away_;
    std::byte* mirrors_ = nullptr;
    size_t mirrors_bytes_ = 0;
    bool kept_ = false;
    int owner_pid_ = 0;
    std::mutex mirror_mutex_;  // guards the call histories in the mirrors
};

}  // namespace unisono

// What one rank sees of every rank of its group: the ranks of its host in the host's segment, those
// of other hosts as mirrors, which are private memory of the same layout that a transport fills.
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

// Who of a group is on this host.
struct Seats {
    uint32_t ranks;              // of the group
    std::vector<uint32_t> here;  // those at the places of the host's segment
    // Every rank is here, at the place of its number.
    static Seats one_host(uint32_t ranks);
};

class View {
  public:
    View(Segment& segment, uint32_t rank, Seats seats);
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View();
    // What a rank of another host has called, by whatever way the news came; from any thread.
    void hear(uint32_t r, const Called& called) noexcept {
        const std::lock_guard lock(hearing_);
        unisono::hear(control(r), called);
    }
    // See Segment::give_back(). Of a mirror RankControl stays, so that others may still hear().
    void give_back() noexcept;
    // All memory stays mapped until the process ends.
    void keep() noexcept {
        kept_ = true;
        segment_.keep();
    }

    [[nodiscard]] uint32_t rank() const noexcept { return rank_; }
    [[nodiscard]] uint32_t ranks() const noexcept { return static_cast<uint32_t>(seen_.size()); }
    [[nodiscard]] Segment& segment() const noexcept { return segment_; }
    [[nodiscard]] RankControl& control(uint32_t r) const noexcept { return *seen_[r].control; }
    [[nodiscard]] RankControl& own() const noexcept { return control(rank_); }
    [[nodiscard]] bool local(uint32_t r) const noexcept { return seen_[r].place != kAway; }
    // Of a local rank: where it is in the segment.
    [[nodiscard]] uint32_t place(uint32_t r) const noexcept { return seen_[r].place; }
    [[nodiscard]] const std::vector<uint32_t>& here() const noexcept { return here_; }
    [[nodiscard]] const std::vector<uint32_t>& away() const noexcept { return away_; }
    // Whether the rank has left in good order.
    [[nodiscard]] bool has_left(uint32_t r) const noexcept {
        return control(r).presence.load(std::memory_order_acquire) ==
               static_cast<uint32_t>(Presence::left);
    }
    // What bells of this host need.
    [[nodiscard]] Fence fence() const noexcept {
        const bool full = segment_.group().fences_needed.load(std::memory_order_relaxed) != 0;
        return full ? Fence::full : Fence::light;
    }
    // The first of a rank's areas of one strip; they lie one after the other.
    [[nodiscard]] std::byte* areas(uint32_t r, size_t strip) const noexcept {
        return seen_[r].areas[strip];
    }

  private:
    static constexpr uint32_t kAway = ~0U;
    struct Seen {
        RankControl* control = nullptr;
        std::array<std::byte*, kStrips> areas{};
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
    std::mutex hearing_;  // guards the call history of mirrors
};

}  // namespace unisono

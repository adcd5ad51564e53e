// Distributes the ranks of a host evenly over the cores.
//
// With a core for each rank, two ranks on one core run one after the other, so a program takes
// twice its time. If a thread of another program occupies the other core, the kernel sees no reason
// to move a rank: one of the cores has two threads in any case. So a rank that waits for a peer on
// its own core moves.
//
// With more ranks than cores, ranks that wake up at the same time may occupy the cores unevenly,
// such as 3 ranks on one core and 1 on the other. The kernel needs up to 100 ms to correct this,
// and until then a call takes 1.5 times as long. So a waiting rank moves from the fullest core to
// the emptiest.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <span>

#include "core/control_words.h"
#include "memory/group_memory.h"

namespace unisono {

// Returns the core to which the rank at `place` should move, or -1 if it should stay. `cores` are
// the cores of a host's ranks (negative: unknown), and `usable` are the cores that the rank may
// use. Only one rank moves at a time: the last one on the first of the fullest cores. The others
// stay, even if it cannot move.
[[nodiscard]] int emptier_core(std::span<const int> cores, size_t place,
                               std::span<const int> usable);

class CoreSharing {
  public:
    explicit CoreSharing(RankControl& own) noexcept : own_(own) {}
    // Publishes the core of the calling thread, which enters a call: in each call of many bytes,
    // and in one of 4 others, since to ask for the core costs more than the rest of a call's
    // beginning.
    void enter(uint64_t bytes) noexcept {
        if (bytes >= kManyBytes || calls_++ % kCallsBetween == 0) publish(::sched_getcpu());
    }
    // Moves the calling thread, which waits for the peer, if the peer was last seen on this core.
    void leave(const RankControl& peer) noexcept;
    // Moves the calling thread, which waits for a peer, if the ranks occupy the cores unevenly.
    void even_out(const View& view);
    // Returns true if the peer was last seen on another core, so it may be running now.
    [[nodiscard]] bool elsewhere(const RankControl& peer) const noexcept {
        return peer.core.load(std::memory_order_relaxed) !=
               own_.core.load(std::memory_order_relaxed);
    }

  private:
    static constexpr uint32_t kCallsBetween = 4;
    static constexpr uint64_t kManyBytes = 32 << 10;

    // Takes a turn to move, at most once every 2 ms, because a move costs some microseconds.
    [[nodiscard]] bool takes_turn() noexcept;
    void publish(int core) noexcept {
        if (own_.core.load(std::memory_order_relaxed) != core)
            own_.core.store(core, std::memory_order_relaxed);
    }

    RankControl& own_;
    uint32_t calls_ = 0;
    std::chrono::steady_clock::time_point tried_{};
};

}  // namespace unisono

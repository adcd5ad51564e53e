// Ends the sharing of a core by ranks that could use a core each.
//
// Two ranks on one core run one after the other, so a program takes twice its time. If a thread of
// another program occupies the other core, the kernel sees no reason to move a rank: one of the
// cores has two threads in any case. So a rank that waits for a peer on its own core moves.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>

#include "core/control_words.h"

namespace unisono {

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
    // Moves at most once every 2 ms, because a move costs some microseconds.
    void end(const RankControl& peer) noexcept;

  private:
    static constexpr uint32_t kCallsBetween = 4;
    static constexpr uint64_t kManyBytes = 32 << 10;

    void publish(int core) noexcept {
        if (own_.core.load(std::memory_order_relaxed) != core)
            own_.core.store(core, std::memory_order_relaxed);
    }

    RankControl& own_;
    uint32_t calls_ = 0;
    std::chrono::steady_clock::time_point moved_{};
};

}  // namespace unisono

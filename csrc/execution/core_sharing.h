// Ends the sharing of a core by ranks that could use a core each.
//
// Two ranks on one core run one after the other, so a program takes twice its time. If a thread of
// another program occupies the other core, the kernel sees no reason to move a rank: one of the
// cores has two threads in any case. So a rank that waits for a peer on its own core moves.
#pragma once

#include <chrono>
#include <cstdint>

#include "core/control_words.h"

namespace unisono {

class CoreSharing {
  public:
    explicit CoreSharing(RankControl& own) noexcept : own_(own) {}
    // Publishes the core of the calling thread, which enters a call, in one of 4 calls: to ask for
    // the core costs more than the rest of a call's beginning.
    void enter() noexcept {
        if (calls_++ % kCallsBetween == 0) publish();
    }
    // Moves the calling thread, which waits for the peer, if the peer entered its last call on this
    // core. Moves at most once every 2 ms, because a move costs some microseconds.
    void end(const RankControl& peer) noexcept;

  private:
    static constexpr uint32_t kCallsBetween = 4;

    void publish() noexcept;

    RankControl& own_;
    uint32_t calls_ = 0;
    std::chrono::steady_clock::time_point moved_{};
};

}  // namespace unisono

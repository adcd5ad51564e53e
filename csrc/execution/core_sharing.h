// Ends the sharing of a core by ranks that could use a core each.
//
// Two ranks on one core run one after the other, so a program takes twice its time. If a thread of
// another program occupies the other core, the kernel sees no reason to move a rank: one of the
// cores has two threads in any case. So a rank that waits for a peer on its own core moves.
#pragma once

#include <chrono>

#include "core/control_words.h"

namespace unisono {

class CoreSharing {
  public:
    explicit CoreSharing(RankControl& own) noexcept : own_(own) {}
    // Publishes the core of the calling thread, which enters a call.
    void publish() noexcept;
    // Moves the calling thread, which waits for the peer, if the peer entered its last call on this
    // core. Moves at most once every 2 ms, because a move costs some microseconds.
    void end(const RankControl& peer) noexcept;

  private:
    RankControl& own_;
    std::chrono::steady_clock::time_point moved_{};
};

}  // namespace unisono

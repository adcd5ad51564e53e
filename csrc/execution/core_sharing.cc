#include "execution/core_sharing.h"

#include <sched.h>

#include "execution/cpu_cores.h"

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kBetweenMoves{2};

}  // namespace

void CoreSharing::end(const RankControl& peer) noexcept {
    const int core = ::sched_getcpu();
    publish(core);
    if (core < 0 || peer.core.load(std::memory_order_relaxed) != core) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - moved_ < kBetweenMoves) return;
    moved_ = now;
    if (leave_core(core)) publish(::sched_getcpu());
}

}  // namespace unisono

#include "execution/core_sharing.h"

#include <sched.h>

#include <algorithm>
#include <vector>

#include "execution/cpu_cores.h"

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kBetweenMoves{2};

}  // namespace

int emptier_core(std::span<const int> cores, size_t place, std::span<const int> usable) {
    const auto ranks_on = [&](int core) {
        return core < 0 ? 0 : std::count(cores.begin(), cores.end(), core);
    };
    const auto is_emptier = [&](int a, int b) { return ranks_on(a) < ranks_on(b); };
    const int own = cores[place];
    const auto last = std::find(cores.rbegin(), cores.rend(), own);
    const auto full = std::max_element(cores.begin(), cores.end(), is_emptier);
    const auto empty = std::min_element(usable.begin(), usable.end(), is_emptier);
    if (empty == usable.end() || *full != own || last.base() - cores.begin() != place + 1)
        return -1;
    return ranks_on(*empty) + 1 < ranks_on(own) ? *empty : -1;
}

bool CoreSharing::takes_turn() noexcept {
    const auto now = std::chrono::steady_clock::now();
    if (now - tried_ < kBetweenMoves) return false;
    tried_ = now;
    return true;
}

void CoreSharing::leave(const RankControl& peer) noexcept {
    const int core = ::sched_getcpu();
    publish(core);
    if (core < 0 || peer.core.load(std::memory_order_relaxed) != core || !takes_turn()) return;
    if (leave_core(core)) publish(::sched_getcpu());
}

void CoreSharing::even_out(const View& view) {
    if (!takes_turn()) return;
    publish(::sched_getcpu());
    std::vector<int> cores;
    for (const uint32_t rank : view.here())
        cores.push_back(view.control(rank).core.load(std::memory_order_relaxed));
    const int core = emptier_core(cores, view.place(view.rank()), usable_core_numbers());
    if (core >= 0 && go_to_core(core)) publish(core);
}

}  // namespace unisono

#include "memory/waiter.h"

#include <array>
#include <cstdio>

namespace unisono {

std::string timeout_text(double timeout_s) {
    std::array<char, 32> seconds;
    std::snprintf(seconds.data(), seconds.size(), "%.9g", timeout_s);
    return std::string("timeout after ") + seconds.data() + " s";
}

std::string timeout_text(uint32_t rank, double timeout_s) {
    return timeout_text(timeout_s) + " on rank " + std::to_string(rank);
}

void Waiter::make_slow_checks(const Interrupted& interrupted) {
    if (interrupted && interrupted()) {
        members_.record(Fault::aborted,
                        "rank " + std::to_string(members_.rank()) + " was interrupted by a signal");
        throw Error(Fault::interrupted, "interrupted");
    }
    members_.require_due_peers_alive();
}

}  // namespace unisono

#include "waiter.h"

namespace unisono {

void Waiter::check_world(const Interrupted& interrupted) {
    if (interrupted && interrupted()) {
        members_.record(Fault::aborted,
                        "rank " + std::to_string(members_.rank()) + " was interrupted by a signal");
        throw Error(Fault::interrupted, "interrupted");
    }
    members_.require_due_peers_alive();
}

}  // namespace unisono

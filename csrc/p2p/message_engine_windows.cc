// One-sided access to ranks of other hosts.
#include <string>

#include "p2p/message_engine.h"
#include "p2p/remote_endpoint.h"

namespace unisono::p2p {

uint64_t Engine::serve(const ServedWindow& window, bool in_background) {
    if (!transport_) return 0;
    const std::lock_guard lock(mutex_);
    const uint64_t number = windows_.add(window);
    if (in_background) wake_progress_thread();
    return number;
}

void Engine::stop_serving(uint64_t number) noexcept {
    if (!transport_ || members_.in_child() || mutex_.held_here()) return;
    const std::lock_guard lock(mutex_);
    windows_.remove(number);
}

void Engine::access(Request& request, uint64_t window, uint64_t at, double timeout_s,
                    const Interrupted& interrupted) {
    check(request);
    {
        const std::lock_guard lock(mutex_);
        start(request, [&] {
            RemoteEndpoint& peer = *remotes_[static_cast<size_t>(request.message().peer)];
            request.sends() ? peer.put_to(request, window, at) : peer.get_from(request, window, at);
            peer.progress();
        });
    }
    try {
        wait(request, timeout_s, -1, interrupted);
    } catch (...) {
        end(request);
        throw;
    }
}

void Engine::signal(uint32_t peer, uint64_t window) {
    const std::lock_guard lock(mutex_);
    guarded([&] {
        remotes_[peer]->signal(window);
        return true;
    });
}

}  // namespace unisono::p2p

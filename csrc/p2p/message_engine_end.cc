// The end of all requests, after a failure or when the engine stops.
#include <mutex>

#include "p2p/message_engine.h"
#include "p2p/remote_endpoint.h"

namespace unisono::p2p {

// Drops all messages from the transport. Keeps the memory of transfers that the transport cannot
// stop.
void Engine::forget_messages() noexcept {
    if (transport_->forget_messages()) return;
    for (RemoteEndpoint* const remote : remotes_) {
        if (remote) remote->keep_memory();
    }
}

void Engine::fail_all(const Error& error) noexcept {
    if (transport_ && !stopped_) {
        unfinished_ = unfinished_ || transport_->reads_in_place();
        forget_messages();
    }
    const auto end = [&](Request* request) {
        request->failed(error);
        complete(*request);
    };
    for (Request* const receive : matcher_.take_all_posted()) end(receive);
    matcher_.forget_all();
    for (Peer& peer : peers_) {
        for (; !peer.held.empty(); peer.held.pop_front()) end(peer.held.front());
        peer.endpoint->fail(error);
    }
}

// Ends all requests after the group has failed. Afterwards no data moves into the callers' memory.
void Engine::end_all() noexcept {
    if (mutex_.held_here()) return;  // in a signal handler: the interrupted code ends the requests
    const std::lock_guard lock(mutex_);
    try {
        poll();
    } catch (const std::exception&) {  // all requests have the error now
    }
}

}  // namespace unisono::p2p

// The end of all requests, after a failure or when the engine stops.
#include <mutex>
#include <string>
#include <utility>

#include "p2p/message_engine.h"
#include "p2p/remote_endpoint.h"

namespace unisono::p2p {
namespace {

// Limit of the wait for peers that write to memory of failed receives. A write takes less than a
// millisecond, but the peer may have to wait for a core.
constexpr double kWritesEnd_s = 2;

const Error kUnfinished(Fault::aborted, "the communicator was closed with this message under way");

}  // namespace

// Drops all messages from the transport. Keeps the memory of transfers that the transport cannot
// stop.
void Engine::forget_messages(const Error& failure) noexcept {
    if (transport_->forget_messages(failure)) return;
    for (RemoteEndpoint* const remote : remotes_) {
        if (remote) remote->keep_memory();
    }
}

// Ends all requests. If a poll finds that this rank has closed the group, the transport must still
// tell the peers that the rank leaves, so it is not closed without need.
void Engine::fail_all(const Error& error) noexcept {
    if (transport_ && !stopped_) {
        // `error` may only be that this rank has closed the group; the peers must learn the
        // failure.
        if (const std::optional<Error> failure = members_.failure())
            forget_messages(*failure);
        else
            leave_transport();
    }
    const auto end = [&](Request* request) {
        request->failed(error);
        complete(*request);
    };
    for (Request* const receive : matcher_.take_all_posted()) end(receive);
    matcher_.forget_all();
    Deadline writes_end(kWritesEnd_s);
    for (Peer& peer : peers_) {
        for (; !peer.held.empty(); peer.held.pop_front()) end(peer.held.front());
        peer.endpoint->fail(error, writes_end);
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

// A wait may throw although the group has not failed, for example if there is no memory for its
// timeout. The failure ends the request in any case: `end_all` needs no memory.
void Engine::end(Request& request) noexcept {
    if (request.done() || members_.in_child()) return;
    if (!members_.closed()) {
        members_.record_made(Fault::aborted, [&] {
            return "rank " + std::to_string(members_.rank()) + " gave up its " + text_of(request);
        });
    }
    end_all();
}

void Engine::stop() noexcept {
    if (members_.in_child()) {  // only the parent has the thread, and perhaps the lock
        if (thread_.joinable()) thread_.detach();
        static_cast<void>(changed_.release());
        return;
    }
    // A signal handler stops the engine. The destructor does the remaining work.
    if (mutex_.held_here()) {
        stopping_ = true;
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        changed_->notify_all();
    }
    ring_always(view_.own().p2p);
    if (transport_) transport_->wake();
    if (thread_.joinable()) thread_.join();
    const std::lock_guard lock(mutex_);
    if (transport_ && !stopped_) leave_transport();
    stopped_ = true;
    fail_all(kUnfinished);
}

// Leaves in order, or closes the transport after a failure, or because messages are under way:
// their transfers must not use the callers' memory any more. Requires the lock.
void Engine::leave_transport() noexcept {
    if (std::exchange(transport_left_, true)) return;
    if (members_.failed()) return end_transport(members_.failure());
    if (!transport_->part()) end_transport(kUnfinished);
}

bool Engine::parted() noexcept {
    if (!transport_ || members_.in_child() || mutex_.held_here()) return true;
    const std::lock_guard lock(mutex_);
    return !stopped_ || transport_closed_ || transport_->parted();
}

void Engine::close_transport() noexcept {
    if (!transport_ || members_.in_child() || mutex_.held_here()) return;
    const std::lock_guard lock(mutex_);
    if (stopped_) end_transport(std::nullopt);
}

void Engine::end_transport(const std::optional<Error>& failure) noexcept {
    if (std::exchange(transport_closed_, true)) return;
    transport_->close(failure);
    forget_messages(failure.value_or(kUnfinished));
}

}  // namespace unisono::p2p

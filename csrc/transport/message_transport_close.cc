// The end of a message transport: its last frames, and the memory that the library still uses.
#include <algorithm>
#include <chrono>
#include <new>
#include <thread>
#include <utility>

#include "core/error.h"
#include "memory/waiter.h"
#include "transport/message_transport.h"

namespace unisono {
namespace {

constexpr double kLinger_s = 0.1;  // time for the last frames of a library that closes at once

}  // namespace

// Drops all messages by closing the library, because there is no other way to cancel the transfers
// that have begun.
bool MessageTransport::forget_messages() noexcept {
    return close_library();
}

// Closes the library without sending a failure. The peers learn of a failure through the control
// channels. But they learn only by the last frames that this rank has left, so these get some time
// to be sent.
void MessageTransport::close(const std::optional<Error>&) noexcept {
    Deadline brief(kLinger_s);
    while (parting_ && !parted() && !brief.passed())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    close_library();
}

// Returns true if callers' memory is still to be sent.
bool MessageTransport::reads_in_place() const noexcept {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return !peer.leaving.empty(); });
}

bool MessageTransport::part() noexcept {
    parting_ = true;
    for (const uint32_t peer : view_.away()) {
        try {
            Frame frame{};
            frame.kind = FrameKind::left;
            frame.loads = peers_[peer].leaving.empty() ? 0 : 1;
            send(peer, frame, {});
        } catch (const std::exception&) {  // the peer cannot be reached
        }
    }
    return !reads_in_place() && coming_.load(std::memory_order_relaxed) == 0;
}

// Polls, and returns true once all frames are sent. A frame that is unsent when the library closes
// is never sent.
bool MessageTransport::parted() noexcept {
    try {
        if (!idle()) poll();
        return idle();
    } catch (const std::exception&) {  // no peer could receive the rest
        return true;
    }
}

// Closes the library. Returns true if all memory is free again. Otherwise the library may continue
// a transfer until the process ends, even in the library's finalizer. The memory of this transport
// and of the group is then kept.
bool MessageTransport::close_library() noexcept {
    if (library_mutex_.held_here()) return false;  // a signal handler has interrupted the library
    const std::lock_guard lock(library_mutex_);
    if (std::exchange(closed_, true)) return clean_;
    clean_ = library_->close();
    if (clean_) return true;
    view_.keep();
    static_cast<void>(slots_.release());
    static_cast<void>(new (std::nothrow) std::deque<Buffer>(std::move(buffers_)));
    return false;
}

}  // namespace unisono

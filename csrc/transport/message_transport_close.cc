// The end of a message transport: its last frames, and the memory that the library still uses.
#include <algorithm>
#include <chrono>
#include <new>
#include <string_view>
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
// that have begun. The library may still send the content of callers' memory.
bool MessageTransport::forget_messages(const Error& failure) noexcept {
    if (closed_.load(std::memory_order_relaxed)) return close_library();
    parting_ = true;
    const std::string_view text = failure.what();
    const Load load{0, reinterpret_cast<const std::byte*>(text.data()),
                    std::min(text.size(), kFaultText)};
    Frame frame{};
    frame.kind = FrameKind::failed;
    frame.called.kind = static_cast<uint32_t>(failure.fault());
    send_last(frame, {&load, 1}, [](const Peer& peer) { return !peer.leaving.empty(); });
    return close_library();
}

// Sends a last frame to the peers that `needs_it`.
template <class Needs>
void MessageTransport::send_last(const Frame& frame, std::span<const Load> loads,
                                 Needs&& needs_it) noexcept {
    for (const uint32_t peer : view_.away()) {
        try {
            if (needs_it(peers_[peer])) send(peer, frame, loads);
        } catch (const std::exception&) {  // the peer cannot be reached
        }
    }
}

// Closes the library without sending a failure. The peers learn of a failure through the control
// channels. But they learn only by the last frames that this rank has left, so these get some time
// to be sent.
void MessageTransport::close(const std::optional<Error>&) noexcept {
    Deadline brief(kLinger_s);
    while (parting_ && !closed_.load(std::memory_order_relaxed) && !parted() && !brief.passed())
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
    Frame frame{};
    frame.kind = FrameKind::left;
    send_last(frame, {}, [](const Peer& peer) { return peer.leaving.empty(); });
    frame.loads = 1;
    send_last(frame, {}, [](const Peer& peer) { return !peer.leaving.empty(); });
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
    if (closed_.exchange(true)) return clean_;
    clean_ = library_->close();
    if (clean_) return true;
    view_.keep();
    static_cast<void>(slots_.release());
    static_cast<void>(new (std::nothrow) std::deque<Buffer>(std::move(buffers_)));
    return false;
}

}  // namespace unisono

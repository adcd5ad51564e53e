// The end of a message transport: its last frames, and the memory that the library still uses.
#include <new>
#include <utility>

#include "core/error.h"
#include "transport/message_transport.h"

namespace unisono {
// Drops all messages by closing the library, because there is no other way to cancel the transfers
// that have begun.
bool MessageTransport::forget_messages() noexcept {
    return close_library();
}

// Closes the library without sending a failure. The peers learn of a failure through the control
// channels.
void MessageTransport::close(const std::optional<Error>&) noexcept {
    close_library();
}

void MessageTransport::part() noexcept {
    try {
        Frame frame{};
        frame.kind = FrameKind::left;
        for (const uint32_t peer : view_.away()) send(peer, frame, {});
    } catch (const std::exception&) {  // no peer can be reached
    }
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

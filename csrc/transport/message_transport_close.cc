// How a wire of messages ends: what is sent before, and what becomes of memory still in use.
#include <new>
#include <utility>

#include "core/error.h"
#include "transport/message_transport.h"

namespace unisono {
// What the carrier has begun can only be taken back by closing it.
bool MessageWire::forget_messages() noexcept {
    return let_go();
}

// Of a failure the others hear by whoever speaks with them besides.
void MessageWire::close(const std::optional<Error>&) noexcept {
    let_go();
}

void MessageWire::part() noexcept {
    try {
        Frame frame{};
        frame.kind = FrameKind::left;
        for (const uint32_t peer : view_.away()) send(peer, frame, {});
    } catch (const std::exception&) {  // nobody is left to be told
    }
}

// What has not been sent when the carrier closes never will be.
bool MessageWire::parted() noexcept {
    try {
        if (!idle()) poll();
        return idle();
    } catch (const std::exception&) {  // nobody is left who could take it
        return true;
    }
}

// Closes the carrier; true if memory is free again. What it still moves, it moves until the process
// ends, perhaps in the library's last act: it must find memory there, of this wire and the group.
bool MessageWire::let_go() noexcept {
    if (carrying_.held_here()) return false;  // a signal handler has interrupted the carrier
    const std::lock_guard lock(carrying_);
    if (std::exchange(closed_, true)) return clean_;
    clean_ = carrier_->close();
    if (clean_) return true;
    view_.keep();
    static_cast<void>(slots_.release());
    static_cast<void>(new (std::nothrow) std::deque<Buffer>(std::move(buffers_)));
    return false;
}

}  // namespace unisono

#include "execution/remote_slots.h"

#include <algorithm>
#include <string>

#include "core/call.h"

namespace unisono {

RemoteSlots::RemoteSlots(View& view, Membership& members)
    : view_(view), members_(members), ended_(members.ranks()) {
    for (size_t s = 0; s < kSizeClasses; ++s)
        pending_reads_[s].resize(view.segment().size_class(s).depth);
}

void RemoteSlots::send_slots(uint32_t peer, const Place& place, std::span<const Load> loads) {
    Frame frame{};
    frame.kind = FrameKind::post;
    frame.size_class = static_cast<uint8_t>(place.size_class);
    frame.progress = view_.own().progress.load(std::memory_order_relaxed);
    frame.called = last_call_of(view_.own());
    std::erase_if(owed_acks_, [peer](const OwedAck& ack) { return ack.peer == peer; });
    transport_->send(peer, frame, loads);
}

void RemoteSlots::end_block(const Plan& plan, const Place& place, uint64_t lead,
                            uint64_t progress) {
    auto& pending = pending_reads_[place.size_class][place.position];
    std::erase_if(pending, [this](const PendingRead& read) { return is_done(read); });
    for (const uint32_t reader : plan.readers_of_any) {
        if (!view_.local(reader)) pending.push_back({reader, progress});
    }
    for (const uint32_t source : plan.sources) {
        if (!view_.local(source)) owed_acks_.push_back({source, place.size_class, place.block});
    }
    // A peer needs the acknowledgement of a block before it uses the same buffer again, `depth`
    // blocks later. If first rounds run `lead` blocks ahead, the peer uses the buffer `lead` blocks
    // earlier than that, so this rank must also acknowledge `lead` blocks earlier.
    const uint64_t depth = view_.segment().size_class(place.size_class).depth;
    const uint64_t most = std::min((depth + 1) / 2, depth - lead);
    acknowledge(place.size_class,
                [&](const OwedAck& ack) { return place.block - ack.block + 1 >= most; });
}

void RemoteSlots::acknowledge_all(size_t size_class) {
    acknowledge(size_class, [](const OwedAck&) { return true; });
}

template <class Due>
void RemoteSlots::acknowledge(size_t size_class, Due due) {
    const auto wanted = [&](const OwedAck& ack) {
        return ack.size_class == size_class && due(ack);
    };
    for (;;) {
        const auto found = std::find_if(owed_acks_.begin(), owed_acks_.end(), wanted);
        if (found == owed_acks_.end()) return;
        // This removes the acknowledgement from the list, so the loop ends.
        send_slots(found->peer, {size_class, 0, 0}, {});
    }
}

bool RemoteSlots::is_done(const PendingRead& read) const noexcept {
    return view_.control(read.peer).progress.load(std::memory_order_acquire) >= read.progress;
}

std::optional<uint32_t> RemoteSlots::pending_reader(const Place& place) noexcept {
    auto& pending = pending_reads_[place.size_class][place.position];
    std::erase_if(pending, [this](const PendingRead& read) { return is_done(read); });
    if (pending.empty()) return std::nullopt;
    return pending.front().peer;
}

bool RemoteSlots::has_read(uint32_t peer, const Place& place) const noexcept {
    const auto& pending = pending_reads_[place.size_class][place.position];
    return std::none_of(pending.begin(), pending.end(), [&](const PendingRead& read) {
        return read.peer == peer && !is_done(read);
    });
}

// Returns the address to which a frame's payload is received. Slots go directly to the mirror of
// the peer, which is this rank's copy of the peer's staging buffers.
std::byte* RemoteSlots::place(uint32_t peer, const Frame& frame) {
    if (frame.kind == FrameKind::failed) {
        if (std::byte* text = fault_reports_.place(peer, frame)) return text;
    }
    const bool known = frame.kind == FrameKind::load || frame.kind == FrameKind::post;
    if (!known || frame.size_class >= kSizeClasses) {
        nonsense(peer, "a frame with payload of kind " +
                           std::to_string(static_cast<uint32_t>(frame.kind)) + " for size class " +
                           std::to_string(frame.size_class) +
                           ": expected a load or a post, for size class 0 to " +
                           std::to_string(kSizeClasses - 1));
    }
    const uint64_t room = view_.segment().size_class(frame.size_class).bytes(1);
    if (frame.place > room || frame.bytes > room - frame.place) {
        nonsense(peer, std::to_string(frame.bytes) + " bytes at offset " +
                           std::to_string(frame.place) + " of its staging buffers, which have " +
                           std::to_string(room) + " bytes");
    }
    return view_.buffers(peer, frame.size_class) + frame.place;
}

void RemoteSlots::deliver(uint32_t peer, const Frame& frame) {
    RankControl& mirror = view_.control(peer);
    switch (frame.kind) {
        case FrameKind::post:
            if (frame.progress < mirror.progress.load(std::memory_order_relaxed))
                nonsense(peer, "decreasing progress: " + std::to_string(frame.progress) +
                                   " after " + std::to_string(mirror.progress.load()));
            view_.update_last_call(peer, frame.called);
            mirror.progress.store(frame.progress, std::memory_order_release);
            return;
        case FrameKind::left:
            mirror.presence.store(static_cast<uint32_t>(Presence::left), std::memory_order_release);
            ended_[peer] = true;
            return;
        case FrameKind::failed: {
            const Error error = fault_reports_.read(peer, frame);
            members_.fail(error.fault(), error.what());
        }
        default:
            break;
    }
    nonsense(peer, "a frame of kind " + std::to_string(static_cast<uint32_t>(frame.kind)) +
                       ", which connections of collectives do not use");
}

void RemoteSlots::lost(uint32_t peer, const std::string& why) {
    ended_[peer] = true;
    if (view_.has_left(peer)) return;
    members_.fail_gone(peer, why);
}

bool RemoteSlots::has_departed(uint32_t peer) const noexcept {
    return view_.has_left(peer) && (ended_[peer] || !transport_->reached(peer));
}

}  // namespace unisono

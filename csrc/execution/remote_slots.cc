#include "execution/remote_slots.h"

#include <algorithm>
#include <string>

#include "core/call.h"

namespace unisono {

Courier::Courier(View& view, Membership& members)
    : view_(view), members_(members), ended_(members.ranks()) {
    for (size_t s = 0; s < kStrips; ++s) debts_[s].resize(view.segment().strip(s).depth);
}

void Courier::show(uint32_t peer, const Place& place, std::span<const Load> loads) {
    Frame frame{};
    frame.kind = FrameKind::post;
    frame.strip = static_cast<uint8_t>(place.strip);
    frame.progress = view_.own().progress.load(std::memory_order_relaxed);
    frame.called = called_by(view_.own());
    std::erase_if(owed_, [peer](const Owed& owed) { return owed.peer == peer; });
    transport_->send(peer, frame, loads);
}

void Courier::end_block(const Plan& plan, const Place& place, uint64_t lead, uint64_t progress) {
    auto& debts = debts_[place.strip][place.position];
    std::erase_if(debts, [this](const Debt& debt) { return paid(debt); });
    for (const uint32_t reader : plan.readers_of_any) {
        if (!view_.local(reader)) debts.push_back({reader, progress});
    }
    for (const uint32_t source : plan.sources) {
        if (!view_.local(source)) owed_.push_back({source, place.strip, place.block});
    }
    // A peer needs the answer when it comes to this area again, `depth` blocks on; and this rank
    // needs the peer's first round `lead` blocks before it ends one.
    const uint64_t depth = view_.segment().strip(place.strip).depth;
    const uint64_t most = std::min((depth + 1) / 2, depth - lead);
    answer(place.strip, [&](const Owed& owed) { return place.block - owed.block + 1 >= most; });
}

void Courier::answer_all(size_t strip) {
    answer(strip, [](const Owed&) { return true; });
}

template <class Due>
void Courier::answer(size_t strip, Due due) {
    const auto wanted = [&](const Owed& owed) { return owed.strip == strip && due(owed); };
    for (;;) {
        const auto found = std::find_if(owed_.begin(), owed_.end(), wanted);
        if (found == owed_.end()) return;
        show(found->peer, {strip, 0, 0}, {});  // which takes it off the list
    }
}

bool Courier::paid(const Debt& debt) const noexcept {
    return view_.control(debt.peer).progress.load(std::memory_order_acquire) >= debt.progress;
}

std::optional<uint32_t> Courier::debtor(const Place& place) noexcept {
    auto& debts = debts_[place.strip][place.position];
    std::erase_if(debts, [this](const Debt& debt) { return paid(debt); });
    if (debts.empty()) return std::nullopt;
    return debts.front().peer;
}

bool Courier::answered(uint32_t peer, const Place& place) const noexcept {
    const auto& debts = debts_[place.strip][place.position];
    return std::none_of(debts.begin(), debts.end(),
                        [&](const Debt& debt) { return debt.peer == peer && !paid(debt); });
}

// Straight into the mirror of the slot it was sent from.
std::byte* Courier::place(uint32_t peer, const Frame& frame) {
    if (frame.kind == FrameKind::failed) {
        if (std::byte* text = fault_reports_.place(peer, frame)) return text;
    }
    const bool known = frame.kind == FrameKind::load || frame.kind == FrameKind::post;
    if (!known || frame.strip >= kStrips) {
        nonsense(peer, "a frame with payload of kind " +
                           std::to_string(static_cast<uint32_t>(frame.kind)) + " for staging " +
                           std::to_string(frame.strip) +
                           ": expected a load or a post, for staging 0 to " +
                           std::to_string(kStrips - 1));
    }
    const uint64_t room = view_.segment().strip(frame.strip).bytes(1);
    if (frame.place > room || frame.bytes > room - frame.place) {
        nonsense(peer, std::to_string(frame.bytes) + " bytes for place " +
                           std::to_string(frame.place) + " of its staging, which has " +
                           std::to_string(room) + " bytes");
    }
    return view_.areas(peer, frame.strip) + frame.place;
}

void Courier::deliver(uint32_t peer, const Frame& frame) {
    RankControl& mirror = view_.control(peer);
    switch (frame.kind) {
        case FrameKind::post:
            if (frame.progress < mirror.progress.load(std::memory_order_relaxed))
                nonsense(peer, "progress that falls: " + std::to_string(frame.progress) +
                                   " after " + std::to_string(mirror.progress.load()));
            view_.hear(peer, frame.called);
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
                       ", which the connections of collectives do not carry");
}

void Courier::lost(uint32_t peer, const std::string& why) {
    ended_[peer] = true;
    if (view_.has_left(peer)) return;
    members_.fail_gone(peer, why);
}

bool Courier::has_departed(uint32_t peer) const noexcept {
    return view_.has_left(peer) && (ended_[peer] || !transport_->reached(peer));
}

}  // namespace unisono

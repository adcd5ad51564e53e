// How a wire of TCP connections ends: what is sent before, and what is told to the peers.
#include <algorithm>
#include <chrono>
#include <string_view>
#include <thread>

#include "error.h"
#include "fault_news.h"
#include "tcp_wire.h"
#include "waiter.h"

namespace unisono {
namespace {

constexpr double kLingerFailed_s = 0.1;

}  // namespace

void TcpWire::close(const std::optional<Error>& failure,
                    const std::function<bool()>& enough) noexcept {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        arrivals_.clear();
        any_arrivals_.store(false, std::memory_order_relaxed);
    }
    try {
        Deadline brief(kLingerFailed_s);
        failure ? say_failed(*failure) : say_left();
        linger([&] { return failure ? brief.passed() : enough(); });
    } catch (const std::exception&) {  // no memory for the last words
    }
    const std::lock_guard lock(mutex_);
    for (Peer& peer : peers_) peer = {};
    here_.clear();
    unsent_bytes_.store(0, std::memory_order_relaxed);
}

void TcpWire::abandon() noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;  // nobody is there any more who would let it go
    arrivals_.clear();
    for (Peer& peer : peers_) {
        for (const auto& stream : peer.streams) {
            if (stream) stream->close();
        }
    }
}

// Else a peer that has not heard of the failure yet would take this rank for the one that is gone.
void TcpWire::say_failed(const Error& failure) {
    const std::string_view text = failure.what();
    Frame frame{};
    frame.kind = FrameKind::failed;
    frame.bytes = std::min(text.size(), kFaultText);
    frame.called.kind = static_cast<uint32_t>(failure.fault());
    for (Peer& peer : peers_) {
        if (!peer.connected || peer.open == 0) continue;
        for (const auto& stream : peer.streams) stream->cut_short();
        peer.streams.front()->push({frame, reinterpret_cast<const std::byte*>(text.data())});
    }
}

void TcpWire::say_left() {
    for (Peer& peer : peers_) {
        if (!peer.connected || peer.open == 0) continue;
        Frame frame{};
        frame.kind = FrameKind::left;
        frame.number = ++peer.sent;
        push(peer, {frame, nullptr});
    }
}

// The kernel throws away what it has not yet sent if something comes for a socket that is closed,
// and something does: the peers' last progress. So this waits until all of it has arrived; a peer
// that computes takes it late.
void TcpWire::linger(const std::function<bool()>& enough) noexcept {
    const auto arrived = [&](Stream& stream) {
        stream.flush();
        if (!stream.discard()) return true;  // the peer has closed: it needs nothing more
        return stream.drained() && stream.acknowledged();
    };
    for (;;) {
        bool all = true;
        for (Peer& peer : peers_) {
            for (const auto& stream : peer.streams) all = (!stream || arrived(*stream)) && all;
        }
        if (all || enough()) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

bool TcpWire::forget_messages() noexcept {
    for (Peer& peer : peers_) {
        for (const Outgoing& outgoing : peer.early)
            unsent_bytes_ -= sizeof(Frame) + outgoing.frame.bytes;
        peer.early.clear();
        for (const auto& stream : peer.streams) {
            if (!stream) continue;
            unsent_bytes_ -= stream->waiting_bytes();
            stream->cut_short();
            unsent_bytes_ += stream->waiting_bytes();
        }
    }
    return true;
}

}  // namespace unisono

// The end of a TCP transport: its last frames, and its last messages to the peers.
#include <algorithm>
#include <chrono>
#include <string_view>
#include <thread>

#include "core/error.h"
#include "memory/waiter.h"
#include "transport/fault_reports.h"
#include "transport/tcp_transport.h"

namespace unisono {
namespace {

constexpr double kLingerFailed_s = 0.1;

}  // namespace

void TcpTransport::close(const std::optional<Error>& failure) noexcept {
    try {
        if (failure) {
            stop_attaching();
            say_failed(*failure);
            Deadline brief(kLingerFailed_s);
            while (!parted() && !brief.passed())
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    } catch (const std::exception&) {  // no memory for the last frames
    }
    const std::lock_guard lock(mutex_);
    for (Peer& peer : peers_) peer = {};
    buffered_.clear();
    unsent_bytes_.store(0, std::memory_order_relaxed);
}

// Returns true if callers' memory is still to be sent.
bool TcpTransport::reads_in_place() const noexcept {
    return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
        return std::any_of(peer.early.begin(), peer.early.end(), has_callers_memory) ||
               std::any_of(peer.streams.begin(), peer.streams.end(),
                           [](const auto& stream) { return stream && stream->reads_in_place(); });
    });
}

// Received data go to callers' memory only during `poll`, which nobody calls after this.
bool TcpTransport::part() noexcept {
    if (reads_in_place()) return false;
    try {
        stop_attaching();
        say_left();
    } catch (const std::exception&) {  // no memory for the last frames
    }
    return true;
}

// Admits waiting connections, so that their peers receive the last frames too.
void TcpTransport::stop_attaching() noexcept {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    try {
        admit();
    } catch (const std::exception&) {  // a connection that cannot be used
    }
}

void TcpTransport::abandon() noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;  // the thread that holds the lock does not exist in the child
    arrivals_.clear();
    for (Peer& peer : peers_) {
        for (const auto& stream : peer.streams) {
            if (stream) stream->close();
        }
    }
}

// Sends the failure to all peers. Without it, a peer that does not know of the failure would report
// this rank as lost.
void TcpTransport::say_failed(const Error& failure) {
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

void TcpTransport::say_left() {
    for (Peer& peer : peers_) {
        const auto there = std::find_if(peer.streams.begin(), peer.streams.end(),
                                        [](const auto& stream) { return stream != nullptr; });
        if (there == peer.streams.end() || peer.open == 0) continue;
        Frame frame{};
        frame.kind = FrameKind::left;
        frame.number = ++peer.sent;
        if (peer.connected) {
            push(peer, {frame, nullptr});
        } else {  // some of the peer's connections are not ready yet
            (*there)->push({frame, nullptr});
        }
        for (const auto& stream : peer.streams) {
            if (stream) stream->flush();
        }
    }
}

void TcpTransport::say_left_to(Channel channel) {
    Stream stream(std::move(channel));
    Frame frame{};
    frame.kind = FrameKind::left;
    frame.number = 1;
    stream.push({frame, nullptr});
    stream.flush();
    static_cast<void>(stream.discard());
}

// Returns true once every peer has acknowledged all data, has closed, or is silent for too long.
// The closing rank waits for this, because the kernel discards unsent bytes if input arrives for a
// closed socket, and the peers' last progress does arrive. A peer that computes reads the data
// late.
bool TcpTransport::parted() noexcept {
    const auto now = Silence::Clock::now();
    const bool checks = is_time_to_check_silence(now);
    bool all = true;
    for (Peer& peer : peers_) {
        for (const auto& stream : peer.streams) {
            if (!stream || arrived(*stream)) continue;
            if (checks) stream->ended = stream->silence().too_long(now);
            all = all && stream->ended;
        }
    }
    return all;
}

bool TcpTransport::arrived(Stream& stream) noexcept {
    if (stream.ended) return true;
    stream.flush();
    if (!stream.discard()) return stream.ended = true;  // the peer has closed and needs no more
    return stream.drained() && stream.acknowledged();
}

bool TcpTransport::forget_messages(const Error&) noexcept {
    for (uint32_t peer = 0; peer < peers_.size(); ++peer) forget_messages(peer);
    return true;
}

bool TcpTransport::forget_messages(uint32_t peer) noexcept {
    for (const Outgoing& outgoing : peers_[peer].early)
        unsent_bytes_ -= sizeof(Frame) + outgoing.frame.bytes;
    peers_[peer].early.clear();
    for (const auto& stream : peers_[peer].streams) {
        if (!stream) continue;
        unsent_bytes_ -= stream->waiting_bytes();
        stream->cut_short();
        unsent_bytes_ += stream->waiting_bytes();
    }
    return true;
}

}  // namespace unisono

#include "transport/tcp_transport.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <string>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace unisono {
namespace {

// Epoll data of the doorbell; a stream has peer << 32 | stream.
constexpr uint64_t kDoorbell = ~0ULL;
constexpr int kMostEvents = 64;
// Maximum number of reads from one stream in one poll, so that the other streams are read, too.
constexpr int kMostReads = 64;
// Number of posts that may arrive before an earlier post has arrived completely.
constexpr uint64_t kMostPartial = 1 << 16;
constexpr uint64_t kPiece = 128 << 10;   // Maximum bytes of one part of a divided load.
constexpr uint64_t kUncut = 32 << 10;    // Minimum bytes of one part of a divided load.
constexpr uint32_t kMostStreams = 1024;  // Maximum number of streams to one peer.

// Returns the length of the parts into which a load is divided. The parts of a load have the same
// length, and of a large load each stream sends the same number of parts. So no stream finishes
// later than the others.
uint64_t piece_bytes(uint64_t bytes, uint64_t streams) noexcept {
    const uint64_t turns = (bytes + streams * kPiece - 1) / (streams * kPiece);
    const uint64_t pieces = std::max<uint64_t>(1, std::min(bytes / kUncut, turns * streams));
    const uint64_t each = (bytes + pieces - 1) / pieces;
    return (each + kLine - 1) / kLine * kLine;
}

}  // namespace

TcpTransport::TcpTransport(uint32_t ranks, Receiver& receiver)
    : receiver_(receiver),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      doorbell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(ranks) {
    if (epoll_.get() < 0 || doorbell_.get() < 0)
        throw_errno("creating a transport's epoll and eventfd");
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kDoorbell;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, doorbell_.get(), &event) != 0)
        throw_errno("watching a transport's eventfd");
}

void TcpTransport::attach(uint32_t peer, uint32_t stream, uint32_t streams, Channel channel) {
    if (peer >= peers_.size() || stream >= streams || streams > kMostStreams)
        throw Error(Fault::invalid, "connection " + std::to_string(stream) + " of " +
                                        std::to_string(streams) + " to rank " +
                                        std::to_string(peer) + ": expected one of at most " +
                                        std::to_string(kMostStreams) + " to a rank below " +
                                        std::to_string(peers_.size()));
    {
        const std::lock_guard lock(mutex_);
        if (closed_) return say_left_to(std::move(channel));
        arrivals_.push_back({peer, stream, streams, std::move(channel)});
        any_arrivals_.store(true, std::memory_order_release);
    }
    wake();
}

void TcpTransport::admit() {
    std::vector<Arrival> arrivals;
    {
        const std::lock_guard lock(mutex_);
        arrivals.swap(arrivals_);
        any_arrivals_.store(false, std::memory_order_relaxed);
    }
    for (Arrival& arrival : arrivals) {
        if (!take(arrival)) continue;
        Peer& peer = peers_[arrival.peer];
        watch(arrival.peer, arrival.stream);
        if (peer.streams[arrival.stream]->pending())
            buffered_.emplace_back(arrival.peer, arrival.stream);
        if (++peer.open < peer.streams.size()) continue;
        peer.connected = true;
        for (const Outgoing& outgoing : std::exchange(peer.early, {})) {
            unsent_bytes_ -= sizeof(Frame) + outgoing.frame.bytes;
            push(peer, outgoing);
        }
        flush(arrival.peer);
    }
}

// Adds a connection to its peer. Keeps the first connection for each stream number and drops
// others.
bool TcpTransport::take(Arrival& arrival) {
    const std::lock_guard lock(mutex_);
    auto& streams = peers_[arrival.peer].streams;
    if (streams.empty()) streams.resize(arrival.streams);
    if (streams.size() != arrival.streams)
        receiver_.nonsense(arrival.peer,
                           "different numbers of streams: " + std::to_string(arrival.streams) +
                               " after " + std::to_string(streams.size()));
    auto& stream = streams[arrival.stream];
    if (stream) return false;
    stream = std::make_unique<Stream>(std::move(arrival.channel));
    return true;
}

// Updates the events that epoll watches. A stream that is not watched for any event is removed from
// epoll; otherwise the end of its connection would wake every sleep.
void TcpTransport::watch(uint32_t peer, size_t index) {
    Stream& stream = *peers_[peer].streams[index];
    epoll_event event{};
    event.events =
        (stream.watched_for_input ? EPOLLIN : 0U) | (stream.watched_for_room ? EPOLLOUT : 0U);
    event.data.u64 = uint64_t{peer} << 32 | index;
    const bool wanted = event.events != 0;
    if (!wanted && !stream.watched) return;
    const int operation = !wanted ? EPOLL_CTL_DEL : stream.watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if (::epoll_ctl(epoll_.get(), operation, stream.fd(), &event) != 0 && wanted)
        throw_errno("watching a connection to another host");
    stream.watched = wanted;
}

void TcpTransport::send(uint32_t peer, const Frame& head, std::span<const Load> loads) {
    Peer& to = peers_[peer];
    if (to.connected && to.open == 0) return;  // the peer has left and needs no more frames
    Frame frame = head;
    if (!is_p2p(frame.kind)) frame.number = ++to.sent;
    const auto enqueue = [&](const Frame& f, const std::byte* data) {
        if (to.connected) return push(to, {f, data});
        to.early.push_back({f, data});
        unsent_bytes_ += sizeof(Frame) + f.bytes;
    };
    uint64_t total = 0;
    for (const Load& load : loads) total += load.bytes;
    const bool cut = to.streams.size() > 1 && total > kUncut && !is_p2p(frame.kind);
    const Load* with_post = nullptr;  // the load that is sent in the frame of the post itself
    for (const Load& load : loads) {
        if (!cut && &load == &loads.back()) {
            with_post = &load;
            break;
        }
        const uint64_t each = cut ? piece_bytes(load.bytes, to.streams.size()) : load.bytes;
        for (uint64_t at = 0; at < load.bytes;) {
            const uint64_t bytes = std::min(each, load.bytes - at);
            Frame piece{};
            piece.kind = FrameKind::load;
            piece.size_class = frame.size_class;
            piece.number = frame.number;
            piece.place = load.place + at;
            piece.bytes = bytes;
            enqueue(piece, load.data + at);
            ++frame.loads;
            at += bytes;
        }
    }
    if (with_post) {
        if (!is_p2p(frame.kind)) frame.place = with_post->place;
        frame.bytes = with_post->bytes;
    }
    enqueue(frame, with_post ? with_post->data : nullptr);
    if (to.connected) flush(peer);
}

// Queues a frame on the stream with the fewest waiting bytes. All point-to-point frames use the
// first stream, which keeps their order. The `left` frame also uses the first stream, because it
// must come after them.
void TcpTransport::push(Peer& to, const Outgoing& outgoing) {
    Stream* chosen = to.streams.front().get();
    if (!is_p2p(outgoing.frame.kind)) {
        const bool last = outgoing.frame.kind == FrameKind::left;
        for (const auto& stream : to.streams) {
            if (stream->broken()) continue;
            if (chosen->broken() || (!last && stream->waiting_bytes() < chosen->waiting_bytes()))
                chosen = stream.get();
        }
    }
    if (chosen->push(outgoing)) unsent_bytes_ += sizeof(Frame) + outgoing.frame.bytes;
}

void TcpTransport::flush(uint32_t peer) {
    for (size_t i = 0; i < peers_[peer].streams.size(); ++i) flush(peer, i);
}

void TcpTransport::flush(uint32_t peer, size_t index) {
    Stream& stream = *peers_[peer].streams[index];
    if (stream.drained() && !stream.watched_for_room) return;
    const uint64_t before = stream.waiting_bytes();
    stream.flush();
    unsent_bytes_ -= before - stream.waiting_bytes();
    if (stream.watched_for_room == stream.drained()) {
        stream.watched_for_room = !stream.drained();
        watch(peer, index);
    }
}

uint64_t TcpTransport::handed(uint32_t peer) const noexcept {
    const Peer& to = peers_[peer];
    return to.connected ? to.streams.front()->handed() : 0;
}

bool TcpTransport::poll() {
    if (any_arrivals_.load(std::memory_order_acquire)) admit();
    check_silence();
    bool came = false;
    for (const auto& [peer, index] : std::exchange(buffered_, {})) {
        came |= read(peer, index);
    }
    std::array<epoll_event, kMostEvents> events;
    const int count = ::epoll_wait(epoll_.get(), events.data(), kMostEvents, 0);
    for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[static_cast<size_t>(i)];
        if (event.data.u64 == kDoorbell) {
            uint64_t rings = 0;  // the doorbell is cleared only when no thread sleeps
            if (asleep_.load() == 0)
                static_cast<void>(!::read(doorbell_.get(), &rings, sizeof(rings)));
            continue;
        }
        const auto peer = static_cast<uint32_t>(event.data.u64 >> 32);
        const auto index = static_cast<size_t>(event.data.u64 & 0xffffffffU);
        if (event.events & EPOLLOUT) flush(peer, index);
        if (event.events & ~static_cast<uint32_t>(EPOLLOUT)) came |= read(peer, index);
    }
    return came;
}

bool TcpTransport::is_time_to_check_silence(Silence::Clock::time_point now) noexcept {
    if (now - silence_checked_ < Silence::kCheckEach) return false;
    silence_checked_ = now;
    return true;
}

// Checks the peers' hosts for silence. Every thread that waits for a peer polls, and so detects
// that the peer's host is lost.
void TcpTransport::check_silence() {
    const auto now = Silence::Clock::now();
    if (!is_time_to_check_silence(now)) return;
    for (uint32_t peer = 0; peer < peers_.size(); ++peer) {
        for (const auto& stream : peers_[peer].streams) {
            if (!stream || stream->ended || !stream->silence().too_long(now)) continue;
            receiver_.lost(peer, "its host or the link has been silent for " +
                                     std::to_string(stream->silence().borne().count()) + " ms");
        }
    }
}

bool TcpTransport::read(uint32_t peer, size_t index) {
    Stream& stream = *peers_[peer].streams[index];
    if (!stream.watched_for_input) return false;
    const auto check = [&](const Frame& frame) {
        if (is_p2p(frame.kind) && index != 0)
            receiver_.nonsense(peer,
                               "a message on the wrong connection: expected the first connection");
    };
    const auto place = [&](const Frame& frame) {
        check(frame);
        return receiver_.place(peer, frame);
    };
    const auto on_frame = [&](const Frame& frame) {
        check(frame);
        arrived(peer, frame);
    };
    bool came = false;
    for (int i = 0; i < kMostReads; ++i) {
        switch (stream.receive(place, on_frame)) {
            case Stream::Input::nothing:
                return came;
            case Stream::Input::drained:
                return true;
            case Stream::Input::more:
                came = true;
                break;
            case Stream::Input::ended:
                end(peer, index);
                return true;
        }
    }
    if (stream.pending()) {
        buffered_.emplace_back(peer, index);
        wake();
    }
    return came;
}

void TcpTransport::arrived(uint32_t peer, const Frame& frame) {
    if (frame.kind == FrameKind::load || frame.kind == FrameKind::post ||
        frame.kind == FrameKind::left) {
        // A peer that has left reports this on each later connection.
        const bool leaves = frame.kind == FrameKind::left;
        if (leaves && std::exchange(peers_[peer].left, true)) return;
        note(peer, frame);
        return deliver_whole(peer);
    }
    receiver_.deliver(peer, frame);
}

// Records the arrival of a part of a post.
void TcpTransport::note(uint32_t peer, const Frame& frame) {
    Peer& from = peers_[peer];
    // This is huge for an old number, because the subtraction wraps around.
    const uint64_t ahead = frame.number - from.delivered - 1;
    if (ahead >= kMostPartial) receiver_.nonsense(peer, "a frame out of order");
    if (from.partial.size() <= ahead) from.partial.resize(ahead + 1);
    Partial& partial = from.partial[ahead];
    if (frame.kind == FrameKind::load) {
        ++partial.loads;
    } else {
        if (partial.announced) receiver_.nonsense(peer, "a frame twice");
        partial.frame = frame;
        partial.announced = true;
    }
    if (partial.announced && partial.loads > partial.frame.loads)
        receiver_.nonsense(peer, "more loads than it announced");
}

void TcpTransport::deliver_whole(uint32_t peer) {
    Peer& from = peers_[peer];
    while (!from.partial.empty() && from.partial.front().announced &&
           from.partial.front().loads == from.partial.front().frame.loads) {
        const Frame whole = from.partial.front().frame;
        from.partial.pop_front();
        ++from.delivered;
        receiver_.deliver(peer, whole);
    }
}

// Handles the end of a stream. The peer is lost once its other streams have no more input.
void TcpTransport::end(uint32_t peer, size_t index) {
    Peer& from = peers_[peer];
    Stream& stream = *from.streams[index];
    if (std::exchange(stream.ended, true)) return;  // handles only the first end
    stream.watched_for_input = stream.watched_for_room = false;
    watch(peer, index);
    unsent_bytes_ -= stream.abandon();
    --from.open;
    if (stream.error() != 0 || stream.torn()) {
        for (size_t other = 0; other < from.streams.size(); ++other) {
            while (from.streams[other] && from.streams[other]->watched_for_input &&
                   read(peer, other)) {
            }
        }
    } else if (from.open > 0) {
        return;
    }
    receiver_.lost(peer, stream.why_ended());
}

// Sleeps until an event or a ring of the doorbell. Another thread that polls may take the event
// that would wake this thread. It then rings the doorbell. If it rang before this check, `awake`
// returns true. If it rings later, the doorbell is still set.
Woken TcpTransport::sleep(double seconds, const std::function<bool()>& awake) {
    struct Asleep {
        explicit Asleep(std::atomic<uint32_t>& threads) : count(threads) { ++count; }
        ~Asleep() { --count; }
        std::atomic<uint32_t>& count;
    } const asleep(asleep_);
    if (awake() || any_arrivals_.load(std::memory_order_acquire)) return Woken::rung;
    epoll_event event{};
    const int count =
        ::epoll_wait(epoll_.get(), &event, 1, static_cast<int>(std::ceil(seconds * 1e3)));
    if (count > 0) return Woken::rung;
    return count < 0 && errno == EINTR ? Woken::interrupted : Woken::timed_out;
}

void TcpTransport::wake() noexcept {
    const uint64_t one = 1;
    static_cast<void>(!::write(doorbell_.get(), &one, sizeof(one)));
}

bool TcpTransport::idle() const noexcept {
    return unsent_bytes_.load(std::memory_order_relaxed) == 0;
}

bool TcpTransport::reached(uint32_t peer) const noexcept {
    return peers_[peer].connected;
}

}  // namespace unisono

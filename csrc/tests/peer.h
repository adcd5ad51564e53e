// A real rank of a group on two hosts. The test plays the other rank and may send anything that an
// authenticated peer can send.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

#include "tests/host_groups.h"

namespace unisono::test {

inline constexpr TransportKind kCalls = TransportKind::collectives, kMessages = TransportKind::p2p;

inline Frame frame_of(FrameKind kind, uint64_t number = 0, uint64_t bytes = 0) {
    Frame frame{};
    frame.kind = kind;
    frame.number = number;
    frame.bytes = bytes;
    return frame;
}

// Returns the frame of the first `bytes` of a message. They are the whole message unless `total` is
// larger.
inline Frame message_of(uint64_t number, uint64_t tag, uint64_t bytes, uint64_t total = 0) {
    Frame frame = frame_of(FrameKind::message, number, bytes);
    frame.place = tag;
    frame.progress = std::max(bytes, total);
    frame.called.kind = static_cast<uint32_t>(DType::uint8);
    return frame;
}

inline Frame post_of(uint64_t number, uint64_t progress, uint32_t loads = 0) {
    Frame frame = frame_of(FrameKind::post, number);
    frame.progress = progress;
    frame.loads = loads;
    return frame;
}

// A test of rank 0 of two ranks. The test holds the peer's ends of the connections.
class FakePeer {
  public:
    explicit FakePeer(uint32_t streams = 1, bool connected = true)
        : group_(std::make_shared<Group>(create_segment({1, 2, 1 << 16, 2, 256}, World::nonce), 0,
                                         HostRanks{2, {0}}, World::nonce, 1)),
          rank_(rank_of(group_, 0)) {
        for (const TransportKind kind : kTransports) {
            for (uint32_t s = 0; connected && s < streams; ++s) attach(kind, s, streams);
        }
    }
    ~FakePeer() {
        for (auto& ends : ends_) ends.clear();  // otherwise closing would wait for the peer
        rank_.close();
    }

    Rank& rank() { return rank_; }
    Group& group() { return *group_; }
    Descriptor& end(TransportKind kind, size_t stream = 0) {
        return ends_[static_cast<size_t>(kind)][stream];
    }
    // Connects a stream. A nonzero `room` limits the bytes in flight to about `room`.
    void attach(TransportKind kind, uint32_t stream, uint32_t streams, int room = 0) {
        auto [mine, theirs] = connection();
        if (room > 0) {
            ::setsockopt(mine.get(), SOL_SOCKET, SO_RCVBUF, &room, sizeof(room));
            ::setsockopt(theirs.get(), SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
        }
        ends_[static_cast<size_t>(kind)].push_back(std::move(mine));
        group_->attach(1, kind, stream, streams, std::move(theirs));
    }
    void send(TransportKind kind, const Frame& frame, const std::string& payload = {},
              size_t stream = 0) {
        std::string bytes(reinterpret_cast<const char*>(&frame), sizeof(frame));
        send_bytes(kind, bytes + payload, stream);
    }
    void send_bytes(TransportKind kind, const std::string& bytes, size_t stream = 0) {
        static_cast<void>(
            !::send(end(kind, stream).get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
    }
    // Passes the input to `take`, part by part, until the connection ends or nothing arrives for 10
    // s.
    template <class Take>
    void read(TransportKind kind, size_t stream, Take&& take) {
        std::vector<uint8_t> some(1 << 20);
        wait_at_most(kind, stream, 10);
        for (ssize_t got = 1; got > 0;) {
            got = ::recv(end(kind, stream).get(), some.data(), some.size(), 0);
            take(std::span<const uint8_t>(some).first(std::max<ssize_t>(got, 0)));
        }
    }
    std::vector<uint8_t> rest(TransportKind kind, size_t stream = 0) {
        std::vector<uint8_t> all;
        read(kind, stream, [&](auto piece) { all.insert(all.end(), piece.begin(), piece.end()); });
        return all;
    }
    // Returns the kinds of all frames that arrive before the connection ends.
    std::vector<FrameKind> read_kinds(TransportKind kind, size_t stream = 0) {
        std::vector<FrameKind> kinds;
        const auto all = rest(kind, stream);
        for (size_t at = 0; at + sizeof(Frame) <= all.size();) {
            Frame frame;
            std::memcpy(&frame, all.data() + at, sizeof(frame));
            kinds.push_back(frame.kind);
            at += sizeof(frame) + frame.bytes;
        }
        return kinds;
    }
    // Returns true if a frame of this kind without payload arrives within `soon_s`. Drops all
    // frames before it.
    bool receives(TransportKind kind, FrameKind expected, double soon_s, size_t stream = 0) {
        wait_at_most(kind, stream, soon_s);
        Frame frame;
        while (::recv(end(kind, stream).get(), &frame, sizeof(frame), MSG_WAITALL) ==
               sizeof(frame)) {
            std::vector<std::byte> payload(frame.bytes);
            if (frame.kind == expected) return true;
            if (frame.bytes > 0)
                ::recv(end(kind, stream).get(), payload.data(), payload.size(), MSG_WAITALL);
        }
        return false;
    }
    void hang_up(TransportKind kind, size_t stream, bool reset) {
        const linger hard{1, 0};
        Descriptor& fd = end(kind, stream);
        if (reset) ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
        fd = Descriptor();
    }

  private:
    void wait_at_most(TransportKind kind, size_t stream, double seconds) {
        timeval most{};
        most.tv_sec = static_cast<time_t>(seconds);
        most.tv_usec = static_cast<suseconds_t>((seconds - static_cast<double>(most.tv_sec)) * 1e6);
        ::setsockopt(end(kind, stream).get(), SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
    }

    std::shared_ptr<Group> group_;
    Rank rank_;
    std::array<std::vector<Descriptor>, 2> ends_;
};

}  // namespace unisono::test

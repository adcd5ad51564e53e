// A fuzz target: one of two ranks, with a scripted peer. The fuzzer's bytes are the script: raw
// bytes, frames, receives and ends of connections.
#include <sys/socket.h>

#include <memory>
#include <vector>

#include "fuzz/one_of_two.h"
#include "transport/tcp_transport.h"

namespace unisono::fuzz {
namespace {

// The peer's end of a connection. The socket holds the written bytes until the rank reads them.
class Connection {
  public:
    explicit Connection(TcpTransport& transport, uint32_t stream, uint32_t streams) {
        int ends[2];
        require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        fd_ = Descriptor(ends[0]);
        transport.attach(1, stream, streams, Descriptor(ends[1]));
    }
    void write(const void* data, size_t bytes) {
        if (fd_.get() >= 0) static_cast<void>(!::send(fd_.get(), data, bytes, MSG_NOSIGNAL));
    }
    void end() { fd_ = Descriptor(); }

  private:
    Descriptor fd_;
};

class Script : private OneOfTwo {
  public:
    explicit Script(Bytes bytes) : OneOfTwo(bytes) {
        const auto flags = bytes_.take<uint8_t>();
        streams_ = 1 + flags % 3;
        for (uint32_t s = 0; s < streams_; ++s) {
            calls_.emplace_back(transport_, s, streams_);
            messages_.emplace_back(*p2p_transport_, s, streams_);
        }
    }
    ~Script() {
        calls_.clear();  // otherwise closing would wait for the peer
        messages_.clear();
        members_.leave();
        p2p_.stop();
        transport_.close(members_.failure());
    }

    void play() {
        OneOfTwo::play(p2p_, [this] { step(); }, [this] { transport_.poll(); });
    }

  private:
    using Connections = std::vector<Connection>;

    void step() {
        const auto what = bytes_.take<uint8_t>();
        Connections& connections = what & 8 ? messages_ : calls_;
        Connection& connection = connections[(what >> 4) % connections.size()];
        switch (what & 7) {
            case 0:
                return write_bytes(connection);
            case 1:
                return exchange(p2p_, false);
            case 2:
                if (what & 16) return exchange(p2p_, true);
                return what & 32 ? change(p2p_) : connection.end();
            case 3: {  // an arbitrary frame
                Frame frame{};
                bytes_.copy(&frame, sizeof(frame));
                return connection.write(&frame, sizeof(frame));
            }
            default:
                return write_frame(connection);
        }
    }

    void write_bytes(Connection& connection) {
        const auto [piece, bytes] = take_piece();
        connection.write(piece.data(), bytes);
    }

    // Sends a frame built from few bytes, with a payload of zeros.
    void write_frame(Connection& connection) {
        Frame frame{};
        frame.kind = static_cast<FrameKind>(bytes_.take<uint8_t>() % 16);
        frame.size_class = bytes_.take<uint8_t>() % 4;
        frame.loads = bytes_.take<uint8_t>() % 4;
        frame.number = bytes_.take<uint8_t>();
        frame.place = bytes_.take<uint16_t>();
        frame.bytes = bytes_.take<uint16_t>() % 2048;
        take_sender(frame);
        connection.write(&frame, sizeof(frame));
        const std::vector<std::byte> payload(frame.bytes);
        connection.write(payload.data(), payload.size());
    }

    TcpTransport transport_{2, remote_slots_};
    TcpTransport* p2p_transport_ = nullptr;
    p2p::Engine p2p_{
        view_, members_, waiter_, cross_memory_, counters_, [this](Receiver& receiver) {
            auto transport = std::make_unique<TcpTransport>(2, receiver);
            p2p_transport_ = transport.get();
            return transport;
        }};
    uint32_t streams_ = 1;
    Connections calls_, messages_;
};

}  // namespace

void feed_frames(const uint8_t* data, size_t size) {
    if (size > 4096) return;  // longer input reaches no new code and does not fit into a socket
    Script(Bytes(data, size)).play();
}

}  // namespace unisono::fuzz

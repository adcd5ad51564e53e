// A rank of two whose peer sends what the bytes say: a script of pieces, frames, receives and ends.
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "courier.h"
#include "fuzz.h"
#include "mail.h"
#include "tcp_wire.h"

namespace unisono::fuzz {
namespace {

constexpr std::array<uint8_t, 16> kNonce{1, 2, 3};
constexpr uint64_t kAreaBytes = 4096;
constexpr double kTimeout_s = 60;

void require(bool ok) {
    if (!ok) std::abort();
}

// One end of a connection that holds what is written to it until it is read.
class Line {
  public:
    explicit Line(TcpWire& wire, uint32_t stream, uint32_t streams) {
        int ends[2];
        require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        fd_ = Descriptor(ends[0]);
        wire.attach(1, stream, streams, Descriptor(ends[1]));
    }
    void say(const void* data, size_t bytes) {
        if (fd_.get() >= 0) static_cast<void>(!::send(fd_.get(), data, bytes, MSG_NOSIGNAL));
    }
    void end() { fd_ = Descriptor(); }

  private:
    Descriptor fd_;
};

class Script {
  public:
    explicit Script(Bytes bytes) : bytes_(bytes), segment_(create_segment(kShape, kNonce)) {
        const auto flags = bytes_.take<uint8_t>();
        streams_ = 1 + flags % 3;
        for (uint32_t s = 0; s < streams_; ++s) {
            calls_.emplace_back(wire_, s, streams_);
            letters_.emplace_back(*mail_wire_, s, streams_);
        }
        data_.reserve(kMostReceives);
    }
    ~Script() {
        calls_.clear();  // so that nothing lingers
        letters_.clear();
        members_.leave();
        mail_.stop();
        wire_.close(members_.failure());
    }

    void play() {
        try {
            while (bytes_.left() > 0) {
                step();
                const uint64_t before = view_.control(1).progress.load();
                wire_.poll();
                if (!parcels_.empty()) mail_.wait(*parcels_.back(), kTimeout_s, 0, {});
                require(view_.control(1).progress.load() >= before);
            }
        } catch (const Error& error) {
            // What it raises is what the group has; a peer can make nothing look like a mistake of
            // the caller's.
            const auto failure = members_.failure();
            require(failure && failure->fault() == error.fault());
        }
        for (const auto& parcel : parcels_) require(!parcel->error() || members_.failed());
    }

  private:
    static constexpr SegmentShape kShape{1, 2, kAreaBytes, 1, 64};
    static constexpr size_t kMostReceives = 16;
    using Lines = std::vector<Line>;

    void step() {
        const auto what = bytes_.take<uint8_t>();
        Lines& lines = what & 8 ? letters_ : calls_;
        Line& line = lines[(what >> 4) % lines.size()];
        switch (what & 7) {
            case 0:
                return say_bytes(line);
            case 1:
                return receive();
            case 2:
                return line.end();
            case 3: {  // a frame as it is
                Frame frame{};
                bytes_.copy(&frame, sizeof(frame));
                return line.say(&frame, sizeof(frame));
            }
            default:
                return say_frame(line);
        }
    }

    void say_bytes(Line& line) {
        std::array<uint8_t, 255> piece{};
        const auto bytes = bytes_.take<uint8_t>();
        bytes_.copy(piece.data(), bytes);
        line.say(piece.data(), bytes);
    }

    // A frame in few bytes, with a payload of zeros.
    void say_frame(Line& line) {
        Frame frame{};
        frame.kind = static_cast<FrameKind>(bytes_.take<uint8_t>() % 8);
        frame.strip = bytes_.take<uint8_t>() % 4;
        frame.loads = bytes_.take<uint8_t>() % 4;
        frame.number = bytes_.take<uint8_t>();
        frame.place = bytes_.take<uint16_t>();
        frame.bytes = bytes_.take<uint16_t>() % 2048;
        frame.progress = bytes_.take<uint8_t>();
        frame.called.kind = bytes_.take<uint8_t>();
        frame.called.seq = bytes_.take<uint8_t>();
        frame.called.header = frame.called.seq << 40;
        line.say(&frame, sizeof(frame));
        const std::vector<std::byte> payload(frame.bytes);
        line.say(payload.data(), payload.size());
    }

    void receive() {
        const auto tag = bytes_.take<uint8_t>();
        const auto bytes = bytes_.take<uint16_t>() % 2048;
        if (data_.size() == kMostReceives) return;
        auto& data = data_.emplace_back(bytes);
        parcels_.push_back(mail_.receive({data.data(), data.size(), DType::uint8,
                                          tag & 128 ? kAnySource : 1, uint64_t{tag} & 127}));
    }

    Bytes bytes_;
    Segment segment_;
    View view_{segment_, 0, Seats{2, {0}}};
    Membership members_{view_, kNonce};
    Waiter waiter_{members_, Patience{0, 0}};
    Courier courier_{view_, members_};
    TcpWire wire_{2, courier_};
    TcpWire* mail_wire_ = nullptr;
    PostOffice mail_{view_, members_, waiter_, [this](Receiver& receiver) {
                         auto wire = std::make_unique<TcpWire>(2, receiver);
                         mail_wire_ = wire.get();
                         return wire;
                     }};
    uint32_t streams_ = 1;
    Lines calls_, letters_;
    std::vector<std::vector<std::byte>> data_;
    std::vector<std::shared_ptr<Parcel>> parcels_;
};

}  // namespace

void feed_frames(const uint8_t* data, size_t size) {
    if (size > 4096) return;  // more says nothing new, and would not fit into a socket
    Script(Bytes(data, size)).play();
}

}  // namespace unisono::fuzz

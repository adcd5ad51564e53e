// Tests of a transport with several streams. Each stream gets the same share of a post's data.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "tests/host_groups.h"
#include "tests/report.h"
#include "transport/tcp_transport.h"

namespace unisono::test {
namespace {

constexpr double kPatience_s = 10;

// The receiver of a rank that only sends.
class NoReceiver final : public Receiver {
  public:
    std::byte* place(uint32_t, const Frame&) override { return nullptr; }
    void deliver(uint32_t, const Frame&) override {}
    void lost(uint32_t, const std::string& why) override { throw Error(Fault::peer_lost, why); }
    [[noreturn]] void nonsense(uint32_t, const std::string& what) override {
        throw Error(Fault::system, what);
    }
};

// A transport to one peer. The test holds the peer's ends of the streams.
class Streams {
  public:
    explicit Streams(uint32_t streams) : transport_(2, no_receiver_), came_(streams) {
        for (uint32_t s = 0; s < streams; ++s) {
            auto [mine, theirs] = connection();
            set_nonblocking(mine);
            ends_.push_back(std::move(mine));
            transport_.attach(1, s, streams, Channel(std::move(theirs)));
        }
        transport_.poll();
    }

    void send(const std::vector<std::byte>& data) {
        Frame frame{};
        frame.kind = FrameKind::post;
        transport_.send(1, frame, {{{0, data.data(), data.size()}}});
    }
    // Reads until `bytes` of payload and `posts` posts have arrived.
    bool take(uint64_t bytes, uint32_t posts) {
        Deadline deadline(kPatience_s);
        while (payload() < bytes || posts_ < posts) {
            transport_.poll();
            for (size_t s = 0; s < ends_.size(); ++s) read(s);
            if (deadline.passed()) return false;
        }
        return payload() == bytes && posts_ == posts;
    }
    // Returns the payload of each stream.
    [[nodiscard]] std::vector<uint64_t> shares() const {
        std::vector<uint64_t> bytes;
        for (const Came& came : came_) bytes.push_back(came.payload);
        return bytes;
    }
    [[nodiscard]] const std::vector<std::byte>& memory() const { return memory_; }

  private:
    struct Came {
        std::vector<std::byte> bytes;  // received bytes that are not yet parsed
        uint64_t payload = 0;
    };

    [[nodiscard]] uint64_t payload() const {
        const auto bytes = shares();
        return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
    }
    void read(size_t s) {
        std::vector<std::byte> some(1 << 16);
        const ssize_t got = ::recv(ends_[s].get(), some.data(), some.size(), 0);
        if (got <= 0) return;
        auto& bytes = came_[s].bytes;
        bytes.insert(bytes.end(), some.begin(), some.begin() + got);
        Frame frame;
        while (bytes.size() >= sizeof(frame)) {
            std::memcpy(&frame, bytes.data(), sizeof(frame));
            if (bytes.size() < sizeof(frame) + frame.bytes) return;
            if (memory_.size() < frame.place + frame.bytes)
                memory_.resize(frame.place + frame.bytes);
            std::copy_n(bytes.begin() + sizeof(frame), frame.bytes,
                        memory_.begin() + static_cast<ptrdiff_t>(frame.place));
            bytes.erase(bytes.begin(),
                        bytes.begin() + static_cast<ptrdiff_t>(sizeof(frame) + frame.bytes));
            came_[s].payload += frame.bytes;
            posts_ += frame.kind == FrameKind::post;
        }
    }

    NoReceiver no_receiver_;
    TcpTransport transport_;
    std::vector<Descriptor> ends_;
    std::vector<Came> came_;
    uint32_t posts_ = 0;
    std::vector<std::byte> memory_;
};

std::vector<std::byte> content(size_t count) {
    std::vector<std::byte> data(count);
    for (size_t i = 0; i < count; ++i) data[i] = static_cast<std::byte>(i * 7 + i / 251);
    return data;
}

void check_even_shares(Report& report) {
    for (const uint32_t streams : {2U, 3U, 4U}) {
        for (const size_t bytes : {128UL << 10, 172UL << 10, 512UL << 10, (1UL << 20) + 4}) {
            Streams rails(streams);
            const auto data = content(bytes);
            rails.send(data);
            const std::string what =
                std::to_string(bytes) + " bytes over " + std::to_string(streams) + " streams";
            report.check(rails.take(bytes, 1), what + " do not arrive");
            report.check(rails.memory() == data, what + " arrive wrong");
            const auto shares = rails.shares();
            const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
            report.check(*most - *least <= streams * kLine * 4,
                         what + ": from " + std::to_string(*least) + " to " +
                             std::to_string(*most) + " bytes per stream");
        }
    }
}

void check_one_stream(Report& report) {
    Streams rails(1);
    const auto data = content(300 << 10);
    rails.send(data);
    report.check(rails.take(data.size(), 1) && rails.memory() == data, "one stream alone");
}

}  // namespace
}  // namespace unisono::test

int main() {
    using namespace unisono::test;
    Report report;
    check_even_shares(report);
    check_one_stream(report);
    return report.finish();
}

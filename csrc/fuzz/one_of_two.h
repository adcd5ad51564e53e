// A rank of two that lives on what the bytes say its peer sends.
#pragma once

#include <array>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "courier.h"
#include "fuzz.h"
#include "mail.h"

namespace unisono::fuzz {

inline void require(bool ok) {
    if (!ok) std::abort();
}

class OneOfTwo {
  public:
    explicit OneOfTwo(Bytes bytes) : bytes_(bytes), segment_(create_segment(kShape, kNonce)) {
        data_.reserve(kMostMessages);
    }
    OneOfTwo(const OneOfTwo&) = delete;
    OneOfTwo& operator=(const OneOfTwo&) = delete;

  protected:
    ~OneOfTwo() = default;

    // `step` does what the next bytes say, `poll` moves the wire of the calls.
    template <class Step, class Poll>
    void play(PostOffice& mail, Step&& step, Poll&& poll) {
        try {
            while (bytes_.left() > 0) {
                step();
                const uint64_t before = view_.control(1).progress.load();
                poll();
                if (!parcels_.empty()) mail.wait(*parcels_.back(), kTimeout_s, 0, {});
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

    // Some bytes as they are, in a buffer of zeros; and how many.
    std::pair<std::array<uint8_t, 255>, uint8_t> take_piece() {
        std::array<uint8_t, 255> piece{};
        const auto bytes = bytes_.take<uint8_t>();
        bytes_.copy(piece.data(), bytes);
        return {piece, bytes};
    }

    // What a frame says of its sender.
    void take_sender(Frame& frame) {
        frame.progress = bytes_.take<uint8_t>();
        frame.called.kind = bytes_.take<uint8_t>();
        frame.called.seq = bytes_.take<uint8_t>();
        frame.called.header = frame.called.seq << 40;
    }

    void exchange(PostOffice& mail, bool sends) {
        const auto tag = bytes_.take<uint8_t>();
        const auto bytes = bytes_.take<uint16_t>() % 8192;
        if (data_.size() == kMostMessages) return;
        auto& data = data_.emplace_back(bytes);
        const int32_t peer = tag & 128 && !sends ? kAnySource : 1;
        const Message message{data.data(), data.size(), DType::uint8, peer, uint64_t{tag} & 127};
        parcels_.push_back(sends ? mail.send(message) : mail.receive(message));
    }

    Bytes bytes_;

  private:
    static constexpr std::array<uint8_t, 16> kNonce{1, 2, 3};
    static constexpr SegmentShape kShape{1, 2, 4096, 1, 64};
    static constexpr size_t kMostMessages = 16;
    static constexpr double kTimeout_s = 60;

    std::vector<std::vector<std::byte>> data_;
    std::vector<std::shared_ptr<Parcel>> parcels_;
    Segment segment_;

  protected:
    View view_{segment_, 0, Seats{2, {0}}};
    Membership members_{view_, kNonce};
    Waiter waiter_{members_, Patience{0, 0}};
    Courier courier_{view_, members_};
};

}  // namespace unisono::fuzz

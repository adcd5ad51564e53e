// One of two ranks. The fuzzer's bytes determine the actions of its peer.
#pragma once

#include <array>
#include <cstdlib>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "execution/remote_slots.h"
#include "fuzz/fuzz.h"
#include "memory/single_copy.h"
#include "p2p/message_engine.h"

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

    // Runs the script. `step` executes the next bytes of the script; `poll` polls the transport of
    // the collectives.
    template <class Step, class Poll>
    void play(p2p::Engine& engine, Step&& step, Poll&& poll) {
        engine.serve({served_.data(), served_.size(), signals_.data()}, false);
        try {
            while (bytes_.left() > 0) {
                step();
                const uint64_t before = view_.control(1).progress.load();
                poll();
                progress(engine);
                require(view_.control(1).progress.load() >= before);
            }
        } catch (const Error& error) {
            // The error must be the group's failure. A peer must not cause an error that blames the
            // caller.
            const auto failure = members_.failure();
            require(failure && failure->fault() == error.fault());
        }
        for (const p2p::Request& request : requests_)
            require(!request.error() || request.error()->fault() == Fault::invalid ||
                    members_.failed());
        if (members_.failed()) end_all(engine);
    }

    // Takes up to 255 bytes of the script. Returns them in a zeroed buffer, and their number.
    std::pair<std::array<uint8_t, 255>, uint8_t> take_piece() {
        std::array<uint8_t, 255> piece{};
        const auto bytes = bytes_.take<uint8_t>();
        bytes_.copy(piece.data(), bytes);
        return {piece, bytes};
    }

    // Fills the fields of a frame that describe its sender.
    void take_sender(Frame& frame) {
        frame.progress = bytes_.take<uint16_t>();
        frame.called.kind = bytes_.take<uint8_t>();
        frame.called.seq = bytes_.take<uint8_t>();
        frame.called.header = frame.called.seq << 40;
    }

    void exchange(p2p::Engine& engine, bool sends) {
        const auto tag = bytes_.take<uint8_t>();
        const auto bytes = bytes_.take<uint16_t>() % 8192 * (tag & 64 ? 16 : 1);
        if (data_.size() == kMostMessages) return;
        auto& data = data_.emplace_back(bytes);
        const int32_t peer = tag & 128 && !sends ? p2p::kAnySource : 1;
        p2p::Request& request = requests_.emplace_back(
            p2p::Message{data.data(), data.size(), DType::uint8, peer, uint64_t{tag} & 7}, sends);
        engine.begin(request, false);
    }
    // Cancels a request, or probes.
    void change(p2p::Engine& engine) {
        const auto which = bytes_.take<uint8_t>();
        if (which & 128) {
            static_cast<void>(engine.probe(which & 64 ? p2p::kAnySource : 1, which & 7));
        } else if (!requests_.empty()) {
            engine.cancel(requests_[which % requests_.size()]);
        }
    }
    // Checks that all requests are done after a failure, and that no thread writes to their memory.
    void end_all(p2p::Engine& engine) {
        for (p2p::Request& request : requests_) {
            static_cast<void>(engine.test(request));
            require(request.done());
        }
    }

    Bytes bytes_;

  private:
    static constexpr std::array<uint8_t, 16> kNonce{1, 2, 3};
    static constexpr SegmentShape kShape{1, 2, 4096, 1, 64};
    static constexpr size_t kMostMessages = 16;
    static constexpr double kTimeout_s = 60;

    std::array<std::byte, 64> served_{};  // the array of window 1
    std::array<std::atomic<uint64_t>, 2 * kLine / sizeof(uint64_t)> signals_{};

    void progress(p2p::Engine& engine) {
        for (p2p::Request& request : requests_) {
            if (request.done()) continue;
            engine.wait(request, kTimeout_s, 0, {});
            return;
        }
        static_cast<void>(engine.probe(p2p::kAnySource, kNever));
    }

    static constexpr uint64_t kNever = 1000;  // a tag without messages
    std::vector<std::vector<std::byte>> data_;
    std::deque<p2p::Request> requests_;
    Segment segment_;

  protected:
    View view_{segment_, 0, HostRanks{2, {0}}};
    Membership members_{view_, kNonce};
    Waiter waiter_{members_, SpinPolicy{0, 0}};
    RemoteSlots remote_slots_{view_, members_};
    SharedHeap heap_{view_};
    CrossMemory cross_memory_{view_, members_, heap_};
    OperationCounters counters_;
};

}  // namespace unisono::fuzz

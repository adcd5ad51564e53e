// A real rank of a group whose hosts are connected by a message library. The test plays the
// library and the peers.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/message_ranks.h"
#include "tests/peer.h"
#include "transport/message_transport.h"

namespace unisono::test {

// A message library that finishes a transfer only when the test says so.
class ScriptedLibrary final : public MessageLibrary {
  public:
    struct Transfer {
        uint64_t ticket;
        std::byte* data;
        uint64_t bytes;
    };

    void listen(std::byte* memory, uint64_t slot_bytes, uint32_t slots) override {
        memory_ = memory;
        slot_bytes_ = slot_bytes;
        slots_ = slots;
    }
    void reuse() override {}
    bool send_head(uint32_t peer, const std::byte* data, uint64_t, uint64_t ticket) override {
        if (peer == lost_peer) throw Error(Fault::peer_lost, "the library does not reach it");
        Frame frame;
        std::memcpy(&frame, data, sizeof(frame));
        sent.emplace_back(peer, frame);
        if (!holds_heads) return true;
        heads.push_back(ticket);
        return false;
    }
    bool send(uint32_t, const std::byte*, uint64_t bytes, uint64_t ticket) override {
        sends.push_back({ticket, nullptr, bytes});
        return false;
    }
    bool receive(uint32_t, std::byte* data, uint64_t bytes, uint64_t ticket) override {
        receives.push_back({ticket, data, bytes});
        return false;
    }
    uint32_t poll(std::vector<Ended>& all) override {
        if (on_poll) std::exchange(on_poll, nullptr)();
        all.insert(all.end(), ended.begin(), ended.end());
        ended.clear();
        return std::exchange(filled_, 0);
    }
    // The transfers that have begun go on until here.
    [[nodiscard]] bool close() noexcept override {
        if (on_close) on_close();
        for (const Transfer& in : receives) std::memset(in.data, 0xcc, in.bytes);
        closed = true;
        return releases;
    }

    // Delivers a frame of `from`. Its payload of `separate` bytes follows as a separate message.
    void deliver(uint32_t from, Frame frame, uint64_t separate = 0) {
        fill({frame, from, separate > 0, separate == 0, {0, separate}});
    }
    // Delivers a frame that reports a failure of `from`.
    void deliver_failure(uint32_t from, Fault fault, const std::string& text) {
        Frame frame = frame_of(FrameKind::failed, 0, text.size());
        frame.called.kind = static_cast<uint32_t>(fault);
        const Head head{frame, from, 1, 1, {0, text.size()}};
        std::byte* const slot = fill(head);
        std::memcpy(slot + sizeof(head), text.data(), text.size());
    }
    [[nodiscard]] size_t sent_of(FrameKind kind, uint32_t peer = 1) const {
        return static_cast<size_t>(std::count_if(sent.begin(), sent.end(), [&](const auto& one) {
            return one.first == peer && one.second.kind == kind;
        }));
    }

    std::vector<std::pair<uint32_t, Frame>> sent;  // heads, with their receivers
    std::vector<Transfer> sends, receives;
    std::vector<uint64_t> heads;  // tickets of heads that are not sent yet
    std::vector<Ended> ended;     // the ends of transfers that the next poll reports
    std::function<void()> on_poll, on_close;
    uint32_t lost_peer = ~0U;
    bool holds_heads = false, releases = true, closed = false;

  private:
    struct Head {  // a copy of the transport's private types
        Frame frame;
        uint32_t from;
        uint16_t spans, inside;
        uint64_t span[2];
    };

    std::byte* fill(const Head& head) {
        std::byte* const slot = memory_ + next_++ % slots_ * slot_bytes_;
        std::memcpy(slot, &head, sizeof(head));
        ++filled_;
        return slot;
    }

    std::byte* memory_ = nullptr;
    uint64_t slot_bytes_ = 0;
    uint32_t slots_ = 0, next_ = 0, filled_ = 0;
};

// Rank 0 of `ranks` ranks, each on a separate host.
class LibraryPeer {
  public:
    explicit LibraryPeer(uint32_t ranks = 2)
        : group_(std::make_shared<Group>(
              create_segment({1, 2, 1 << 16, 2, 256}, World::nonce), 0, HostRanks{ranks, {0}},
              World::nonce, 1, [this](TransportKind kind, View& view, Receiver& receiver) {
                  auto library = std::make_unique<ScriptedLibrary>();
                  libraries_[static_cast<size_t>(kind)] = library.get();
                  return std::make_unique<MessageTransport>(view, receiver, std::move(library));
              })) {}

    Group& group() { return *group_; }
    p2p::Engine& engine() { return group_->p2p(); }
    ScriptedLibrary& library(TransportKind kind = kMessages) {
        return *libraries_[static_cast<size_t>(kind)];
    }
    p2p::Request& begin(Data& data, uint64_t tag, bool sends) {
        p2p::Request& request = requests_.emplace_back(message(data, 1, tag), sends);
        engine().begin(request, false);
        return request;
    }
    // Makes rank 1 send a message of which the last bytes come in the library's last receive.
    p2p::Request& receive_most(Data& data, uint64_t number) {
        p2p::Request& request = begin(data, number, false);
        library().deliver(1, message_of(number, number, 0, data.size()));
        static_cast<void>(engine().test(request));
        library().deliver(1, frame_of(FrameKind::data, number, data.size()), data.size());
        static_cast<void>(engine().test(request));
        return request;
    }

  private:
    std::array<ScriptedLibrary*, 2> libraries_{};
    std::deque<p2p::Request> requests_;
    std::shared_ptr<Group> group_;
};

}  // namespace unisono::test

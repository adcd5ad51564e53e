// The transport over a message library. Each frame is a head that includes small payloads. Larger
// payloads are separate messages, received directly into their targets.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/owned_mutex.h"
#include "memory/group_memory.h"
#include "transport/message_library.h"
#include "transport/transport.h"

namespace unisono {

class MessageTransport final : public Transport {
  public:
    MessageTransport(View& view, Receiver& receiver, std::unique_ptr<MessageLibrary> library);
    MessageTransport(const MessageTransport&) = delete;
    MessageTransport& operator=(const MessageTransport&) = delete;
    ~MessageTransport() override;

    void send(uint32_t peer, const Frame& frame, std::span<const Load> loads) override;
    [[nodiscard]] uint64_t handed(uint32_t peer) const noexcept override;
    bool poll() override;
    // Polls in a loop with naps, because the library does not wake a thread for a message.
    Woken sleep(double seconds, const std::function<bool()>& awake) override;
    void wake() noexcept override;
    [[nodiscard]] bool forget_messages(const Error& failure) noexcept override;
    bool forget_messages(uint32_t peer) noexcept override { return peers_[peer].leaving.empty(); }
    [[nodiscard]] bool idle() const noexcept override;
    [[nodiscard]] bool needs_polling() const noexcept override { return true; }
    [[nodiscard]] bool reached(uint32_t peer) const noexcept override;
    [[nodiscard]] bool part() noexcept override;
    [[nodiscard]] bool parted() noexcept override;
    void close(const std::optional<Error>& failure) noexcept override;

  private:
    // Bytes of a head, small enough for libraries to send eagerly.
    static constexpr uint64_t kHeadBytes = 4032;
    static constexpr uint32_t kSlots = 32;
    using Buffer = std::array<std::byte, kHeadBytes>;

    // Target and length of a payload.
    struct Span {
        uint64_t place, bytes;
    };
    // The start of each head. `spans` spans follow, then the payloads if `inside` is set.
    struct Head {
        Frame frame;
        uint32_t from;
        uint16_t spans;
        uint16_t inside;
    };
    static_assert(sizeof(Head) == 88);

    struct Incoming {
        uint64_t number = 0;  // number of the frame among the frames of its rank
        Frame frame{};
        std::vector<Span> spans;
        const std::byte* inside = nullptr;  // payloads that came with the head
        bool placed = false;
        uint32_t missing = 0;  // payloads not yet received
    };
    struct Peer {
        // One entry for each frame with callers' memory that `handed` does not count: true if the
        // frame was sent.
        std::deque<bool> leaving;
        // Number of frames with callers' memory that were sent, up to the first one that is still
        // unsent.
        uint64_t handed = 0;
        std::deque<Incoming> incoming;
        uint64_t came = 0;  // number of frames received
        bool left = false;
        // The peer has left with messages under way. Their content may be wrong, so nothing of the
        // peer is delivered any more.
        bool gave_up = false;
    };
    enum class What : uint8_t { head, payload, callers, arrival };
    struct Ticket {
        What what;
        uint32_t peer;
        // What the transfer belongs to. For `head`, the number of its buffer; for `callers`, the
        // number of its frame; for `arrival`, the number of the incoming frame.
        uint64_t of;
    };

    void post(uint32_t peer, const Frame& frame, std::span<const Load> loads);
    void pack(uint32_t peer, const Frame& frame, std::span<const Load> loads, What what,
              uint64_t number);
    void take(const std::byte* slot);
    Incoming read(const Head& head, const std::byte* slot);
    void advance(uint32_t peer);
    void place(uint32_t peer, Incoming& in);
    void deliver(uint32_t peer, const Frame& frame);
    void end(const MessageLibrary::Ended& ended);
    void settle(const Ticket& ticket);
    void settle_callers(Peer& to, uint64_t number);
    uint64_t issue(const Ticket& ticket);
    void retire(uint64_t ticket);
    template <class Call>
    void start_transfer(const Ticket& ticket, Call&& call);
    bool poll_library();
    bool handle();
    [[nodiscard]] bool reads_in_place() const noexcept;
    template <class Needs>
    void send_last(const Frame& frame, std::span<const Load> loads, Needs&& needs_it) noexcept;
    bool close_library() noexcept;

    View& view_;
    Receiver& receiver_;
    std::unique_ptr<MessageLibrary> library_;
    std::vector<Peer> peers_;
    std::vector<Load> merged_;
    std::unique_ptr<std::array<Buffer, kSlots>> slots_ =
        std::make_unique<std::array<Buffer, kSlots>>();
    uint32_t next_slot_ = 0;
    // Buffers of heads to send; in a deque, because they must not move.
    std::deque<Buffer> buffers_;
    std::vector<uint64_t> free_buffers_;
    std::vector<Ticket> tickets_;
    std::vector<uint64_t> free_tickets_;
    std::atomic<uint64_t> unsent_{0};
    std::atomic<uint64_t> coming_{0};  // number of payloads still to receive
    bool parting_ = false;             // this rank has left, and ignores all input

    const int owner_pid_ = ::getpid();

    OwnedMutex library_mutex_;  // guards the library and its results, which are the next members:
    std::atomic<bool> closed_{false};  // changed only under the lock
    bool clean_ = false;               // no memory of this transport is in use any more
    std::vector<MessageLibrary::Ended> ended_;
    uint32_t filled_ = 0;

    std::mutex mutex_;  // mutex of the condition variable
    std::condition_variable doorbell_;
    std::atomic<bool> rung_{false};
};

}  // namespace unisono

// A wire of messages: each frame is a head, which brings small payloads along, and for larger ones
// payloads that go from where they are to where they belong.
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

class MessageWire final : public Wire {
  public:
    MessageWire(View& view, Receiver& receiver, std::unique_ptr<Carrier> carrier);
    MessageWire(const MessageWire&) = delete;
    MessageWire& operator=(const MessageWire&) = delete;
    ~MessageWire() override;

    void send(uint32_t peer, const Frame& frame, std::span<const Load> loads) override;
    [[nodiscard]] uint64_t handed(uint32_t peer) const noexcept override;
    bool poll() override;
    // Nothing wakes a thread for a message: this looks again and again, with naps between.
    Woken sleep(double seconds, const std::function<bool()>& awake) override;
    void wake() noexcept override;
    [[nodiscard]] bool forget_messages() noexcept override;
    bool forget_messages(uint32_t peer) noexcept override { return peers_[peer].leaving.empty(); }
    [[nodiscard]] bool idle() const noexcept override;
    [[nodiscard]] bool reads_in_place() const noexcept override;
    [[nodiscard]] bool needs_looks() const noexcept override { return true; }
    [[nodiscard]] bool reached(uint32_t peer) const noexcept override;
    void part() noexcept override;
    [[nodiscard]] bool parted() noexcept override;
    void close(const std::optional<Error>& failure) noexcept override;

  private:
    // Small enough for what libraries send at once, without asking the receiver.
    static constexpr uint64_t kHeadBytes = 4032;
    static constexpr uint32_t kSlots = 32;
    using Buffer = std::array<std::byte, kHeadBytes>;

    // Where a payload belongs, and how long it is.
    struct Span {
        uint64_t place, bytes;
    };
    // Begins each head; `spans` of them follow, then the payloads if they are `inside`.
    struct Head {
        Frame frame;
        uint32_t from;
        uint16_t spans;
        uint16_t inside;
    };
    static_assert(sizeof(Head) == 88);

    struct Incoming {
        uint64_t number = 0;  // among those of its rank
        Frame frame{};
        std::vector<Span> spans;
        const std::byte* inside = nullptr;  // payloads that came with the head
        bool placed = false;
        uint32_t missing = 0;  // payloads that are on their way
    };
    struct Peer {
        std::deque<bool> leaving;  // frames of callers' memory, from `handed` on: has it left?
        uint64_t handed = 0;       // of those frames
        std::deque<Incoming> incoming;
        uint64_t came = 0;  // frames
        bool left = false;
    };
    enum class What : uint8_t { head, payload, callers, arrival };
    struct Ticket {
        What what;
        uint32_t peer;
        uint64_t of;  // head: its buffer; callers: its number; arrival: of which incoming frame
    };

    void post(uint32_t peer, const Frame& frame, std::span<const Load> loads);
    void pack(uint32_t peer, const Frame& frame, std::span<const Load> loads, What what,
              uint64_t number);
    void take(const std::byte* slot);
    void advance(uint32_t peer);
    void place(uint32_t peer, Incoming& in);
    void deliver(uint32_t peer, const Frame& frame);
    void end(const Carrier::Ended& ended);
    void settle(const Ticket& ticket);
    void settle_callers(Peer& to, uint64_t number);
    uint64_t issue(const Ticket& ticket);
    void retire(uint64_t ticket);
    template <class Call>
    void carry(const Ticket& ticket, Call&& call);
    bool look();
    bool handle();
    bool let_go() noexcept;

    View& view_;
    Receiver& receiver_;
    std::unique_ptr<Carrier> carrier_;
    std::vector<Peer> peers_;
    std::vector<Load> merged_;
    std::unique_ptr<std::array<Buffer, kSlots>> slots_ =
        std::make_unique<std::array<Buffer, kSlots>>();
    uint32_t next_slot_ = 0;
    std::deque<Buffer> buffers_;  // of heads to be sent; they stay where they are
    std::vector<uint64_t> free_buffers_;
    std::vector<Ticket> tickets_;
    std::vector<uint64_t> free_tickets_;
    std::atomic<uint64_t> unsent_{0};
    std::atomic<uint64_t> coming_{0};  // payloads

    const int owner_pid_ = ::getpid();

    OwnedMutex carrying_;  // guards the carrier, and what it has found:
    bool closed_ = false;
    bool clean_ = false;  // nobody uses any memory of this wire's any more
    std::vector<Carrier::Ended> ended_;
    uint32_t filled_ = 0;

    std::mutex mutex_;  // of the bell
    std::condition_variable doorbell_;
    std::atomic<bool> rung_{false};
};

}  // namespace unisono

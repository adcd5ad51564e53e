// The endpoint for a peer on this host. Messages go through shared memory. Large messages are
// copied directly from the sender's memory into the receiver's memory.
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/futex.h"
#include "memory/membership.h"
#include "memory/single_copy.h"
#include "p2p/endpoint.h"

namespace unisono::p2p {

class ShmEndpoint final : public Endpoint {
  public:
    // `single_copy`: ranks may read and write each other's memory where the kernel permits.
    // `crowded`: ranks share cores.
    ShmEndpoint(View& view, Membership& members, CrossMemory& cross_memory, Completion& completion,
                uint32_t peer, const bool& single_copy, bool crowded);

    bool put(Request& send) override;
    bool put_aside(Request& send) override;
    void hold_back(uint64_t number) override;
    [[nodiscard]] std::optional<uint64_t> asked() const noexcept override;
    void deny() override;
    bool withdraw(Request& send) noexcept override;

    std::optional<Envelope> next() override;
    bool accept(const Envelope& came, Request& receive) override;
    bool claim(const Envelope& came) override;
    [[nodiscard]] uint64_t held() const noexcept override;
    void ask(uint64_t tag) override;
    Answer answer() override;

    bool progress() override;
    [[nodiscard]] bool has_arrivals() const noexcept override;
    void fail(const Error& error, Deadline& writes_end) noexcept override;

  private:
    struct Active {
        uint32_t transfer;
        Request* request;
        Phase phase;  // as receiver: the phase until the transfer is complete
    };
    // This rank's own copy of a slot's fields, because the peer may write to the slot at any time.
    struct Seen {
        uint64_t bytes, place;
        uint32_t transfer;
        bool done;  // the message is finished, so the slot may become free
    };
    // An unexpected message that was copied out of the ring to free space for later messages.
    struct Aside {
        std::vector<std::byte> data;
        uint32_t transfer;
    };

    [[nodiscard]] uint64_t slot_count() const noexcept {
        return view_.segment().shape().pair_slots;
    }
    [[nodiscard]] uint64_t ring_bytes() const noexcept {
        return view_.segment().shape().pair_bytes;
    }
    [[nodiscard]] uint64_t room_bytes() const noexcept {
        return view_.segment().shape().pair_room();
    }
    // The lengths of both rings are powers of two.
    [[nodiscard]] uint64_t at_byte(uint64_t place) const noexcept {
        return place & (ring_bytes() - 1);
    }
    [[nodiscard]] Slot& out_slot(uint64_t number) const noexcept {
        return out_.slots[number & (slot_count() - 1)];
    }
    [[nodiscard]] Slot& in_slot(uint64_t number) const noexcept {
        return in_.slots[number & (slot_count() - 1)];
    }
    std::optional<uint64_t> room_for(uint64_t bytes) noexcept;
    void publish(Slot& slot, const Request& send, uint64_t place, uint32_t transfer) noexcept;
    void offer(uint32_t transfer, Request& send);
    [[nodiscard]] uint32_t transfer_of(const Envelope& came) const;
    bool accept_transfer(uint32_t transfer, Request& receive);
    bool claim_transfer(uint32_t transfer);
    bool give_back_withdrawn(uint32_t transfer) noexcept;
    void forget(const Envelope& came);
    void release(uint64_t number) noexcept;
    void free_ring();
    void read_answer();
    void check(const Envelope& came, const Seen& seen);
    [[nodiscard]] static uint64_t end_of(const Seen& seen) noexcept;
    [[nodiscard]] const std::byte* content_of(uint64_t number, const Seen& seen) const;
    bool advance_sends();
    bool advance_send(const Active& active);
    bool advance_receive(const Active& active);
    bool help(Transfer& t, const Request& send);
    bool read(Transfer& t, Request& receive);
    bool stage(Transfer& t, Request& send);
    bool unstage(Transfer& t, Request& receive);
    void step() noexcept;
    [[nodiscard]] bool revoke(Transfer& t, Deadline& writes_end) noexcept;
    void take_back(Transfer& t) noexcept;
    [[nodiscard]] bool reaches() noexcept;
    void ring_peer() noexcept;
    [[noreturn]] void nonsense_phase(Phase phase);
    [[noreturn]] void nonsense(const std::string& what);

    View& view_;
    Membership& members_;
    CrossMemory& cross_memory_;
    Completion& completion_;
    const uint32_t peer_;
    const bool& single_copy_;
    const uint64_t eager_bytes_;  // longest message that goes through the ring
    enum class Reach : uint8_t { unknown, none, reads, all } reach_ = Reach::unknown;

    // The state of this rank as the sender of messages to the peer.
    const PairMemory out_;
    uint64_t put_ = 0;        // Number of messages sent.
    uint64_t put_bytes_ = 0;  // Bytes of the byte ring used so far, gaps included.
    uint64_t slots_taken_ = 0, bytes_taken_ = 0;  // Latest known values of the peer's counters.
    uint64_t answered_ = 0;
    uint64_t staged_turn_ = 0;  // Number of the transfer that is staged now.
    uint64_t steps_seen_ = 0;   // Number of the receiver's steps to which this rank has reacted.
    std::vector<uint32_t> free_;
    std::vector<Active> outgoing_;

    // The state of this rank as the receiver of messages from the peer.
    const PairMemory in_;
    uint64_t seen_ = 0;                          // Number of messages seen.
    uint64_t released_ = 0;                      // Number of messages whose slots are free again.
    std::deque<Seen> ahead_;                     // Messages that are seen and not yet released.
    std::unordered_map<uint64_t, Aside> aside_;  // By number.
    uint64_t aside_bytes_ = 0;
    uint64_t asked_ = 0;
    Answer answer_ = Answer::none;
    // A requested message that has arrived and that `next` has not returned yet.
    std::optional<uint32_t> aside_waits_;
    uint64_t turns_ = 0;  // number of transfers staged so far
    uint64_t unstaged_turn_ = 0;
    std::vector<Active> incoming_;
};

}  // namespace unisono::p2p

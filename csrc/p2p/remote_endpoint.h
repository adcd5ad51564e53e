// A peer on another host. A message leaves at once with its first bytes, as far as the peer has
// credit for what nobody may have asked for yet; the rest follows when the peer grants it.
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory/membership.h"
#include "p2p/endpoint.h"
#include "transport/transport.h"

namespace unisono::p2p {

class WireEndpoint final : public Endpoint {
  public:
    WireEndpoint(Membership& members, Wire& wire, Completion& completion, uint32_t peer)
        : members_(members), wire_(wire), completion_(completion), peer_(peer) {}

    bool put(Request& send) override;
    bool put_aside(Request& send) override;
    void hold_back(uint64_t number) override;
    [[nodiscard]] std::optional<uint64_t> asked() const noexcept override { return asked_tag_; }
    void deny() override;
    bool withdraw(Request& send) noexcept override;

    std::optional<Envelope> next() override;
    bool accept(const Envelope& came, Request& receive) override;
    bool claim(const Envelope&) override { return true; }
    [[nodiscard]] uint64_t held() const noexcept override { return held_; }
    void ask(uint64_t tag) override;
    Answer answer() override;

    bool progress() override;
    [[nodiscard]] bool has_arrivals() const noexcept override { return !told_.empty(); }
    void fail(const Error& error) noexcept override;

    // Of the receiver that the wire calls; see `Receiver`.
    std::byte* place(const Frame& frame);
    void deliver(const Frame& frame);
    // Keeps what the wire may use until the process ends. Before `fail`.
    void keep_memory() noexcept;
    // Nothing comes any more: it has left, or its connection has ended.
    [[nodiscard]] bool has_ended() const noexcept { return ended_; }
    // The same, also where there was no connection.
    [[nodiscard]] bool has_departed() const noexcept {
        return ended_ || (members_.has_left(peer_) && !wire_.reached(peer_));
    }
    void end() noexcept { ended_ = true; }

  private:
    // A message that has not come wholly, or that nobody has asked for.
    struct Incoming {
        Envelope envelope;
        uint64_t piece;               // bytes that came first
        std::vector<std::byte> data;  // those bytes, until they are asked for
        bool came = false;            // they are here
        bool granted = false;
        bool credited = false;  // they count against the sender's credit
        Request* receive = nullptr;
    };
    // A frame whose memory is in use until the wire has handed it over.
    struct Leaving {
        uint64_t number;  // among those to the peer
        Request* done;    // done then, if it is not nullptr
    };

    void say(FrameKind kind, uint64_t number, uint64_t place = 0);
    void send_message(Request& send, uint64_t piece, bool aside);
    void grant(Incoming& in);
    void give_back(uint64_t bytes);
    void settle(uint64_t id, Incoming& in);
    Incoming& incoming_of(const Frame& frame);

    Membership& members_;
    Wire& wire_;
    Completion& completion_;
    const uint32_t peer_;

    // As sender.
    static constexpr uint64_t kCredit = 256 << 10, kPiece = 64 << 10;  // bytes
    static constexpr uint64_t kOverhead = 256;                         // of a message without any
    uint64_t credit_ = kCredit;
    uint64_t ids_ = 0, left_frames_ = 0;
    std::unordered_map<uint64_t, Request*> ungranted_;
    std::deque<Leaving> leaving_;
    std::optional<uint64_t> asked_tag_;
    uint64_t question_ = 0;

    // As receiver.
    std::unordered_map<uint64_t, Incoming> incoming_;
    std::deque<Envelope> told_;  // for `next`
    uint64_t owed_ = 0;          // credit that the peer has not been given back
    uint64_t stored_ = 0;        // credit that is in use
    uint64_t held_ = 0;
    uint64_t questions_ = 0;
    Answer answer_ = Answer::none;
    bool ended_ = false;
    std::byte nowhere_{};  // where pieces without content go
};

}  // namespace unisono::p2p

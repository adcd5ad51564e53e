// The endpoint for a peer on another host. The first bytes of a message are sent at once (eager),
// within the credit that the peer gives for messages that no receive matches yet. The rest follows
// when the peer grants it.
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory/membership.h"
#include "p2p/endpoint.h"
#include "p2p/served_windows.h"
#include "transport/transport.h"

namespace unisono::p2p {

class RemoteEndpoint final : public Endpoint {
  public:
    // `windows` are the windows that this rank serves to the peer.
    RemoteEndpoint(Membership& members, Transport& transport, Completion& completion,
                   const ServedWindows& windows, uint32_t peer)
        : members_(members),
          transport_(transport),
          completion_(completion),
          windows_(windows),
          peer_(peer) {}

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
    [[nodiscard]] bool has_arrivals() const noexcept override { return !arrivals_.empty(); }
    void fail(const Error& error, Deadline& writes_end) noexcept override;

    // Sends the memory of `put` to the array of the peer's window, from byte `at` on.
    void put_to(Request& put, uint64_t window, uint64_t at);
    // Asks for the bytes of `get` from the array of the peer's window, from byte `at` on.
    void get_from(Request& get, uint64_t window, uint64_t at);
    // Adds a signal of this rank to the peer's window.
    void signal(uint64_t window);

    // The transport calls these functions for frames of this peer; see `Receiver`.
    std::byte* place(const Frame& frame);
    void deliver(const Frame& frame);
    // Tells that the transport may use the memory of unfinished messages until the process ends.
    // Call this before `fail`.
    void keep_memory() noexcept { keeps_memory_ = true; }
    // Returns true if nothing arrives any more: the peer has left, or its connection has ended.
    [[nodiscard]] bool has_ended() const noexcept { return ended_; }
    // Returns true if nothing arrives any more, also if no connection to the peer was made.
    [[nodiscard]] bool has_departed() const noexcept {
        return ended_ || (members_.has_left(peer_) && !transport_.reached(peer_));
    }
    void end() noexcept { ended_ = true; }

  private:
    // A message that has not arrived completely, or that no receive matches yet.
    struct Incoming {
        Envelope envelope;
        uint64_t piece;               // Bytes in the first frame.
        std::vector<std::byte> data;  // Content of the first frame, until a receive matches.
        bool came = false;            // The first bytes have arrived.
        bool granted = false;
        bool credited = false;  // the first bytes use some of the sender's credit
        Request* receive = nullptr;
    };
    // A frame whose memory is in use until the transport has handed it over.
    struct Leaving {
        uint64_t number;  // Number of the frame among all frames to the peer.
        Request* done;    // The request that completes with this frame, or nullptr.
    };

    void send_frame(FrameKind kind, uint64_t number, uint64_t place = 0);
    void send_message(Request& send, uint64_t piece, bool aside);
    void grant(Incoming& in);
    void give_back(uint64_t bytes);
    void settle(uint64_t id, Incoming& in);
    Incoming& incoming_of(const Frame& frame);
    void send_memory(const Frame& frame, std::byte* data, uint64_t bytes, Request* done);
    std::byte* place_access(const Frame& frame);
    void deliver_access(const Frame& frame);
    std::byte* served(uint64_t number, uint64_t at, uint64_t bytes);
    Request& get_of(const Frame& frame);

    Membership& members_;
    Transport& transport_;
    Completion& completion_;
    const ServedWindows& windows_;
    const uint32_t peer_;

    // The state of this rank as the sender of messages to the peer.
    static constexpr uint64_t kCredit = 256 << 10, kPiece = 64 << 10;  // In bytes.
    static constexpr uint64_t kOverhead = 256;  // Credit for each message besides its bytes.
    uint64_t credit_ = kCredit;
    uint64_t ids_ = 0, left_frames_ = 0;
    std::unordered_map<uint64_t, Request*> ungranted_;
    std::deque<Leaving> leaving_;
    std::optional<uint64_t> asked_tag_;
    uint64_t question_ = 0;
    uint64_t gets_sent_ = 0;
    std::unordered_map<uint64_t, Request*> gets_;  // by number; the bytes have not arrived yet

    // The state of this rank as the receiver of messages from the peer.
    std::unordered_map<uint64_t, Incoming> incoming_;
    std::deque<Envelope> arrivals_;  // Messages that `next` has not returned yet.
    uint64_t owed_ = 0;              // Credit that is free again but not yet returned to the peer.
    uint64_t stored_ = 0;            // Credit used by messages that no receive has taken.
    uint64_t held_ = 0;
    uint64_t questions_ = 0;
    Answer answer_ = Answer::none;
    bool ended_ = false, keeps_memory_ = false;
    std::byte nowhere_{};  // address to which a payload of 0 bytes is received
};

}  // namespace unisono::p2p

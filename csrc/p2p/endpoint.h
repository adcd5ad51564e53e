// A rank's endpoint for one peer: the messages to the peer and from it.
#pragma once

#include <cstdint>
#include <optional>

#include "memory/waiter.h"
#include "p2p/message_request.h"
#include "p2p/tag_matching.h"

namespace unisono::p2p {

// Receives a notice of each finished request.
class Completion {
  public:
    virtual ~Completion() = default;
    virtual void complete(Request& request) noexcept = 0;
};

// One peer's messages. The caller of every function holds the engine's lock. If the peer has no
// room for a message, the engine holds the message back, in order, and announces this by
// `hold_back`. Messages that no receive matches may fill the room. A receiver that waits for a
// held-back message then asks for the message by its tag.
class Endpoint {
  public:
    virtual ~Endpoint() = default;

    // ---- as sender
    // Appends the message to the messages already sent. Returns false if there is no room for it
    // yet.
    virtual bool put(Request& send) = 0;
    // Sends a held-back message (one for which the peer had no room) before earlier ones, because
    // the peer has asked for its tag; see `asked`. Returns false if this is not possible yet.
    virtual bool put_aside(Request& send) = 0;
    // Announces held-back messages. `number` changes with each new held-back message, and is 0 if
    // no message is held back.
    virtual void hold_back(uint64_t number) = 0;
    // Returns the tag that the peer asks for, if the peer's question is still unanswered.
    [[nodiscard]] virtual std::optional<uint64_t> asked() const noexcept = 0;
    // Answers that no held-back message has this tag.
    virtual void deny() = 0;
    // Withdraws a sent message. Returns false if the receiver has begun to receive it, or may still
    // begin.
    virtual bool withdraw(Request& send) noexcept = 0;

    // ---- as receiver
    // Returns the next message that has arrived.
    virtual std::optional<Envelope> next() = 0;
    // Moves a message into the memory of the receive that matches it. Returns false if the sender
    // has withdrawn the message.
    virtual bool accept(const Envelope& came, Request& receive) = 0;
    // Claims a message, so that its sender cannot withdraw it while this rank is in the group.
    // Returns false if the sender has already withdrawn it.
    virtual bool claim(const Envelope& came) = 0;
    // Returns the number that the peer passed to `hold_back`.
    [[nodiscard]] virtual uint64_t held() const noexcept = 0;
    // Asks for a held-back message with this tag. Requires that the previous question is answered.
    virtual void ask(uint64_t tag) = 0;
    enum class Answer : uint8_t { none, waiting, found, denied };
    // Returns the answer to the last question; returns `found` or `denied` only once.
    virtual Answer answer() = 0;

    // ---- both
    // Makes all progress that is possible without waiting. Returns true if anything moved.
    virtual bool progress() = 0;
    // Returns true if a message has arrived that `next` has not returned yet.
    [[nodiscard]] virtual bool has_arrivals() const noexcept = 0;
    // Ends all requests after a failure. Afterwards no rank uses their memory. Waits until
    // `writes_end` for a peer that writes to it. A request for whose memory this cannot be ensured
    // needs the memory until the process ends.
    virtual void fail(const Error& error, Deadline& writes_end) noexcept = 0;
};

}  // namespace unisono::p2p

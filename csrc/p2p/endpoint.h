// What a rank has of one peer for messages to it and from it.
#pragma once

#include <cstdint>
#include <optional>

#include "p2p/matcher.h"
#include "p2p/message_request.h"

namespace unisono::p2p {

// Who hears of requests that are done.
class Completion {
  public:
    virtual ~Completion() = default;
    virtual void complete(Request& request) noexcept = 0;
};

// All calls are made with the engine's lock. A message for which there is no room stays with its
// sender, in order: the engine keeps it, and says by `hold_back` that there are such. A receiver
// that waits for one of these behind messages that nobody takes asks for it by its tag.
class Endpoint {
  public:
    virtual ~Endpoint() = default;

    // ---- as sender
    // Puts the message behind all that were put before; false: there is no room for it yet.
    virtual bool put(Request& send) = 0;
    // Puts one ahead of others that wait: the answer to `asked`. False: not yet.
    virtual bool put_aside(Request& send) = 0;
    // A number that changes with every message that has to wait; 0: none waits.
    virtual void hold_back(uint64_t number) = 0;
    // The tag of the peer's question, if there is one without an answer.
    [[nodiscard]] virtual std::optional<uint64_t> asked() const noexcept = 0;
    // Answers that no message which waits has this tag.
    virtual void deny() = 0;
    // Takes back a message that was put, unless the receiver has begun with it, or may still do so.
    virtual bool withdraw(Request& send) noexcept = 0;

    // ---- as receiver
    // The next message that has come.
    virtual std::optional<Envelope> next() = 0;
    // Matches a message: brings it to where the receive wants it. False: it was withdrawn.
    virtual bool accept(const Envelope& came, Request& receive) = 0;
    // Whether a message is still there: from here on its sender cannot take it back while this rank
    // is there. Else it is gone.
    virtual bool claim(const Envelope& came) = 0;
    // What the peer's `hold_back` says.
    [[nodiscard]] virtual uint64_t held() const noexcept = 0;
    // Asks for a message with this tag, once the last question was answered.
    virtual void ask(uint64_t tag) = 0;
    enum class Answer : uint8_t { none, waiting, found, denied };
    // To the last question; `found` and `denied` are told once.
    virtual Answer answer() = 0;

    // ---- both
    // Moves what can move without waiting; true if anything did.
    virtual bool progress() = 0;
    // Messages that have come and that `next` has not told yet.
    [[nodiscard]] virtual bool has_arrivals() const noexcept = 0;
    // After a failure: ends all requests; from here on nobody uses their memory. Where that cannot
    // be had their memory is kept until the process ends.
    virtual void fail(const Error& error) noexcept = 0;
};

}  // namespace unisono::p2p

// What carries messages between ranks of different hosts where their own library moves the fabric:
// whole messages, in order, without waiting. `MessageWire` makes a wire of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace unisono {

// Called by one thread at a time. Memory that is handed over stays as it is until its ticket ends.
// Throws Error; `Fault::peer_lost` if the peer of this very call cannot be reached.
class Carrier {
  public:
    // A transfer that is over: `why` is empty unless it failed.
    struct Ended {
        uint64_t ticket;
        std::string why;
    };

    virtual ~Carrier() = default;
    // Where heads of any rank go: `slots` messages of up to `slot_bytes`, one after the other, and
    // round again. Those of one rank fill slots in the order in which it sent them.
    virtual void listen(std::byte* memory, uint64_t slot_bytes, uint32_t slots) = 0;
    // The oldest slot that was filled is free again.
    virtual void reuse() = 0;
    // True: it is over already, and the ticket will not end.
    virtual bool send_head(uint32_t peer, const std::byte* data, uint64_t bytes,
                           uint64_t ticket) = 0;
    // Payloads between two ranks are received in the order in which they are sent.
    virtual bool send(uint32_t peer, const std::byte* data, uint64_t bytes, uint64_t ticket) = 0;
    virtual bool receive(uint32_t peer, std::byte* data, uint64_t bytes, uint64_t ticket) = 0;
    // Moves what can be moved; appends what is over, returns how many slots were filled since the
    // last time, the next ones in turn.
    virtual uint32_t poll(std::vector<Ended>& ended) = 0;
    // Gives up what has not ended. False: some of it cannot be given up, so that all memory that
    // was handed over has to stay for as long as the process lives.
    [[nodiscard]] virtual bool close() noexcept = 0;
};

}  // namespace unisono

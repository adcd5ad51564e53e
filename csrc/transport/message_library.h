// Interface of a message library, such as MPI, that drives the fabric between hosts. The library
// moves whole messages, in order, without waiting. `MessageTransport` makes a transport from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace unisono {

// Only one thread at a time calls these functions. Memory passed to them stays valid and unchanged
// until its ticket ends. The functions throw Error, with `Fault::peer_lost` if the peer of the call
// cannot be reached.
class MessageLibrary {
  public:
    // A finished transfer. `why` is empty unless the transfer failed.
    struct Ended {
        uint64_t ticket;
        std::string why;
    };

    virtual ~MessageLibrary() = default;
    // Sets the memory into which the library receives the heads (first messages of frames) from all
    // ranks: a ring of `slots` slots, each for a head of up to `slot_bytes`. The heads of one rank
    // fill slots in the order in which they were sent.
    virtual void listen(std::byte* memory, uint64_t slot_bytes, uint32_t slots) = 0;
    // Frees the oldest filled slot.
    virtual void reuse() = 0;
    // Sends a head. Returns true if the transfer is already finished; `poll` does not report its
    // ticket then.
    virtual bool send_head(uint32_t peer, const std::byte* data, uint64_t bytes,
                           uint64_t ticket) = 0;
    // Send and receive payloads. Payloads from one rank to another are received in the order in
    // which they were sent.
    virtual bool send(uint32_t peer, const std::byte* data, uint64_t bytes, uint64_t ticket) = 0;
    virtual bool receive(uint32_t peer, std::byte* data, uint64_t bytes, uint64_t ticket) = 0;
    // Makes progress. Appends the finished transfers to `ended`. Returns the number of slots that
    // were filled since the last call of `poll`; they are filled in ring order.
    virtual uint32_t poll(std::vector<Ended>& ended) = 0;
    // Cancels the unfinished transfers. Returns false if some cannot be cancelled; all memory
    // passed to the library must then stay valid until the process ends.
    [[nodiscard]] virtual bool close() noexcept = 0;
};

}  // namespace unisono

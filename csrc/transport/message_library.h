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
    // Sets the memory that receives the heads of all ranks: a ring of `slots` messages of up to
    // `slot_bytes`. Heads of one rank fill slots in the order of their sends.
    virtual void listen(std::byte* memory, uint64_t slot_bytes, uint32_t slots) = 0;
    // Frees the oldest filled slot.
    virtual void reuse() = 0;
    // Sends a head. Returns true if the transfer is already finished; `poll` does not report its
    // ticket then.
    virtual bool send_head(uint32_t peer, const std::byte* data, uint64_t bytes,
                           uint64_t ticket) = 0;
    // Payloads between two ranks are received in the order of their sends.
    virtual bool send(uint32_t peer, const std::byte* data, uint64_t bytes, uint64_t ticket) = 0;
    virtual bool receive(uint32_t peer, std::byte* data, uint64_t bytes, uint64_t ticket) = 0;
    // Makes progress. Appends finished transfers and returns the number of slots filled since the
    // last call, in ring order.
    virtual uint32_t poll(std::vector<Ended>& ended) = 0;
    // Cancels the unfinished transfers. Returns false if some cannot be cancelled; all memory
    // passed to the library must then stay valid until the process ends.
    [[nodiscard]] virtual bool close() noexcept = 0;
};

}  // namespace unisono

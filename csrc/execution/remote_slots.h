// Sends a rank's slots to their readers on other hosts, and receives the slots of other hosts.
//
// A post sends its slots only to their readers. A reader acknowledges by its progress, which every
// frame carries. A reader with nothing else to send sends an empty frame before the peer needs the
// acknowledgement.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "execution/plan.h"
#include "memory/group_memory.h"
#include "memory/membership.h"
#include "transport/fault_reports.h"
#include "transport/transport.h"

namespace unisono {

// A staging buffer, which holds the slots of one block.
struct Place {
    size_t size_class;
    uint64_t position;
    uint64_t block;  // number of earlier blocks in this size class
};

class RemoteSlots final : public Receiver {
  public:
    RemoteSlots(View& view, Membership& members);
    void use(Transport& transport) noexcept { transport_ = &transport; }
    [[nodiscard]] Transport& transport() const noexcept { return *transport_; }

    // Sends this rank's progress, and the slots `loads` of the buffer `place`.
    void send_slots(uint32_t peer, const Place& place, std::span<const Load> loads);
    // Ends a block after its last post. Records the remote readers, which must acknowledge the
    // block. Sends the acknowledgements that peers will soon need for slots that this rank has
    // read.
    void end_block(const Plan& plan, const Place& place, uint64_t lead, uint64_t progress);
    // Acknowledges all blocks of a size class. Needed before a call whose first rounds run ahead
    // (`lead` above 0): its peers begin with several blocks at once, and so need all buffers.
    void acknowledge_all(size_t size_class);
    // Returns a rank that has not acknowledged the previous block of this buffer, if any.
    [[nodiscard]] std::optional<uint32_t> pending_reader(const Place& place) noexcept;
    // Returns true if the rank has acknowledged the previous block of this buffer.
    [[nodiscard]] bool has_read(uint32_t peer, const Place& place) const noexcept;

    // Returns true if the peer has left and will send nothing more. The control connections may
    // report that a peer has left before its last slots arrive.
    [[nodiscard]] bool has_departed(uint32_t peer) const noexcept;

    std::byte* place(uint32_t peer, const Frame& frame) override;
    void deliver(uint32_t peer, const Frame& frame) override;
    void lost(uint32_t peer, const std::string& why) override;
    [[noreturn]] void nonsense(uint32_t peer, const std::string& what) override {
        members_.fail_nonsense(peer, what);
    }

  private:
    struct PendingRead {
        uint32_t peer;
        uint64_t progress;
    };
    struct OwedAck {  // an acknowledgement that this rank must send
        uint32_t peer;
        size_t size_class;
        uint64_t block;
    };
    template <class Due>
    void acknowledge(size_t size_class, Due due);
    [[nodiscard]] bool is_done(const PendingRead& read) const noexcept;

    View& view_;
    Membership& members_;
    Transport* transport_ = nullptr;
    std::array<std::vector<std::vector<PendingRead>>, kSizeClasses> pending_reads_;  // by buffer
    std::vector<OwedAck> owed_acks_;
    // By peer: true if its last frame has arrived, or its connection has ended.
    std::vector<bool> ended_;
    FaultReports fault_reports_;
};

}  // namespace unisono

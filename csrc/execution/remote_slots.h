// Shows a rank's slots to the ranks of other hosts that read them, and takes theirs in.
//
// What a post shows goes to exactly those who read it. They answer by progress: with whatever they
// send next, or, where they have nothing to send, before their peer could need it.
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

// Where the slots of a block are: an area of a strip.
struct Place {
    size_t strip;
    uint64_t position;
    uint64_t block;  // how many blocks went through the strip before
};

class Courier final : public Receiver {
  public:
    Courier(View& view, Membership& members);
    void use(Transport& transport) noexcept { transport_ = &transport; }
    [[nodiscard]] Transport& transport() const noexcept { return *transport_; }

    // Sends the own progress with `loads` of slots in `place`.
    void show(uint32_t peer, const Place& place, std::span<const Load> loads);
    // After the last post of a block: who has read this rank's slots will have to answer, and whom
    // this rank has read from gets an answer in time.
    void end_block(const Plan& plan, const Place& place, uint64_t lead, uint64_t progress);
    // Before a call that runs ahead: its peers will need all answers about these areas.
    void answer_all(size_t strip);
    // A rank that has not answered for what was in this area before.
    [[nodiscard]] std::optional<uint32_t> debtor(const Place& place) noexcept;
    // Whether that rank has answered for it by now.
    [[nodiscard]] bool answered(uint32_t peer, const Place& place) const noexcept;

    // Whether the peer has left, and nothing more comes of it. By the control connections that may
    // be known before what it has shown is here.
    [[nodiscard]] bool has_departed(uint32_t peer) const noexcept;

    std::byte* place(uint32_t peer, const Frame& frame) override;
    void deliver(uint32_t peer, const Frame& frame) override;
    void lost(uint32_t peer, const std::string& why) override;
    [[noreturn]] void nonsense(uint32_t peer, const std::string& what) override {
        members_.fail_nonsense(peer, what);
    }

  private:
    struct Debt {
        uint32_t peer;
        uint64_t progress;
    };
    struct Owed {  // an answer to a peer
        uint32_t peer;
        size_t strip;
        uint64_t block;
    };
    template <class Due>
    void answer(size_t strip, Due due);
    [[nodiscard]] bool paid(const Debt& debt) const noexcept;

    View& view_;
    Membership& members_;
    Transport* transport_ = nullptr;
    std::array<std::vector<std::vector<Debt>>, kStrips> debts_;  // by area
    std::vector<Owed> owed_;
    std::vector<bool> ended_;  // by peer: whether its last frame has come, or its connection ended
    FaultReports fault_reports_;
};

}  // namespace unisono

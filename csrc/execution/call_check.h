// Whether all ranks mean the same call: fingerprints compared through the polled headers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/call.h"
#include "memory/membership.h"

namespace unisono {

class Agreement {
  public:
    Agreement(View& view, Membership& members)
        : view_(view), members_(members), own_(view.own()), verified_(members.ranks(), 0) {}

    // Writes down what this rank calls; nobody sees it yet.
    void enter(uint64_t seq, const CallArgs& args, uint64_t hash) noexcept {
        remember(own_, seq, args, hash);
    }
    // The same for a call that this rank will not take part in.
    void refuse(uint64_t seq, std::string_view reason) noexcept {
        remember_refusal(own_, seq, reason);
    }
    // Lets the others see it.
    void announce(uint64_t seq, uint64_t hash) noexcept {
        own_.header.store(header_of(seq, hash), std::memory_order_release);
    }

    // Compares all calls up to `seq` that the peer has entered and that were not compared before.
    // False if the peer has not entered `seq`; fails the group if a call differs.
    bool verify(uint32_t peer, uint64_t seq, uint64_t hash) {
        uint64_t& verified = verified_[peer];
        if (verified == seq) return true;
        const uint64_t theirs = view_.control(peer).header.load(std::memory_order_acquire);
        if (theirs != header_of(seq, hash) || verified + 1 != seq)
            return catch_up(peer, seq, theirs);
        verified = seq;
        return true;
    }

    // Calls up to `seq` that were not compared with the peer's.
    [[nodiscard]] uint64_t owed(uint32_t peer, uint64_t seq) const noexcept {
        return seq - verified_[peer];
    }
    // For a rank that waits for `peer` in call `seq`: throws if that is in all_left. `left`: whether
    // the peer has left, known before all that it had shown was taken in.
    void inspect(uint32_t peer, uint64_t seq, bool left);
    // Who has not come to call `seq` within the timeout, and what they called last.
    [[nodiscard]] std::string late(uint64_t seq, double timeout_s) const;

  private:
    bool catch_up(uint32_t peer, uint64_t seq, uint64_t theirs);
    // Of this rank itself no header may be visible yet.
    [[nodiscard]] bool entered(uint32_t peer, uint64_t seq) const noexcept {
        return peer == members_.rank() ||
               ahead_of(view_.control(peer).header.load(std::memory_order_acquire), seq) >= 0;
    }
    [[noreturn]] void mismatch(uint64_t seq);

    View& view_;
    Membership& members_;
    RankControl& own_;
    std::vector<uint64_t> verified_;  // by peer: calls up to here were seen to agree
};

}  // namespace unisono

// Checks that all ranks make the same call: compares fingerprints in the polled headers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/call.h"
#include "memory/membership.h"

namespace unisono {

class CallCheck {
  public:
    CallCheck(View& view, Membership& members)
        : view_(view), members_(members), own_(view.own()), verified_(members.ranks(), 0) {}

    // Records this rank's call; peers do not see it yet.
    void enter(uint64_t seq, const CallArgs& args, uint64_t hash) noexcept {
        record_call(own_, seq, args, hash);
    }
    // Records a call that this rank refuses.
    void refuse(uint64_t seq, std::string_view reason) noexcept {
        record_refusal(own_, seq, reason);
    }
    // Publishes the call to the peers.
    void announce(uint64_t seq, uint64_t hash) noexcept {
        own_.header.store(header_of(seq, hash), std::memory_order_release);
    }

    // Compares all calls up to `seq` that the peer has entered and that are not compared yet.
    // Returns false if the peer has not entered `seq`. Fails the group if a call differs.
    bool verify(uint32_t peer, uint64_t seq, uint64_t hash) {
        uint64_t& verified = verified_[peer];
        if (verified == seq) return true;
        const uint64_t theirs = view_.control(peer).header.load(std::memory_order_acquire);
        if (theirs != header_of(seq, hash) || verified + 1 != seq)
            return catch_up(peer, seq, theirs);
        verified = seq;
        return true;
    }

    // Returns the number of calls up to `seq` that are not compared with the peer's.
    [[nodiscard]] uint64_t unverified(uint32_t peer, uint64_t seq) const noexcept {
        return seq - verified_[peer];
    }
    // Throws if the wait for `peer` in call `seq` cannot succeed. `left` is true if the peer has
    // left. The caller must read this state before it takes in the peer's last data.
    void inspect(uint32_t peer, uint64_t seq, bool left);
    // Returns the text of a timeout: the ranks that have not entered call `seq`, and their last
    // calls.
    [[nodiscard]] std::string late(uint64_t seq, double timeout_s) const;

  private:
    bool catch_up(uint32_t peer, uint64_t seq, uint64_t theirs);
    // Returns true if the rank has entered the call. This rank counts as entered even before it
    // publishes its header.
    [[nodiscard]] bool entered(uint32_t peer, uint64_t seq) const noexcept {
        return peer == members_.rank() ||
               ahead_of(view_.control(peer).header.load(std::memory_order_acquire), seq) >= 0;
    }
    [[noreturn]] void mismatch(uint64_t seq);

    View& view_;
    Membership& members_;
    RankControl& own_;
    std::vector<uint64_t> verified_;  // by peer: all calls up to this one agree
};

}  // namespace unisono

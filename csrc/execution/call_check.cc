#include "execution/call_check.h"

#include <sched.h>

#include <algorithm>

#include "memory/waiter.h"

namespace unisono {
bool CallCheck::catch_up(uint32_t peer, uint64_t seq, uint64_t theirs) {
    // The peer is so many calls ahead that the history has lost this call. On one host this happens
    // only if the peer has refused its calls, because refused calls do not wait.
    if (view_.local(peer) && ahead_of(theirs, seq) >= static_cast<int32_t>(kCallHistory))
        mismatch(seq);
    uint64_t& verified = verified_[peer];
    if (seq > kCallHistory) verified = std::max(verified, seq - kCallHistory);
    for (; verified < seq; ++verified) {
        if (ahead_of(theirs, verified + 1) < 0) return false;
        if (differ(own_, view_.control(peer), verified + 1)) mismatch(verified + 1);
    }
    return true;
}

void CallCheck::inspect(uint32_t peer, uint64_t seq, bool left) {
    members_.require_healthy();
    for (uint32_t r = 0; r < members_.ranks(); ++r) {
        if (r == members_.rank()) continue;
        catch_up(r, seq, view_.control(r).header.load(std::memory_order_acquire));
    }
    if (left && !entered(peer, seq)) {
        members_.fail(Fault::peer_lost, "rank " + std::to_string(peer) +
                                            " left the group before call #" + std::to_string(seq) +
                                            " " + call_text(own_, seq) + "; " +
                                            last_call_text(view_.control(peer)));
    }
}

// Fails the group with a mismatch. First waits briefly for the other ranks, so that the text can
// name the call of each rank.
void CallCheck::mismatch(uint64_t seq) {
    Deadline moment(0.1);
    const auto arrived = [&] {
        for (uint32_t r = 0; r < members_.ranks(); ++r) {
            if (!entered(r, seq)) return false;
        }
        return true;
    };
    while (!arrived() && !moment.passed()) ::sched_yield();
    std::string text = "the ranks disagree about call #" + std::to_string(seq) + " of their group:";
    bool alike = true, mixed = false;
    std::string others;
    for (uint32_t r = 0; r < members_.ranks(); ++r) {
        const std::string done = entered(r, seq) ? outcome_text(view_.control(r), seq) : "";
        alike = alike && (done.empty() || done == outcome_text(own_, seq));
        mixed = mixed ||
                (!done.empty() && is_in_heaps(view_.control(r), seq) != is_in_heaps(own_, seq));
        text += (r ? ", rank " : " rank ") + std::to_string(r) + " " +
                (done.empty() ? "has not made it yet" : done);
        if (!done.empty() && differ(own_, view_.control(r), seq))
            others += (others.empty() ? "rank " : ", rank ") + std::to_string(r);
    }
    if (alike && !others.empty()) {
        text += "; rank " + std::to_string(members_.rank()) + " differs from " + others +
                " in the algorithm, in " + lengths_of(own_, seq) + ", or in reproducible=";
    }
    if (mixed) {
        text +=
            ". Pass shared arrays (contiguous arrays of Communicator.empty) on all ranks, or on "
            "none";
    }
    members_.fail(Fault::mismatch, text);
}

std::string CallCheck::late(uint64_t seq, double timeout_s) const {
    std::string text = "call #" + std::to_string(seq) + " " + call_text(own_, seq) + ": " +
                       timeout_text(members_.rank(), timeout_s) + ":";
    bool named = false;
    for (uint32_t r = 0; r < members_.ranks(); ++r) {
        if (entered(r, seq)) continue;
        text += (named ? "; rank " : " rank ") + std::to_string(r) + " has not arrived, " +
                activity_text(view_.control(r));
        named = true;
    }
    if (named) return text;
    text += " all ranks have arrived, but some make no progress";
    const uint64_t mine = own_.progress.load(std::memory_order_relaxed);
    for (uint32_t r = 0; r < members_.ranks(); ++r) {
        const uint64_t theirs = view_.control(r).progress.load(std::memory_order_acquire);
        if (r == members_.rank() || theirs > mine) continue;
        text += (named ? ", rank " : ": rank ") + std::to_string(r);
        named = true;
    }
    return text;
}

}  // namespace unisono

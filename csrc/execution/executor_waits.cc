// What an executor waits for, and how.
#include <functional>

#include "execution/executor.h"

namespace unisono {
namespace {

constexpr double kNapWhileSending_s = 300e-6;
constexpr uint64_t kMostOwed = 16;  // calls: to look at all of these costs little more than one

}  // namespace

// The area of this block held the block `depth` ago: all ranks must be past that one. It may have
// belonged to another call with other readers, hence all.
bool Executor::reuse_slots(Wait& wait) {
    const uint64_t ahead = wait.call.ahead();
    const uint64_t target = wait.call.lane->reusable_at(ahead);
    for (const uint32_t peer : view_.here()) {
        uint64_t& passed = passed_[peer];  // each look costs a line that the peer writes
        if (peer == members_.rank() || passed >= target) continue;
        const auto& progress = view_.control(peer).progress;
        const auto ready = [&] {
            passed = progress.load(std::memory_order_acquire);
            return passed >= target;
        };
        if (!wait_for(wait, peer, ready)) return false;
    }
    if (!courier_) return true;
    const Place place = wait.call.lane->place(ahead);
    while (const auto peer = courier_->debtor(place)) {  // of other hosts, those who read it
        const auto ready = [&] { return courier_->answered(*peer, place); };
        if (!wait_for(wait, *peer, ready)) return false;
    }
    return true;
}

bool Executor::wait_progress(Wait& wait, const Record& record) {
    const uint32_t peer = record.peer;
    // The peer did it so many steps earlier.
    const uint64_t steps = wait.call.lead_of(record.posted) - wait.call.lead_of(record.round);
    const uint64_t target = base_ + record.value - steps * wait.call.plan->stages;
    const auto& progress = view_.control(peer).progress;
    const auto ready = [&] { return progress.load(std::memory_order_acquire) >= target; };
    if (!wait_for(wait, peer, ready)) return false;
    // Before anything is read from its slots: the header is on the line that was just looked at.
    static_cast<void>(agreement_.verify(peer, wait.call.seq, wait.call.hash));
    return true;
}

// No rank returns before it has seen every peer of its host enter this very call: there a barrier
// is nothing else. Of the other hosts it has seen those whose slots it read. One exception: a call
// equal to the one before, which this rank could finish alone, need not hold it up (a root that
// broadcasts in a loop); what is owed is verified with a later call.
bool Executor::verify_all(Wait& wait) {
    Execution& call = wait.call;
    if (!call.announced) {
        announce(call);
        ring(own_.bell, fence());
    }
    const bool may_owe = call.hash == last_hash_ && call.args.root >= 0;
    for (; call.verified < members_.ranks(); ++call.verified) {
        const uint32_t peer = call.verified;
        if (peer == members_.rank() || !view_.local(peer)) continue;
        if (may_owe && agreement_.owed(peer, call.seq) < kMostOwed) continue;
        const auto ready = [&] { return agreement_.verify(peer, call.seq, call.hash); };
        if (!ready() && !may_owe && !wait_for(wait, peer, ready)) return false;
    }
    last_hash_ = call.hash;
    return true;
}

// Nobody may be reading what this rank has lent once its caller may change it. And what it has read
// is right only if the lender had not given the call up before.
bool Executor::take_back(Wait& wait) {
    const Plan& plan = *wait.call.plan;
    if (plan.lends) {
        for (; wait.call.returned < plan.readers_of_any.size(); ++wait.call.returned) {
            const uint32_t peer = plan.readers_of_any[wait.call.returned];
            const auto& progress = view_.control(peer).progress;
            const auto ready = [&] { return progress.load(std::memory_order_acquire) >= base_; };
            if (!wait_for(wait, peer, ready)) return false;
        }
    }
    if (plan.borrows) {
        std::atomic_thread_fence(std::memory_order_acquire);
        members_.require_healthy();
    }
    return true;
}

template <class Ready>
bool Executor::wait_for(Wait& wait, uint32_t peer, Ready ready) {
    if (ready()) return true;
    if (!wait.call.announced) {
        announce(wait.call);
        ring(own_.bell, fence());
    }
    return view_.local(peer) ? wait_here(wait, peer, ready) : wait_away(wait, peer, ready);
}

template <class Ready>
bool Executor::wait_here(Wait& wait, uint32_t peer, Ready ready) {
    Bell& bell = view_.control(peer).bell;
    const auto rest = [&](auto&& awake, double seconds) {
        if (!courier_ || !courier_->transport().needs_polling())
            return sleep_on(bell, awake, seconds);
        courier_->transport().poll();  // what other hosts wait for must not wait for this
        const double nap_s = std::min(seconds, kNapWhileSending_s);
        const Woken woken = sleep_on(bell, awake, nap_s);
        return woken == Woken::timed_out && nap_s < seconds ? Woken::rung : woken;
    };
    return waiter_.wait(
        rest, ready, [&] { agreement_.inspect(peer, wait.call.seq, view_.has_left(peer)); },
        [&] { return wait.late(agreement_); }, wait.deadline, wait.interrupted, wait.limit_s);
}

template <class Ready>
bool Executor::wait_away(Wait& wait, uint32_t peer, Ready ready) {
    Transport& transport = courier_->transport();
    const auto brought = [&] {
        if (ready()) return true;
        transport.poll();
        return ready();
    };
    const auto rest = [&](auto&& awake, double seconds) {
        return transport.sleep(seconds, std::ref(awake));
    };
    const auto look = [&] {
        const bool departed = courier_->has_departed(peer);  // what it sent before is here now
        transport.poll();
        agreement_.inspect(peer, wait.call.seq, departed && courier_->has_departed(peer));
    };
    Waiter& waiter = is_large(wait.call) ? away_ : away_small_;
    return waiter.wait(
        rest, brought, look, [&] { return wait.late(agreement_); }, wait.deadline, wait.interrupted,
        wait.limit_s);
}

// Who has left without ever having been connected takes nothing of what it should have read.
void Executor::look_for_readers(const Execution& call) {
    members_.require_healthy();
    for (const uint32_t peer : call.plan->readers_of_any) {
        if (!view_.local(peer) && !courier_->transport().reached(peer))
            agreement_.inspect(peer, call.seq, view_.has_left(peer));
    }
}

// What this rank has shown must have left it before it goes about other things: nobody moves the
// transport then.
bool Executor::hand_over(Wait& wait) {
    if (!courier_ || courier_->transport().idle()) return true;
    Transport& transport = courier_->transport();
    const auto gone = [&] {
        if (!transport.idle()) transport.poll();
        return transport.idle();
    };
    const auto rest = [&](auto&& awake, double seconds) {
        return transport.sleep(seconds, std::ref(awake));
    };
    return away_.wait(
        rest, gone, [&] { look_for_readers(wait.call); },
        [&] { return wait.late(agreement_) + "; not all take what this rank sends"; },
        wait.deadline, wait.interrupted, wait.limit_s);
}

}  // namespace unisono

// The waits of an executor.
#include <functional>

#include "execution/executor.h"

namespace unisono {
namespace {

constexpr double kNapWhileSending_s = 300e-6;
// Number of calls that may stay uncompared. To compare 16 calls costs little more than one.
constexpr uint64_t kMostUnverified = 16;
// With more ranks than cores, a peer on another core may be about to post. These pauses take less
// time than a switch to another rank and back.
constexpr int kPausesForOtherCore = 10;

}  // namespace

// Waits until the earlier block in this buffer, `depth` blocks ago, is finished. That block may
// belong to another call with other readers, so all ranks of this host must have finished it.
bool Executor::reuse_slots(Wait& wait) {
    const uint64_t ahead = wait.call.ahead();
    const uint64_t target = wait.call.staging->reusable_at(ahead);
    for (const uint32_t peer : view_.here()) {
        // If the last progress that was read from the peer is already enough, the peer's cache line
        // is not loaded again. Each load would take the line from the peer, which writes it.
        uint64_t& passed = passed_[peer];
        if (peer == members_.rank() || passed >= target) continue;
        const auto& progress = view_.control(peer).progress;
        const auto ready = [&] {
            passed = progress.load(std::memory_order_acquire);
            return passed >= target;
        };
        if (!wait_for(wait, peer, ready)) return false;
    }
    if (!remote_slots_) return true;
    const Place place = wait.call.staging->place(ahead);
    while (const auto peer = remote_slots_->pending_reader(place)) {  // for readers on other hosts
        const auto ready = [&] { return remote_slots_->has_read(*peer, place); };
        if (!wait_for(wait, *peer, ready)) return false;
    }
    return true;
}

bool Executor::wait_progress(Wait& wait, const Record& record) {
    const uint32_t peer = record.peer;
    // Number of steps by which the peer's post precedes this wait.
    const uint64_t steps = wait.call.lead_of(record.posted) - wait.call.lead_of(record.round);
    const uint64_t target = base_ + record.value - steps * wait.call.plan->stages;
    const auto& progress = view_.control(peer).progress;
    const auto ready = [&] { return progress.load(std::memory_order_acquire) >= target; };
    if (!wait_for(wait, peer, ready)) return false;
    // Compares the calls before any read of the peer's slots. The header is on the cache line that
    // was just loaded.
    static_cast<void>(call_check_.verify(peer, wait.call.seq, wait.call.hash));
    return true;
}

// Waits until every peer of this host has entered this call, and compares the calls. For a barrier,
// this is the whole effect. Of the ranks on other hosts, only those whose slots were read are
// compared. One exception is a call that equals the previous call and that this rank can finish
// alone, such as a broadcast by its root in a loop. This call does not wait; a later call makes the
// missing comparisons.
bool Executor::verify_all(Wait& wait) {
    Execution& call = wait.call;
    if (!call.announced) {
        announce(call);
        ring(own_.doorbell, fence());
    }
    const bool may_skip = call.hash == last_hash_ && call.args.root >= 0;
    for (; call.verified < members_.ranks(); ++call.verified) {
        const uint32_t peer = call.verified;
        if (peer == members_.rank() || !view_.local(peer)) continue;
        if (may_skip && call_check_.unverified(peer, call.seq) < kMostUnverified) continue;
        const auto ready = [&] { return call_check_.verify(peer, call.seq, call.hash); };
        if (!ready() && !may_skip && !wait_for(wait, peer, ready)) return false;
    }
    last_hash_ = call.hash;
    return true;
}

// Waits until peers have read this rank's shared memory, because its caller may change it after the
// call. Then checks for a failure, because data read from a peer is valid only if the peer had not
// given up the call when the data was read. In shared heaps, a third rank may have read this data.
bool Executor::await_readers(Wait& wait) {
    const Plan& plan = *wait.call.plan;
    if (plan.shares_memory) {
        for (; wait.call.readers_done < plan.readers_of_any.size(); ++wait.call.readers_done) {
            const uint32_t peer = plan.readers_of_any[wait.call.readers_done];
            if (!view_.local(peer)) continue;  // a rank of another host reads slots only
            const auto& progress = view_.control(peer).progress;
            const auto ready = [&] { return progress.load(std::memory_order_acquire) >= base_; };
            if (!wait_for(wait, peer, ready)) return false;
        }
    }
    if (plan.reads_in_place || wait.call.args.in_heaps) {
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
        ring(own_.doorbell, fence());
    }
    return view_.local(peer) ? wait_local(wait, peer, ready) : wait_remote(wait, peer, ready);
}

template <class Ready>
bool Executor::wait_local(Wait& wait, uint32_t peer, Ready ready) {
    Doorbell& doorbell = view_.control(peer).doorbell;
    const auto rest = [&](auto&& awake, double seconds) {
        if (!remote_slots_ || !remote_slots_->transport().needs_polling())
            return sleep_on(doorbell, awake, seconds);
        // Moves the data for other hosts while this rank waits.
        remote_slots_->transport().poll();
        const double nap_s = std::min(seconds, kNapWhileSending_s);
        const Woken woken = sleep_on(doorbell, awake, nap_s);
        return woken == Woken::timed_out && nap_s < seconds ? Woken::rung : woken;
    };
    const auto inspect = [&] {
        call_check_.inspect(peer, wait.call.seq, view_.has_left(peer));
        if (!wait.in_foreground()) return;
        if (waiter_.oversubscribed())
            core_sharing_.even_out(view_);
        else
            core_sharing_.leave(view_.control(peer));
    };
    if (waiter_.oversubscribed() && core_sharing_.elsewhere(view_.control(peer)) &&
        Waiter::pause_until(ready, kPausesForOtherCore))
        return true;
    return waiter_.wait(
        rest, ready, inspect, [&] { return wait.late(call_check_); }, waited_ns(wait),
        wait.deadline, wait.interrupted, wait.limit_s);
}

template <class Ready>
bool Executor::wait_remote(Wait& wait, uint32_t peer, Ready ready) {
    Transport& transport = remote_slots_->transport();
    const auto brought = [&] {
        if (ready()) return true;
        transport.poll();
        return ready();
    };
    const auto rest = [&](auto&& awake, double seconds) {
        return transport.sleep(seconds, std::ref(awake));
    };
    const auto look = [&] {
        const bool departed =
            remote_slots_->has_departed(peer);  // if true, all data of the peer has arrived
        transport.poll();
        call_check_.inspect(peer, wait.call.seq, departed && remote_slots_->has_departed(peer));
    };
    Waiter& waiter = is_large(wait.call) ? remote_waiter_ : small_remote_waiter_;
    return waiter.wait(
        rest, brought, look, [&] { return wait.late(call_check_); }, waited_ns(wait), wait.deadline,
        wait.interrupted, wait.limit_s);
}

// Checks the readers on other hosts to which no connection was made. Throws if such a reader has
// left, because it will never take the data.
void Executor::check_remote_readers(const Execution& call) {
    members_.require_healthy();
    for (const uint32_t peer : call.plan->readers_of_any) {
        if (!view_.local(peer) && !remote_slots_->transport().reached(peer))
            call_check_.inspect(peer, call.seq, view_.has_left(peer));
    }
}

// Waits until all sent data has left this rank, because no thread drives the transport after the
// call.
bool Executor::flush_sends(Wait& wait) {
    if (!remote_slots_ || remote_slots_->transport().idle()) return true;
    Transport& transport = remote_slots_->transport();
    const auto gone = [&] {
        if (!transport.idle()) transport.poll();
        return transport.idle();
    };
    const auto rest = [&](auto&& awake, double seconds) {
        return transport.sleep(seconds, std::ref(awake));
    };
    return remote_waiter_.wait(
        rest, gone, [&] { check_remote_readers(wait.call); },
        [&] { return wait.late(call_check_) + "; some do not receive what this rank sends"; },
        waited_ns(wait), wait.deadline, wait.interrupted, wait.limit_s);
}

}  // namespace unisono

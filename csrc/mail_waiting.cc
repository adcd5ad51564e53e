// Who moves the mail: those who wait for a parcel, and a thread where nobody waits.
#include <algorithm>
#include <string>

#include "call.h"
#include "mail.h"
#include "progress_thread.h"

namespace unisono {
namespace {

constexpr double kSlice_s = 0.05;
constexpr double kNapBetween_s = 1e-3;  // where both a bell and a wire may ring

// Others can say what a rank waits for that is late in a collective.
class Errand {
  public:
    Errand(RankControl& own, uint64_t word) noexcept : word_(own.errand) {
        word_.store(word, std::memory_order_relaxed);
    }
    Errand(const Errand&) = delete;
    Errand& operator=(const Errand&) = delete;
    ~Errand() { word_.store(0, std::memory_order_relaxed); }

  private:
    std::atomic<uint64_t>& word_;
};

}  // namespace

bool PostOffice::wait(Parcel& parcel, double timeout_s, double limit_s,
                      const Interrupted& interrupted) {
    if (!parcel.done()) members_.require_own_process();
    Deadline deadline(timeout_s);
    const auto ready = [&] {
        if (parcel.done()) return true;
        // Not try_lock: who has the lock may have looked already, and never look again.
        const std::lock_guard lock(mutex_);
        if (!parcel.done()) poll();
        return parcel.done();
    };
    const auto inspect = [&] {
        members_.require_healthy();
        check_departed(parcel);
    };
    const Message& m = parcel.message_;
    const bool any = m.peer == kAnySource;
    const bool here = any ? view_.here().size() > 1 : view_.local(static_cast<uint32_t>(m.peer));
    const bool away = any ? wire_ != nullptr : !here;
    const auto sleep = [&](auto&& awake, double seconds) {
        return rest(here, away, awake, seconds);
    };
    const double most_s = limit_s < 0 ? 0 : std::max(limit_s, 1e-9);
    try {
        if (!ready()) {
            const Errand errand(view_.own(), errand_of(parcel.sends_, m.peer));
            const auto tell = [&] { return late(parcel); };
            if (!waiter_.wait(sleep, ready, inspect, tell, deadline, interrupted, most_s))
                return false;
        }
    } catch (...) {
        if (!members_.in_child()) end_all();
        throw;
    }
    if (parcel.error_) throw *parcel.error_;
    return true;
}

// Sleeps until a peer of this host (`here`) or of another (`away`) may have done something.
template <class Awake>
Woken PostOffice::rest(bool here, bool away, Awake&& awake, double seconds) {
    Bell& bell = view_.own().mail;
    if (!away && (!wire_ || !wire_->needs_looks())) return sleep_on(bell, awake, seconds);
    const double nap_s = here ? std::min(seconds, kNapBetween_s) : seconds;
    away_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const Woken woken = away ? wire_->sleep(nap_s, std::ref(awake)) : sleep_on(bell, awake, nap_s);
    away_sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return woken == Woken::timed_out && nap_s < seconds ? Woken::rung : woken;
}

bool PostOffice::has_departed(uint32_t peer) const noexcept {
    const bool left = view_.control(peer).presence.load(std::memory_order_acquire) ==
                      static_cast<uint32_t>(Presence::left);
    if (!view_.local(peer)) return lanes_[peer].departed || (left && !wire_->reached(peer));
    return left;
}

// Fails if everybody who could serve the parcel has left the group.
void PostOffice::check_departed(const Parcel& parcel) {
    const Message& m = parcel.message_;
    const std::lock_guard lock(mutex_);  // else a message just being moved is in no place
    if (parcel.done()) return;
    bool departed = false;
    for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
        if (peer == members_.rank() ||
            (m.peer != kAnySource && m.peer != static_cast<int32_t>(peer)))
            continue;
        if (!has_departed(peer)) return;
        if (view_.local(peer) && !parcel.sends_) {
            const Mailbox& box =
                view_.segment().mailbox(view_.place(peer), view_.place(members_.rank()));
            if (box.head.load(std::memory_order_acquire) !=
                box.tail.load(std::memory_order_relaxed)) {
                return;  // what it sent is still to be taken
            }
        }
        departed = true;
    }
    if (!departed) return;
    const std::string who =
        m.peer == kAnySource ? "every other rank" : "rank " + std::to_string(m.peer);
    members_.fail(Fault::peer_lost, who + " left the group while rank " +
                                        std::to_string(members_.rank()) + " was " +
                                        (parcel.sends_ ? "sending to it" : "receiving from it"));
}

std::string PostOffice::late(const Parcel& parcel) const {
    const Message& m = parcel.message_;
    const std::string text = errand_text(parcel.sends_, m.peer) + " (" + std::to_string(m.bytes) +
                             " bytes, tag " + std::to_string(m.tag) + ") timed out on rank " +
                             std::to_string(members_.rank()) +
                             (parcel.sends_ ? ": it was not received" : ": nothing was sent");
    if (m.peer == kAnySource) return text;
    return text + "; rank " + std::to_string(m.peer) + ": " +
           whereabouts(view_.control(static_cast<uint32_t>(m.peer)));
}

void PostOffice::progress_loop() {
    std::unique_lock lock(mutex_);
    const bool here = view_.here().size() > 1;
    while (!stopping_) {
        if (idle()) {
            changed_->wait(lock, [this] { return stopping_ || !idle(); });
            continue;
        }
        const auto ready = [&] {  // looks once more after it has said that it sleeps
            const std::lock_guard again(mutex_);
            return stopping_ || members_.failed() || poll() || idle();
        };
        try {
            if (poll() || idle()) continue;
            lock.unlock();
            if (rest(here, wire_ != nullptr, ready, kSlice_s) == Woken::timed_out)
                waiter_.check_world({});
        } catch (const std::exception&) {  // recorded in the group: poll ends what is under way
        }
        if (!lock.owns_lock()) lock.lock();
    }
}

void PostOffice::stop() noexcept {
    if (members_.in_child()) {  // the lock may be held, and the thread is there, in the parent only
        if (thread_.joinable()) thread_.detach();
        static_cast<void>(changed_.release());
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        changed_->notify_all();
    }
    ring_always(view_.own().mail);
    if (wire_) wire_->wake();
    if (thread_.joinable()) thread_.join();
    const std::lock_guard lock(mutex_);
    const Error unfinished(Fault::aborted,
                           "the communicator was closed with this message under way");
    // What is still under way must not read the callers' memory any more.
    if (wire_ && !wire_closed_) {
        const bool idle = wire_->idle() && !unfinished_;
        wire_->close(idle || members_.failed() ? members_.failure() : std::optional(unfinished));
    }
    wire_closed_ = true;
    fail_all(unfinished);
}

void PostOffice::carry_on() {
    const std::lock_guard lock(mutex_);
    if (stopping_ || idle()) return;
    if (!thread_.joinable()) {
        start_progress(thread_, [this] { progress_loop(); });
    }
    changed_->notify_all();
}

}  // namespace unisono

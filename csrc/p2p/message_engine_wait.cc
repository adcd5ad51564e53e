// Progress of messages, by the threads that wait for a message, and by a progress thread if no
// thread waits.
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "core/call.h"
#include "core/progress_thread.h"
#include "p2p/message_engine.h"
#include "p2p/remote_endpoint.h"

namespace unisono::p2p {
namespace {

constexpr double kSlice_s = 0.05;
// Length of a sleep in a wait for a message that may come through shared memory or through a
// transport. One sleep cannot wait for both.
constexpr double kNapBetween_s = 1e-3;
constexpr uint64_t kPollsEach = 8;  // Every 8th poll polls all peers, the others the awaited peer.
// Timing of the progress thread. If no waiting thread polls for kNap, the progress thread polls. It
// stays awake for kLinger after the last message, because waking it costs as much as a message.
constexpr std::chrono::microseconds kNap{200}, kLongestNap{3200};
constexpr std::chrono::milliseconds kLinger{20}, kInspectEach{50};

// Publishes the awaited request, so that other ranks can report why this rank is late.
class Waiting {
  public:
    Waiting(RankControl& own, uint64_t word) noexcept : word_(own.awaited_message) {
        word_.store(word, std::memory_order_relaxed);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting() { word_.store(0, std::memory_order_relaxed); }

  private:
    std::atomic<uint64_t>& word_;
};

// Counts a thread that sleeps in the transport, where a message from another host wakes it.
class AwaySleeper {
  public:
    explicit AwaySleeper(std::atomic<uint32_t>& sleepers) noexcept : sleepers_(sleepers) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
    }
    AwaySleeper(const AwaySleeper&) = delete;
    AwaySleeper& operator=(const AwaySleeper&) = delete;
    ~AwaySleeper() { sleepers_.fetch_sub(1, std::memory_order_relaxed); }

  private:
    std::atomic<uint32_t>& sleepers_;
};

}  // namespace

bool Engine::test(Request& request, bool ends_without_peers) noexcept {
    if (request.done()) return true;
    if (members_.in_child()) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || request.done()) return request.done();
    try {
        poll();
        if (!request.done()) inspect(request.inspected);
        if (!request.done() && ends_without_peers) end_if_all_peers_left(request);
    } catch (const std::exception&) {  // the request has the error, like all pending requests
    }
    return request.done();
}

// Makes the slow checks (liveness of peers) that a wait would make, for a program that calls `test`
// in a loop. Every check except the first also asks the other hosts for their last calls. Requires
// the lock.
void Engine::inspect(std::chrono::steady_clock::time_point& last) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last < kInspectEach) return;
    const bool first = std::exchange(last, now) == std::chrono::steady_clock::time_point{};
    make_slow_checks();
    if (!first) members_.ask_other_hosts();
}

bool Engine::wait(Request& request, double timeout_s, double limit_s,
                  const Interrupted& interrupted) {
    uint64_t polls = 0;
    const auto ready = [&] {
        if (request.done()) return true;
        // Waits for the lock, because the thread that holds it may already have made its last poll.
        const std::lock_guard lock(mutex_);
        if (!request.done()) ++polls % kPollsEach == 0 ? poll() : poll_for(request);
        return request.done();
    };
    const auto last = [&] {
        const std::lock_guard lock(mutex_);
        // If a poll moved a part of a message, another poll may find more, and no doorbell rings
        // for the rest.
        return request.done() || poll() || request.done();
    };
    Request* const one = &request;
    if (!wait_for({&one, 1}, ready, last, timeout_s, limit_s, interrupted)) return false;
    if (request.error()) throw *request.error();
    return true;
}

std::optional<size_t> Engine::wait_any(Requests requests, double timeout_s, double limit_s,
                                       const Interrupted& interrupted) {
    size_t place = 0;
    const auto found = [&] {
        for (place = 0; place < requests.size(); ++place) {
            if (requests[place]->done()) return true;
        }
        return false;
    };
    const auto ready = [&] {
        if (found()) return true;
        const std::lock_guard lock(mutex_);
        if (!found()) poll();
        return found();
    };
    const auto last = [&] {
        if (found()) return true;
        const std::lock_guard lock(mutex_);
        return found() || poll() || found();
    };
    try {
        if (!wait_for(requests, ready, last, timeout_s, limit_s, interrupted)) return std::nullopt;
    } catch (const Error& error) {  // a request has failed, or this call itself was interrupted
        if (error.fault() == Fault::interrupted || !found()) throw;
    }
    return place;
}

void Engine::expire(Request& request, double timeout_s) {
    Request* const one = &request;
    try {
        members_.fail(Fault::timeout, late({&one, 1}, timeout_s));
    } catch (const Error&) {  // the request gets this error now
        end_all();
    }
}

std::optional<Envelope> Engine::wait_probe(int32_t source, uint64_t tag, double timeout_s,
                                           double limit_s, const Interrupted& interrupted,
                                           double check_s) {
    Request wanted({nullptr, 0, DType::uint8, source, tag},
                   false);  // only for error texts; this request never begins
    std::optional<Envelope> found;
    const auto ready = [&] {
        if (!found) found = probe(source, tag);
        return found.has_value();
    };
    Request* const one = &wanted;
    wait_for({&one, 1}, ready, ready, timeout_s, limit_s, interrupted, check_s);
    return found;
}

// Waits until `ready` returns true; `ready` makes the progress. `last` is the last check before a
// sleep.
template <class Ready, class Last>
bool Engine::wait_for(Requests requests, Ready&& ready, Last&& last, double timeout_s,
                      double limit_s, const Interrupted& interrupted, double check_s) {
    members_.require_own_process();
    bool here = false, away = false;
    for (const Request* const request : requests) {
        const int32_t peer = request->message().peer;
        const bool any = peer == kAnySource, local = !any && !remotes_[static_cast<size_t>(peer)];
        here |= any ? view_.here().size() > 1 : local;
        away |= any ? transport_ != nullptr : !local;
    }
    Deadline deadline(timeout_s);
    const auto inspect = [&] {
        members_.require_healthy();
        // Without the lock, another thread could be moving a message from the endpoint to its
        // receive. The message would then be found in neither, and the wait would fail although the
        // message has arrived.
        const std::lock_guard lock(mutex_);
        check_departed(requests);
    };
    const auto sleep = [&](auto&&, double seconds) {
        const auto awake = [&] { return last() || members_.failed(); };
        return rest(here, away, awake, seconds);
    };
    const auto tell = [&] { return late(requests, timeout_s); };
    const double most_s = limit_s < 0 ? 0 : std::max(limit_s, 1e-9);
    try {
        if (ready()) return true;
        if (background_asleep_.load(std::memory_order_relaxed)) ring_always(view_.own().p2p);
        const Message& first = requests.front()->message();
        const int32_t peer = requests.size() == 1 ? first.peer : kAnySource;
        const Waiting waiting(view_.own(), awaited_message_of(requests.front()->sends(), peer));
        auto& waited_ns = counters_.waited_ns(requests.front()->sends() ? kSendRow : kReceiveRow);
        return waiter_.wait(sleep, ready, inspect, tell, waited_ns, deadline, interrupted, most_s,
                            check_s);
    } catch (...) {
        if (!members_.in_child()) end_all();
        throw;
    }
}

void Engine::await_signals(uint32_t peer, const std::function<bool()>& arrived,
                           const std::function<std::string()>& late, double timeout_s,
                           const Interrupted& interrupted) {
    const auto ready = [&] {
        if (arrived()) return true;
        const std::lock_guard lock(mutex_);
        poll();
        return arrived();
    };
    const auto inspect = [&] {
        members_.require_healthy();
        const std::lock_guard lock(mutex_);
        if (!remotes_[peer]->has_departed() || arrived()) return;
        poll();  // takes what the peer sent before it left
        // A peer that has departed sends nothing, so signals that are missing now never arrive.
        if (remotes_[peer]->has_departed() && !arrived())
            members_.fail(Fault::peer_lost,
                          "rank " + std::to_string(peer) + " left the group while rank " +
                              std::to_string(members_.rank()) + " waited for its signal");
    };
    const auto sleep = [&](auto&&, double seconds) {
        const auto awake = [&] { return ready() || members_.failed(); };
        return rest(false, true, awake, seconds);
    };
    Deadline deadline(timeout_s);
    try {
        if (ready()) return;
        waiter_.wait(sleep, ready, inspect, late, counters_.waited_ns(kWaitRow), deadline,
                     interrupted);
    } catch (...) {
        if (!members_.in_child()) end_all();
        throw;
    }
}

// Sleeps until a peer of this host (`here`) or of another host (`away`) may have made progress.
template <class Awake>
Woken Engine::rest(bool here, bool away, Awake&& awake, double seconds) {
    Doorbell& doorbell = view_.own().p2p;
    if (!away && (!transport_ || !transport_->needs_polling()))
        return sleep_on(doorbell, awake, seconds);
    const double nap_s = here ? std::min(seconds, kNapBetween_s) : seconds;
    const AwaySleeper announced(away_sleepers_);
    const Woken woken = [&] {
        try {
            return away ? transport_->sleep(nap_s, std::ref(awake))
                        : sleep_on(doorbell, awake, nap_s);
        } catch (const Error& error) {
            // An error of a message library. It was not thrown inside `guarded`, which would have
            // recorded it.
            if (!mutex_.held_here()) record(error);
            throw;
        }
    }();
    return woken == Woken::timed_out && nap_s < seconds ? Woken::rung : woken;
}

bool Engine::has_departed(uint32_t peer) const noexcept {
    if (const RemoteEndpoint* const remote = remotes_[peer]) return remote->has_departed();
    return view_.has_left(peer);
}

bool Engine::cannot_complete(const Request& request) noexcept {
    if (request.done() || members_.in_child()) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    return lock.owns_lock() && all_peers_left(request);
}

// Returns true if every peer of the request has left and no message of these peers is unread.
// Requires the lock.
bool Engine::all_peers_left(const Request& request) const {
    const Message& m = request.message();
    if (request.done()) return false;
    bool departed = false;
    for (uint32_t peer = 0; peer < peers_.size(); ++peer) {
        if (peer == members_.rank() ||
            (m.peer != kAnySource && m.peer != static_cast<int32_t>(peer)))
            continue;
        if (!has_departed(peer)) return false;
        // A message from that peer may still be unread.
        if (!request.sends() && !m.one_sided && peers_[peer].endpoint->has_arrivals()) return false;
        departed = true;
    }
    return departed;
}

// Fails the group if no request can ever be done, because all their peers have left. Requires the
// lock.
void Engine::check_departed(Requests requests) {
    const auto all_left = [this](const Request* request) { return this->all_peers_left(*request); };
    if (!std::all_of(requests.begin(), requests.end(), all_left)) return;
    poll();  // takes what the peers sent before they left
    if (!std::all_of(requests.begin(), requests.end(), all_left)) return;
    const Error departed = departed_from(*requests.front());
    members_.fail(departed.fault(), departed.what());
}

// Ends only this request, because the rank may test other requests that can still be done. If the
// request cannot be withdrawn, the group fails. Requires the lock.
void Engine::end_if_all_peers_left(Request& request) {
    if (!all_peers_left(request)) return;
    poll();  // takes what the peers sent before they left
    if (!all_peers_left(request)) return;
    const Error departed = departed_from(request);
    if (!take_back(request, departed) && !request.done())
        members_.fail(departed.fault(), departed.what());
}

Error Engine::departed_from(const Request& request) const {
    const int32_t peer = request.message().peer;
    const std::string who =
        peer == kAnySource ? "every other rank" : "rank " + std::to_string(peer);
    return {Fault::peer_lost, who + " left the group while rank " +
                                  std::to_string(members_.rank()) + " was " +
                                  (request.sends() ? "sending to it" : "receiving from it")};
}

void Engine::progress_loop() {
    std::unique_lock lock(mutex_);
    const bool here = view_.here().size() > 1;
    auto lingers = std::chrono::steady_clock::time_point{};
    auto nap = kNap;
    while (!stopping_) {
        const auto now = std::chrono::steady_clock::now();
        if (!idle()) lingers = now + kLinger;
        if (idle() && now > lingers) {
            parked_ = true;
            changed_->wait(lock, [this] { return stopping_ || !idle(); });
            parked_ = false;
            continue;
        }
        const uint64_t polls = polls_.load(std::memory_order_relaxed);
        changed_->wait_for(lock, nap, [this] { return stopping_; });
        const bool needless = polls_.load(std::memory_order_relaxed) != polls;
        nap = needless ? std::min(2 * nap, kLongestNap) : kNap;
        if (stopping_ || idle() || needless) continue;
        const auto ready = [&] {  // polls once more after announcing its sleep
            const std::lock_guard again(mutex_);
            return stopping_ || members_.failed() || poll() || idle();
        };
        try {
            if (poll() || idle()) continue;
            const bool messages = here && under_way_ > 0;
            lock.unlock();
            background_asleep_.store(true, std::memory_order_relaxed);
            // If no request is under way, only other hosts can need this thread, for a window.
            if (rest(messages, transport_ != nullptr, ready, kSlice_s) == Woken::timed_out)
                waiter_.make_slow_checks({});
        } catch (const std::exception&) {  // recorded in the group: poll ends the pending requests
        }
        background_asleep_.store(false, std::memory_order_relaxed);
        if (!lock.owns_lock()) lock.lock();
    }
}

// Wakes the progress thread, or starts it. Requires the lock.
void Engine::wake_progress_thread() {
    if (stopping_) return;
    if (!thread_.joinable()) start_progress(thread_, [this] { progress_loop(); });
    if (parked_) changed_->notify_all();
    if (!windows_.empty()) transport_->wake();  // it may sleep until another host needs it
}

std::string Engine::late(Requests requests, double timeout_s) const {
    const Request& first = *requests.front();
    const Message& m = first.message();
    std::string text = text_of(first);
    if (requests.size() > 1)
        text = "each of " + std::to_string(requests.size()) + " messages, the first a " + text;
    text += ": " + timeout_text(members_.rank(), timeout_s);
    if (!m.one_sided) text += first.sends() ? ": it was not received" : ": nothing was sent";
    if (m.peer == kAnySource || requests.size() > 1) return text;
    text += "; rank " + std::to_string(m.peer) + ": " +
            activity_text(view_.control(static_cast<uint32_t>(m.peer)));
    return text + cycle();
}

// Describes a cycle of ranks that wait for each other and include this one; empty if there is none.
std::string Engine::cycle() const {
    std::string text;
    uint32_t rank = members_.rank();
    for (uint32_t step = 0; step < peers_.size(); ++step) {
        const uint64_t awaited_message =
            view_.control(rank).awaited_message.load(std::memory_order_relaxed);
        const auto peer = static_cast<int32_t>(awaited_message & 0xffffffff);
        if (awaited_message == 0 || peer < 0 || static_cast<uint32_t>(peer) >= peers_.size())
            return {};
        text += (step == 0 ? " rank " : ", rank ") + std::to_string(rank) + " in " +
                message_text(awaited_message == awaited_message_of(true, peer), peer);
        rank = static_cast<uint32_t>(peer);
        if (rank == members_.rank()) return "; these ranks wait for each other:" + text;
    }
    return {};
}

}  // namespace unisono::p2p

// The point-to-point engine of one rank: its pending sends and receives, and their progress.
//
// A thread that waits for one request makes progress for all of the rank's messages. If no thread
// waits, a progress thread takes over after a delay. The delay saves work, because most programs
// wait soon.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/operation_counters.h"
#include "core/owned_mutex.h"
#include "memory/group_memory.h"
#include "memory/single_copy.h"
#include "memory/waiter.h"
#include "p2p/endpoint.h"
#include "p2p/served_windows.h"
#include "p2p/tag_matching.h"
#include "transport/fault_reports.h"
#include "transport/transport.h"

namespace unisono::p2p {

class RemoteEndpoint;

using Requests = std::span<Request* const>;

class Engine final : private Receiver, private Completion {
  public:
    // `counters` counts each completed message. `make_transport(receiver)` makes the transport to
    // ranks of other hosts, and is empty if there are no other hosts.
    using MakeTransport = std::function<std::unique_ptr<Transport>(Receiver&)>;
    Engine(View& view, Membership& members, Waiter waiter, CrossMemory& cross_memory,
           OperationCounters& counters, const MakeTransport& make_transport = {});
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    ~Engine() override;

    // Sets whether ranks of this host may read and write each other's memory. Call before the first
    // request.
    void use_single_copy(bool use) noexcept { single_copy_ = use; }

    // Begins a request and moves as much of it as possible without waiting. The caller must not
    // move or destroy the request until it is done. A request is also done when this function
    // throws Error. `in_background`: the progress thread continues the request if no thread waits
    // for it.
    void begin(Request& request, bool in_background);
    // Begins a request if no other thread holds the engine's lock. Otherwise does nothing and
    // returns false.
    bool try_begin(Request& request, bool in_background);
    // Waits until the request is done. Returns false if the request is still pending after
    // `limit_s` (negative: no limit). After `timeout_s` the group fails. Throws Error.
    bool wait(Request& request, double timeout_s, double limit_s, const Interrupted& interrupted);
    // Waits until one of several requests is done or has failed. Returns its index, or nothing
    // after `limit_s`.
    std::optional<size_t> wait_any(Requests requests, double timeout_s, double limit_s,
                                   const Interrupted& interrupted);
    // Ends a request whose caller gives up. Fails the group if the request is still pending.
    void end(Request& request) noexcept;
    // Fails the group because a caller has waited `timeout_s` for a request.
    void expire(Request& request, double timeout_s);
    // Makes progress, unless another thread does so. Returns true if the request is done. With
    // `ends_without_peers`, a request whose peers have all left ends with an error, and other
    // requests continue.
    bool test(Request& request, bool ends_without_peers = true) noexcept;
    // Returns true if every rank that could serve the request has left the group. Returns false
    // while another thread makes progress.
    [[nodiscard]] bool cannot_complete(const Request& request) noexcept;
    // Cancels a request. Returns false if it is too late; the request then completes normally.
    bool cancel(Request& request);
    // Returns the message that a receive would get now, or nothing. Throws Error.
    std::optional<Envelope> probe(int32_t source, uint64_t tag);
    // Waits for a message that a receive would get. Returns nothing after `limit_s`. Checks about
    // every `check_s` seconds that the other ranks are alive.
    std::optional<Envelope> wait_probe(int32_t source, uint64_t tag, double timeout_s,
                                       double limit_s, const Interrupted& interrupted,
                                       double check_s = Waiter::kCheck_s);
    // Lets ranks of other hosts access this rank's part of a window, until `stop_serving`. Returns
    // the number by which they name the window. `in_background`: the progress thread runs until
    // then.
    uint64_t serve(const ServedWindow& window, bool in_background);
    void stop_serving(uint64_t number) noexcept;
    // Puts to a window of a rank of another host, or gets from it, and waits until the request's
    // memory is free again. If this function throws, the request has ended.
    void access(Request& request, uint64_t window, uint64_t at, double timeout_s,
                const Interrupted& interrupted);
    // Adds a signal of this rank to a window of a rank of another host.
    void signal(uint32_t peer, uint64_t window);
    // Waits until `arrived()` returns true, which signals of a rank of another host cause.
    void await_signals(uint32_t peer, const std::function<bool()>& arrived,
                       const std::function<std::string()>& late, double timeout_s,
                       const Interrupted& interrupted);
    // Stops the engine after the rank has left the group. Pending requests fail as aborted.
    void stop() noexcept;
    // Sends the remaining data after `stop`. Returns true once the ranks of other hosts have all
    // data.
    [[nodiscard]] bool parted() noexcept;
    // Closes the transport, even if messages are still unsent.
    void close_transport() noexcept;
    // Returns true if the engine does not use the group's memory any more.
    [[nodiscard]] bool stopped() const noexcept { return stopped_; }
    // Returns the transport to ranks of other hosts, or nullptr.
    [[nodiscard]] Transport* transport() const noexcept { return transport_.get(); }
    // Describes a request, such as "send to rank 1 (8 bytes, tag 0)".
    [[nodiscard]] static std::string text_of(const Request& request);

  private:
    struct Peer {
        std::unique_ptr<Endpoint> endpoint;
        std::deque<Request*> held;  // Held-back sends, for which the peer has no room yet.
        uint64_t holds = 0;         // Number of sends that had to wait so far.
        // Questions to the peer for held-back messages: the index of the posted receive for which
        // to ask next, and the values of `held`, `changes` and `probed` when the questions began.
        size_t next_question = 0;
        uint64_t asked_holds = 0, asked_changes = 0;
        std::optional<uint64_t> asked_probed;
    };

    void begin_locked(Request& request, bool in_background);
    template <class Move>
    void start(Request& request, Move&& move);
    void begin_send(Request& send);
    void begin_receive(Request& receive);
    void check(Request& request) const;
    bool accept(const Envelope& came, Request& receive);
    [[noreturn]] void fail_mismatch(const Envelope& came, const Request& receive);
    bool poll();
    bool poll_for(const Request& request);
    template <class Move>
    bool guarded(Move&& move);
    void record(const Error& error) noexcept;
    bool advance(Peer& peer);
    bool advance_held(Peer& peer);
    bool advance_arrivals(Peer& peer);
    const Envelope* find(Peer& peer, int32_t source, uint64_t tag);
    bool answer(Peer& peer);
    bool ask(uint32_t rank, Peer& peer, std::optional<uint64_t> probed = {});
    void complete(Request& request) noexcept override;
    void wake_waiting_threads() noexcept;
    void count(const Request& request) noexcept;
    void leave_transport() noexcept;
    void end_transport(const std::optional<Error>& failure) noexcept;
    void forget_messages(const Error& failure) noexcept;
    bool take_back(Request& request, const Error& error);
    void fail_all(const Error& error) noexcept;
    void end_all() noexcept;
    [[nodiscard]] bool idle() const noexcept;

    std::byte* place(uint32_t peer, const Frame& frame) override;
    void deliver(uint32_t peer, const Frame& frame) override;
    void lost(uint32_t peer, const std::string& why) override;
    [[noreturn]] void nonsense(uint32_t peer, const std::string& what) override {
        members_.fail_nonsense(peer, what);
    }

    void wake_progress_thread();
    void progress_loop();
    template <class Ready, class Last>
    bool wait_for(Requests requests, Ready&& ready, Last&& last, double timeout_s, double limit_s,
                  const Interrupted& interrupted, double check_s = Waiter::kCheck_s);
    template <class Awake>
    Woken rest(bool here, bool away, Awake&& awake, double seconds);
    void inspect(std::chrono::steady_clock::time_point& last);
    void make_slow_checks();
    void end_if_all_peers_left(Request& request);
    [[nodiscard]] Error departed_from(const Request& request) const;
    [[nodiscard]] bool has_departed(uint32_t peer) const noexcept;
    [[nodiscard]] bool all_peers_left(const Request& request) const;
    void check_departed(Requests requests);
    [[nodiscard]] std::string late(Requests requests, double timeout_s) const;
    [[nodiscard]] std::string cycle() const;

    View& view_;
    Membership& members_;
    Waiter waiter_;
    OperationCounters& counters_;
    bool single_copy_ = true;
    std::unique_ptr<Transport> transport_;
    std::atomic<uint32_t> away_sleepers_{0};
    std::atomic<uint64_t> polls_{0};              // Number of polls by waiting threads.
    std::atomic<bool> background_asleep_{false};  // The progress thread sleeps until it is woken.
    OwnedMutex mutex_;                            // Guards all members below.
    std::vector<Peer> peers_;
    std::vector<RemoteEndpoint*> remotes_;  // by rank; nullptr for a rank of this host
    FaultReports fault_reports_;
    Matcher matcher_;
    ServedWindows windows_;
    uint64_t under_way_ = 0;
    // On the heap, so that a forked child can leak it: the destructor waits for threads that do not
    // exist in the child.
    std::unique_ptr<std::condition_variable_any> changed_ =
        std::make_unique<std::condition_variable_any>();
    std::chrono::steady_clock::time_point inspected_;  // time of the last check by a probe
    bool stopping_ = false;
    bool parked_ = false;  // the progress thread has nothing to do
    std::atomic<bool> stopped_{false};
    bool transport_left_ = false, transport_closed_ = false;
    std::thread thread_;
};

// Runs `move` and returns its result. Once the group has failed, nothing moves any more and all
// requests end, because their callers are about to reuse the memory.
template <class Move>
bool Engine::guarded(Move&& move) {
    try {
        members_.require_healthy();
        return move();
    } catch (const Error& error) {  // an error of a message library is not recorded yet
        record(error);
        fail_all(error);
        throw;
    } catch (const std::exception& error) {
        members_.record_made(Fault::system, [&] {
            return "rank " + std::to_string(members_.rank()) +
                   " cannot move a message: " + error_of(error).what();
        });
        fail_all(error_of(error));
        members_.require_healthy();
        throw;
    }
}

// Runs `move`, which begins the request. If `move` throws, the request is done and has the error.
// Requires the lock.
template <class Move>
void Engine::start(Request& request, Move&& move) {
    ++under_way_;
    try {
        guarded([&] {
            move();
            return true;
        });
    } catch (const std::exception& error) {
        if (!request.done()) {
            request.failed(error_of(error));
            complete(request);
        }
        throw;
    }
}

}  // namespace unisono::p2p

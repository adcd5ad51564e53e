// Point-to-point messages of one rank: sends and receives under way, and who moves them.
//
// Whoever waits for a request moves all of the rank's messages. Where nobody waits, a thread does,
// after a while: most programs wait soon.
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

#include "core/owned_mutex.h"
#include "memory/group_memory.h"
#include "memory/single_copy.h"
#include "memory/waiter.h"
#include "p2p/endpoint.h"
#include "p2p/matcher.h"
#include "transport/fault_reports.h"
#include "transport/transport.h"

namespace unisono::p2p {

class WireEndpoint;

using Requests = std::span<Request* const>;

class Engine final : private Receiver, private Completion {
  public:
    // `make_wire(receiver)` makes the wire to ranks of other hosts, if there are any.
    using MakeWire = std::function<std::unique_ptr<Wire>(Receiver&)>;
    Engine(View& view, Membership& members, Waiter waiter, CrossMemory& cross_memory,
           const MakeWire& make_wire = {});
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    ~Engine() override;

    // Whether ranks of this host may read and write each other's memory. Before the first request.
    void use_single_copy(bool use) noexcept { single_copy_ = use; }

    // Begins a request, as far as that goes without waiting. It stays where it is until it is done,
    // as it is when this throws an Error, too. `carried`: if nobody waits for it, a thread carries
    // on with it.
    void begin(Request& request, bool carried);
    // The same if no other thread is at work here; false: nothing has happened.
    bool try_begin(Request& request, bool carried);
    // False after `limit_s` (negative: never) with the request still under way. After `timeout_s`
    // the group fails. Throws Error.
    bool wait(Request& request, double timeout_s, double limit_s, const Interrupted& interrupted);
    // The same until one of several is done, well or not: its place; nothing after `limit_s`.
    std::optional<size_t> wait_any(Requests requests, double timeout_s, double limit_s,
                                   const Interrupted& interrupted);
    // Fails the group, since a caller has waited so long for a request.
    void expire(Request& request, double timeout_s);
    // Moves what can be moved now, unless another thread does that; whether the request is done.
    // One for which nobody is left is, if `ends_in_vain`: with an error, of it alone.
    bool test(Request& request, bool ends_in_vain = true) noexcept;
    // Whether everybody who could serve the request has left the group; false while another thread
    // moves messages.
    [[nodiscard]] bool is_in_vain(const Request& request) noexcept;
    // Takes a request back; false if that comes too late: then it will be done as others are.
    bool cancel(Request& request);
    // The first message that a receive would get; nothing if none has come. Throws Error.
    std::optional<Envelope> probe(int32_t source, uint64_t tag);
    // The same, once one has come; nothing after `limit_s`.
    std::optional<Envelope> wait_probe(int32_t source, uint64_t tag, double timeout_s,
                                       double limit_s, const Interrupted& interrupted);
    // After the group was left. What is under way fails as aborted.
    void stop() noexcept;
    // After that: whether ranks of other hosts have all that was sent; moves what is left of it.
    [[nodiscard]] bool parted() noexcept;
    // The end of the wire, whoever has what.
    void close_wire() noexcept;
    // Nothing here uses the group's memory any more.
    [[nodiscard]] bool stopped() const noexcept { return stopped_; }
    // To ranks of other hosts.
    [[nodiscard]] Wire* wire() const noexcept { return wire_.get(); }
    // "send to rank 1 (8 bytes, tag 0)".
    [[nodiscard]] static std::string text_of(const Request& request);

  private:
    struct Peer {
        std::unique_ptr<Endpoint> endpoint;
        std::deque<Request*> held;  // sends for which there is no room
        uint64_t holds = 0;         // how many had to wait
        // Asking the peer for messages that it holds back: which of those that are wanted is next,
        // and the state in which the first was asked for.
        size_t next_question = 0;
        uint64_t asked_holds = 0, asked_changes = 0;
        std::optional<uint64_t> asked_probed;
    };

    void begin_locked(Request& request, bool carried);
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
    void end_wire(const std::optional<Error>& failure) noexcept;
    void forget_messages() noexcept;
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

    void carry_on();
    void progress_loop();
    template <class Ready, class Last>
    bool wait_for(Requests requests, Ready&& ready, Last&& last, double timeout_s, double limit_s,
                  const Interrupted& interrupted);
    template <class Awake>
    Woken rest(bool here, bool away, Awake&& awake, double seconds);
    void inspect(std::chrono::steady_clock::time_point& last);
    void check_world();
    void end_if_in_vain(Request& request);
    [[nodiscard]] Error departed_from(const Request& request) const;
    [[nodiscard]] bool has_departed(uint32_t peer) const noexcept;
    [[nodiscard]] bool in_vain(const Request& request) const;
    void check_departed(Requests requests);
    [[nodiscard]] std::string late(Requests requests, double timeout_s) const;
    [[nodiscard]] std::string cycle() const;

    View& view_;
    Membership& members_;
    Waiter waiter_;
    bool single_copy_ = true;
    std::unique_ptr<Wire> wire_;
    std::atomic<uint32_t> away_sleepers_{0};
    std::atomic<uint64_t> looks_{0};              // by those who wait
    std::atomic<bool> background_asleep_{false};  // the thread sleeps until it is woken
    OwnedMutex mutex_;                            // guards all below
    std::vector<Peer> peers_;
    std::vector<WireEndpoint*> wired_;  // by rank; nullptr on this host
    FaultNews news_;
    Matcher matcher_;
    uint64_t under_way_ = 0;
    // On the heap: a forked child has to leak it, for its end waits for threads that are not there.
    std::unique_ptr<std::condition_variable_any> changed_ =
        std::make_unique<std::condition_variable_any>();
    std::chrono::steady_clock::time_point inspected_;  // by who probes
    bool stopping_ = false;
    bool parked_ = false;  // the thread has nothing to do
    std::atomic<bool> stopped_{false};
    bool unfinished_ = false;  // a message to another host was given up
    bool wire_closed_ = false;
    std::thread thread_;
};

}  // namespace unisono::p2p

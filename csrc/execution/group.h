// One rank of a group: all state that lives as long as a communicator.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "execution/dispatcher.h"
#include "execution/remote_slots.h"
#include "memory/shared_heap.h"
#include "p2p/message_engine.h"
#include "transport/tcp_transport.h"

namespace unisono {

// The two transports of a group. They are separate so that a message never waits behind a
// collective.
enum class TransportKind : uint32_t { collectives = 0, p2p = 1 };

// Makes a transport of a group to ranks of other hosts.
using MakeTransport = std::function<std::unique_ptr<Transport>(TransportKind, View&, Receiver&)>;

class Group {
  public:
    // Joins a group on one host.
    Group(Descriptor segment, uint32_t rank, const std::array<uint8_t, 16>& nonce, uint32_t cores)
        : Group(std::make_unique<Segment>(std::move(segment)), rank, std::nullopt, nonce, cores,
                {}) {}
    // Joins a group on several hosts. `make_transport` makes the transports to ranks on other
    // hosts. If `make_transport` is empty, the group uses the connections that `attach` adds.
    Group(Descriptor segment, uint32_t rank, HostRanks host_ranks,
          const std::array<uint8_t, 16>& nonce, uint32_t cores, MakeTransport make_transport = {})
        : Group(std::make_unique<Segment>(std::move(segment)), rank,
                std::optional(std::move(host_ranks)), nonce, cores, std::move(make_transport)) {}
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    // Calls close() before any member's destructor, so that no destructor waits for peers.
    ~Group() { close(); }

    [[nodiscard]] Segment& segment() noexcept { return *segment_; }
    [[nodiscard]] View& view() noexcept { return view_; }
    [[nodiscard]] Membership& members() noexcept { return members_; }
    [[nodiscard]] Dispatcher& dispatcher() noexcept { return dispatcher_; }
    [[nodiscard]] SharedHeap& heap() noexcept { return heap_; }
    [[nodiscard]] p2p::Engine& p2p() noexcept { return p2p_; }
    // Returns a waiter for ranks of this host.
    [[nodiscard]] const Waiter& waiter() const noexcept { return waiter_; }
    // Returns true if the transports of the group use a message library.
    [[nodiscard]] bool uses_library() const noexcept { return make_ != nullptr; }
    [[nodiscard]] uint64_t calls() const noexcept { return executor_.calls(); }
    [[nodiscard]] bool can_read_peers() const noexcept { return executor_.can_read_peers(); }
    // Returns this rank's counters, which remain after the end of the group.
    [[nodiscard]] const OperationCounters& counters() const noexcept { return counters_; }
    [[nodiscard]] OperationCounters& counters() noexcept { return counters_; }

    // Gives a number to a collective call that this rank refuses. Ranks that make the call raise
    // the reason. Does not wait.
    void refuse(std::string reason) { dispatcher_.refuse(std::move(reason)); }
    // Adds a connection to `peer`, which has proved its identity. Any thread may call this.
    void attach(uint32_t peer, TransportKind kind, uint32_t stream, uint32_t streams,
                Channel channel) {
        TcpTransport* const transport = tcp_[static_cast<size_t>(kind)];
        if (!transport || peer >= view_.ranks() || view_.local(peer))
            throw Error(Fault::invalid, "a connection to rank " + std::to_string(peer) +
                                            ": expected a rank of another host, in a group over "
                                            "TCP");
        transport->attach(peer, stream, streams, std::move(channel));
    }
    // Closes the parent's connections in a forked child; otherwise they would outlive the parent.
    void abandon() noexcept {
        if (!members_.in_child()) return;
        for (TcpTransport* const transport : tcp_) {
            if (transport) transport->abandon();
        }
    }
    // Take reports about a peer on another host. peer_left(): the peer has left without a failure.
    // record_last_call(): the peer's last call, and the message that the peer waits for.
    void peer_left(uint32_t peer) noexcept {
        if (peer >= view_.ranks() || view_.local(peer)) return;
        view_.control(peer).presence.store(static_cast<uint32_t>(Presence::left),
                                           std::memory_order_release);
        wake();
    }
    void record_last_call(uint32_t peer, const Activity& doing) noexcept {
        if (peer >= view_.ranks() || view_.local(peer)) return;
        view_.update_last_call(peer, doing.called);
        view_.control(peer).awaited_message.store(doing.awaited_message, std::memory_order_relaxed);
    }
    [[nodiscard]] Activity doing() const noexcept {
        return {last_call_of(view_.own()),
                view_.own().awaited_message.load(std::memory_order_relaxed)};
    }

    // Records a failure and wakes all ranks of this host. The group cannot be used afterwards.
    void fail(Fault fault, const std::string& text) noexcept {
        members_.record(fault, text);
        wake();
    }
    // Fails the group with `reason` and wakes all ranks.
    void abort(const std::string& reason) noexcept { fail(Fault::aborted, reason); }
    // Fails the group with a mismatch that was found outside of the group.
    void fail_mismatch(const std::string& text) noexcept { fail(Fault::mismatch, text); }
    // Leaves without a failure, so peers may finish calls that do not need this rank. Waits for up
    // to `timeout_s` until sent data has reached other hosts. A signal ends this wait.
    void close(double timeout_s = kLinger_s, const Interrupted& interrupted = {}) noexcept {
        members_.leave();
        dispatcher_.stop();
        p2p_.stop();
        if (members_.in_child() || closed_.exchange(true)) return;
        // If another thread is still running a call, only that thread may use the transport, so the
        // transport is not closed here. The connections and the memory are then released by the
        // destructor of this object.
        Transport* const transport = dispatcher_.quiet() ? transport_.get() : nullptr;
        // Parts before any wait, so that both transports start to close. The transport of the
        // collectives uses the group's own memory only, so it need not close at once.
        if (transport && !members_.failed()) static_cast<void>(transport->part());
        StopCondition over(timeout_s, interrupted);
        const auto parted = [&] {  // drives both transports, so that neither waits for the other
            const bool calls = !transport || transport->parted();
            return p2p_.parted() && calls;
        };
        while (!members_.failed() && !parted() && !over())
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        p2p_.close_transport();
        if (transport) transport->close(members_.failure());
        ended_ = true;
    }
    // Releases the memory and the descriptor of a closed group, even while this object is
    // referenced. Call this once no other host asks for the group's successor, because that memory
    // holds the successor.
    void give_back() noexcept {
        if (!ended_ || members_.in_child()) return;
        if (dispatcher_.await_idle() && p2p_.stopped()) members_.give_back();
    }

  private:
    Group(std::unique_ptr<Segment> segment, uint32_t rank, std::optional<HostRanks> host_ranks,
          const std::array<uint8_t, 16>& nonce, uint32_t cores, MakeTransport make_transport)
        : make_(std::move(make_transport)),
          segment_(std::move(segment)),
          view_(*segment_, rank,
                host_ranks ? std::move(*host_ranks) : HostRanks::one_host(segment_->shape().ranks)),
          members_(view_, nonce),
          waiter_(members_, SpinPolicy::for_group(on_host(), cores)),
          heap_(view_),
          executor_(view_, members_, waiter_, StoreRule(on_host()), counters_, heap_,
                    make_remote_slots()),
          dispatcher_(executor_, members_, grace_for(on_host(), cores)),
          p2p_(view_, members_, Waiter(members_, SpinPolicy::for_messages(on_host(), cores)),
               executor_.cross_memory(), counters_, make_p2p_transport()) {}

    static constexpr double kLinger_s = 2;

    [[nodiscard]] uint32_t on_host() const noexcept { return segment_->shape().ranks; }
    // Returns the grace of the dispatcher, which is the time that the progress thread leaves to the
    // caller to run a queued call itself. The time is longer if there are more ranks than cores,
    // because then no core is free on which the progress thread could work beside the caller.
    static std::chrono::microseconds grace_for(uint32_t ranks, uint32_t cores) noexcept {
        return std::chrono::microseconds(ranks <= cores ? 50 : 1000);
    }
    RemoteSlots* make_remote_slots() {
        if (view_.away().empty()) return nullptr;
        remote_slots_.emplace(view_, members_);
        transport_ = make_transport(TransportKind::collectives, *remote_slots_);
        remote_slots_->use(*transport_);
        return &*remote_slots_;
    }
    p2p::Engine::MakeTransport make_p2p_transport() {
        if (view_.away().empty()) return {};
        return [this](Receiver& receiver) { return make_transport(TransportKind::p2p, receiver); };
    }
    std::unique_ptr<Transport> make_transport(TransportKind kind, Receiver& receiver) {
        if (make_) return make_(kind, view_, receiver);
        auto transport = std::make_unique<TcpTransport>(view_.ranks(), receiver);
        tcp_[static_cast<size_t>(kind)] = transport.get();
        return transport;
    }
    void wake() noexcept {
        if (members_.in_child()) return;  // the doorbells belong to the parent
        if (transport_) transport_->wake();
        if (Transport* const transport = p2p_.transport()) transport->wake();
    }

    const MakeTransport make_;
    std::array<TcpTransport*, 2> tcp_{};  // by kind: the TCP transports, or nullptr
    std::unique_ptr<Segment> segment_;
    View view_;
    Membership members_;
    OperationCounters counters_;
    Waiter waiter_;
    std::optional<RemoteSlots> remote_slots_;
    std::unique_ptr<Transport> transport_;
    std::atomic<bool> closed_{false}, ended_{false};  // close() has started; close() has ended
    SharedHeap heap_;
    Executor executor_;
    Dispatcher dispatcher_;
    p2p::Engine p2p_;
};

}  // namespace unisono

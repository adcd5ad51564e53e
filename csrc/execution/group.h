// A rank's end of a group: everything that lives as long as a communicator does.
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
#include "p2p/message_engine.h"
#include "transport/tcp_transport.h"

namespace unisono {

// The two transports of a group: a message never waits behind a collective.
enum class TransportKind : uint32_t { collectives = 0, p2p = 1 };

// Makes the transports of a group to ranks of other hosts.
using MakeTransport = std::function<std::unique_ptr<Transport>(TransportKind, View&, Receiver&)>;

class Group {
  public:
    // A group on one host.
    Group(Descriptor segment, uint32_t rank, const std::array<uint8_t, 16>& nonce, uint32_t cores)
        : Group(std::make_unique<Segment>(std::move(segment)), rank, std::nullopt, nonce, cores,
                {}) {}
    // Of several hosts: ranks elsewhere are reached by what `make_transport` makes, if it is given,
    // else by the connections that `attach` brings.
    Group(Descriptor segment, uint32_t rank, Seats seats, const std::array<uint8_t, 16>& nonce,
          uint32_t cores, MakeTransport make_transport = {})
        : Group(std::make_unique<Segment>(std::move(segment)), rank,
                std::optional(std::move(seats)), nonce, cores, std::move(make_transport)) {}
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    ~Group() { close(); }  // first of all: nothing below waits for peers any more

    [[nodiscard]] Segment& segment() noexcept { return *segment_; }
    [[nodiscard]] View& view() noexcept { return view_; }
    [[nodiscard]] Membership& members() noexcept { return members_; }
    [[nodiscard]] Dispatcher& dispatcher() noexcept { return dispatcher_; }
    [[nodiscard]] p2p::Engine& p2p() noexcept { return p2p_; }
    // Whether messages' memory may be used for longer than their calls last: see
    // `p2p::Message::keep`.
    [[nodiscard]] bool outlives_calls() const noexcept { return make_ != nullptr; }
    [[nodiscard]] uint64_t calls() const noexcept { return executor_.calls(); }
    [[nodiscard]] bool can_borrow() const noexcept { return executor_.can_borrow(); }

    // Takes the number of a collective call of which this rank refuses the arguments: ranks that
    // make it raise the reason. Waits for nobody.
    void refuse(std::string reason) { dispatcher_.refuse(std::move(reason)); }
    // A connection whose other end was proved to be `peer`; from any thread.
    void attach(uint32_t peer, TransportKind kind, uint32_t stream, uint32_t streams,
                Channel channel) {
        TcpTransport* const transport = tcp_[static_cast<size_t>(kind)];
        if (!transport || peer >= view_.ranks() || view_.local(peer))
            throw Error(Fault::invalid, "a connection to rank " + std::to_string(peer) +
                                            ": expected a rank of another host, in a group over "
                                            "TCP");
        transport->attach(peer, stream, streams, std::move(channel));
    }
    // In a forked child: lets go of the parent's connections, which else would outlive the parent.
    void abandon() noexcept {
        if (!members_.in_child()) return;
        for (TcpTransport* const transport : tcp_) {
            if (transport) transport->abandon();
        }
    }
    // What the other hosts tell of a peer: it has left in good order; what it is doing.
    void peer_left(uint32_t peer) noexcept {
        if (peer >= view_.ranks() || view_.local(peer)) return;
        view_.control(peer).presence.store(static_cast<uint32_t>(Presence::left),
                                           std::memory_order_release);
        wake();
    }
    void heard(uint32_t peer, const Doing& doing) noexcept {
        if (peer >= view_.ranks() || view_.local(peer)) return;
        view_.hear(peer, doing.called);
        view_.control(peer).errand.store(doing.errand, std::memory_order_relaxed);
    }
    [[nodiscard]] Doing doing() const noexcept {
        return {called_by(view_.own()), view_.own().errand.load(std::memory_order_relaxed)};
    }

    // Records a failure; the group is of no use afterwards, and everybody of this host wakes.
    void fail(Fault fault, const std::string& text) noexcept {
        members_.record(fault, text);
        wake();
    }
    // Wakes everybody with the reason.
    void abort(const std::string& reason) noexcept { fail(Fault::aborted, reason); }
    // What the ranks found out by themselves about calls that do not match.
    void fail_mismatch(const std::string& text) noexcept { fail(Fault::mismatch, text); }
    // Leaves in good order: the others may finish what does not need this rank. What was sent has
    // `timeout_s` to reach other hosts, unless that is interrupted.
    void close(double timeout_s = kLinger_s, const Interrupted& interrupted = {}) noexcept {
        members_.leave();
        dispatcher_.stop();
        p2p_.stop();
        if (members_.in_child() || closed_.exchange(true)) return;
        // Who drives the executor still, moves the transport: its connections end with this object
        // then, and so does the memory.
        Transport* const transport = dispatcher_.quiet() ? transport_.get() : nullptr;
        if (transport && !members_.failed())
            transport->part();  // on both before it waits for either
        Over over(timeout_s, interrupted);
        const auto parted = [&] {  // each call moves its transport: neither waits for the other
            const bool calls = !transport || transport->parted();
            return p2p_.parted() && calls;
        };
        while (!members_.failed() && !parted() && !over())
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        p2p_.close_transport();
        if (transport) transport->close(members_.failure());
        ended_ = true;
    }
    // Gives back the memory and the descriptor of a group that was closed, whoever refers to this
    // object still. When no other host asks any more what succeeds the group: that is in the
    // memory.
    void give_back() noexcept {
        const bool quiet = dispatcher_.idle() && p2p_.stopped();
        if (ended_ && !members_.in_child() && quiet) members_.give_back();
    }

  private:
    Group(std::unique_ptr<Segment> segment, uint32_t rank, std::optional<Seats> seats,
          const std::array<uint8_t, 16>& nonce, uint32_t cores, MakeTransport make_transport)
        : make_(std::move(make_transport)),
          segment_(std::move(segment)),
          view_(*segment_, rank,
                seats ? std::move(*seats) : Seats::one_host(segment_->shape().ranks)),
          members_(view_, nonce),
          waiter_(members_, Patience::for_group(on_host(), cores)),
          executor_(view_, members_, waiter_, StoreRule(on_host()), make_courier()),
          dispatcher_(executor_, members_, grace_for(on_host(), cores)),
          p2p_(view_, members_, Waiter(members_, Patience::for_messages(on_host(), cores)),
               executor_.loans(), make_p2p_transport()) {}

    static constexpr double kLinger_s = 2;

    [[nodiscard]] uint32_t on_host() const noexcept { return segment_->shape().ranks; }
    // With more ranks than cores nothing is gained by a thread that works beside its caller.
    static std::chrono::microseconds grace_for(uint32_t ranks, uint32_t cores) noexcept {
        return std::chrono::microseconds(ranks <= cores ? 50 : 1000);
    }
    Courier* make_courier() {
        if (view_.away().empty()) return nullptr;
        courier_.emplace(view_, members_);
        transport_ = make_transport(TransportKind::collectives, *courier_);
        courier_->use(*transport_);
        return &*courier_;
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
        if (members_.in_child()) return;  // the bells are the parent's
        if (transport_) transport_->wake();
        if (Transport* const transport = p2p_.transport()) transport->wake();
    }

    const MakeTransport make_;
    std::array<TcpTransport*, 2> tcp_{};  // by kind, if that is what they are
    std::unique_ptr<Segment> segment_;
    View view_;
    Membership members_;
    Waiter waiter_;
    std::optional<Courier> courier_;
    std::unique_ptr<Transport> transport_;
    std::atomic<bool> closed_{false}, ended_{false};  // begun to close; has closed
    Executor executor_;
    Dispatcher dispatcher_;
    p2p::Engine p2p_;
};

}  // namespace unisono

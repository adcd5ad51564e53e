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

// The two wires of a group: a message never waits behind a collective.
enum class WireKind : uint32_t { collectives = 0, p2p = 1 };

// Makes the wires of a group to ranks of other hosts.
using MakeWire = std::function<std::unique_ptr<Wire>(WireKind, View&, Receiver&)>;

class Group {
  public:
    // A group on one host.
    Group(Descriptor segment, uint32_t rank, const std::array<uint8_t, 16>& nonce, uint32_t cores)
        : Group(std::make_unique<Segment>(std::move(segment)), rank, std::nullopt, nonce, cores,
                {}) {}
    // Of several hosts: ranks elsewhere are reached by what `make_wire` makes, if it is given, else
    // by the connections that `attach` brings.
    Group(Descriptor segment, uint32_t rank, Seats seats, const std::array<uint8_t, 16>& nonce,
          uint32_t cores, MakeWire make_wire = {})
        : Group(std::make_unique<Segment>(std::move(segment)), rank,
                std::optional(std::move(seats)), nonce, cores, std::move(make_wire)) {}
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
    void attach(uint32_t peer, WireKind kind, uint32_t stream, uint32_t streams, Channel channel) {
        TcpWire* const wire = tcp_[static_cast<size_t>(kind)];
        if (!wire || peer >= view_.ranks() || view_.local(peer))
            throw Error(Fault::invalid, "a connection to rank " + std::to_string(peer) +
                                            ": expected a rank of another host, in a group over "
                                            "TCP");
        wire->attach(peer, stream, streams, std::move(channel));
    }
    // In a forked child: lets go of the parent's connections, which else would outlive the parent.
    void abandon() noexcept {
        if (!members_.in_child()) return;
        for (TcpWire* const wire : tcp_) {
            if (wire) wire->abandon();
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
        // Who drives the executor still, moves the wire: its connections end with this object then,
        // and so does the memory.
        Wire* const wire = dispatcher_.quiet() ? wire_.get() : nullptr;
        if (wire && !members_.failed()) wire->part();  // on both before it waits for either
        Over over(timeout_s, interrupted);
        const auto parted = [&] {  // each call moves its wire: neither waits for the other
            const bool calls = !wire || wire->parted();
            return p2p_.parted() && calls;
        };
        while (!members_.failed() && !parted() && !over())
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        p2p_.close_wire();
        if (wire) wire->close(members_.failure());
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
          const std::array<uint8_t, 16>& nonce, uint32_t cores, MakeWire make_wire)
        : make_(std::move(make_wire)),
          segment_(std::move(segment)),
          view_(*segment_, rank,
                seats ? std::move(*seats) : Seats::one_host(segment_->shape().ranks)),
          members_(view_, nonce),
          waiter_(members_, Patience::for_group(on_host(), cores)),
          executor_(view_, members_, waiter_, StoreRule(on_host()), make_courier()),
          dispatcher_(executor_, members_, grace_for(on_host(), cores)),
          p2p_(view_, members_, Waiter(members_, Patience::for_messages(on_host(), cores)),
               executor_.loans(), make_p2p_wire()) {}

    static constexpr double kLinger_s = 2;

    [[nodiscard]] uint32_t on_host() const noexcept { return segment_->shape().ranks; }
    // With more ranks than cores nothing is gained by a thread that works beside its caller.
    static std::chrono::microseconds grace_for(uint32_t ranks, uint32_t cores) noexcept {
        return std::chrono::microseconds(ranks <= cores ? 50 : 1000);
    }
    Courier* make_courier() {
        if (view_.away().empty()) return nullptr;
        courier_.emplace(view_, members_);
        wire_ = make_wire(WireKind::collectives, *courier_);
        courier_->use(*wire_);
        return &*courier_;
    }
    p2p::Engine::MakeWire make_p2p_wire() {
        if (view_.away().empty()) return {};
        return [this](Receiver& receiver) { return make_wire(WireKind::p2p, receiver); };
    }
    std::unique_ptr<Wire> make_wire(WireKind kind, Receiver& receiver) {
        if (make_) return make_(kind, view_, receiver);
        auto wire = std::make_unique<TcpWire>(view_.ranks(), receiver);
        tcp_[static_cast<size_t>(kind)] = wire.get();
        return wire;
    }
    void wake() noexcept {
        if (members_.in_child()) return;  // the bells are the parent's
        if (wire_) wire_->wake();
        if (Wire* const wire = p2p_.wire()) wire->wake();
    }

    const MakeWire make_;
    std::array<TcpWire*, 2> tcp_{};  // by kind, if that is what they are
    std::unique_ptr<Segment> segment_;
    View view_;
    Membership members_;
    Waiter waiter_;
    std::optional<Courier> courier_;
    std::unique_ptr<Wire> wire_;
    std::atomic<bool> closed_{false}, ended_{false};  // begun to close; has closed
    Executor executor_;
    Dispatcher dispatcher_;
    p2p::Engine p2p_;
};

}  // namespace unisono

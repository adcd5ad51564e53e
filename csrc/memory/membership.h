// Who is in the group, whether they live, and the group's one failure.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "memory/group_events.h"
#include "memory/group_memory.h"

namespace unisono {

// A page that a forked child finds wiped: it tells the child that the group is not its own.
class ForkGuard {
  public:
    ForkGuard();
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;
    ~ForkGuard();
    [[nodiscard]] bool in_child() const noexcept {
        return page_->load(std::memory_order_relaxed) == 0;
    }

  private:
    std::atomic<uint32_t>* page_;
};

class Membership {
  public:
    // Joins: proves by `nonce` that the memory is the owner's, takes the rank's lock.
    Membership(View& view, const std::array<uint8_t, 16>& nonce);
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;
    ~Membership();

    [[nodiscard]] uint32_t rank() const noexcept { return view_.rank(); }
    [[nodiscard]] uint32_t ranks() const noexcept { return view_.ranks(); }
    [[nodiscard]] Events& events() noexcept { return events_; }
    [[nodiscard]] bool in_child() const noexcept { return guard_.in_child(); }

    // Throws in a forked child, which must not even look at the group's locks.
    void require_own_process() const {
        if (guard_.in_child()) raise();
    }
    [[nodiscard]] bool has_left(uint32_t rank) const noexcept { return view_.has_left(rank); }
    // It was closed here.
    [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_relaxed); }
    // Throws if the group has failed, if it was closed here, or in a forked child. Cheap.
    void require_healthy() const {
        if (closed_.load(std::memory_order_relaxed) || guard_.in_child() || failed()) raise();
    }
    [[nodiscard]] bool failed() const noexcept {
        return segment().group().failure.state.load(std::memory_order_relaxed) != 0;
    }
    // The recorded failure; nothing if there is none. Also where memory is lacking.
    [[nodiscard]] std::optional<Error> failure() const noexcept;
    // Asks the kernel about every peer of this host; fails the group if one is gone.
    void require_peers_alive();
    // The same about those whose turn it is: if some rank calls this every 50 ms, all are asked
    // about in time, however many call it.
    void require_due_peers_alive();
    // Whether the peer's process runs, as one that is stopped or gone does not. For after a
    // failure.
    [[nodiscard]] bool runs(uint32_t peer) const noexcept;
    // Asks the ranks of other hosts, if there are any, what they called last. Every rank that waits
    // has to: only who asks hears within UNISONO_PEER_TIMEOUT_S that a host or a link is lost.
    void ask_other_hosts() noexcept {
        if (view_.here().size() < view_.ranks()) events_.raise(Event::anxious);
    }
    // Records the group's failure unless one is recorded already, wakes all, and raises.
    [[noreturn]] void fail(Fault fault, const std::string& text);
    // The same with the text that `make` returns, if there is memory for it.
    template <class Make>
    [[noreturn]] void fail_made(Fault fault, Make&& make) {
        record_made(fault, std::forward<Make>(make));
        raise();
    }
    // Fails: the connection to the rank has ended unexpectedly.
    [[noreturn]] void fail_gone(uint32_t rank, const std::string& why);
    // Fails: the rank sent what no rank sends.
    [[noreturn]] void fail_nonsense(uint32_t rank, const std::string& what);
    // The same without raising.
    void record(Fault fault, std::string_view text) noexcept;
    // The same with the text that `make` returns, if there is memory for it.
    template <class Make>
    void record_made(Fault fault, Make&& make) noexcept {
        try {
            record(fault, make());
        } catch (const std::bad_alloc&) {
            std::array<char, 64> text{};
            std::snprintf(text.data(), text.size(),
                          "rank %u has no memory left, and gave up its call", rank());
            record(fault, text.data());
        }
    }
    void leave() noexcept;
    // Gives back the memory and the descriptor, after this rank has left, and while no call is
    // under way.
    void give_back() noexcept;
    // Whether `peer` still is of this group: it has not left, and its process lives. Works in a
    // group that has failed.
    [[nodiscard]] bool present(uint32_t peer) const;
    // Moves the group's successor from `expected` to `desired`; what it was before. Works also
    // after this rank has left, for others of its host may need it still: until the memory is given
    // back, from when on it can only be looked at.
    uint64_t exchange_successor(uint64_t expected, uint64_t desired);

  private:
    [[nodiscard]] Segment& segment() const noexcept { return view_.segment(); }
    void wake_all() noexcept;
    [[noreturn]] void raise() const;
    [[nodiscard]] bool alive(uint32_t peer) const noexcept;
    void require_alive(uint32_t peer);
    void lock_own_byte();
    [[nodiscard]] bool has_neighbours() const noexcept;
    void close_descriptor() noexcept;

    View& view_;
    Events events_;
    ForkGuard guard_;
    std::atomic<bool> closed_{false};
    std::mutex giving_;  // guards what follows, and the memory while the successor is moved
    bool given_back_ = false;
};

}  // namespace unisono

// Membership of a group: its ranks, their liveness, and the group's first failure.
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

// A page that the kernel clears in a forked child. By this page the child detects that the group
// belongs to its parent.
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
    // Joins the group: checks by `nonce` that the memory is that of the group's owner, and takes
    // the rank's lock.
    Membership(View& view, const std::array<uint8_t, 16>& nonce);
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;
    ~Membership();

    [[nodiscard]] uint32_t rank() const noexcept { return view_.rank(); }
    [[nodiscard]] uint32_t ranks() const noexcept { return view_.ranks(); }
    [[nodiscard]] Events& events() noexcept { return events_; }
    [[nodiscard]] bool in_child() const noexcept { return guard_.in_child(); }

    // Throws in a forked child, which must not access the group's locks.
    void require_own_process() const {
        if (guard_.in_child()) raise();
    }
    [[nodiscard]] bool has_left(uint32_t rank) const noexcept { return view_.has_left(rank); }
    // Returns true if this rank has closed the group.
    [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_relaxed); }
    // Throws if the group has failed, if this rank has closed the group, or in a forked child.
    // Makes no system call.
    void require_healthy() const {
        if (closed_.load(std::memory_order_relaxed) || guard_.in_child() || failed()) raise();
    }
    [[nodiscard]] bool failed() const noexcept {
        return segment().group().failure.state.load(std::memory_order_relaxed) != 0;
    }
    // Returns the recorded failure, if any. Works even without free memory.
    [[nodiscard]] std::optional<Error> failure() const noexcept;
    // Checks that every peer of this host is alive, by asking the kernel. Fails the group if a peer
    // is gone.
    void require_peers_alive();
    // Checks that the peers whose check is due are alive. If any rank calls this every 50 ms, all
    // peers are checked in time. The number of ranks that call this does not matter.
    void require_due_peers_alive();
    // Returns false if the peer's process is certainly stopped or gone. Returns true if it runs, or
    // if this process cannot find out. For use after a failure.
    [[nodiscard]] bool may_run(uint32_t peer) const noexcept;
    // Asks the ranks of other hosts, if any, for their last calls. Every waiting rank must do so.
    // Only a rank that asks learns within UNISONO_PEER_TIMEOUT_S of a lost host or link.
    void ask_other_hosts() noexcept {
        if (view_.here().size() < view_.ranks()) events_.raise(Event::slow_wait);
    }
    // Records the group's failure unless one is recorded, wakes all ranks, and throws.
    [[noreturn]] void fail(Fault fault, const std::string& text);
    // Fails the group with the text that `make` returns, or with a short text if memory is
    // exhausted. Throws.
    template <class Make>
    [[noreturn]] void fail_made(Fault fault, Make&& make) {
        record_made(fault, std::forward<Make>(make));
        raise();
    }
    // Fails the group: the connection to the rank has ended unexpectedly.
    [[noreturn]] void fail_gone(uint32_t rank, const std::string& why);
    // Fails the group: the rank has violated the protocol.
    [[noreturn]] void fail_nonsense(uint32_t rank, const std::string& what);
    // Records the group's failure as fail() does, but does not throw.
    void record(Fault fault, std::string_view text) noexcept;
    // Records the group's failure with the text that `make` returns, or with a short text if memory
    // is exhausted.
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
    // Releases the memory and the descriptor. Call this only after this rank has left, and while no
    // call runs.
    void give_back() noexcept;
    // Returns true if `peer` has not left the group and its process lives. Works after a failure.
    [[nodiscard]] bool present(uint32_t peer) const;
    // Changes the group's successor from `expected` to `desired`, and returns the earlier value.
    // Works after this rank has left, because other ranks of its host may still need the result.
    // After give_back() the value can only be read.
    uint64_t exchange_successor(uint64_t expected, uint64_t desired);

  private:
    [[nodiscard]] Segment& segment() const noexcept { return view_.segment(); }
    void wake_all() noexcept;
    [[noreturn]] void raise() const;
    [[nodiscard]] bool alive(uint32_t peer) const noexcept;
    void require_alive(uint32_t peer);
    void lock_own_byte();
    [[nodiscard]] bool has_process_peers() const noexcept;
    void close_descriptor() noexcept;

    View& view_;
    Events events_;
    ForkGuard guard_;
    std::atomic<bool> closed_{false};
    std::mutex release_mutex_;  // guards `given_back_`, and the memory during exchange_successor()
    bool given_back_ = false;
};

}  // namespace unisono

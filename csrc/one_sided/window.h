// One-sided access: a window is one array of each rank, which the other ranks write and read
// without a call of its owner. Signals order the accesses: a rank that has waited for a signal of a
// peer sees everything that the peer put to this rank before the signal.
//
// Each rank has two ranges in its shared heap: its array, and one word for each peer, in which the
// peer counts its signals. Ranks of one host access these ranges directly. Ranks of other hosts
// send frames, and the owner's messages engine accesses the ranges. Any number of threads may use a
// window.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "execution/group.h"
#include "execution/store_policy.h"
#include "memory/shared_heap.h"

namespace unisono {

// This rank's part of a window. Peers may access it as soon as it is constructed.
class OwnPart {
  public:
    // `signals`: the range of Window::signal_bytes(), all of it 0.
    OwnPart(Group& group, const HeapRange& array, const HeapRange& signals);
    OwnPart(const OwnPart&) = delete;
    OwnPart& operator=(const OwnPart&) = delete;
    ~OwnPart();

    // Returns the number by which ranks of other hosts name this part.
    [[nodiscard]] uint64_t number() const noexcept { return number_; }

  private:
    Group& group_;
    HeapRange array_, signals_;
    uint64_t number_;
};

// How long an access to a rank of another host may take. If the access fails, `needs_memory` tells
// that the caller's memory may be in use until the process ends.
struct RemoteWait {
    double timeout_s;
    Interrupted interrupted;
    bool needs_memory = false;
};

class Window {
  public:
    // One rank's part of a window: offsets and lengths in its heap.
    struct Part {
        uint64_t array, bytes;
        uint64_t signals;
        uint64_t number;  // see OwnPart
    };
    [[nodiscard]] static uint64_t signal_bytes(uint32_t ranks) noexcept { return ranks * kLine; }

    // `parts`: of every rank. `element_bytes` is for error texts.
    Window(Group& group, const std::vector<Part>& parts, uint64_t element_bytes);
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;
    ~Window() = default;

    // Copies `bytes` from `from` to a rank's array, `at` bytes after its start. All functions throw
    // Error(invalid) for wrong arguments, which does not fail the group, and the group's failure.
    // `wait` is only for ranks of other hosts.
    void put(uint32_t rank, uint64_t at, const std::byte* from, uint64_t bytes, RemoteWait& wait);
    // Copies `bytes` of a rank's array to `to`.
    void get(uint32_t rank, uint64_t at, std::byte* to, uint64_t bytes, RemoteWait& wait);
    // Adds a signal at `rank`. The puts of this thread to `rank` arrive before the signal.
    void signal(uint32_t rank);
    // Takes `count` signals of a rank, and waits until they have arrived. Fails the group after
    // `timeout_s`.
    void wait(uint32_t rank, uint64_t count, double timeout_s, const Interrupted& interrupted);
    // Returns the number of a rank's signals that have arrived and are not taken.
    [[nodiscard]] uint64_t arrived(uint32_t rank) const;
    // Completes all that this thread has put or got, before anything that it does afterwards.
    void fence(RemoteWait& wait);
    // Returns true if the rank is on another host.
    [[nodiscard]] bool is_away(uint32_t rank) const noexcept { return !view_.local(rank); }

  private:
    // A rank's memory, in this process's view; the pointers are null for ranks of other hosts.
    struct Place {
        std::byte* array;
        uint64_t bytes;
        std::atomic<uint64_t>* signals;  // of this rank, at that rank
        uint64_t number;
    };

    void check_access(uint32_t rank, uint64_t at, uint64_t bytes, const char* what) const;
    void access_away(p2p::Request& request, uint64_t at, RemoteWait& wait);
    void detach_after_failure() const noexcept;
    void require_healthy() const;
    void require_rank(uint32_t rank, const char* what) const;
    void require_present(uint32_t rank, const char* what) const;
    void wait_here(uint32_t rank, uint64_t target, double timeout_s,
                   const Interrupted& interrupted);
    [[nodiscard]] bool has_arrived(uint32_t rank, uint64_t target) const noexcept {
        return own_word(rank).load(std::memory_order_acquire) >= target;
    }
    // Returns the word of this rank in which `rank` counts its signals.
    [[nodiscard]] std::atomic<uint64_t>& own_word(uint32_t rank) const noexcept {
        return p2p::signal_word(places_[view_.rank()].signals, rank);
    }
    [[nodiscard]] kernels::Store store_for(uint64_t bytes) const noexcept;
    [[nodiscard]] std::string late_text(uint32_t rank, uint64_t target, double timeout_s) const;

    Group& group_;
    View& view_;
    Membership& members_;
    Waiter waiter_;
    StoreRule stores_;
    SharedHeap& heap_;
    OperationCounters& counters_;
    uint64_t element_bytes_;
    std::vector<Place> places_;
    std::vector<std::atomic<uint64_t>> taken_;  // by rank: signals that waits have taken
    // By rank of another host: the number of puts and signals that were sent, and how many of them
    // have arrived according to a fence.
    std::vector<std::atomic<uint64_t>> sent_, confirmed_;
};

}  // namespace unisono

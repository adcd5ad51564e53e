// One-sided access: a window is one array of each rank of a host, which the other ranks write and
// read without a call of its owner. Signals order the accesses: a rank that has waited for a signal
// of a peer sees everything that the peer put before.
//
// Each rank has two ranges in its shared heap: its array, and one word for each peer, in which the
// peer counts its signals. Any number of threads may use a window.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/operation_counters.h"
#include "execution/store_policy.h"
#include "memory/shared_heap.h"
#include "memory/waiter.h"

namespace unisono {

class Window {
  public:
    // One rank's part of a window: offsets and lengths in its heap.
    struct Part {
        uint64_t array, bytes;
        uint64_t signals;  // signal_bytes() for all ranks; 0 at the start
    };
    [[nodiscard]] static uint64_t signal_bytes(uint32_t ranks) noexcept { return ranks * kLine; }

    // `parts`: of every rank. `element_bytes` is for error texts.
    Window(View& view, Membership& members, Waiter waiter, SharedHeap& heap,
           OperationCounters& counters, const std::vector<Part>& parts, uint64_t element_bytes);
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;
    ~Window();

    // Copies `bytes` from `from` to a rank's array, `at` bytes after its start. All functions throw
    // Error(invalid) for wrong arguments, which does not fail the group, and the group's failure.
    void put(uint32_t rank, uint64_t at, const std::byte* from, uint64_t bytes);
    // Copies `bytes` of a rank's array to `to`.
    void get(uint32_t rank, uint64_t at, std::byte* to, uint64_t bytes);
    // Adds a signal at `rank`, after all that this thread has put.
    void signal(uint32_t rank);
    // Takes `count` signals of a rank, and waits until they have arrived. Fails the group after
    // `timeout_s`.
    void wait(uint32_t rank, uint64_t count, double timeout_s, const Interrupted& interrupted);
    // Returns the number of a rank's signals that have arrived and are not taken.
    [[nodiscard]] uint64_t arrived(uint32_t rank) const;
    // Completes all that this thread has put or got, before anything that it does afterwards.
    void fence();

  private:
    // A rank's memory, in this process's view.
    struct Place {
        std::byte* array;
        uint64_t bytes;
        std::atomic<uint64_t>* signals;  // of this rank, at that rank
    };

    [[nodiscard]] std::byte* memory_of(uint32_t rank, uint64_t at, uint64_t bytes,
                                       const char* what) const;
    void require_healthy() const;
    void require_rank(uint32_t rank, const char* what) const;
    void require_present(uint32_t rank, const char* what) const;
    [[nodiscard]] std::atomic<uint64_t>& word(uint32_t at, uint32_t from) const noexcept;
    [[nodiscard]] kernels::Store store_for(uint64_t bytes) const noexcept;
    [[nodiscard]] std::string late_text(uint32_t rank, uint64_t target, double timeout_s) const;

    View& view_;
    Membership& members_;
    Waiter waiter_;
    StoreRule stores_;
    SharedHeap& heap_;
    OperationCounters& counters_;
    uint64_t element_bytes_;
    std::vector<Place> places_;
    HeapRange own_array_, own_signals_;
    std::vector<std::atomic<uint64_t>> taken_;  // by rank: signals that waits have taken
};

}  // namespace unisono

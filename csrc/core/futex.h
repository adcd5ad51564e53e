// Futex sleep on a word of shared memory, and doorbells on top of it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/control_words.h"

namespace unisono {

enum class Woken : uint8_t { rung, timed_out, interrupted };

// Sleeps until `word` differs from `seen`, a wake or a signal arrives, or `timeout_s` has passed.
Woken futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, double timeout_s) noexcept;
void futex_wake_all(const std::atomic<uint32_t>& word) noexcept;

// A full memory barrier between two threads that costs time in only one of them. heavy_barrier()
// makes every running thread of all registered processes execute a barrier, by membarrier(2) in its
// global expedited form. So the other thread needs no fence of its own.
// register_for_heavy_barrier() registers the process; later calls have no effect. It returns false
// if the kernel refuses.
[[nodiscard]] bool register_for_heavy_barrier() noexcept;
void heavy_barrier() noexcept;

// `light` requires that all ranks have registered for heavy barriers.
enum class Fence : uint8_t { light, full };

// Wakes the sleepers of a doorbell. The caller must first make the store that a sleeper may wait
// for. That store must take effect before the load of `sleepers`, because a sleeper raises
// `sleepers` before it checks its condition a last time. A full fence would wait until the polled
// line returns from the peer, which takes half the time of a small message.
inline void ring(Doorbell& doorbell, Fence fence = Fence::full) noexcept {
    if (fence == Fence::light) {
        std::atomic_signal_fence(std::memory_order_seq_cst);
    } else {
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    if (doorbell.sleepers.load(std::memory_order_relaxed) == 0) return;
    doorbell.rings.fetch_add(1, std::memory_order_release);
    futex_wake_all(doorbell.rings);
}

// Wakes all sleepers, including threads that have not raised `sleepers` yet.
inline void ring_always(Doorbell& doorbell) noexcept {
    doorbell.rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(doorbell.rings);
}

// Counts this thread as a sleeper during the object's lifetime.
class Sleeper {
  public:
    explicit Sleeper(Doorbell& doorbell) noexcept : doorbell_(doorbell) {
        doorbell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
        heavy_barrier();
    }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    ~Sleeper() { doorbell_.sleepers.fetch_sub(1, std::memory_order_relaxed); }

  private:
    Doorbell& doorbell_;
};

// Sleeps on the doorbell unless `ready()`. Returns the reason of the wake-up, or `rung` if
// `ready()` was true.
template <class Ready>
Woken sleep_on(Doorbell& doorbell, Ready&& ready, double timeout_s) {
    const Sleeper announced(doorbell);
    const uint32_t seen = doorbell.rings.load(std::memory_order_acquire);
    return ready() ? Woken::rung : futex_wait(doorbell.rings, seen, timeout_s);
}

}  // namespace unisono

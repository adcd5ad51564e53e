// Sleeping in the kernel on a word of shared memory, and the bell protocol on top of it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/control_words.h"

namespace unisono {

enum class Woken : uint8_t { rung, timed_out, interrupted };

// Sleeps until `word` is no longer `seen`, or a wake, a signal, or `timeout_s`.
Woken futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, double timeout_s) noexcept;
void futex_wake_all(const std::atomic<uint32_t>& word) noexcept;

// A full barrier whose price only one side pays: heavy_barrier() makes every running thread of
// every registered process pass one (membarrier(2), global expedited), so that the other side needs
// none. Registering is once per process, and again does nothing; false if the kernel refuses.
[[nodiscard]] bool register_for_heavy_barrier() noexcept;
void heavy_barrier() noexcept;

enum class Fence : uint8_t { light, full };  // light: all ranks are registered

// Called after the store that a sleeper may be waiting for. That store must come before the look at
// `sleepers`; a sleeper orders its announcement before its last look at the condition. A full fence
// would wait until the polled line has come back from the peer: half of a small message's time.
inline void ring(Bell& bell, Fence fence = Fence::full) noexcept {
    if (fence == Fence::light) {
        std::atomic_signal_fence(std::memory_order_seq_cst);
    } else {
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    if (bell.sleepers.load(std::memory_order_relaxed) == 0) return;
    bell.rings.fetch_add(1, std::memory_order_release);
    futex_wake_all(bell.rings);
}

// Wakes whoever sleeps, announced or about to.
inline void ring_always(Bell& bell) noexcept {
    bell.rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(bell.rings);
}

// Announces a sleeper for as long as it lives.
class Sleeper {
  public:
    explicit Sleeper(Bell& bell) noexcept : bell_(bell) {
        bell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
        heavy_barrier();
    }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    ~Sleeper() { bell_.sleepers.fetch_sub(1, std::memory_order_relaxed); }

  private:
    Bell& bell_;
};

// Sleeps on the bell unless `ready()`; returns how the sleep ended (`rung` if it was ready).
template <class Ready>
Woken sleep_on(Bell& bell, Ready&& ready, double timeout_s) {
    const Sleeper announced(bell);
    const uint32_t seen = bell.rings.load(std::memory_order_acquire);
    return ready() ? Woken::rung : futex_wait(bell.rings, seen, timeout_s);
}

}  // namespace unisono

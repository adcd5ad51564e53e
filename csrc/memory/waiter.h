// How a rank waits: spin, yield, sleep in the kernel; always watching for failure and for the
// clock.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "core/futex.h"
#include "memory/membership.h"

namespace unisono {

inline void relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile(
        "isb" ::
            : "memory");  // yield is a no-op on most cores; isb waits about as long as pause
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// How long to look before sleeping. Measured: with more ranks than cores any spinning is harmful,
// in proportion; with a core each, 2000 pauses are about 55 us, the price of one wake.
struct Patience {
    int pauses;
    int yields;
    // Yields after which something else has run on the core. A sleeper wakes on a free one.
    int crowded = 1 << 30;
    static Patience for_group(uint32_t ranks, uint32_t cores) noexcept {
        return ranks <= cores ? Patience{300, 100} : Patience{0, 200};
    }
    // Of messages: a stream of them stops for as long as its sender or its receiver takes for some
    // dozens, and to be woken then costs as much again.
    static Patience for_messages(uint32_t ranks, uint32_t cores) noexcept {
        return ranks <= cores ? Patience{300, 600, 3} : for_group(ranks, cores);
    }
};

// The time after which a call gives up. Started when first asked for, so that calls which never
// wait never read the clock.
class Deadline {
  public:
    explicit Deadline(double timeout_s) noexcept : timeout_s_(timeout_s) {}
    [[nodiscard]] double timeout_s() const noexcept { return timeout_s_; }
    [[nodiscard]] bool passed() noexcept { return elapsed_s() > timeout_s_; }
    [[nodiscard]] double elapsed_s() noexcept {
        const auto now = std::chrono::steady_clock::now();
        if (started_ == std::chrono::steady_clock::time_point{}) started_ = now;
        return std::chrono::duration<double>(now - started_).count();
    }

  private:
    double timeout_s_;
    std::chrono::steady_clock::time_point started_{};
};

// "timed out on rank 1 after 5 s (timeout)": with the word and the time that programs look for.
[[nodiscard]] std::string timed_out(uint32_t rank, double timeout_s);

// Returns true if a signal handler wants the call to end; called about every 50 ms of a sleep.
using Interrupted = std::function<bool()>;

// Whether a wait that looks by itself is over: asked often, it asks for signals now and then.
class Over {
  public:
    Over(double timeout_s, const Interrupted& interrupted) noexcept
        : late_(timeout_s), interrupted_(interrupted) {}
    [[nodiscard]] bool operator()() {
        over_ = over_ || late_.passed();
        if (!over_ && interrupted_ && ask_.passed()) {
            ask_ = Deadline(kAsk_s);
            over_ = interrupted_();
        }
        return over_;
    }

  private:
    static constexpr double kAsk_s = 0.05;
    Deadline late_, ask_{kAsk_s};
    const Interrupted& interrupted_;
    bool over_ = false;
};

class Waiter {
  public:
    Waiter(Membership& members, Patience patience) noexcept
        : members_(members), patience_(patience) {}
    // More ranks than cores: who waits gives its core away at once.
    [[nodiscard]] bool crowded() const noexcept { return patience_.pauses == 0; }

    // Waits until `ready()`. Between looks it calls `inspect()`, which throws if waiting is in
    // all_left, and after `limit_s` seconds (if positive) returns false: the caller goes on elsewhere.
    // `rest(awake, seconds)` sleeps unless `awake()`; `late()` makes the text of the timeout.
    template <class Rest, class Ready, class Inspect, class Late>
    bool wait(Rest&& rest, Ready&& ready, Inspect&& inspect, Late&& late, Deadline& deadline,
              const Interrupted& interrupted, double limit_s = 0) {
        for (int i = 0; i < patience_.pauses; ++i) {
            if (ready()) return true;
            relax();
        }
        inspect();
        // Where the cores are busy with other programs, each yield takes milliseconds.
        auto now = std::chrono::steady_clock::now();
        const auto enough = now + kYielding;
        for (int i = 0, crowded = 0; i < patience_.yields && now < enough; ++i) {
            if (ready()) return true;
            ::sched_yield();
            const auto before = std::exchange(now, std::chrono::steady_clock::now());
            if (now - before > kCrowded && ++crowded > patience_.crowded) break;
        }
        double looked_s = 0;
        while (!ready()) {
            inspect();
            const double elapsed_s = deadline.elapsed_s();
            double left_s = deadline.timeout_s() - elapsed_s;
            if (left_s <= 0) members_.fail(Fault::timeout, late());
            if (limit_s > 0) {
                left_s = std::min(left_s, limit_s - elapsed_s);
                if (left_s <= 0) return false;
                if (left_s < kNap_s) {
                    ::sched_yield();
                    continue;
                }
            }
            const auto awake = [&] { return ready() || members_.failed(); };
            const Woken woken = rest(awake, std::min(left_s, kSlice_s));
            // A bell that rings all the time, for others, must not keep this rank from looking.
            if (woken != Woken::rung || elapsed_s - looked_s > kSlice_s) {
                check_world(interrupted);
                if (elapsed_s > kAnxious_s) members_.ask_other_hosts();  // whatever it waits for
                looked_s = elapsed_s;
            }
        }
        return true;
    }

    template <class Ready, class Inspect, class Late>
    bool wait(Bell& bell, Ready&& ready, Inspect&& inspect, Late&& late, Deadline& deadline,
              const Interrupted& interrupted, double limit_s = 0) {
        const auto rest = [&bell](auto&& awake, double seconds) {
            return sleep_on(bell, awake, seconds);
        };
        return wait(rest, ready, inspect, late, deadline, interrupted, limit_s);
    }

    // The slow checks: has a signal come, are the peers alive whose turn it is?
    void check_world(const Interrupted& interrupted);

  private:
    static constexpr double kSlice_s = 0.05;
    static constexpr double kAnxious_s = 0.1;
    static constexpr std::chrono::milliseconds kYielding{20};
    static constexpr std::chrono::microseconds kCrowded{3};
    static constexpr double kNap_s = 200e-6;  // for less, going to sleep does not pay

    Membership& members_;
    Patience patience_;
};

}  // namespace unisono

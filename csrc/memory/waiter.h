// A rank's wait: the rank spins, yields, then sleeps in the kernel. During the wait, it checks for
// failures and for the timeout.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "core/futex.h"
#include "core/operation_counters.h"
#include "memory/membership.h"

namespace unisono {

inline void relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile(
        "isb" ::
            : "memory");  // yield is a no-op on most cores; isb takes about as long as pause
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// The number of polls before a rank sleeps. Measured: with more ranks than cores, spinning is
// harmful, in proportion to its length, unless it is very short (executor_waits.cc). With a core
// for each rank, 2000 pauses take about 55 us, as long as one wake-up.
struct SpinPolicy {
    int pauses;
    int yields;
    // Number of slow yields before the rank sleeps. A yield is slow if other threads ran on the
    // core. The sleeping rank then wakes on a free core.
    int crowded = 1 << 30;
    static SpinPolicy for_group(uint32_t ranks, uint32_t cores) noexcept {
        return ranks <= cores ? SpinPolicy{300, 100} : SpinPolicy{0, 200};
    }
    // The policy for messages. In a stream of messages, a rank waits while its peer handles some
    // dozens of messages. If the waiting rank slept, the sleep and the wake-up would take the same
    // time again.
    static SpinPolicy for_messages(uint32_t ranks, uint32_t cores) noexcept {
        return ranks <= cores ? SpinPolicy{300, 600, 3} : for_group(ranks, cores);
    }
};

// The timeout of a call. The clock starts at the first query, so a call that never waits does not
// read the clock.
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

// Returns "timeout after 5 s on rank 1". A space must precede the text: programs search for "
// timeout " with both spaces, as torch's own tests do, and for the time.
[[nodiscard]] std::string timeout_text(uint32_t rank, double timeout_s);

// Returns "timeout after 5 s".
[[nodiscard]] std::string timeout_text(double timeout_s);

// Returns true if a signal handler wants to end the call. Called about every 50 ms of a sleep.
using Interrupted = std::function<bool()>;

// Condition that ends a polling wait: a timeout, or a signal. Checks for signals every 50 ms.
class StopCondition {
  public:
    StopCondition(double timeout_s, const Interrupted& interrupted) noexcept
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
    Waiter(Membership& members, SpinPolicy spin_policy) noexcept
        : members_(members), spin_policy_(spin_policy) {}
    // Returns true with more ranks than cores. A waiting rank then soon gives up its core.
    [[nodiscard]] bool oversubscribed() const noexcept { return spin_policy_.pauses == 0; }

    // Polls until `ready()`, with a pause after each poll. Returns false after `most` pauses.
    template <class Ready>
    [[nodiscard]] static bool pause_until(Ready&& ready, int most) {
        for (int i = 0; i < most; ++i) {
            if (ready()) return true;
            relax();
        }
        return false;
    }

    // Waits until `ready()`. Between polls it calls `inspect()`, which throws if the wait cannot
    // succeed. After `limit_s` seconds (if positive) it returns false, so that the caller can
    // continue the wait later. `rest(awake, seconds)` sleeps unless `awake()`; `late()` returns the
    // text of the timeout. The slow checks are made about every `check_s` seconds. `waited_ns`
    // receives the time after the pauses, because a wait that ends during the pauses reads no
    // clock.
    template <class Rest, class Ready, class Inspect, class Late>
    bool wait(Rest&& rest, Ready&& ready, Inspect&& inspect, Late&& late,
              std::atomic<uint64_t>& waited_ns, Deadline& deadline, const Interrupted& interrupted,
              double limit_s = 0, double check_s = kCheck_s) {
        if (pause_until(ready, spin_policy_.pauses)) return true;
        inspect();
        // If other programs occupy the cores, each yield takes milliseconds.
        const auto begun = std::chrono::steady_clock::now();
        auto now = begun;
        for (int i = 0, crowded = 0; i < spin_policy_.yields && now - begun < kYielding; ++i) {
            if (ready()) {
                WaitTime::add(waited_ns, now - begun);  // no need to read the clock again
                return true;
            }
            ::sched_yield();
            const auto before = std::exchange(now, std::chrono::steady_clock::now());
            if (now - before > kCrowded && ++crowded > spin_policy_.crowded) break;
        }
        const WaitTime wait_time(waited_ns, begun);
        double checked_s = 0;
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
            const Woken woken = rest(awake, std::min(left_s, check_s));
            // Makes the slow checks even if the doorbell keeps ringing for other ranks.
            if (woken != Woken::rung || elapsed_s - checked_s > check_s) {
                make_slow_checks(interrupted);
                // Asks the other hosts for their last calls in any slow wait, whatever the rank
                // waits for.
                if (elapsed_s > kSlowWait_s) members_.ask_other_hosts();
                checked_s = elapsed_s;
            }
        }
        return true;
    }

    template <class Ready, class Inspect, class Late>
    bool wait(Doorbell& doorbell, Ready&& ready, Inspect&& inspect, Late&& late,
              std::atomic<uint64_t>& waited_ns, Deadline& deadline, const Interrupted& interrupted,
              double limit_s = 0) {
        const auto rest = [&doorbell](auto&& awake, double seconds) {
            return sleep_on(doorbell, awake, seconds);
        };
        return wait(rest, ready, inspect, late, waited_ns, deadline, interrupted, limit_s);
    }

    // Makes the slow checks: signals, and the liveness of the peers that are due.
    void make_slow_checks(const Interrupted& interrupted);

    static constexpr double kCheck_s = 0.05;

  private:
    static constexpr double kSlowWait_s = 0.1;
    static constexpr std::chrono::milliseconds kYielding{20};
    static constexpr std::chrono::microseconds kCrowded{3};
    static constexpr double kNap_s = 200e-6;  // a shorter sleep costs more than it saves

    Membership& members_;
    SpinPolicy spin_policy_;
};

}  // namespace unisono

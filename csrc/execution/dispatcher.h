// Runs the calls of a group in the order in which they were made. A call runs in its caller's
// thread if possible, and in a progress thread if the caller does not wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>

#include "execution/executor.h"

namespace unisono {

// Returns the time of the steady clock, which is Python's `time.monotonic_ns` on Linux.
inline int64_t steady_now_ns() noexcept {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the next call, made from the results of the finished call, or nothing. No other call runs
// between the two calls.
using Continuation = std::function<std::optional<Execution>()>;

class Job {
  public:
    Job(Execution execution, double timeout_s, Continuation continuation)
        : execution_(std::move(execution)),
          continuation_(std::move(continuation)),
          deadline_(timeout_s) {}

    [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    // Returns the time at which the job ended, by the steady clock. Requires that the job is done.
    [[nodiscard]] int64_t ended_ns() const noexcept { return ended_ns_; }
    // Returns the error of a failed job. Requires that the job is done.
    [[nodiscard]] const std::optional<Error>& error() const noexcept { return error_; }

  private:
    friend class Dispatcher;
    Execution execution_;
    Continuation continuation_;
    Deadline deadline_;
    std::optional<Error> error_;
    int64_t ended_ns_ = 0;
    std::atomic<bool> done_{false};
};

class Dispatcher {
  public:
    // `grace` is the time that the progress thread waits before it runs a queued call. A caller
    // that waits within this time runs the call itself, which saves two thread switches.
    Dispatcher(Executor& executor, Membership& members, std::chrono::microseconds grace = {})
        : executor_(executor), members_(members), grace_(grace) {}
    Dispatcher(const Dispatcher&) = delete;
    Dispatcher& operator=(const Dispatcher&) = delete;
    ~Dispatcher() { stop(); }

    // Runs the call to its end, after all earlier calls. Throws Error.
    void run(Execution&& execution, double timeout_s, const Interrupted& interrupted,
             Continuation continuation = {});
    // Starts the call in this thread if no other call is queued, and waits for at most `inline_s`
    // seconds. The progress thread completes the call.
    std::shared_ptr<Job> submit(Execution execution, double timeout_s, double inline_s,
                                Continuation continuation = {});
    // Gives a number to a call that this rank refuses, after all earlier calls have their numbers.
    // Does not wait.
    void refuse(std::string reason);
    // Returns what `make` returns. Fails the group if memory is exhausted: a call that cannot be
    // queued has no number, so all later calls would have wrong numbers.
    template <class Make>
    auto or_fail(Make&& make) {
        try {
            return make();
        } catch (const std::bad_alloc&) {
            members_.record_made(Fault::aborted, [this] {
                return "rank " + std::to_string(members_.rank()) + " has no memory for a call";
            });
            throw;
        }
    }
    // Waits for the job. If no other thread drives the executor, this thread runs the job and the
    // calls before it. Returns false after `timeout_s` (negative: no limit) if the job is not done.
    // Throws the job's Error.
    bool wait(Job& job, double timeout_s, const Interrupted& interrupted);
    // Ends the progress thread, after this rank has left the group. Queued calls fail as aborted.
    // On return, the running call has failed and the peers have its failure.
    void stop() noexcept;
    // Returns true if no other thread drives a call.
    [[nodiscard]] bool quiet() const noexcept { return !driving() || driven_from_here(); }
    // Waits until no thread drives a call: a call that begins while the group closes drives for a
    // moment, until it finds the group closed. Returns false if a thread still drives after a
    // second, and in a signal handler that has interrupted a driving call.
    [[nodiscard]] bool await_idle() noexcept;

  private:
    // The right to drive the executor, granted if no other thread has it. This is not a mutex,
    // because a thread without the right must wait for two events at once: the right and the
    // group's end.
    class DriverClaim {
      public:
        explicit DriverClaim(Dispatcher& owner) noexcept : owner_(owner) {
            std::thread::id nobody;
            mine_ = owner.driver_.compare_exchange_strong(nobody, std::this_thread::get_id());
        }
        DriverClaim(const DriverClaim&) = delete;
        DriverClaim& operator=(const DriverClaim&) = delete;
        ~DriverClaim() {
            if (mine_) owner_.end_claim();
        }
        explicit operator bool() const noexcept { return mine_; }

      private:
        Dispatcher& owner_;
        bool mine_;
    };

    bool drive(Execution& execution, Continuation& continuation, Deadline& deadline,
               const Interrupted& interrupted, double limit_s);
    bool advance(Job& job, const Interrupted& interrupted, double limit_s);
    void work_until(Job& job, const Interrupted& interrupted);
    void work_for(double limit_s, const Interrupted& interrupted);
    void enqueue(const std::shared_ptr<Job>& job);
    void withdraw(Job& job) noexcept;
    void finish(Job& job) noexcept;
    void start_thread();
    void progress_loop();
    void end_claim() noexcept;
    void drop_queued() noexcept;
    void await_driver(std::unique_lock<std::mutex>& lock) noexcept;
    std::shared_ptr<Job> front();
    [[nodiscard]] bool driving() const noexcept { return driver_.load() != std::thread::id(); }
    // Returns true in a signal handler that has interrupted a driving call of the same thread.
    [[nodiscard]] bool driven_from_here() const noexcept {
        return driver_.load() == std::this_thread::get_id();
    }
    [[nodiscard]] bool nothing_before() const noexcept {
        return queued_.load(std::memory_order_acquire) == 0;
    }

    Executor& executor_;
    Membership& members_;
    std::chrono::microseconds grace_;
    std::atomic<std::thread::id> driver_{};  // the thread that drives the executor
    std::atomic<uint32_t> queued_{0};
    std::atomic<bool> stopping_{false};  // Set under the mutex.
    std::mutex mutex_;                   // Guards the fields below.
    // On the heap, because a forked child has to leak it: its destructor would wait for threads
    // that exist only in the parent.
    std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
    std::deque<std::shared_ptr<Job>> queue_;
    Job* driven_ = nullptr;  // the job in the queue that a thread drives
    std::thread thread_;
};

}  // namespace unisono

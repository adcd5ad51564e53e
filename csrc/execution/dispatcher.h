// Runs the calls of a group in the order in which they were made: in the caller's thread where
// possible, in a progress thread where the caller does not wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
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

// Returns the call that follows once the first has ended, or nothing. No other call comes between
// the two.
using Sequel = std::function<std::optional<Execution>()>;

class Job {
  public:
    Job(Execution execution, double timeout_s, Sequel sequel)
        : execution_(std::move(execution)), sequel_(std::move(sequel)), deadline_(timeout_s) {}

    [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    // The error it ended with, if it is done and failed.
    [[nodiscard]] const std::optional<Error>& error() const noexcept { return error_; }

  private:
    friend class Dispatcher;
    Execution execution_;
    Sequel sequel_;
    Deadline deadline_;
    std::optional<Error> error_;
    std::atomic<bool> done_{false};
};

class Dispatcher {
  public:
    // `grace` is what the progress thread leaves to the caller: who waits soon does the work
    // itself, and spares two switches between threads.
    Dispatcher(Executor& executor, Membership& members, std::chrono::microseconds grace = {})
        : executor_(executor), members_(members), grace_(grace) {}
    Dispatcher(const Dispatcher&) = delete;
    Dispatcher& operator=(const Dispatcher&) = delete;
    ~Dispatcher() { stop(); }

    // Runs the call to its end, after all calls made before. Throws Error.
    void run(Execution&& execution, double timeout_s, const Interrupted& interrupted,
             Sequel sequel = {});
    // Begins the call here and now if nothing is before it, for at most `inline_s` seconds of
    // waiting; what is left goes to the progress thread.
    std::shared_ptr<Job> submit(Execution execution, double timeout_s, double inline_s,
                                Sequel sequel = {});
    // Takes the number of a call that this rank does not make, as soon as all calls before it have
    // theirs. Waits for nobody.
    void refuse(std::string reason);
    // What `make` returns. If it finds no memory, the group fails: a call that cannot even be
    // queued has no number, and all that follow it would have wrong ones.
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
    // Waits for the end; works on it (and on what is before it) if nobody else does. False after
    // `timeout_s` (negative: never), with the job still under way. Throws the job's Error.
    bool wait(Job& job, double timeout_s, const Interrupted& interrupted);
    // Ends the progress thread, after the group was left. What is still queued fails as aborted;
    // what is under way has failed, and the others know, when this returns.
    void stop() noexcept;
    // Nobody else drives a call.
    [[nodiscard]] bool quiet() const noexcept { return !driving() || driven_from_here(); }
    // Nobody drives a call, not even one that this thread interrupts.
    [[nodiscard]] bool idle() const noexcept { return !driving(); }

  private:
    // The right to drive the executor, if nobody else has it. No mutex: who cannot have it must be
    // able to wait for this and for the end of the group at once.
    class Turn {
      public:
        explicit Turn(Dispatcher& owner) noexcept : owner_(owner) {
            std::thread::id nobody;
            mine_ = owner.driver_.compare_exchange_strong(nobody, std::this_thread::get_id());
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        ~Turn() {
            if (mine_) owner_.end_turn();
        }
        explicit operator bool() const noexcept { return mine_; }

      private:
        Dispatcher& owner_;
        bool mine_;
    };

    bool drive(Execution& execution, Sequel& sequel, Deadline& deadline,
               const Interrupted& interrupted, double limit_s);
    bool advance(Job& job, const Interrupted& interrupted, double limit_s);
    void work_until(Job& job, const Interrupted& interrupted);
    void work_for(double limit_s, const Interrupted& interrupted);
    void enqueue(const std::shared_ptr<Job>& job);
    void withdraw(Job& job) noexcept;
    void finish(Job& job) noexcept;
    void start_thread();
    void progress_loop();
    void end_turn() noexcept;
    void drop_queued() noexcept;
    void await_driver(std::unique_lock<std::mutex>& lock) noexcept;
    std::shared_ptr<Job> front();
    [[nodiscard]] bool driving() const noexcept { return driver_.load() != std::thread::id(); }
    // In a signal handler, of which the interrupted call below has the turn.
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
    std::atomic<bool> stopping_{false};  // set under the mutex
    std::mutex mutex_;                   // guards what follows
    // On the heap: a forked child has to leak it, for its end waits for threads that are not there.
    std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
    std::deque<std::shared_ptr<Job>> queue_;
    Job* driven_ = nullptr;  // the one of the queue that is being worked on
    std::thread thread_;
};

}  // namespace unisono

#include "dispatcher.h"

#include <csignal>

#include <chrono>
#include <utility>

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kLook{50};  // how often a blocked thread looks for signals

// Signals are for the threads of the program, not for this one.
void block_signals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

void check_interrupt(const Interrupted& interrupted, Membership& members) {
    if (!interrupted || !interrupted()) return;
    members.record(Fault::aborted, "rank " + std::to_string(members.rank()) + " was interrupted by a signal");
    throw Error(Fault::interrupted, "interrupted");
}

}  // namespace

void Dispatcher::run(Execution& execution, double timeout_s, const Interrupted& interrupted) {
    if (nothing_before() && executing_.try_lock()) {
        const std::lock_guard lock(executing_, std::adopt_lock);
        if (nothing_before()) {  // still: a call may have been queued by who held the lock
            Deadline deadline(timeout_s);
            executor_.advance(execution, deadline, interrupted, 0);
            return;
        }
    }
    auto job = std::make_shared<Job>(std::move(execution), timeout_s);
    enqueue(job);
    work_until(*job, interrupted);
    if (job->error_) throw *job->error_;
}

std::shared_ptr<Job> Dispatcher::submit(Execution execution, double timeout_s, double inline_s) {
    auto job = std::make_shared<Job>(std::move(execution), timeout_s);
    if (inline_s > 0 && nothing_before() && executing_.try_lock()) {
        const std::lock_guard lock(executing_, std::adopt_lock);
        if (nothing_before() && advance(*job, {}, inline_s)) return job;
        enqueue(job);  // before the lock goes: no other call may overtake one that has begun
    } else {
        enqueue(job);
    }
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable() && !stopping_) {
        thread_ = std::thread([this] {
            block_signals();
            progress_loop();
        });
    }
    changed_.notify_all();
    return job;
}

bool Dispatcher::wait(Job& job, double timeout_s, const Interrupted& interrupted) {
    if (!job.done() && timeout_s < 0) work_until(job, interrupted);
    if (!job.done()) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
        std::unique_lock lock(mutex_);
        while (!job.done() && std::chrono::steady_clock::now() < until) {
            changed_.wait_for(lock, kLook);
            check_interrupt(interrupted, members_);
        }
    }
    if (job.done() && job.error_) throw *job.error_;
    return job.done();
}

// Drives the executor until the job is done; if another thread drives it, waits for the job.
void Dispatcher::work_until(Job& job, const Interrupted& interrupted) {
    while (!job.done()) {
        if (executing_.try_lock()) {
            const std::lock_guard lock(executing_, std::adopt_lock);
            while (!job.done()) {
                if (auto next = front()) advance(*next, interrupted, 0);
            }
            return;
        }
        std::unique_lock lock(mutex_);
        if (!job.done()) changed_.wait_for(lock, kLook);
        lock.unlock();
        check_interrupt(interrupted, members_);
    }
}

// True if the job has ended, well or not.
bool Dispatcher::advance(Job& job, const Interrupted& interrupted, double limit_s) {
    try {
        if (!executor_.advance(job.execution_, job.deadline_, interrupted, limit_s)) return false;
    } catch (const Error& error) {
        job.error_ = error;
    } catch (const std::exception& error) {
        job.error_ = Error(Fault::system, error.what());
    }
    finish(job);
    return true;
}

void Dispatcher::finish(Job& job) noexcept {
    const std::lock_guard lock(mutex_);
    if (!queue_.empty() && queue_.front().get() == &job) {
        queue_.pop_front();
        queued_.fetch_sub(1, std::memory_order_release);
    }
    job.done_.store(true, std::memory_order_release);
    changed_.notify_all();
}

void Dispatcher::enqueue(std::shared_ptr<Job> job) {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Error(Fault::aborted, "this communicator is closed");
    queue_.push_back(std::move(job));
    queued_.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<Job> Dispatcher::front() {
    const std::lock_guard lock(mutex_);
    return queue_.empty() ? nullptr : queue_.front();
}

void Dispatcher::progress_loop() {
    for (;;) {
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
            if (stopping_) return;
        }
        const std::lock_guard driving(executing_);
        if (auto job = front()) advance(*job, {}, 0);
    }
}

void Dispatcher::stop() noexcept {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    if (!thread_.joinable()) return;
    if (members_.in_child()) {
        thread_.detach();  // it exists in the parent only
        return;
    }
    thread_.join();
    for (const auto& job : queue_) {
        if (job->done()) continue;
        job->error_ = Error(Fault::aborted, "the communicator was closed before this call began");
        job->done_.store(true, std::memory_order_release);
    }
}

}  // namespace unisono

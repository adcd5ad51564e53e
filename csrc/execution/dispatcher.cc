#include "execution/dispatcher.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "core/progress_thread.h"

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kLook{50};  // how often a blocked thread looks for signals
constexpr std::chrono::seconds kFarewell{1};    // for a driver that a signal handler may hold up
constexpr double kRefusal_s = 1;                // positive: here and now, if no call is before it
constexpr const char* kInHandler =
    "a signal handler cannot wait for a call: the one that the signal interrupted comes first";

// Made before: where memory is lacking, calls still have to end.
const Error kClosed(Fault::aborted, "the communicator was closed before this call was complete"),
    kInterrupted(Fault::aborted, "this call was interrupted by a signal");

void check_interrupt(const Interrupted& interrupted, Membership& members) {
    if (!interrupted || !interrupted()) return;
    members.record(Fault::aborted,
                   "rank " + std::to_string(members.rank()) + " was interrupted by a signal");
    throw Error(Fault::interrupted, "interrupted");
}

}  // namespace

// The call and what follows from it. False if it has to wait longer than `limit_s`.
bool Dispatcher::drive(Execution& execution, Sequel& sequel, Deadline& deadline,
                       const Interrupted& interrupted, double limit_s) {
    while (executor_.advance(execution, deadline, interrupted, limit_s)) {
        if (!sequel) return true;
        try {
            std::optional<Execution> next = std::exchange(sequel, nullptr)();
            if (!next) return true;
            execution = std::move(*next);
        } catch (const std::exception& error) {
            executor_.abandon(execution, error.what());
            throw;
        }
    }
    return false;
}

void Dispatcher::run(Execution&& execution, double timeout_s, const Interrupted& interrupted,
                     Sequel sequel) {
    members_.require_own_process();
    if (nothing_before()) {
        const Turn turn(*this);
        if (turn && nothing_before()) {  // still: a call may have been queued by who had the turn
            Deadline deadline(timeout_s);
            drive(execution, sequel, deadline, interrupted, 0);
            return;
        }
    }
    if (driven_from_here()) {
        refuse(std::string(name_of(execution.args.op)) + ": " + kInHandler);
        throw Error(Fault::invalid, kInHandler);
    }
    const auto job = or_fail(
        [&] { return std::make_shared<Job>(std::move(execution), timeout_s, std::move(sequel)); });
    enqueue(job);
    try {
        work_until(*job, interrupted);
    } catch (...) {
        withdraw(*job);  // the memory is the caller's again
        throw;
    }
    if (job->error_) throw *job->error_;
}

std::shared_ptr<Job> Dispatcher::submit(Execution execution, double timeout_s, double inline_s,
                                        Sequel sequel) {
    members_.require_own_process();
    auto job = or_fail(
        [&] { return std::make_shared<Job>(std::move(execution), timeout_s, std::move(sequel)); });
    if (inline_s > 0 && nothing_before()) {
        const Turn turn(*this);
        if (turn && nothing_before()) {
            if (advance(*job, {}, inline_s)) return job;
            enqueue(job);  // before the turn ends: no other call may overtake one that has begun
            start_thread();
            return job;
        }
    }
    enqueue(job);
    start_thread();
    return job;
}

void Dispatcher::refuse(std::string reason) {
    Execution call{};
    call.refusal = or_fail([&] { return std::make_shared<const std::string>(std::move(reason)); });
    submit(std::move(call), 0, kRefusal_s);
}

bool Dispatcher::wait(Job& job, double timeout_s, const Interrupted& interrupted) {
    if (!job.done()) members_.require_own_process();
    if (timeout_s < 0) {
        work_until(job, interrupted);
    } else {
        const auto until =
            std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
        std::unique_lock lock(mutex_);
        while (!job.done()) {
            const std::chrono::duration<double> left = until - std::chrono::steady_clock::now();
            if (left.count() <= 0) break;
            const bool alone = !thread_.joinable();  // none could be started
            if (!alone || driving())
                changed_->wait_for(lock, std::min<std::chrono::duration<double>>(left, kLook));
            lock.unlock();  // a signal handler may call anything
            if (alone) work_for(left.count(), interrupted);
            check_interrupt(interrupted, members_);
            lock.lock();
        }
    }
    if (job.done() && job.error_) throw *job.error_;
    return job.done();
}

// Drives the executor until the job is done; if another thread drives it, waits for the job.
void Dispatcher::work_until(Job& job, const Interrupted& interrupted) {
    while (!job.done()) {
        if (const Turn turn(*this); turn) {
            while (auto next = job.done() ? nullptr : front()) advance(*next, interrupted, 0);
            continue;
        }
        if (driven_from_here()) throw Error(Fault::invalid, kInHandler);
        std::unique_lock lock(mutex_);
        changed_->wait_for(lock, kLook, [&] { return job.done() || !driving(); });
        lock.unlock();
        check_interrupt(interrupted, members_);
    }
}

// Drives what is first in the queue, unless another thread does.
void Dispatcher::work_for(double limit_s, const Interrupted& interrupted) {
    const Turn turn(*this);
    if (!turn) return;
    const auto first = front();
    if (!first) return;
    const double until_s = first->deadline_.elapsed_s() + limit_s;
    if (advance(*first, interrupted, until_s)) return;
    const std::lock_guard lock(mutex_);
    driven_ = nullptr;
    if (stopping_) drop_queued();
}

// True if the job has ended, well or not. Throws only if a signal ended it: the caller is the one
// who was interrupted, whosever job this is.
bool Dispatcher::advance(Job& job, const Interrupted& interrupted, double limit_s) {
    std::exception_ptr interruption;
    try {
        if (!drive(job.execution_, job.sequel_, job.deadline_, interrupted, limit_s)) return false;
    } catch (const Error& error) {
        if (error.fault() == Fault::interrupted) interruption = std::current_exception();
        job.error_ = interruption ? kInterrupted : error;
    } catch (const std::exception& error) {
        job.error_ = error_of(error);
    }
    finish(job);
    if (interruption) std::rethrow_exception(interruption);
    return true;
}

void Dispatcher::finish(Job& job) noexcept {
    const std::lock_guard lock(mutex_);
    if (!queue_.empty() && queue_.front().get() == &job) {
        queue_.pop_front();
        queued_.fetch_sub(1);
        driven_ = nullptr;
    }
    job.done_.store(true, std::memory_order_release);
    changed_->notify_all();
}

void Dispatcher::enqueue(const std::shared_ptr<Job>& job) {
    const std::lock_guard lock(mutex_);
    const bool begun = job->execution_.seq != 0;
    if (stopping_) {
        executor_.abandon(job->execution_, "the communicator was closed");
        throw Error(Fault::aborted, "this communicator is closed");
    }
    or_fail([&] { return queue_.insert(begun ? queue_.begin() : queue_.end(), job); });
    queued_.fetch_add(1);
}

// Takes the job back; when this returns nobody works on it.
void Dispatcher::withdraw(Job& job) noexcept {
    std::unique_lock lock(mutex_);
    changed_->wait(lock, [&] { return driven_ != &job; });
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [&](const auto& queued) { return queued.get() == &job; });
    if (found == queue_.end()) return;
    queue_.erase(found);
    queued_.fetch_sub(1);
}

std::shared_ptr<Job> Dispatcher::front() {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) return nullptr;
    driven_ = queue_.front().get();
    return queue_.front();
}

// Either the one who queued a call, or who stops, sees that the turn has ended, or this sees them.
void Dispatcher::end_turn() noexcept {
    driver_.store({});
    if (queued_.load() == 0 && !stopping_.load()) return;
    const std::lock_guard lock(mutex_);
    changed_->notify_all();
}

void Dispatcher::start_thread() {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable() && !stopping_) {
        start_progress(thread_, [this] { progress_loop(); });
    }
    changed_->notify_all();
}

void Dispatcher::progress_loop() {
    for (;;) {
        {
            std::unique_lock lock(mutex_);
            changed_->wait(lock, [this] { return stopping_ || (!queue_.empty() && !driving()); });
            const auto taken = [this] { return stopping_ || queue_.empty() || driving(); };
            changed_->wait_for(lock, grace_, taken);
            if (stopping_) return;
            if (taken()) continue;
        }
        const Turn turn(*this);
        if (!turn) continue;
        try {
            if (auto job = front()) advance(*job, {}, 0);
        } catch (const Error&) {  // of Python's code in this thread: the job has it
        }
    }
}

// A peer asks no more whether this rank lives, now that it has left; so the process must not end
// before the call under way has.
void Dispatcher::await_driver(std::unique_lock<std::mutex>& lock) noexcept {
    changed_->wait_for(lock, kFarewell, [this] { return quiet(); });
}

// After the group was closed, with the lock.
void Dispatcher::drop_queued() noexcept {
    std::erase_if(queue_, [this](const std::shared_ptr<Job>& job) {
        if (job.get() == driven_) return false;  // who drives it finds the group closed
        executor_.abandon(job->execution_, "the communicator was closed");
        job->error_ = kClosed;
        job->done_.store(true, std::memory_order_release);
        queued_.fetch_sub(1);
        return true;
    });
    changed_->notify_all();
}

void Dispatcher::stop() noexcept {
    if (members_.in_child()) {  // the lock may be held, and the thread is there, in the parent only
        if (thread_.joinable()) thread_.detach();
        static_cast<void>(changed_.release());
        return;
    }
    {
        std::unique_lock lock(mutex_);
        stopping_ = true;
        drop_queued();
        await_driver(lock);
    }
    if (thread_.joinable()) thread_.join();
}

}  // namespace unisono

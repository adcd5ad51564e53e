#include "execution/dispatcher.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "core/progress_thread.h"

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kSignalCheck{
    50};  // interval at which a blocked thread checks for signals
constexpr std::chrono::seconds kDriverWait{
    1};  // Limit of the wait for a driving thread, which a signal handler may delay.
// A positive time, so that a refused call runs in this thread if no call is queued.
constexpr double kRefusal_s = 1;
constexpr const char* kInHandler =
    "a signal handler cannot wait for a call: the interrupted call must end first";

// These errors are static, because calls must end even if memory is exhausted.
const Error kClosed(Fault::aborted, "the communicator was closed before this call was complete"),
    kInterrupted(Fault::aborted, "this call was interrupted by a signal");

void check_interrupt(const Interrupted& interrupted, Membership& members) {
    if (!interrupted || !interrupted()) return;
    members.record(Fault::aborted,
                   "rank " + std::to_string(members.rank()) + " was interrupted by a signal");
    throw Error(Fault::interrupted, "interrupted");
}

}  // namespace

// Runs the call, and then the call that its continuation returns, if any. Returns false if a wait
// would exceed `limit_s`.
bool Dispatcher::drive(Execution& execution, Continuation& continuation, Deadline& deadline,
                       const Interrupted& interrupted, double limit_s) {
    while (executor_.advance(execution, deadline, interrupted, limit_s)) {
        if (!continuation) return true;
        try {
            std::optional<Execution> next = std::exchange(continuation, nullptr)();
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
                     Continuation continuation) {
    members_.require_own_process();
    if (nothing_before()) {
        const DriverClaim claim(*this);
        if (claim &&
            nothing_before()) {  // checked again: the previous driver may have queued a call
            Deadline deadline(timeout_s);
            drive(execution, continuation, deadline, interrupted, 0);
            return;
        }
    }
    if (driven_from_here()) {
        refuse(std::string(name_of(execution.args.op)) + ": " + kInHandler);
        throw Error(Fault::invalid, kInHandler);
    }
    const auto job = or_fail([&] {
        return std::make_shared<Job>(std::move(execution), timeout_s, std::move(continuation));
    });
    enqueue(job);
    try {
        work_until(*job, interrupted);
    } catch (...) {
        withdraw(*job);  // after this, no thread uses the caller's memory
        throw;
    }
    if (job->error_) throw *job->error_;
}

std::shared_ptr<Job> Dispatcher::submit(Execution execution, double timeout_s, double inline_s,
                                        Continuation continuation) {
    members_.require_own_process();
    auto job = or_fail([&] {
        return std::make_shared<Job>(std::move(execution), timeout_s, std::move(continuation));
    });
    if (inline_s > 0 && nothing_before()) {
        const DriverClaim claim(*this);
        if (claim && nothing_before()) {
            if (advance(*job, {}, inline_s)) return job;
            // The job is queued while this thread still has the claim (the right to run calls).
            // Otherwise another thread could run a different call while this call has started but
            // not ended.
            enqueue(job);
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
            const bool alone = !thread_.joinable();  // no progress thread could be started
            if (!alone || driving())
                changed_->wait_for(lock,
                                   std::min<std::chrono::duration<double>>(left, kSignalCheck));
            lock.unlock();  // a signal handler may call any function
            if (alone) work_for(left.count(), interrupted);
            check_interrupt(interrupted, members_);
            lock.lock();
        }
    }
    if (job.done() && job.error_) throw *job.error_;
    return job.done();
}

// Drives the executor until the job is done. If another thread drives the executor, waits for the
// job.
void Dispatcher::work_until(Job& job, const Interrupted& interrupted) {
    while (!job.done()) {
        if (const DriverClaim claim(*this); claim) {
            while (auto next = job.done() ? nullptr : front()) advance(*next, interrupted, 0);
            continue;
        }
        if (driven_from_here()) throw Error(Fault::invalid, kInHandler);
        std::unique_lock lock(mutex_);
        changed_->wait_for(lock, kSignalCheck, [&] { return job.done() || !driving(); });
        lock.unlock();
        check_interrupt(interrupted, members_);
    }
}

// Drives the first job of the queue, unless another thread drives the executor.
void Dispatcher::work_for(double limit_s, const Interrupted& interrupted) {
    const DriverClaim claim(*this);
    if (!claim) return;
    const auto first = front();
    if (!first) return;
    const double until_s = first->deadline_.elapsed_s() + limit_s;
    if (advance(*first, interrupted, until_s)) return;
    const std::lock_guard lock(mutex_);
    driven_ = nullptr;
    if (stopping_) drop_queued();
}

// Runs the job. Returns true if the job has ended, with or without an error. Throws only if a
// signal has ended the job: the calling thread is interrupted even if the job belongs to another
// thread.
bool Dispatcher::advance(Job& job, const Interrupted& interrupted, double limit_s) {
    std::exception_ptr interruption;
    try {
        if (!drive(job.execution_, job.continuation_, job.deadline_, interrupted, limit_s))
            return false;
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
    const bool was_queued = !queue_.empty() && queue_.front().get() == &job;
    if (was_queued) {
        queue_.pop_front();
        queued_.fetch_sub(1);
        driven_ = nullptr;
    }
    job.ended_ns_ = steady_now_ns();
    job.done_.store(true, std::memory_order_release);
    // If the job was never queued, no other thread waits for it. A needless wake-up of the progress
    // thread would take a core from a peer.
    if (was_queued) changed_->notify_all();
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

// Removes the job from the queue. After this function returns, no thread uses the job.
void Dispatcher::withdraw(Job& job) noexcept {
    std::unique_lock lock(mutex_);
    changed_->wait(lock, [&] { return driven_ != &job; });
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [&](const auto& queued) { return queued.get() == &job; });
    if (found == queue_.end()) return;
    executor_.abandon(job.execution_, "its caller was interrupted");
    queue_.erase(found);
    queued_.fetch_sub(1);
}

std::shared_ptr<Job> Dispatcher::front() {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) return nullptr;
    driven_ = queue_.front().get();
    return queue_.front();
}

// Ends this thread's right to run calls. Another thread may queue a call, or stop the dispatcher,
// at the same time. The order of the accesses guarantees that either that thread sees that the
// claim has ended, or this function sees the queued call or the stop, and wakes the waiting
// threads.
void Dispatcher::end_claim() noexcept {
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
        const DriverClaim claim(*this);
        if (!claim) continue;
        try {
            if (auto job = front()) advance(*job, {}, 0);
        } catch (const Error&) {  // thrown by Python code in this thread; the job stores the error
        }
    }
}

// Waits for the running call, so that the process does not end before the call. Peers no longer
// check if this rank is alive, because it has left.
void Dispatcher::await_driver(std::unique_lock<std::mutex>& lock) noexcept {
    changed_->wait_for(lock, kDriverWait, [this] { return quiet(); });
}

bool Dispatcher::await_idle() noexcept {
    if (driven_from_here()) return false;
    std::unique_lock lock(mutex_);
    await_driver(lock);
    return !driving();
}

// Drops the queued calls of a closed group. Requires the lock.
void Dispatcher::drop_queued() noexcept {
    std::erase_if(queue_, [this](const std::shared_ptr<Job>& job) {
        if (job.get() == driven_) return false;  // the thread that runs it finds the group closed
        executor_.abandon(job->execution_, "the communicator was closed");
        job->error_ = kClosed;
        job->ended_ns_ = steady_now_ns();
        job->done_.store(true, std::memory_order_release);
        queued_.fetch_sub(1);
        return true;
    });
    changed_->notify_all();
}

void Dispatcher::stop() noexcept {
    if (members_
            .in_child()) {  // the thread, and perhaps the lock's holder, exist only in the parent
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

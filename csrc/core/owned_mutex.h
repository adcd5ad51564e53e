// A mutex that knows whether this thread has it.
//
// Python's code runs while a transport is moved whose library is a Python object; and with it, in
// the main thread, handlers of signals. One that calls the library again would wait for its own
// thread.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "core/error.h"

namespace unisono {

class OwnedMutex {
  public:
    void lock() {
        if (held_here())
            throw Error(Fault::invalid,
                        "a signal handler cannot use a communicator whose messages the interrupted "
                        "thread is just moving");
        mutex_.lock();
        owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    [[nodiscard]] bool try_lock() noexcept {
        if (held_here() || !mutex_.try_lock()) return false;
        owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
        return true;
    }
    void unlock() noexcept {
        owner_.store(std::thread::id(), std::memory_order_relaxed);
        mutex_.unlock();
    }
    // Nobody but this thread itself ever stores its number.
    [[nodiscard]] bool held_here() const noexcept {
        return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
    }

  private:
    std::mutex mutex_;
    std::atomic<std::thread::id> owner_;
};

}  // namespace unisono

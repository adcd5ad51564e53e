// A mutex that can tell if the calling thread holds it.
//
// A message library may be a Python object, so Python code may run while a thread holds the mutex
// and moves messages. In the main thread, signal handlers may then run, too. A signal handler that
// calls this library again would wait for its own thread.
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
                        "a signal handler cannot use this communicator: the interrupted thread is "
                        "moving its messages");
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
    // Only the thread itself ever stores its own id.
    [[nodiscard]] bool held_here() const noexcept {
        return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
    }

  private:
    std::mutex mutex_;
    std::atomic<std::thread::id> owner_;
};

}  // namespace unisono

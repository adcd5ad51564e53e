// Events that a group raises for the thread that communicates with the other hosts.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "core/error.h"
#include "memory/segment.h"

namespace unisono {

enum class Event : uint32_t {
    // The group has failed on this host: the thread reports the failure to the other hosts.
    failed = 1,
    // A rank has waited for a long time: the thread asks the other hosts for their last calls.
    slow_wait = 2,
};

class Events {
  public:
    Events() = default;
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;
    ~Events() { const Descriptor last(fd_.load()); }
    // Returns a descriptor that is readable after a raise(). The first call creates it, because a
    // group on one host needs none.
    [[nodiscard]] int fd() {
        if (fd_.load() < 0) {
            Descriptor made(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
            if (made.get() < 0) throw_errno("making a group's eventfd");
            fd_.store(made.release());
            if (bits_.load() != 0) ring();
        }
        return fd_.load();
    }
    // Raises an event. Any thread may call this.
    void raise(Event event) noexcept {
        const auto bit = static_cast<uint32_t>(event);
        if (!(bits_.fetch_or(bit) & bit)) ring();
    }
    // Returns the events raised since the last take(), as bits.
    uint32_t take() noexcept {
        uint64_t count = 0;
        static_cast<void>(!::read(fd_.load(), &count, sizeof(count)));
        return bits_.exchange(0);
    }

  private:
    void ring() noexcept {
        const uint64_t one = 1;
        static_cast<void>(!::write(fd_.load(), &one, sizeof(one)));
    }

    // raise() sets a bit before it loads the descriptor, and fd() stores the descriptor before it
    // loads the bits. So raise() sees the descriptor, or fd() sees the bit.
    std::atomic<int> fd_{-1};
    std::atomic<uint32_t> bits_{0};
};

}  // namespace unisono

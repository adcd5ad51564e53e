// What a group has to tell the thread that speaks with the other hosts.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "error.h"
#include "segment.h"

namespace unisono {

enum class Event : uint32_t {
    failed = 1,   // the group failed here: the others have to hear of it
    anxious = 2,  // a rank has waited for long: what have the others called?
};

class Events {
  public:
    Events() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (fd_.get() < 0) throw_errno("making a group's eventfd");
    }
    [[nodiscard]] int fd() const noexcept { return fd_.get(); }
    // From any thread.
    void raise(Event event) noexcept {
        const auto bit = static_cast<uint32_t>(event);
        if (bits_.fetch_or(bit, std::memory_order_acq_rel) & bit) return;
        const uint64_t one = 1;
        static_cast<void>(!::write(fd_.get(), &one, sizeof(one)));
    }
    // What was raised since the last time, as bits.
    uint32_t take() noexcept {
        uint64_t count = 0;
        static_cast<void>(!::read(fd_.get(), &count, sizeof(count)));
        return bits_.exchange(0, std::memory_order_acq_rel);
    }

  private:
    Descriptor fd_;
    std::atomic<uint32_t> bits_{0};
};

}  // namespace unisono

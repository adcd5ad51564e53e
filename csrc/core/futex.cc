#include "core/futex.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace unisono {

// Does not use the _PRIVATE operations, because several processes map the word.
Woken futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, double timeout_s) noexcept {
    timespec limit{};
    limit.tv_sec = static_cast<time_t>(timeout_s);
    limit.tv_nsec = static_cast<long>((timeout_s - static_cast<double>(limit.tv_sec)) * 1e9);
    const long rc = ::syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT, seen,
                              &limit, nullptr, 0);
    if (rc == 0 || errno == EAGAIN) return Woken::rung;
    return errno == EINTR ? Woken::interrupted : Woken::timed_out;
}

bool register_for_heavy_barrier() noexcept {
    return ::syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
}

void heavy_barrier() noexcept {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    ::syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
}

void futex_wake_all(const std::atomic<uint32_t>& word) noexcept {
    ::syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
              nullptr, 0);
}

}  // namespace unisono

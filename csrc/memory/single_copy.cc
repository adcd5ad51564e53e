#include "memory/single_copy.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <string>

#include "kernels/kernels.h"

namespace unisono {
namespace {

// When a process ends, the kernel first removes its memory and only some time later its lock. So
// after a failed copy, the check of the lock is repeated for a while.
constexpr int kChecks = 500;
constexpr useconds_t kBetweenChecks_us = 1000;
// Time for which a rank that was found counts as found. A pid gets a new process only after the
// kernel has given all other pids, which takes longer.
constexpr int64_t kTrusted_ms = 20;

// Reads the clock of the kernel's timer ticks, because it costs a few nanoseconds only.
int64_t coarse_now_ms() noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1000000;
}

}  // namespace

CrossMemory::CrossMemory(View& view, Membership& members, SharedHeap& heap)
    : view_(view),
      members_(members),
      heap_(heap),
      token_{view.own().process.load(std::memory_order_relaxed), view.rank()},
      checked_ms_(view.ranks()) {
    view.own().token.store(reinterpret_cast<uintptr_t>(&token_), std::memory_order_release);
}

bool CrossMemory::reach_all() const noexcept {
    const auto& here = view_.here();
    return std::all_of(here.begin(), here.end(), [this](uint32_t rank) { return reach(rank); });
}

bool CrossMemory::reach(uint32_t rank) const noexcept {
    const RankControl& peer = view_.control(rank);
    const uint64_t address = peer.token.load(std::memory_order_acquire);
    Token found{0, 0};
    return address != 0 &&
           fetch(rank, &found, reinterpret_cast<const void*>(address), sizeof found) ==
               sizeof found &&
           found.rank == rank && found.process == peer.process.load(std::memory_order_relaxed);
}

// Returns true if the rank's pid still names the rank's process. A rank that has died may not be
// noticed for a long time, and another process may then have its pid.
bool CrossMemory::is_still(uint32_t rank) noexcept {
    const int64_t now_ms = coarse_now_ms();
    std::atomic<int64_t>& checked_ms = checked_ms_[rank];
    if (now_ms - checked_ms.load(std::memory_order_relaxed) < kTrusted_ms) return true;
    if (!reach(rank)) return false;
    checked_ms.store(now_ms, std::memory_order_relaxed);
    return true;
}

int64_t CrossMemory::fetch(uint32_t rank, void* dst, const void* theirs,
                           uint64_t bytes) const noexcept {
    const iovec to{dst, bytes}, from{const_cast<void*>(theirs), bytes};
    return ::process_vm_readv(view_.control(rank).pid.load(std::memory_order_relaxed), &to, 1,
                              &from, 1, 0);
}

void CrossMemory::read(uint32_t rank, std::byte* dst, const std::byte* theirs, uint64_t bytes) {
    if (bytes > 0 && !is_still(rank)) explain(rank, ESRCH, "read");
    while (bytes > 0) {
        const int64_t got = fetch(rank, dst, theirs, bytes);
        if (got <= 0) explain(rank, got < 0 ? errno : EFAULT, "read");
        dst += got;
        theirs += got;
        bytes -= static_cast<uint64_t>(got);
    }
}

uint64_t CrossMemory::location_of(const std::byte* memory, uint64_t bytes) const noexcept {
    if (heap_.contains(memory, bytes)) return kInHeap | heap_.offset_of(memory);
    return reinterpret_cast<uintptr_t>(memory);
}

void CrossMemory::read_at(uint32_t rank, std::byte* dst, uint64_t location, uint64_t at,
                          uint64_t bytes) {
    if (is_in_heap(location)) {
        std::memcpy(dst, heap_.at(rank, (location & ~kInHeap) + at, bytes), bytes);
    } else {
        read(rank, dst, reinterpret_cast<const std::byte*>(location) + at, bytes);
    }
}

// Tries process_vm_writev with no data, because a sandbox may permit process_vm_readv and forbid
// this call.
bool CrossMemory::may_write() noexcept {
    return ::process_vm_writev(::getpid(), nullptr, 0, nullptr, 0, 0) == 0;
}

int CrossMemory::write(uint32_t rank, const std::atomic<uint64_t>* to, const std::byte* data,
                       uint64_t bytes) noexcept {
    static_assert(sizeof(iovec) == 2 * sizeof(std::atomic<uint64_t>));
    if (!is_still(rank)) return ESRCH;
    const iovec from{const_cast<std::byte*>(data), bytes};
    const ssize_t wrote =
        ::process_vm_writev(view_.control(rank).pid.load(std::memory_order_relaxed), &from, 1,
                            reinterpret_cast<const iovec*>(to), 1, 0);
    if (wrote == static_cast<ssize_t>(bytes)) return 0;
    return wrote < 0 ? errno : EFAULT;
}

// Throws the reason of a failed copy: the rank is gone, it has given up the call, or it has
// unmapped memory that was in use.
void CrossMemory::explain(uint32_t rank, int error, const char* verb) {
    for (int look = 0; look < kChecks; ++look) {
        members_.require_peers_alive();
        ::usleep(kBetweenChecks_us);
    }
    // The failure is recorded even if there is no memory for the text. Otherwise ranks that wait
    // for this copy would treat it as done.
    members_.fail_made(Fault::aborted, [&] {
        return "rank " + std::to_string(members_.rank()) + " cannot " + verb +
               " the memory that rank " + std::to_string(rank) +
               " shares in this call: " + std::strerror(error);
    });
}

}  // namespace unisono

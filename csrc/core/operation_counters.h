// Counters of one rank's calls in a group, by operation: calls, bytes and waits. They are always
// on.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/call.h"

namespace unisono {

// The rows of the counters: one for each operation of the program, one for all calls that the
// library makes for itself, two for messages, four for windows.
inline constexpr uint32_t kInternalRow = static_cast<uint32_t>(OpKind::split),
                          kSendRow = kInternalRow + 1, kReceiveRow = kInternalRow + 2,
                          kPutRow = kInternalRow + 3, kGetRow = kInternalRow + 4,
                          kSignalRow = kInternalRow + 5, kWaitRow = kInternalRow + 6,
                          kCounterRows = kInternalRow + 7;

// The amounts that a call adds to its row. They depend on the operation and the lengths only, so
// they are known before the first run; see unisono.communicator.call_volume.
struct CallVolume {
    uint32_t row = 0;
    // Calls of the program; more than 1 if the library has packed several into one.
    uint32_t calls = 0;
    uint64_t bytes_sent = 0, bytes_received = 0;
};

class OperationCounters {
  public:
    struct alignas(64) Row {
        std::atomic<uint64_t> calls{0}, bytes_sent{0}, bytes_received{0};
        std::atomic<uint64_t> waited_ns{0};
    };

    // Adds a call that has succeeded. Only one thread at a time may add to a row, so no atomic
    // read-modify-write is needed. Any thread may read.
    void add(const CallVolume& volume) noexcept {
        Row& row = rows_[volume.row];
        raise(row.calls, volume.calls);
        raise(row.bytes_sent, volume.bytes_sent);
        raise(row.bytes_received, volume.bytes_received);
    }
    // Adds a call to a row to which several threads may add at once.
    void add_from_any_thread(const CallVolume& volume) noexcept {
        Row& row = rows_[volume.row];
        row.calls.fetch_add(volume.calls, std::memory_order_relaxed);
        if (volume.bytes_sent > 0)
            row.bytes_sent.fetch_add(volume.bytes_sent, std::memory_order_relaxed);
        if (volume.bytes_received > 0)
            row.bytes_received.fetch_add(volume.bytes_received, std::memory_order_relaxed);
    }
    // Returns the nanoseconds of a row's waits. Any thread may add to them.
    [[nodiscard]] std::atomic<uint64_t>& waited_ns(uint32_t row) noexcept {
        return rows_[row].waited_ns;
    }
    [[nodiscard]] const Row& row(uint32_t number) const noexcept { return rows_[number]; }

  private:
    static void raise(std::atomic<uint64_t>& counter, uint64_t by) noexcept {
        counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
    }

    std::array<Row, kCounterRows> rows_;
};

// Adds the time since `begun` to a counter at the end of a wait, also if an exception ends the
// wait.
class WaitTime {
  public:
    using Clock = std::chrono::steady_clock;
    WaitTime(std::atomic<uint64_t>& waited_ns, Clock::time_point begun) noexcept
        : waited_ns_(waited_ns), begun_(begun) {}
    WaitTime(const WaitTime&) = delete;
    WaitTime& operator=(const WaitTime&) = delete;
    ~WaitTime() { add(waited_ns_, Clock::now() - begun_); }

    static void add(std::atomic<uint64_t>& waited_ns, Clock::duration waited) noexcept {
        const auto ns = std::chrono::nanoseconds(waited).count();
        if (ns > 0) waited_ns.fetch_add(static_cast<uint64_t>(ns), std::memory_order_relaxed);
    }

  private:
    std::atomic<uint64_t>& waited_ns_;
    Clock::time_point begun_;
};

}  // namespace unisono

// The ring of a rank's last events. The layout is that of src/unisono/timeline/event_kinds.py.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "bind/buffer.h"
#include "execution/dispatcher.h"

namespace unisono::bind {

// The kinds of events that C++ code records, with the values of event_kinds.py.
enum class EventKind : uint16_t {
    submitted = 1,
    launched = 2,
    transferred = 4,
    waited = 5,
    planned = 9,
};

// An entry of the ring. A reader accepts an entry only if its two sequence numbers are equal.
struct TimelineEntry {
    uint64_t sequence;
    int64_t time_ns, begun_ns, ended_ns, number, value;
    uint32_t name;
    uint16_t kind, thread;
    std::atomic<uint64_t> check;
};
static_assert(sizeof(TimelineEntry) == 64);

class TimelineRing {
  public:
    // The ring stores numbers instead of names. `ids` maps each known name to its number,
    // `add(name)` gives a new name a number, and `name_thread` returns the number of the calling
    // thread's name. `clock` replaces the steady clock unless it is None.
    TimelineRing(Address entries, uint64_t count, nanobind::object keep, nanobind::dict ids,
                 nanobind::callable add, nanobind::callable name_thread, nanobind::object clock)
        : entries_(reinterpret_cast<TimelineEntry*>(at(entries))),
          count_(count),
          keep_(std::move(keep)),
          ids_(std::move(ids)),
          add_(std::move(add)),
          name_thread_(std::move(name_thread)),
          clock_(std::move(clock)) {}

    void record(uint16_t kind, nanobind::str name, int64_t number, int64_t value, int64_t begun_ns,
                int64_t ended_ns) {
        if (!writes_) return;
        const uint32_t name_id = id_of(name);
        const uint16_t thread = thread_id();
        const int64_t now_ns =
            clock_.is_none() ? steady_now_ns() : nanobind::cast<int64_t>(clock_());
        const uint64_t sequence = last_.fetch_add(1, std::memory_order_relaxed) + 1;
        TimelineEntry& entry = entries_[sequence % count_];
        entry.check.store(0, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        entry.sequence = sequence;
        entry.time_ns = now_ns;
        entry.begun_ns = begun_ns;
        entry.ended_ns = ended_ns;
        entry.number = number;
        entry.value = value;
        entry.name = name_id;
        entry.kind = kind;
        entry.thread = thread;
        entry.check.store(sequence, std::memory_order_release);
    }

    void record(EventKind kind, nanobind::str name, int64_t number, int64_t value,
                int64_t begun_ns = 0, int64_t ended_ns = 0) {
        record(static_cast<uint16_t>(kind), std::move(name), number, value, begun_ns, ended_ns);
    }

    // Makes `record` do nothing. Called in a forked child, because the ring belongs to the parent.
    void disown() noexcept { writes_ = false; }

  private:
    uint32_t id_of(const nanobind::str& name) {
        PyObject* found = PyDict_GetItemWithError(ids_.ptr(), name.ptr());
        if (found != nullptr) return nanobind::cast<uint32_t>(nanobind::handle(found));
        if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
        return nanobind::cast<uint32_t>(add_(name));
    }

    uint16_t thread_id() {
        thread_local uint64_t ring = 0;
        thread_local uint16_t id = 0;
        if (ring != serial_) {
            id = nanobind::cast<uint16_t>(name_thread_());
            ring = serial_;
        }
        return id;
    }

    static inline std::atomic<uint64_t> rings_{0};

    TimelineEntry* entries_;
    uint64_t count_;
    nanobind::object keep_;  // keeps the memory alive
    nanobind::dict ids_;
    nanobind::callable add_, name_thread_;
    nanobind::object clock_;
    // Unique number of this ring; the address may be reused by another ring.
    uint64_t serial_ = ++rings_;
    std::atomic<uint64_t> last_{0};
    bool writes_ = true;
};

}  // namespace unisono::bind

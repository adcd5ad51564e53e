// The simulator's event loop: tasks that depend on each other, and their flows over shared links.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "simulator/deadlines.h"
#include "simulator/event_queue.h"
#include "simulator/ragged_lists.h"
#include "simulator/sharing.h"
#include "simulator/usage.h"

namespace unisono::simulator {

// The paths that tasks can take. Every span has an entry for each path; see `Sharing` for
// resources.
struct Paths {
    Lists resources;
    std::span<const double> weights;  // One for each entry of resources.values; empty: all are 1.
    // The server through which each task passes first, one task after the other; -1: none.
    std::span<const int32_t> server;
    std::span<const double> busy_s;  // Time that the server takes for each task.
    // Delay between the server and the departure of the first byte.
    std::span<const double> delay_s;
    std::span<const double> tail_s;  // delay between the departure of the last byte and its arrival
};

// A task starts once all its needs have arrived. It then sends its bytes along its path, at the
// max-min fair rate. Every span has an entry for each task.
struct Tasks {
    std::span<const int32_t> path;
    // If infinite, the task never ends, and the simulation does not wait for it.
    std::span<const double> bytes;
    Lists needs;  // Tasks that must have arrived.
    // Another task, whose last byte must have left before this task starts; -1: none. The span may
    // be empty, which means none for all tasks.
    std::span<const int32_t> after;
};

// Results for each task: the times at which it began to send and at which it arrived, and the last
// task that it waited for.
struct Times {
    std::span<double> begun_s;
    std::span<double> arrived_s;
    std::span<int32_t> cause;
};

class Engine {
  public:
    // The memory of the spans must outlive the engine. `bins` is the number of time bins for the
    // usage, or 0 for none.
    Engine(std::span<const double> capacity, const Paths& paths, const Tasks& tasks, Times times,
           uint32_t bins);

    // Processes about `events` events. Returns true if more remain.
    bool advance(uint64_t events);

    // Returns the number of tasks that have not arrived, without tasks of infinite length.
    [[nodiscard]] uint64_t to_come() const { return to_come_; }
    [[nodiscard]] double now_s() const { return now_; }
    [[nodiscard]] const Usage& usage() const { return usage_; }

  private:
    struct Event {
        int32_t task;
        bool arrives;  // true: the task arrives; false: it begins
    };
    struct Member {
        double target;  // value of ActivePath::served at which this flow finishes
        int32_t task;
        auto operator<=>(const Member&) const = default;
    };
    // A path with flows. At each time all flows of the path have the same rate, so one counter of
    // bytes (`served`) is enough for all of them. Each flow remembers the value of this counter at
    // which it finishes.
    struct ActivePath {
        int32_t path = -1;
        double served = 0;
        double since = 0;
        double rate = 0;
        bool woken = false;
        std::vector<Member> members;  // a heap
    };

    static size_t index(int32_t i) { return static_cast<size_t>(i); }
    void ready(int32_t task);
    void begin(int32_t task);
    void departed(int32_t task);
    void count(int32_t path, double bytes);
    void arrive(int32_t task);
    void release(int32_t task, int32_t by);
    void finish(int32_t active);
    [[nodiscard]] bool more() const;
    [[nodiscard]] double next_s() const;
    void drain();
    void update();
    void serve(ActivePath& active);
    void wake(int32_t active);
    int32_t active_path_of(int32_t path);

    Paths paths_;
    Tasks tasks_;
    Times times_;
    Sharing sharing_;
    Usage usage_;
    Clock<Event> clock_;
    Deadlines finish_times_;      // By active path: time at which the path's next flow finishes.
    std::vector<int32_t> waits_;  // By task: number of events that the task still waits for.
    // The tasks that need a task, in one list for each task; wanted_starts_ has the start of each
    // list.
    std::vector<int32_t> wanted_by_;
    std::vector<int64_t> wanted_starts_;
    std::vector<int32_t> next_;       // By task: a task that waits until this one's last byte left.
    std::vector<double> free_s_;      // By server: time at which the server is free.
    std::vector<int32_t> active_at_;  // By path: index of the path in active_paths_; -1: none.
    std::vector<ActivePath> active_paths_;
    std::vector<int32_t> idle_, woken_, ready_;
    std::vector<Event> events_;
    double now_ = 0;
    uint64_t to_come_ = 0;
    struct Endless {
        int32_t active;
        double served;  // value of `served` when the flow began
    };
    std::vector<Endless> endless_;
};

}  // namespace unisono::simulator

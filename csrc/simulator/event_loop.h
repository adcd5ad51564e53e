// The event loop: tasks that wait for each other, and the flows that they send over shared links.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "simulator/clock.h"
#include "simulator/deadlines.h"
#include "simulator/lists.h"
#include "simulator/sharing.h"
#include "simulator/usage.h"

namespace unisono::simulator {

// Where a task can go. One entry for each path in all spans; see `Sharing` for resources.
struct Paths {
    Lists resources;
    std::span<const double> weights;  // one for each of resources.values; none: all are 1
    std::span<const int32_t> server;  // which serves one task after the other first; -1: none
    std::span<const double> busy_s;   // how long it is busy with each
    std::span<const double> delay_s;  // then, before the first byte leaves
    std::span<const double> tail_s;   // from the last byte leaving to its arrival
};

// A task goes a path once all that it needs is there: so many bytes at the rate that max-min
// fairness gives. One entry for each task in all spans.
struct Tasks {
    std::span<const int32_t> path;
    std::span<const double> bytes;  // infinite: it goes on to the end, and the end does not wait
    Lists needs;                    // tasks that must have arrived
    std::span<const int32_t>
        after;  // a task whose last byte must have left; -1: none. Or no entries
};

// When each task began to send, and arrived; which of those that it waited for was the last.
struct Times {
    std::span<double> begun_s;
    std::span<double> arrived_s;
    std::span<int32_t> cause;
};

class Engine {
  public:
    // What the spans show must outlive the engine. `bins`: of the usage over time; 0: none.
    Engine(std::span<const double> capacity, const Paths& paths, const Tasks& tasks, Times times,
           uint32_t bins);

    // Goes on for about so many events; whether there is more to do.
    bool advance(uint64_t events);

    // Tasks that have not arrived; those without end do not count.
    [[nodiscard]] uint64_t to_come() const { return to_come_; }
    [[nodiscard]] double now_s() const { return now_; }
    [[nodiscard]] const Usage& usage() const { return usage_; }

  private:
    struct Event {
        int32_t task;
        bool arrives;  // else it begins
    };
    struct Member {
        double target;  // bytes that the lane has served a flow when this one is through
        int32_t task;
        auto operator<=>(const Member&) const = default;
    };
    // The flows of one path. All get the same bytes from now on, so one counter serves all.
    struct Lane {
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
    void left(int32_t task);
    void count(int32_t path, double bytes);
    void arrive(int32_t task);
    void release(int32_t task, int32_t by);
    void finish(int32_t lane);
    [[nodiscard]] bool more() const;
    [[nodiscard]] double next_s() const;
    void drain();
    void update();
    void serve(Lane& lane);
    void wake(int32_t lane);
    int32_t lane_of(int32_t path);

    Paths paths_;
    Tasks tasks_;
    Times times_;
    Sharing sharing_;
    Usage usage_;
    Clock<Event> clock_;
    Deadlines through_;               // of each lane, when its next flow is through
    std::vector<int32_t> waits_;      // of each task, how many more must come before it
    std::vector<int32_t> wanted_by_;  // tasks that need each, in lists
    std::vector<int64_t> wanted_starts_;
    std::vector<int32_t> next_;     // who waits for each to have left
    std::vector<double> free_s_;    // of each server
    std::vector<int32_t> lane_at_;  // of each path; -1: none
    std::vector<Lane> lanes_;
    std::vector<int32_t> idle_, woken_, ready_;
    std::vector<Event> events_;
    double now_ = 0;
    uint64_t to_come_ = 0;
    struct Endless {
        int32_t lane;
        double served;  // what the lane had served when it began
    };
    std::vector<Endless> endless_;
};

}  // namespace unisono::simulator

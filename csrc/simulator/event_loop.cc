#include "simulator/event_loop.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace unisono::simulator {

Engine::Engine(std::span<const double> capacity, const Paths& paths, const Tasks& tasks,
               Times times, uint32_t bins)
    : paths_(paths),
      tasks_(tasks),
      times_(times),
      sharing_(capacity, paths.resources, paths.weights),
      usage_(capacity.size(), bins),
      waits_(tasks.path.size(), 0),
      wanted_by_(tasks.needs.values.size()),
      wanted_starts_(tasks.path.size() + 1, 0),
      active_at_(paths.resources.size(), -1) {
    const size_t count = tasks_.path.size();
    for (const int32_t needed : tasks_.needs.values) ++wanted_starts_[index(needed) + 1];
    for (size_t i = 0; i < count; ++i) wanted_starts_[i + 1] += wanted_starts_[i];
    std::vector<int64_t> fill(wanted_starts_.begin(), wanted_starts_.end() - 1);
    for (size_t i = 0; i < count; ++i) {
        const auto needs = tasks_.needs[i];
        waits_[i] = static_cast<int32_t>(needs.size());
        for (const int32_t needed : needs)
            wanted_by_[static_cast<size_t>(fill[index(needed)]++)] = static_cast<int32_t>(i);
    }
    if (!tasks_.after.empty()) {
        next_.assign(count, -1);
        for (size_t i = 0; i < count; ++i) {
            if (tasks_.after[i] < 0) continue;
            next_[index(tasks_.after[i])] = static_cast<int32_t>(i);
            ++waits_[i];
        }
    }
    const auto servers = paths_.server.empty() ? -1 : *std::ranges::max_element(paths_.server);
    free_s_.assign(static_cast<size_t>(servers + 1), 0.0);
    std::ranges::fill(times_.cause, -1);
    for (size_t i = 0; i < count; ++i) {
        if (waits_[i] == 0) ready_.push_back(static_cast<int32_t>(i));
        if (!std::isinf(tasks_.bytes[i])) ++to_come_;
    }
    drain();
    update();
}

bool Engine::advance(uint64_t events) {
    uint64_t seen = 0;
    while (more() && seen < events) {
        now_ = next_s();
        const double until = now_ * (1 + kInstant);
        clock_.take(until, events_);
        seen += events_.size();
        for (; !finish_times_.empty() && finish_times_.time() <= until; ++seen)
            finish(finish_times_.id());
        for (const Event& event : events_) {
            if (event.arrives) {
                arrive(event.task);
            } else {
                begin(event.task);
            }
        }
        drain();
        update();
    }
    if (more()) return true;
    for (const auto& [number, served] : endless_) {
        ActivePath& active = active_paths_[index(number)];
        serve(active);
        count(active.path, active.served - served);
    }
    endless_.clear();
    return false;
}

bool Engine::more() const {
    return to_come_ != 0 && !(clock_.empty() && finish_times_.empty());
}

double Engine::next_s() const {
    if (finish_times_.empty()) return clock_.time();
    return clock_.empty() ? finish_times_.time() : std::min(clock_.time(), finish_times_.time());
}

// Starts the ready tasks, and the tasks that these make ready at the same time.
void Engine::drain() {
    for (size_t i = 0; i < ready_.size(); ++i) ready(ready_[i]);
    ready_.clear();
}

void Engine::ready(int32_t task) {
    const size_t path = index(tasks_.path[index(task)]);
    double start = now_;
    if (const int32_t server = paths_.server[path]; server >= 0) {
        start = std::max(start, free_s_[index(server)]) + paths_.busy_s[path];
        free_s_[index(server)] = start;
    }
    start += paths_.delay_s[path];
    if (start > now_) {
        clock_.at(start, {task, false});
    } else {
        begin(task);
    }
}

void Engine::begin(int32_t task) {
    times_.begun_s[index(task)] = now_;
    const int32_t path = tasks_.path[index(task)];
    const double bytes = tasks_.bytes[index(task)];
    if (bytes <= 0 || paths_.resources[index(path)].empty()) {
        departed(task);
        return;
    }
    const int32_t number = active_path_of(path);
    ActivePath& active = active_paths_[index(number)];
    serve(active);
    if (std::isinf(bytes)) endless_.push_back({number, active.served});
    active.members.push_back({active.served + bytes, task});
    std::push_heap(active.members.begin(), active.members.end(), std::greater<>());
    sharing_.change(path, 1);
    wake(number);
}

// Finishes the next flow of a path, and flows that finish at the same time.
void Engine::finish(int32_t number) {
    ActivePath& active = active_paths_[index(number)];
    const double target = active.members.front().target;
    serve(active);
    active.served = target;
    finish_times_.remove(number);
    wake(number);
    while (!active.members.empty() && active.members.front().target <= target * (1 + kInstant)) {
        const int32_t task = active.members.front().task;
        std::pop_heap(active.members.begin(), active.members.end(), std::greater<>());
        active.members.pop_back();
        sharing_.change(active.path, -1);
        departed(task);
    }
}

void Engine::departed(int32_t task) {
    const int32_t path = tasks_.path[index(task)];
    count(path, tasks_.bytes[index(task)]);
    if (!next_.empty() && next_[index(task)] >= 0) release(next_[index(task)], task);
    const double tail = paths_.tail_s[index(path)];
    if (tail > 0) {
        clock_.at(now_ + tail, {task, true});
    } else {
        arrive(task);
    }
}

void Engine::count(int32_t path, double bytes) {
    const auto resources = paths_.resources[index(path)];
    const int64_t first = paths_.resources.starts[index(path)];
    for (size_t i = 0; i < resources.size(); ++i)
        usage_.add(index(resources[i]), bytes * sharing_.weight(first + static_cast<int64_t>(i)));
}

void Engine::arrive(int32_t task) {
    times_.arrived_s[index(task)] = now_;
    --to_come_;
    const auto first = static_cast<size_t>(wanted_starts_[index(task)]);
    const auto last = static_cast<size_t>(wanted_starts_[index(task) + 1]);
    for (size_t i = first; i < last; ++i) release(wanted_by_[i], task);
}

void Engine::release(int32_t task, int32_t by) {
    if (--waits_[index(task)] != 0) return;
    times_.cause[index(task)] = by;
    ready_.push_back(task);
}

int32_t Engine::active_path_of(int32_t path) {
    int32_t& number = active_at_[index(path)];
    if (number >= 0) return number;
    if (idle_.empty()) {
        number = static_cast<int32_t>(active_paths_.size());
        active_paths_.emplace_back();
    } else {
        number = idle_.back();
        idle_.pop_back();
    }
    ActivePath& active = active_paths_[index(number)];
    active.path = path;
    active.served = 0;
    active.since = now_;
    active.rate = 0;
    return number;
}

void Engine::serve(ActivePath& active) {
    if (usage_.timed() && active.rate > 0 && now_ > active.since) {
        const auto resources = paths_.resources[index(active.path)];
        const int64_t first = paths_.resources.starts[index(active.path)];
        const double rate = active.rate * static_cast<double>(active.members.size());
        for (size_t i = 0; i < resources.size(); ++i)
            usage_.spread(index(resources[i]),
                          rate * sharing_.weight(first + static_cast<int64_t>(i)), active.since,
                          now_);
    }
    active.served += active.rate * (now_ - active.since);
    active.since = now_;
}

void Engine::wake(int32_t number) {
    ActivePath& active = active_paths_[index(number)];
    if (active.woken) return;
    active.woken = true;
    woken_.push_back(number);
}

// Computes the new rates at the end of an instant, and the time at which the next flow of each path
// finishes.
void Engine::update() {
    sharing_.settle();
    for (const auto& [path, rate] : sharing_.changes()) {
        const int32_t number = active_at_[index(path)];
        ActivePath& active = active_paths_[index(number)];
        serve(active);
        active.rate = rate;
        wake(number);
    }
    for (const int32_t number : woken_) {
        ActivePath& active = active_paths_[index(number)];
        active.woken = false;
        if (active.members.empty()) {
            active_at_[index(active.path)] = -1;
            idle_.push_back(number);
            continue;
        }
        const double left = active.members.front().target - active.served;
        if (std::isinf(left)) continue;
        finish_times_.set(number, now_ + std::max(left, 0.0) / active.rate);
    }
    woken_.clear();
}

}  // namespace unisono::simulator

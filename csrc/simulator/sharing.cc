#include "simulator/sharing.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace unisono::simulator {

namespace {

// Rates that differ by less are the same; sums of rates are rounded.
constexpr double kClose = 1e-9;

}  // namespace

Sharing::Sharing(std::span<const double> capacity, Lists paths, std::span<const double> weights)
    : capacity_(capacity),
      paths_(paths),
      weights_(weights),
      lanes_(paths.size()),
      places_(paths.values.size()),
      resources_(capacity.size()) {}

void Sharing::change(int32_t path, int delta) {
    Lane& lane = lanes_[index(path)];
    lane.flows += static_cast<uint32_t>(delta);
    if (lane.dirty) return;
    lane.dirty = true;
    dirty_lanes_.push_back(path);
}

void Sharing::settle() {
    changes_.clear();
    for (const int32_t path : dirty_lanes_) apply(path);
    ++epoch_;
    filling_.clear();
    touched_.clear();
    for (const int32_t path : dirty_lanes_) {
        Lane& lane = lanes_[index(path)];
        lane.dirty = false;
        if (lane.flows == lane.settled) continue;
        lane.settled = lane.flows;
        if (lane.flows == 0) continue;
        if (alone(path)) {
            settle_alone(path);
        } else {
            add(path);
        }
    }
    for (const int32_t resource : dirty_resources_) {
        Resource& r = resources_[index(resource)];
        r.dirty = false;
        for (const Entry& entry : r.entries)
            if (lanes_[index(entry.path)].bottleneck == resource) add(entry.path);
    }
    dirty_lanes_.clear();
    dirty_resources_.clear();
    if (filling_.empty()) return;
    do {
        fill();
    } while (grow());
    finish();
}

// Puts a lane into its resources' lists, or takes it out.
void Sharing::apply(int32_t path) {
    Lane& lane = lanes_[index(path)];
    if (lane.flows == lane.settled) return;
    if (lane.flows == 0) lane.rate = 0;
    const auto resources = paths_[index(path)];
    const int64_t first = paths_.starts[index(path)];
    for (size_t i = 0; i < resources.size(); ++i) {
        auto& entries = resources_[index(resources[i])].entries;
        const auto hop = static_cast<size_t>(first) + i;
        if (lane.settled == 0) {
            places_[hop] = static_cast<uint32_t>(entries.size());
            entries.push_back({path, static_cast<int64_t>(hop)});
        } else if (lane.flows == 0) {
            entries[places_[hop]] = entries.back();
            places_[static_cast<size_t>(entries.back().hop)] = places_[hop];
            entries.pop_back();
        }
        soil(resources[i]);
    }
}

void Sharing::soil(int32_t resource) {
    Resource& r = resources_[index(resource)];
    if (r.dirty) return;
    r.dirty = true;
    dirty_resources_.push_back(resource);
}

bool Sharing::alone(int32_t path) const {
    for (const int32_t resource : paths_[index(path)])
        if (resources_[index(resource)].entries.size() != 1) return false;
    return true;
}

void Sharing::settle_alone(int32_t path) {
    Lane& lane = lanes_[index(path)];
    const auto resources = paths_[index(path)];
    const int64_t first = paths_.starts[index(path)];
    double least = 0;
    for (size_t i = 0; i < resources.size(); ++i) {
        const double share =
            capacity_[index(resources[i])] / (weight(first + static_cast<int64_t>(i)) * lane.flows);
        if (i != 0 && share >= least) continue;
        least = share;
        lane.bottleneck = resources[i];
    }
    lane.mark = epoch_;
    if (lane.rate == least) return;
    lane.rate = least;
    changes_.push_back({path, least});
}

void Sharing::add(int32_t path) {
    Lane& lane = lanes_[index(path)];
    if (lane.mark == epoch_) return;
    lane.mark = epoch_;
    filling_.emplace_back(path, lane.rate);
    for (const int32_t resource : paths_[index(path)]) touch(resource);
}

void Sharing::touch(int32_t resource) {
    Resource& r = resources_[index(resource)];
    if (r.mark == epoch_) return;
    r.mark = epoch_;
    touched_.push_back(resource);
}

// Progressive filling of the lanes in filling_: the resource with the least for each is next.
void Sharing::fill() {
    for (const auto& [path, before] : filling_) lanes_[index(path)].fixed = false;
    heap_.clear();
    for (const int32_t resource : touched_) {
        Resource& r = resources_[index(resource)];
        r.room = capacity_[index(resource)];
        r.wanting = 0;
        r.unfixed = 0;
        for (const Entry& entry : r.entries) {
            const Lane& lane = lanes_[index(entry.path)];
            const double share = weight(entry.hop) * lane.flows;
            if (lane.mark == epoch_) {
                r.wanting += share;
                ++r.unfixed;
            } else {
                r.room -= share * lane.rate;
            }
        }
        r.room = std::max(r.room, 0.0);
        heap_.emplace_back(r.room / r.wanting, resource);
    }
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    while (!heap_.empty()) {
        std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
        const auto [key, resource] = heap_.back();
        heap_.pop_back();
        Resource& r = resources_[index(resource)];
        if (r.unfixed == 0) continue;
        const double share = std::max(r.room, 0.0) / r.wanting;
        if (share > key) {
            heap_.emplace_back(share, resource);
            std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
            continue;
        }
        for (const Entry& entry : r.entries) {
            const Lane& lane = lanes_[index(entry.path)];
            if (lane.mark == epoch_ && !lane.fixed) fix(entry.path, key, resource);
        }
    }
}

void Sharing::fix(int32_t path, double rate, int32_t bottleneck) {
    Lane& lane = lanes_[index(path)];
    lane.fixed = true;
    lane.rate = rate;
    lane.bottleneck = bottleneck;
    const auto resources = paths_[index(path)];
    const int64_t first = paths_.starts[index(path)];
    for (size_t i = 0; i < resources.size(); ++i) {
        Resource& r = resources_[index(resources[i])];
        const double share = weight(first + static_cast<int64_t>(i)) * lane.flows;
        r.room -= share * rate;
        r.wanting -= share;
        --r.unfixed;
    }
}

// Adds the lanes that are not at their fair rate any more; whether there were any.
bool Sharing::grow() {
    const size_t before = filling_.size();
    const size_t resources = touched_.size();
    for (size_t i = 0; i < resources; ++i) {
        const int32_t resource = touched_[i];
        const Resource& r = resources_[index(resource)];
        double used = 0, most = 0, level = -1;
        bool others = false;
        for (const Entry& entry : r.entries) {
            const Lane& lane = lanes_[index(entry.path)];
            used += weight(entry.hop) * lane.flows * lane.rate;
            most = std::max(most, lane.rate);
            if (lane.mark != epoch_) {
                others = true;
            } else if (lane.bottleneck == resource) {
                level = lane.rate;
            }
        }
        if (!others) continue;
        const bool full = used >= capacity_[index(resource)] * (1 - kClose);
        for (const Entry& entry : r.entries) {
            const Lane& lane = lanes_[index(entry.path)];
            if (lane.mark == epoch_) continue;
            const bool poor =
                lane.bottleneck == resource && (!full || lane.rate < most * (1 - kClose));
            const bool rich = level >= 0 && lane.rate > level * (1 + kClose);
            if (poor || rich) add(entry.path);
        }
    }
    return filling_.size() > before;
}

void Sharing::finish() {
    for (const auto& [path, before] : filling_) {
        Lane& lane = lanes_[index(path)];
        if (std::abs(lane.rate - before) <= before * 1e-13) {
            lane.rate = before;
        } else {
            changes_.push_back({path, lane.rate});
        }
    }
}

}  // namespace unisono::simulator

#include "simulator/sharing.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace unisono::simulator {

namespace {

// Relative difference below which rates count as equal, because sums of rates are rounded.
constexpr double kClose = 1e-9;
constexpr uint32_t kUpdates = 64;

}  // namespace

Sharing::Sharing(std::span<const double> capacity, Lists paths, std::span<const double> weights)
    : capacity_(capacity),
      paths_(paths),
      weights_(weights),
      active_paths_(paths.size()),
      places_(paths.values.size()),
      resources_(capacity.size()) {}

void Sharing::change(int32_t path, int delta) {
    ActivePath& active = active_paths_[index(path)];
    active.flows += static_cast<uint32_t>(delta);
    if (active.dirty) return;
    active.dirty = true;
    dirty_paths_.push_back(path);
}

void Sharing::settle() {
    changes_.clear();
    for (const int32_t path : dirty_paths_) apply(path);
    ++epoch_;
    filling_.clear();
    touched_.clear();
    for (const int32_t path : dirty_paths_) {
        ActivePath& active = active_paths_[index(path)];
        active.dirty = false;
        if (active.flows == active.settled) continue;
        active.settled = active.flows;
        if (active.flows == 0) continue;
        if (alone(path)) {
            settle_alone(path);
        } else {
            add(path);
        }
    }
    for (const int32_t resource : dirty_resources_) {
        Resource& r = resources_[index(resource)];
        r.dirty = false;
        for (int32_t path = r.first; path >= 0; path = active_paths_[index(path)].next) add(path);
    }
    dirty_paths_.clear();
    dirty_resources_.clear();
    if (filling_.empty()) return;
    do {
        fill();
    } while (grow());
    finish();
}

// Calls visit(resource, weight, hop) for each hop of a path.
template <class Visit>
void Sharing::each_hop(int32_t path, Visit visit) {
    const auto resources = paths_[index(path)];
    const int64_t first = paths_.starts[index(path)];
    for (size_t i = 0; i < resources.size(); ++i) {
        const int64_t hop = first + static_cast<int64_t>(i);
        visit(resources_[index(resources[i])], weight(hop), hop);
    }
}

// Computes the sums again after a number of updates, before rounding errors accumulate.
void Sharing::add_up(Resource& r) {
    if (r.updates <= r.entries.size() + kUpdates) return;
    r.updates = 0;
    r.used = 0;
    r.top = 0;
    for (const Entry& entry : r.entries) {
        const ActivePath& active = active_paths_[index(entry.path)];
        r.used += static_cast<long double>(weight(entry.hop)) * active.flows * active.rate;
        r.top = std::max(r.top, active.rate);
    }
}

std::span<const Sharing::Hop> Sharing::filled(const Resource& r) const {
    return {hops_.data() + r.filled - r.filling, r.filling};
}

void Sharing::release(ActivePath& active) {
    if (active.bottleneck < 0) return;
    Resource& r = resources_[index(active.bottleneck)];
    --r.held;
    (active.before < 0 ? r.first : active_paths_[index(active.before)].next) = active.next;
    if (active.next >= 0) active_paths_[index(active.next)].before = active.before;
    active.bottleneck = -1;
}

void Sharing::hold(int32_t path, int32_t bottleneck, double rate) {
    ActivePath& active = active_paths_[index(path)];
    Resource& r = resources_[index(bottleneck)];
    r.level = rate;
    active.rate = rate;
    if (active.bottleneck == bottleneck) return;
    release(active);
    ++r.held;
    active.bottleneck = bottleneck;
    active.before = -1;
    active.next = r.first;
    if (r.first >= 0) active_paths_[index(r.first)].before = path;
    r.first = path;
}

// Adds an active path to the lists of its resources, or removes it.
void Sharing::apply(int32_t path) {
    ActivePath& active = active_paths_[index(path)];
    if (active.flows == active.settled) return;
    const double more = static_cast<double>(active.flows) - active.settled;
    each_hop(path, [&](Resource& r, double part, int64_t at) {
        const auto hop = static_cast<size_t>(at);
        auto& entries = r.entries;
        if (active.settled == 0) {
            places_[hop] = static_cast<uint32_t>(entries.size());
            entries.push_back({path, at});
        } else if (active.flows == 0) {
            entries[places_[hop]] = entries.back();
            places_[static_cast<size_t>(entries.back().hop)] = places_[hop];
            entries.pop_back();
        }
        r.used = entries.empty() ? 0 : r.used + static_cast<long double>(part) * more * active.rate;
        ++r.updates;
    });
    for (const int32_t resource : paths_[index(path)]) mark_dirty(resource);
    if (active.flows != 0) return;
    active.rate = 0;
    release(active);
}

void Sharing::mark_dirty(int32_t resource) {
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
    ActivePath& active = active_paths_[index(path)];
    const double before = active.rate;
    double least = 0;
    int32_t bottleneck = -1;
    const auto resources = paths_[index(path)];
    const int64_t first = paths_.starts[index(path)];
    for (size_t i = 0; i < resources.size(); ++i) {
        const double share = capacity_[index(resources[i])] /
                             (weight(first + static_cast<int64_t>(i)) * active.flows);
        if (i != 0 && share >= least) continue;
        least = share;
        bottleneck = resources[i];
    }
    active.mark = epoch_;
    hold(path, bottleneck, least);
    each_hop(path, [&](Resource& r, double part, int64_t) {
        r.used = static_cast<long double>(part) * active.flows * least;
        r.top = least;
        r.updates = 0;
    });
    if (before != least) changes_.push_back({path, least});
}

void Sharing::add(int32_t path) {
    ActivePath& active = active_paths_[index(path)];
    if (active.mark == epoch_) return;
    active.mark = epoch_;
    filling_.emplace_back(path, active.rate);
    for (const int32_t resource : paths_[index(path)]) touch(resource);
}

void Sharing::touch(int32_t resource) {
    Resource& r = resources_[index(resource)];
    if (r.mark == epoch_) return;
    r.mark = epoch_;
    r.old_level = r.level;
    touched_.push_back(resource);
}

// Lists the hops of the paths in filling_ by resource, and the remaining capacity.
void Sharing::list_hops() {
    for (const int32_t resource : touched_) {
        Resource& r = resources_[index(resource)];
        r.others = r.used;
        r.wanting = 0;
        r.unfixed = 0;
    }
    for (const auto& [path, before] : filling_) {
        ActivePath& active = active_paths_[index(path)];
        active.fixed = false;
        each_hop(path, [&, before = before](Resource& r, double part, int64_t) {
            const double share = part * active.flows;
            r.others -= static_cast<long double>(share) * before;
            r.wanting += share;
            ++r.unfixed;
        });
    }
    size_t total = 0;
    for (const int32_t resource : touched_) {
        Resource& r = resources_[index(resource)];
        if (r.unfixed == r.entries.size()) r.others = 0;
        r.room = std::max(static_cast<double>(capacity_[index(resource)] - r.others), 0.0);
        r.filled = total;
        r.filling = r.unfixed;
        total += r.unfixed;
    }
    hops_.resize(total);
    for (const auto& [path, before] : filling_) {
        const ActivePath& active = active_paths_[index(path)];
        each_hop(path, [&, path = path](Resource& r, double part, int64_t) {
            hops_[r.filled++] = {path, part * active.flows};
        });
    }
}

// Computes the rates of the paths in filling_ by progressive filling. Repeatedly takes the resource
// that can give its paths the lowest equal rate, and fixes the rates of these paths.
void Sharing::fill() {
    list_hops();
    heap_.clear();
    for (const int32_t resource : touched_) {
        const Resource& r = resources_[index(resource)];
        if (r.unfixed != 0) heap_.emplace_back(r.room / r.wanting, resource);
    }
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    size_t left = filling_.size();
    while (left != 0 && !heap_.empty()) {
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
        for (const Hop& hop : filled(r)) {
            if (active_paths_[index(hop.path)].fixed) continue;
            fix(hop.path, key, resource);
            --left;
        }
    }
}

void Sharing::fix(int32_t path, double rate, int32_t bottleneck) {
    ActivePath& active = active_paths_[index(path)];
    active.fixed = true;
    hold(path, bottleneck, rate);
    each_hop(path, [&](Resource& r, double part, int64_t) {
        const double share = part * active.flows;
        r.room -= share * rate;
        r.wanting -= share;
        --r.unfixed;
    });
}

// Adds to filling_ the paths that no longer have their fair rate. Returns true if there were any.
bool Sharing::grow() {
    const size_t before = filling_.size();
    const size_t resources = touched_.size();
    for (size_t i = 0; i < resources; ++i) {
        const Resource& r = resources_[index(touched_[i])];
        if (filled(r).size() != r.entries.size()) grow(touched_[i]);
    }
    return filling_.size() > before;
}

// Adds to filling_ two kinds of paths on this resource. The first kind is limited by this resource,
// although the resource has capacity left or gives another path a higher rate. The second kind has
// a higher rate than this resource gives to the paths that it limits.
void Sharing::grow(int32_t resource) {
    Resource& r = resources_[index(resource)];
    long double used = r.others;
    double most = 0, level = -1;
    uint32_t held = r.held;
    for (const Hop& hop : filled(r)) {
        const ActivePath& active = active_paths_[index(hop.path)];
        used += static_cast<long double>(hop.share) * active.rate;
        most = std::max(most, active.rate);
        if (active.bottleneck != resource) continue;
        level = active.rate;
        --held;
    }
    const bool full = used >= capacity_[index(resource)] * (1 - kClose);
    if (held != 0 && (!full || r.old_level < most * (1 - kClose))) {
        for (int32_t path = r.first; path >= 0; path = active_paths_[index(path)].next) add(path);
    }
    if (level < 0 || r.top <= level * (1 + kClose)) return;
    r.top = 0;
    for (const Entry& entry : r.entries) {
        const ActivePath& active = active_paths_[index(entry.path)];
        r.top = std::max(r.top, active.rate);
        if (active.rate > level * (1 + kClose)) add(entry.path);
    }
}

void Sharing::finish() {
    for (const auto& [path, before] : filling_) {
        ActivePath& active = active_paths_[index(path)];
        if (std::abs(active.rate - before) <= before * 1e-13) {
            active.rate = before;
            continue;
        }
        changes_.push_back({path, active.rate});
        each_hop(path, [&, before = before](Resource& r, double part, int64_t) {
            r.top = std::max(r.top, active.rate);
            r.used += static_cast<long double>(part) * active.flows *
                      (static_cast<long double>(active.rate) - before);
            ++r.updates;
        });
    }
    for (const int32_t resource : touched_) add_up(resources_[index(resource)]);
}

}  // namespace unisono::simulator

// Max-min fair rates of flows on shared resources, updated as flows start and end.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "simulator/ragged_lists.h"

namespace unisono::simulator {

// An active path is a path with flows; all its flows have the same rate. A path is a list of
// resources (links, ports) with capacities in bytes per second. A flow at rate x uses weight * x of
// each resource.
//
// Rates are max-min fair if each active path has a bottleneck: a resource that is fully used and
// gives no other path a higher rate. `settle` starts from the active paths whose bottleneck has
// changed. It fills these progressively and keeps all others fixed. Then it adds the paths that
// have lost their bottleneck, or that could gain from a path with a higher rate, and fills again.
// It ends when all paths have a bottleneck, so the result is exact.
//
// Unchanged paths are not visited. Each resource stores the total use of its paths and the rate of
// the paths that it limits, so only filled paths are visited.
class Sharing {
  public:
    // `weights` has an entry for each of `paths.values`, or is empty: then all weights are 1.
    Sharing(std::span<const double> capacity, Lists paths, std::span<const double> weights);

    // Adds or removes a flow on a path with at least one resource.
    void change(int32_t path, int delta);

    // Updates all rates.
    void settle();

    struct Change {
        int32_t path;
        double rate;
    };
    // Returns the paths whose rates the last `settle` changed. Paths without flows are omitted.
    [[nodiscard]] std::span<const Change> changes() const { return changes_; }

    [[nodiscard]] double rate(int32_t path) const { return active_paths_[index(path)].rate; }
    [[nodiscard]] uint32_t flows(int32_t path) const { return active_paths_[index(path)].flows; }
    [[nodiscard]] double weight(int64_t hop) const {
        return weights_.empty() ? 1.0 : weights_[static_cast<size_t>(hop)];
    }

  private:
    struct ActivePath {
        double rate = 0;
        uint32_t flows = 0;
        uint32_t settled = 0;            // Flows at the last settle().
        int32_t bottleneck = -1;         // A resource.
        int32_t next = -1, before = -1;  // List of active paths with the same bottleneck.
        uint32_t mark = 0;               // Equals epoch_ if this path is being filled.
        bool dirty = false;
        bool fixed = false;
    };
    struct Entry {
        int32_t path;
        int64_t hop;
    };
    struct Resource {
        std::vector<Entry> entries;
        // Total use by all paths, in bytes per second; during settle(), the use before it.
        long double used = 0;
        uint32_t updates = 0;    // Updates of `used` since it was last summed up anew.
        int32_t first = -1;      // First path of the list of paths that this resource limits.
        uint32_t held = 0;       // Number of paths that this resource limits.
        double level = 0;        // Rate of the paths that this resource limits, if any.
        double top = 0;          // Upper bound of all paths' rates.
        double old_level = 0;    // Value of `level` before this settle().
        long double others = 0;  // While filling: use of the paths that are not filled.
        double room = 0;         // While filling: remaining capacity.
        double wanting = 0;      // While filling: total weight of flows without a rate yet.
        uint32_t unfixed = 0;
        uint32_t mark = 0;
        size_t filled = 0;     // End of the resource's list in hops_.
        uint32_t filling = 0;  // Length of that list.
        bool dirty = false;
    };
    // A hop of a path that is being filled.
    struct Hop {
        int32_t path;
        double share;
    };

    static size_t index(int32_t i) { return static_cast<size_t>(i); }
    void apply(int32_t path);
    void mark_dirty(int32_t resource);
    bool alone(int32_t path) const;
    void settle_alone(int32_t path);
    void add(int32_t path);
    void touch(int32_t resource);
    void fill();
    void fix(int32_t path, double rate, int32_t bottleneck);
    void list_hops();
    bool grow();
    void grow(int32_t resource);
    void finish();
    void hold(int32_t path, int32_t bottleneck, double rate);
    void release(ActivePath& active);
    void add_up(Resource& resource);
    // Returns the hops of filled paths on a touched resource.
    [[nodiscard]] std::span<const Hop> filled(const Resource& r) const;
    template <class Visit>
    void each_hop(int32_t path, Visit visit);

    std::span<const double> capacity_;
    Lists paths_;
    std::span<const double> weights_;
    std::vector<ActivePath> active_paths_;
    std::vector<uint32_t> places_;  // by hop: its index in the entries of its resource
    std::vector<Resource> resources_;
    std::vector<int32_t> dirty_paths_, dirty_resources_;
    std::vector<std::pair<int32_t, double>> filling_;  // paths, with their earlier rates
    std::vector<int32_t> touched_;
    std::vector<Hop> hops_;  // hops of the filled paths, ordered by resource
    std::vector<std::pair<double, int32_t>> heap_;
    std::vector<Change> changes_;
    uint32_t epoch_ = 0;
};

}  // namespace unisono::simulator

// Who gets how much of which resource: max-min fairness, kept up to date as flows come and go.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "simulator/lists.h"

namespace unisono::simulator {

// A lane is a path with the flows that are on it now: they all get the same rate. A path is a list
// of resources (links, ports) with capacities in bytes a second; a flow at rate x takes weight * x
// of each.
//
// A rate is max-min fair if each lane has a bottleneck: a resource that is used up, on which no
// other lane gets more. `settle` starts from the lanes whose bottleneck is a resource that changed,
// fills those progressively with all others held fixed, then looks for lanes that have lost their
// bottleneck or could take from a richer one, adds those and fills again. It ends when all lanes
// have a bottleneck, so the result is exact, and what did not change is not looked at: of a
// resource it is known how much all its lanes use, and what those get whose bottleneck it is, so
// only the lanes that are filled are visited.
class Sharing {
  public:
    // `weights` has an entry for each of `paths.values`, or none: then all are 1.
    Sharing(std::span<const double> capacity, Lists paths, std::span<const double> weights);

    // One flow more or less on a path with at least one resource.
    void change(int32_t path, int delta);

    // Brings all rates up to date.
    void settle();

    struct Change {
        int32_t path;
        double rate;
    };
    // The paths whose rates the last `settle` changed; those without flows are not among them.
    [[nodiscard]] std::span<const Change> changes() const { return changes_; }

    [[nodiscard]] double rate(int32_t path) const { return lanes_[index(path)].rate; }
    [[nodiscard]] uint32_t flows(int32_t path) const { return lanes_[index(path)].flows; }
    [[nodiscard]] double weight(int64_t hop) const {
        return weights_.empty() ? 1.0 : weights_[static_cast<size_t>(hop)];
    }

  private:
    struct Lane {
        double rate = 0;
        uint32_t flows = 0;
        uint32_t settled = 0;            // flows at the last settling
        int32_t bottleneck = -1;         // the resource
        int32_t next = -1, before = -1;  // lanes that have the same bottleneck
        uint32_t mark = 0;               // equals epoch_: among those being filled
        bool dirty = false;
        bool fixed = false;
    };
    struct Entry {
        int32_t path;
        int64_t hop;
    };
    struct Resource {
        std::vector<Entry> entries;
        long double used = 0;    // by all lanes; before this settling, while it lasts
        uint32_t updates = 0;    // of `used`, since it was added up anew
        int32_t first = -1;      // of the lanes whose bottleneck this is
        uint32_t held = 0;       // lanes whose bottleneck this is
        double level = 0;        // the rate of those, if there are any
        double top = 0;          // no lane has more
        double old_level = 0;    // before this settling
        long double others = 0;  // while filling: what lanes use that are not being filled
        double room = 0;         // while filling: what is left
        double wanting = 0;      // while filling: weights of flows without a rate yet
        uint32_t unfixed = 0;
        uint32_t mark = 0;
        size_t filled = 0;     // its list in hops_: up to where
        uint32_t filling = 0;  // and how long it is
        bool dirty = false;
    };
    // A hop of a lane that is being filled.
    struct Hop {
        int32_t path;
        double share;
    };

    static size_t index(int32_t i) { return static_cast<size_t>(i); }
    void apply(int32_t path);
    void soil(int32_t resource);
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
    void release(Lane& lane);
    void add_up(Resource& resource);
    // Of a resource that was touched, the hops of the lanes being filled.
    [[nodiscard]] std::span<const Hop> filled(const Resource& r) const;
    template <class Visit>
    void each_hop(int32_t path, Visit visit);

    std::span<const double> capacity_;
    Lists paths_;
    std::span<const double> weights_;
    std::vector<Lane> lanes_;
    std::vector<uint32_t> places_;  // of each hop, where it is in its resource's entries
    std::vector<Resource> resources_;
    std::vector<int32_t> dirty_lanes_, dirty_resources_;
    std::vector<std::pair<int32_t, double>> filling_;  // lanes, with their rates before
    std::vector<int32_t> touched_;
    std::vector<Hop> hops_;  // of the lanes being filled, by resource
    std::vector<std::pair<double, int32_t>> heap_;
    std::vector<Change> changes_;
    uint32_t epoch_ = 0;
};

}  // namespace unisono::simulator

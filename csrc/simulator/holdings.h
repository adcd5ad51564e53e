// The values that every rank holds at each location of its memory. Values are not data: each is a
// number that stands for the tasks that produced it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono::simulator {

// The value of a location before the first write.
constexpr int32_t kInitial = -1;

// Stores one value for each unit of each rank. A unit is `unit` neighbouring locations, which
// always have the same value.
class DenseHoldings {
  public:
    DenseHoldings(uint32_t ranks, uint32_t locations, uint32_t unit)
        : unit_(unit), width_(locations / unit), cells_(size_t{ranks} * width_, kInitial) {}

    // Calls visit(value&) for the values of these chunks.
    template <class Visit>
    void each(int32_t rank, int32_t first, int32_t count, Visit visit) {
        const size_t begin =
            static_cast<size_t>(rank) * width_ + static_cast<uint32_t>(first) / unit_;
        const size_t end = begin + static_cast<uint32_t>(count) / unit_;
        for (size_t i = begin; i < end; ++i) visit(cells_[i]);
    }

  private:
    uint32_t unit_;
    size_t width_;
    std::vector<int32_t> cells_;
};

// Stores one value for each sequence of neighbouring locations (a run) with the same history. Saves
// memory if there are many ranks and the sequences are long.
class RunHoldings {
  public:
    RunHoldings(uint32_t ranks, uint32_t, uint32_t) : runs_(ranks) {}

    template <class Visit>
    void each(int32_t rank, int32_t first, int32_t count, Visit visit) {
        auto& runs = runs_[static_cast<size_t>(rank)];
        const size_t begin = cut(runs, first);
        const size_t end = cut(runs, first + count);
        for (size_t i = begin; i < end; ++i) visit(runs[i].value);
    }

  private:
    struct Run {
        int32_t first;
        int32_t value;
    };

    // Returns the index of the run that begins at location `chunk`. If no run begins there, splits
    // the run that contains it.
    static size_t cut(std::vector<Run>& runs, int32_t chunk) {
        const auto at = std::lower_bound(runs.begin(), runs.end(), chunk,
                                         [](const Run& run, int32_t c) { return run.first < c; });
        const auto i = static_cast<size_t>(at - runs.begin());
        if (at != runs.end() && at->first == chunk) return i;
        const int32_t value = i == 0 ? kInitial : runs[i - 1].value;
        runs.insert(at, {chunk, value});
        return i;
    }

    std::vector<std::vector<Run>> runs_;
};

}  // namespace unisono::simulator

// Event queue of the simulator, ordered by time.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace unisono::simulator {

// Events closer than this fraction of the elapsed time count as simultaneous, because rounding
// makes equal times differ in their last digits. So symmetric ranks stay in step, and their rates
// are computed together.
constexpr double kInstant = 1e-11;

// A queue ordered by time. Equal times share a bucket, so a thousand simultaneous events cost one
// heap entry.
template <class Event>
class Clock {
  public:
    void at(double time, Event event) {
        for (const auto& [known, bucket] : recent_) {
            if (known != time) continue;
            buckets_[bucket].push_back(event);
            return;
        }
        uint32_t bucket = static_cast<uint32_t>(buckets_.size());
        if (free_.empty()) {
            buckets_.emplace_back();
        } else {
            bucket = free_.back();
            free_.pop_back();
        }
        buckets_[bucket].push_back(event);
        recent_[turn_] = {time, bucket};
        turn_ = (turn_ + 1) % recent_.size();
        // Buckets of equal time keep the order in which they were added.
        heap_.push_back({time, added_++, bucket});
        std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    }

    [[nodiscard]] bool empty() const { return heap_.empty(); }

    [[nodiscard]] double time() const { return heap_.front().time; }

    // Removes and returns the events up to time `until`.
    void take(double until, std::vector<Event>& events) {
        events.clear();
        while (!heap_.empty() && heap_.front().time <= until) {
            const Entry entry = heap_.front();
            std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
            heap_.pop_back();
            auto& bucket = buckets_[entry.bucket];
            events.insert(events.end(), bucket.begin(), bucket.end());
            bucket.clear();
            free_.push_back(entry.bucket);
            for (auto& [known, number] : recent_)
                if (number == entry.bucket) known = -1;
        }
    }

  private:
    struct Entry {
        double time;
        uint64_t added;
        uint32_t bucket;
        auto operator<=>(const Entry&) const = default;
    };
    std::vector<Entry> heap_;
    std::vector<std::vector<Event>> buckets_;
    std::vector<uint32_t> free_;
    std::array<std::pair<double, uint32_t>, 4> recent_{{{-1, 0}, {-1, 0}, {-1, 0}, {-1, 0}}};
    size_t turn_ = 0;
    uint64_t added_ = 0;
};

}  // namespace unisono::simulator

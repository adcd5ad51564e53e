// A queue of ids ordered by their due times, which may change.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono::simulator {

// A heap that stores the position of every entry. Most times change before they are due, so an
// update moves the entry and leaves no stale entry. An entry does not move past entries of equal
// time, so updates of many equal times are cheap.
class Deadlines {
  public:
    [[nodiscard]] bool empty() const { return heap_.empty(); }
    [[nodiscard]] double time() const { return heap_.front().time; }
    [[nodiscard]] int32_t id() const { return heap_.front().id; }

    void set(int32_t id, double time) {
        const auto number = static_cast<size_t>(id);
        if (number >= places_.size()) places_.resize(number + 1, kNowhere);
        size_t at = places_[number];
        if (at == kNowhere) {
            at = heap_.size();
            heap_.push_back({time, id});
        }
        heap_[at].time = time;
        down(up(at));
    }

    void remove(int32_t id) {
        const auto number = static_cast<size_t>(id);
        if (number >= places_.size() || places_[number] == kNowhere) return;
        const size_t at = places_[number];
        places_[number] = kNowhere;
        const Entry last = heap_.back();
        heap_.pop_back();
        if (at == heap_.size()) return;
        heap_[at] = last;
        down(up(at));
    }

  private:
    struct Entry {
        double time;
        int32_t id;
    };
    static constexpr size_t kNowhere = static_cast<size_t>(-1);
    static constexpr size_t kWidth = 4;

    void put(size_t at, const Entry& entry) {
        heap_[at] = entry;
        places_[static_cast<size_t>(entry.id)] = at;
    }

    size_t up(size_t at) {
        const Entry entry = heap_[at];
        for (; at != 0 && entry.time < heap_[(at - 1) / kWidth].time; at = (at - 1) / kWidth)
            put(at, heap_[(at - 1) / kWidth]);
        put(at, entry);
        return at;
    }

    void down(size_t at) {
        const Entry entry = heap_[at];
        while (true) {
            const size_t first = at * kWidth + 1;
            const size_t end = std::min(first + kWidth, heap_.size());
            size_t least = at;
            double time = entry.time;
            for (size_t child = first; child < end; ++child) {
                if (heap_[child].time >= time) continue;
                least = child;
                time = heap_[child].time;
            }
            if (least == at) break;
            put(at, heap_[least]);
            at = least;
        }
        put(at, entry);
    }

    std::vector<Entry> heap_;
    std::vector<size_t> places_;  // position of each id in the heap
};

}  // namespace unisono::simulator

// The windows that this rank serves to ranks of other hosts. They send frames, and the thread that
// polls the transport accesses the array.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>

#include "core/control_words.h"

namespace unisono::p2p {

// This rank's part of a window.
struct ServedWindow {
    std::byte* array;
    uint64_t bytes;
    std::atomic<uint64_t>* signals;  // see signal_word()
};

// Returns the word in which a rank counts its signals. Each word has its own cache line.
[[nodiscard]] inline std::atomic<uint64_t>& signal_word(std::atomic<uint64_t>* signals,
                                                        uint32_t rank) noexcept {
    return signals[rank * (kLine / sizeof(uint64_t))];
}

class ServedWindows {
  public:
    // Returns the number by which peers name the window.
    uint64_t add(const ServedWindow& window) {
        windows_.emplace(++last_, window);
        return last_;
    }
    void remove(uint64_t number) noexcept { windows_.erase(number); }
    [[nodiscard]] bool empty() const noexcept { return windows_.empty(); }
    // Returns a window, or nullptr if there is none with this number.
    [[nodiscard]] const ServedWindow* find(uint64_t number) const noexcept {
        const auto found = windows_.find(number);
        return found == windows_.end() ? nullptr : &found->second;
    }

  private:
    std::map<uint64_t, ServedWindow> windows_;
    uint64_t last_ = 0;
};

}  // namespace unisono::p2p

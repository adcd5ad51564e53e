// Views of lists of different lengths, stored as two arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace unisono::simulator {

// List i is values[starts[i] .. starts[i + 1]).
struct Lists {
    std::span<const int32_t> values;
    std::span<const int64_t> starts;

    [[nodiscard]] size_t size() const { return starts.empty() ? 0 : starts.size() - 1; }
    [[nodiscard]] std::span<const int32_t> operator[](size_t i) const {
        const auto first = static_cast<size_t>(starts[i]);
        return values.subspan(first, static_cast<size_t>(starts[i + 1]) - first);
    }
};

}  // namespace unisono::simulator

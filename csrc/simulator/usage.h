// Bytes that each resource has carried, in total and over time.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace unisono::simulator {

// Sums of bytes in time bins that cover the elapsed time. When the bins are full, neighbouring bins
// are merged and the width doubles.
class Usage {
  public:
    Usage(size_t resources, uint32_t bins) : total_(resources, 0.0), bins_(bins) {
        if (bins_ != 0) binned_.assign(resources * bins_, 0.0F);
    }

    [[nodiscard]] bool timed() const { return bins_ != 0; }
    [[nodiscard]] double width_s() const { return width_s_; }
    [[nodiscard]] uint32_t bins() const { return bins_; }
    [[nodiscard]] const std::vector<double>& total() const { return total_; }
    // Returns one row of bins for each resource.
    [[nodiscard]] const std::vector<float>& binned() const { return binned_; }

    void add(size_t resource, double bytes) { total_[resource] += bytes; }

    // Adds a flow of `rate_Bps` between two times.
    void spread(size_t resource, double rate_Bps, double from_s, double to_s) {
        if (to_s <= from_s) return;
        if (width_s_ == 0) width_s_ = to_s / bins_;
        while (to_s > width_s_ * bins_ * (1 + 1e-9)) widen();
        float* row = &binned_[resource * bins_];
        const auto last = static_cast<uint32_t>(to_s / width_s_);
        for (auto bin = static_cast<uint32_t>(from_s / width_s_); bin <= last && bin < bins_;
             ++bin) {
            const double begin = std::fmax(from_s, bin * width_s_);
            const double end = std::fmin(to_s, (bin + 1) * width_s_);
            if (end > begin) row[bin] += static_cast<float>(rate_Bps * (end - begin));
        }
    }

  private:
    void widen() {
        width_s_ *= 2;
        for (size_t row = 0; row < total_.size(); ++row) {
            float* bytes = &binned_[row * bins_];
            for (uint32_t i = 0; i < bins_; ++i) {
                const uint32_t two = 2 * i;
                bytes[i] = two < bins_ ? bytes[two] + (two + 1 < bins_ ? bytes[two + 1] : 0) : 0;
            }
        }
    }

    std::vector<double> total_;
    std::vector<float> binned_;
    uint32_t bins_;
    double width_s_ = 0;
};

}  // namespace unisono::simulator
